"""multiply: y = a · b and the FP8 form of y from one pass, for producers of a linear's input.

A product of 16-bit numbers is exact in float32, so y, rounded once, is that of `torch.mul` bit for bit on every device;
so is a product of float32 numbers, rounded by IEEE 754, and rounded again if y has 16 bits. No sum, root or exponential
is involved, whose last bit an implementation could choose. The FP8 form is `quantize` of y.

Memory traffic per element for 16-bit factors: 2 bytes read per matrix, 2 written, 1 per FP8 copy. `torch.mul` and
`quantize` after it read y once more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.conformance.mismatches import difference
from octavo.kernels.library import define
from octavo.kernels.quantize import reference as quantize_reference
from octavo.kernels.quantize.reference import padded
from octavo.kernels.registry import Backend, Case, Op, register, triton_unsupported
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import ROW, QuantSpec
from octavo.tensor import Order, ScaledTensor

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""y [R,C], its FP8 data row-major and column-major (both [R,C]; the same one if only one order is written), scales."""


def supports(spec: QuantSpec) -> bool:
    """Return whether the FP8 form may have a spec: float32 scales by row."""
    return spec.granularity == ROW and spec.scale_dtype == torch.float32


def multiply(a: Tensor, b: Tensor, dtype: torch.dtype, spec: QuantSpec, order: Order) -> tuple[Tensor, ScaledTensor]:
    """Multiply a matrix by a matrix or by a row vector, and quantize the result.

    Args:
        a: [R,C], float32, bfloat16 or float16, any strides.
        b: [R,C] or [C], one of these dtypes.
        dtype: Dtype of y. A product of a 16-bit dtype by itself has that one; others are computed in float32.
        spec: Spec of the FP8 form, with float32 scales by row.
        order: Memory orders of the FP8 data, as in `quantize`.

    Returns:
        y = (a * b).to(dtype) [R,C], and `quantize(y, spec, order=order)`.

    Raises:
        ValueError: An operand has a wrong dtype, shape or device, or the spec is not by row.
    """
    _check(a, b, dtype, spec, order)
    y, *data, scale = torch.ops.octavo.multiply(a, b, dtype, spec.text, order)
    views = [data[0] if order != "columns" else data[0].t(), *(d.t() for d in data[1:])]
    return y, ScaledTensor(views[0], scale, spec, views[1] if len(views) == 2 else None)


def plan_multiply(a: Tensor, b: Tensor, dtype: torch.dtype, spec: QuantSpec, order: Order, shape: Sequence[int]) -> Any:
    """Return a plan whose `run` takes factors like these and returns `Outputs`, y in a shape of as many elements; None
    if its backend makes no plans. Raises as `multiply`.
    """
    _check(a, b, dtype, spec, order)
    plan = MULTIPLY.choose(a.device, (spec.text,)).plan
    return None if plan is None else plan(a, b, dtype, spec, order, shape)


def _check(a: Tensor, b: Tensor, dtype: torch.dtype, spec: QuantSpec, order: str) -> None:
    shapes = (a.shape, a.shape[-1:])
    dtypes = {a.dtype, b.dtype, dtype} <= set(SUPPORTED_DTYPES)
    if a.ndim != 2 or b.shape not in shapes or b.device != a.device or not dtypes:
        raise ValueError(
            "multiply takes float32, bfloat16 or float16 matrices [R,C], of which the second may be a vector [C], on "
            f"one device; got {a.dtype} {list(a.shape)} on {a.device} and {b.dtype} {list(b.shape)} on {b.device}, for "
            f"a result in {dtype}"
        )
    if torch.promote_types(a.dtype, b.dtype) not in (dtype, torch.float32):
        raise ValueError(f"multiply: a product of {a.dtype} and {b.dtype} is not rounded to {dtype}")
    if not supports(spec) or order not in ("rows", "columns", "both"):
        raise ValueError(f"multiply quantizes with float32 scales by row, to one order or both; got {spec} {order}")


def reference(a: Tensor, b: Tensor, dtype: torch.dtype, spec: QuantSpec, order: str) -> list[Tensor]:
    """Return y, and the outputs of `quantize` of it."""
    y = (a * b).to(dtype).contiguous()
    return [y, *quantize_reference.quantize(y, spec, None, order=order)]


def _triton(*arguments: Any, **options: Any) -> list[Tensor]:
    from octavo.kernels.multiply import triton  # imports Triton

    return triton.multiply(*arguments, **options)


def _triton_plan(*arguments: Any) -> Any:
    from octavo.kernels.multiply import triton

    return triton.MultiplyPlan(*arguments)


def _probe(backend: Backend, device: torch.device, case: Case) -> str | None:
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(48, 272, generator=generator, device="cpu", dtype=torch.float32).to(device, torch.bfloat16)
        for _ in range(2)
    )
    calls = [(a, factor, torch.bfloat16, QuantSpec.parse(case[0]), order) for factor in (b, b[0]) for order in _ORDERS]
    return next((text for call in calls if (text := difference(reference(*call), backend.run(*call)))), None)


_ORDERS = ("rows", "both")
_CASES: dict[str, Case] = {recipe.x.text: (recipe.x.text,) for recipe in RECIPES.values() if supports(recipe.x)}

MULTIPLY = register(Op(name="multiply", cases=_CASES, probe=_probe))
MULTIPLY.add(Backend(name="triton", run=_triton, plan=_triton_plan, unsupported_reason=triton_unsupported))
MULTIPLY.add(Backend(name="reference", run=reference))


def _run(a: Tensor, b: Tensor, dtype: torch.dtype, spec: str, order: str) -> list[Tensor]:
    outputs: list[Tensor] = MULTIPLY.choose(a.device, (spec,)).run(a, b, dtype, QuantSpec.parse(spec), order)
    return outputs


def _fake(a: Tensor, b: Tensor, dtype: torch.dtype, spec: str, order: str) -> list[Tensor]:
    rows, columns = a.shape
    code = QuantSpec.parse(spec).format.dtype
    outputs = [a.new_empty((rows, columns), dtype=dtype)]
    outputs += [a.new_empty((rows, columns), dtype=code)] if order != "columns" else []
    outputs += [a.new_empty((columns, padded(rows)), dtype=code)[:, :rows]] if order != "rows" else []
    return [*outputs, a.new_empty((rows, 1), dtype=torch.float32)]


define("multiply(Tensor a, Tensor b, ScalarType dtype, str spec, str order) -> Tensor[]", _run, _fake)
