"""quantize: a matrix in, its FP8 form out, by the rules of `numerics.spec`.

    q, s = quantize(x · fold)        fold: optional float32 scales of the other operand, [R,1] or [1,C]

Must move per element (bf16 in): 2 bytes read + 1 written by row, 2 + 2 + 1 by tensor, where the maximum is needed
first.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from octavo.kernels.library import define
from octavo.kernels.quantize import reference
from octavo.kernels.registry import Backend, Case, Op, register
from octavo.numerics.error import first_mismatch
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

__all__ = ["QUANTIZE", "quantize"]

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize(x: Tensor, spec: QuantSpec, fold: Tensor | None = None, *, anew: bool = False) -> ScaledTensor:
    """Quantize a matrix.

    Args:
        x: [R,C], float32, bfloat16 or float16, any strides, any size from 0 up.
        spec: Format, granularity and scale rule.
        fold: float32 [R,1] or [1,C], multiplied into x (in float32) first; see `numerics.recipe` for why.
        anew: Same numbers; under torch.compile it keeps this call from being merged with an equal one before it, whose
            bytes would then be held in memory until here.

    Returns:
        Contiguous FP8 data [R,C] with scales of shape `spec.granularity.scale_shape((R,C))`.

    Raises:
        ValueError: Where x is not a matrix of a supported dtype, or fold does not broadcast along one of its
            dimensions.
    """
    if x.ndim != 2 or x.dtype not in _INPUT_DTYPES:
        raise ValueError(
            f"quantize takes a float32, bfloat16 or float16 matrix [R,C]; got {x.dtype} of shape {tuple(x.shape)}"
        )
    if fold is not None and (fold.dtype != torch.float32 or fold.shape not in ((x.shape[0], 1), (1, x.shape[1]))):
        raise ValueError(
            f"quantize: fold is float32 [{x.shape[0]},1] or [1,{x.shape[1]}]; got {fold.dtype} {tuple(fold.shape)}"
        )
    data, scale = torch.ops.octavo.quantize(x, spec.text, fold, anew)
    return ScaledTensor(data, scale, spec)


def _probe(backend: Backend, device: torch.device, case: Case) -> str | None:
    x = torch.randn(48, 272, generator=torch.Generator().manual_seed(0), device="cpu").to(device, torch.bfloat16)
    expected = reference.quantize(x, QuantSpec.parse(case[0]), None)
    actual = backend.run(x, QuantSpec.parse(case[0]), None)
    for name, e, a in zip(("data", "scale"), expected, actual, strict=True):
        if (mismatch := first_mismatch(e, a)) is not None:
            return f"{name} differs from reference: {mismatch}"
    return None


def _specs() -> dict[str, Case]:
    """Every spec that a recipe uses, labelled by its text form."""
    fields = ("x", "w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
    specs = {str(spec) for recipe in RECIPES.values() for f in fields if (spec := getattr(recipe, f)) is not None}
    return {text: (text,) for text in sorted(specs)}


def _run_triton(x: Tensor, spec: QuantSpec, fold: Tensor | None) -> tuple[Tensor, Tensor]:
    from octavo.kernels.quantize import triton  # imports Triton, so only once it is wanted

    return triton.quantize(x, spec, fold)


def _refuses_triton(device: torch.device, case: Case) -> str | None:
    if device.type != "cuda":
        return f"Triton compiles for GPUs; this device is {device.type!r}"
    return None if find_spec("triton") else "Triton is not installed"


QUANTIZE = register(Op(name="quantize", cases=_specs(), probe=_probe))
QUANTIZE.add(Backend(name="reference", run=reference.quantize))
QUANTIZE.add(Backend(name="triton", run=_run_triton, refuses=_refuses_triton))


def _run(x: Tensor, spec: str, fold: Tensor | None, anew: bool) -> tuple[Tensor, Tensor]:
    data, scale = QUANTIZE.choose(x.device, (spec,)).run(x, QuantSpec.parse(spec), fold)
    return data, scale


def _fake(x: Tensor, spec: str, fold: Tensor | None, anew: bool) -> tuple[Tensor, Tensor]:
    parsed = QuantSpec.parse(spec)
    rows, columns = x.shape
    return (
        x.new_empty((rows, columns), dtype=parsed.format.dtype),
        x.new_empty(parsed.granularity.scale_shape((rows, columns)), dtype=parsed.scale_dtype),
    )


define("quantize(Tensor x, str spec, Tensor? fold, bool anew) -> (Tensor, Tensor)", _run, _fake)
