"""scaled_mm: the product of two quantized matrices, in the layouts of a linear layer's three products.

    nt    A [M,K] · B [N,K]ᵀ    forward   Y  = X Wᵀ
    nn    A [M,N] · B [N,K]     dgrad     ∂X = G W
    tn    A [M,N]ᵀ · B [M,K]    wgrad     ∂W = Gᵀ X

The letters state whether A and B are transposed. Scales, then the bias, apply to the float32 sum, rounded once.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.kernels.conformance.mismatches import low_sqnr
from octavo.kernels.direct import Call, Plans, signature
from octavo.kernels.gemm import reference, torch_bf16, torch_scaled
from octavo.kernels.gemm.operand_layout import CONTRACTED, UNIT_SCALE, data_along
from octavo.kernels.library import check_like, define
from octavo.kernels.quantize import quantize
from octavo.kernels.registry import GPU_TYPES, Backend, Case, register, triton_backend, triton_unsupported
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.recipe import RECIPES, Recipe
from octavo.numerics.spec import QuantSpec
from octavo.numerics.suggestions import check_choice
from octavo.runtime.extras import lazy_function
from octavo.runtime.torch_compat import disable_current_modes
from octavo.tensor import ScaledTensor

__all__ = [
    "SCALED_MM", "UNIT_SCALE", "Layout", "ProductPlan", "accelerated", "cases_of", "needs_both_orders", "scaled_mm",
]  # fmt: skip

Layout = Literal["nt", "nn", "tn"]


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, layout: Layout, *, out_dtype: torch.dtype, bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply quantized matrices a [m,k] ([k,m] in layout "tn") and b [k,n] ([n,k] in "nt") to [m,n], contiguous.

    `out_dtype` is float32, bfloat16 or float16, and so is that of the bias [n], which is added to every row.
    `fast_accum` lets the hardware accumulate in its shorter accumulator (Hopper); `reference` ignores it. Raises
    ValueError if operands differ in the contracted size or the device, or their dtype, scales or the bias do not fit.
    """
    check_choice("scaled_mm: layout", layout, CONTRACTED)
    along_a, along_b = CONTRACTED[layout]
    a_data, b_data = data_along(a, along_a), data_along(b, along_b)
    if (tensors := signature(a_data, b_data, a.scale, b.scale, bias)) is not None:
        key = (a.spec.text, b.spec.text, layout, out_dtype, fast_accum, tensors)
        call = _CALLS.get(key)
        if call is None:
            _check(a, b, layout, out_dtype, bias)
            call = _CALLS.add(key, Call(_case(a, b, layout), _shape(a_data, b_data, layout)))
        plan = call.plan(SCALED_MM, a_data.device, a, b, layout, out_dtype, bias, fast_accum)
        product = None if plan is None else plan(a_data, b_data, a.scale, b.scale, bias)
        if product is not None:
            return product  # type: ignore[no-any-return]
    else:
        _check(a, b, layout, out_dtype, bias)
    return torch.ops.octavo.scaled_mm.default(  # type: ignore[no-any-return]
        a_data, a.scale, a.spec.text, b_data, b.scale, b.spec.text, layout, out_dtype, bias, fast_accum
    )


_CALLS: Plans[Call] = Plans()


class ProductPlan:
    """Products of operands like those of the first call; `call` is the plan of the backend if that is one of cuBLAS."""

    def __init__(
        self, a_spec: QuantSpec, b_spec: QuantSpec, layout: Layout, out_dtype: torch.dtype, fast_accum: bool = False
    ) -> None:
        self._specs, self._options = (a_spec, b_spec), (layout, out_dtype, fast_accum)
        self._plan: torch_scaled.PreparedProduct | None = None
        self.call: torch_scaled.OneCall | None = None

    def __call__(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply a and b, with the data contiguous along the contraction and None for unit scales."""
        product = None if self._plan is None else self._plan(a, b, a_scale, b_scale, bias)
        if product is not None:
            return product
        left, right = ScaledTensor(a, a_scale, self._specs[0]), ScaledTensor(b, b_scale, self._specs[1])
        layout, out_dtype, fast_accum = self._options
        result = scaled_mm(left, right, layout, out_dtype=out_dtype, bias=bias, fast_accum=fast_accum)
        if self._plan is None:
            backend = SCALED_MM.choose(a.device, _case(left, right, layout), _shape(a, b, layout))
            self._plan = backend.plan(left, right, layout, out_dtype, bias, fast_accum)
            self.call = self._plan if isinstance(self._plan, torch_scaled.OneCall) else None
        return result


def _check(a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None) -> None:
    op, (along_a, along_b) = f"scaled_mm {layout}", CONTRACTED[layout]
    a_shape, b_shape = tuple(a.data.shape), tuple(b.data.shape)
    if a_shape[along_a] != b_shape[along_b]:
        raise ValueError(f"{op}: the operands contract over different sizes: A is {a_shape}, B is {b_shape}")
    for name, operand in (("A", a), ("B", b)):
        data, spec = operand.data, operand.spec
        rows, columns = data.shape[:2]
        check_like(op, f"{name} by {spec}", data, (rows, columns), (spec.format.dtype,), a.data)
        what, shape = f"scales of {name} {tuple(data.shape)} by {spec}", spec.granularity.scale_shape((rows, columns))
        check_like(op, what, operand.scale, shape, (spec.scale_dtype,), data)
    if out_dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"{op}: out_dtype must be float32, bfloat16 or float16; got {out_dtype}")
    check_like(op, "bias", bias, (b_shape[1 - along_b],), SUPPORTED_DTYPES, a.data)


def _case(a: ScaledTensor, b: ScaledTensor, layout: str) -> Case:
    return (UNIT_SCALE if a.scale is None else a.spec.text, UNIT_SCALE if b.scale is None else b.spec.text, layout)


def _shape(a: Tensor, b: Tensor, layout: str) -> tuple[int, int, int]:
    """Return m, n, k."""
    along_a, along_b = CONTRACTED[layout]
    return a.shape[1 - along_a], b.shape[1 - along_b], a.shape[along_a]


def cases_of(recipe: Recipe) -> dict[str, Case]:
    """Return the FP8 products of a recipe, by name."""
    cases: dict[str, Case] = {
        "forward": (recipe.x.text, recipe.w.text, "nt"),
        "dgrad": (recipe.dgrad_g.text, str(recipe.dgrad_w_epilogue or UNIT_SCALE), "nn"),
    }
    if recipe.wgrad_x is not None and recipe.wgrad_g is not None:
        cases["wgrad"] = (recipe.wgrad_g.text, str(recipe.wgrad_x_epilogue or UNIT_SCALE), "tn")
    return cases


def _probe(backend: Backend[Tensor], device: torch.device, case: Case) -> str | None:
    """Compare the products of a linear with `reference` within bf16 rounding; no size is a multiple of 16."""
    # The tiny product has fewer tiles than a GPU has multiprocessors; the backend's `trials` have more.
    layout = case[2]
    n = 70
    generator = torch.Generator().manual_seed(0)
    a, b = _random_operands(case, 33, n, 167, generator, device)
    some_bias = torch.randn(n, generator=generator, device="cpu", dtype=torch.float32).to(device, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        for bias in (None, some_bias) if layout == "nt" else (None,):
            expected = reference.scaled_mm(a, b, layout, dtype, bias, False)
            actual = backend.run(a, b, layout, dtype, bias, layout == "nt")
            if problem := low_sqnr([expected], [actual], 45, [f"the product of {dtype}"]):
                return problem
            if problem := _plan_differs(backend, a, b, layout, actual, bias):
                return problem
    for config, (m, n) in backend.trials(device, case, backend.config):
        a, b = _random_operands(case, m, n, 300, generator, device)
        expected = reference.scaled_mm(a, b, layout, torch.bfloat16, None, False)
        actual = backend.run(a, b, layout, torch.bfloat16, None, layout == "nt", config=config)
        name = f"the product [{m},{n}] of many tiles in configuration {config}"
        if problem := low_sqnr([expected], [actual], 45, [name]):
            return problem
    return None


def _plan_differs(
    backend: Backend[Tensor], a: ScaledTensor, b: ScaledTensor, layout: str, expected: Tensor, bias: Tensor | None
) -> str | None:
    """Compare a backend's plan with its ordinary call: the first calls of a plan prepare what later ones launch."""
    if a.data.device.type not in GPU_TYPES:
        return None
    plan = backend.plan(a, b, layout, expected.dtype, bias, layout == "nt")
    along_a, along_b = CONTRACTED[layout]
    for call in range(0 if plan is None else 4):
        actual = plan(data_along(a, along_a), data_along(b, along_b), a.scale, b.scale, bias)
        name = f"call {call + 1} of the plan for {expected.dtype}"
        if actual is not None and (problem := low_sqnr([expected], [actual], 45, [name])):
            return problem
    return None


def _random_operands(
    case: Case, m: int, n: int, k: int, generator: torch.Generator, device: torch.device
) -> tuple[ScaledTensor, ScaledTensor]:
    a_text, b_text, layout = case
    a = random_operand(a_text, (k, m) if layout[0] == "t" else (m, k), generator, device)
    return a, random_operand(b_text, (n, k) if layout[1] == "t" else (k, n), generator, device)


def random_operand(text: str, shape: tuple[int, int], generator: torch.Generator, device: torch.device) -> ScaledTensor:
    values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(device)
    quantized = quantize(values, QuantSpec.parse(text if text != UNIT_SCALE else "e4m3/tensor"))
    return quantized.unscaled if text == UNIT_SCALE else quantized


def _triton_unsupported(device: torch.device, case: Case) -> str | None:
    return triton_unsupported(device, case) or _unsupported_case(case)


def _plain_triton_unsupported(device: torch.device, case: Case) -> str | None:
    reason = _triton_unsupported(device, case)
    same = reason is None and not _overlaps(device, case)
    return "the backend triton runs the same kernels" if same else reason


_unsupported_case = lazy_function("octavo.kernels.gemm.triton:unsupported_reason")
_overlaps = lazy_function("octavo.kernels.gemm.triton:overlaps_in_training")
_TRITON = triton_backend(
    "gemm.triton:scaled_mm", plan="plan_of", unsupported_reason=_triton_unsupported,
    trials=lazy_function("octavo.kernels.gemm.triton:trials"),
)  # fmt: skip
SCALED_MM = register(
    "scaled_mm",
    {f"{r.name} {product}": case for r in RECIPES.values() for product, case in cases_of(r).items()},
    _probe,
    Backend(
        name="torch_scaled", run=torch_scaled.scaled_mm, plan=torch_scaled.plan_of,
        unsupported_reason=torch_scaled.unsupported_reason,
    ),
    _TRITON,
    replace(  # for a GPU or Triton on which the kernel in Gluon fails its probe
        _TRITON, name="triton_plain", run=partial(_TRITON.run, overlap=False),
        plan=partial(lazy_function("octavo.kernels.gemm.triton:plan_of"), overlap=False),
        unsupported_reason=_plain_triton_unsupported,
    ),
    Backend(
        name="torch_bf16", run=torch_bf16.scaled_mm, unsupported_reason=torch_bf16.unsupported_reason, emulates=True
    ),
    reference=reference.scaled_mm,
    emulates=True,
)  # fmt: skip


def needs_both_orders(device: torch.device) -> bool:
    """Whether products on this device need both operands contiguous along the contraction, as FP8 matrix units do.

    If so, operands contracted over both dimensions (W, G and X of a linear) are stored in both memory orders.
    """
    return device.type in GPU_TYPES


def accelerated(recipe: Recipe, device: torch.device) -> bool:
    """Whether all FP8 products of a recipe run on this device's matrix units; True on meta."""
    cases = cases_of(recipe).values()
    return device.type == "meta" or all(not SCALED_MM.choose(device, case).emulates for case in cases)


def _run(
    a: Tensor, a_scale: Tensor | None, a_spec: str, b: Tensor, b_scale: Tensor | None, b_spec: str,
    layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
) -> Tensor:  # fmt: skip
    left = ScaledTensor(a, a_scale, QuantSpec.parse(a_spec))
    right = ScaledTensor(b, b_scale, QuantSpec.parse(b_spec))
    backend = SCALED_MM.choose(a.device, _case(left, right, layout), _shape(a, b, layout))
    return backend.run(left, right, layout, out_dtype, bias, fast_accum)


def _fake(
    a: Tensor, a_scale: object, a_spec: str, b: Tensor, b_scale: object, b_spec: str, layout: str,
    out_dtype: torch.dtype, *options: object,
) -> Tensor:  # fmt: skip
    return a.new_empty(_shape(a, b, layout)[:2], dtype=out_dtype)


def _flops(
    a: torch.Size, a_scale: object, a_spec: str, b: torch.Size, b_scale: object, b_spec: str, layout: str,
    *options: object, out_shape: torch.Size, **_: object,
) -> int:  # fmt: skip
    return 2 * math.prod(out_shape) * a[CONTRACTED[layout][0]]


def _decompose(
    a: Tensor, a_scale: Tensor | None, a_spec: str, b: Tensor, b_scale: Tensor | None, b_spec: str,
    layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
) -> Any:  # fmt: skip
    left = ScaledTensor(a, a_scale, QuantSpec.parse(a_spec))
    right = ScaledTensor(b, b_scale, QuantSpec.parse(b_spec))
    shape = _shape(a, b, layout)
    with disable_current_modes():  # the choice may probe
        static = all(isinstance(size, int) for size in shape)
        backend = SCALED_MM.choose(a.device, _case(left, right, layout), shape if static else None)
    if backend.name != "torch_scaled":
        return NotImplemented
    product = torch_scaled.traced_scaled_mm(left, right, layout, out_dtype, bias, fast_accum)
    return NotImplemented if product is None else product


define("scaled_mm", _run, _fake, _decompose, _flops)
