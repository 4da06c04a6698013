"""quantize: a matrix to FP8 data and scales, by the rules of `numerics.spec`.

    q, s = quantize(x · fold)
    q1, s1, q2, s2 = quantize_pair(x · fold, x · fold_t)    two outputs from the same reads, the second column-major

`fold` is the other operand's scales, [R,1] or [1,C], or None.
"""

from typing import Any, get_args

import torch
from torch import Tensor

from octavo.kernels.direct import ZEROS, Call, Plans, signature
from octavo.kernels.library import check_like, check_matrix, define, sample
from octavo.kernels.quantize import decomposed, reference
from octavo.kernels.registry import Case, register, same_bytes, triton_backend, triton_unsupported
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import QuantSpec
from octavo.numerics.suggestions import check_choice
from octavo.tensor import Order, ScaledTensor

__all__ = ["QUANTIZE", "QUANTIZE_PAIR", "plan_pair", "plan_quantize", "quantize", "quantize_pair"]


def quantize(
    x: Tensor, spec: QuantSpec, fold: Tensor | None = None, *, order: Order = "rows", amax: Tensor | None = None,
    scale: Tensor | None = None, fuse_with: Tensor | None = None,
) -> ScaledTensor:  # fmt: skip
    """Quantize a matrix x [R,C], float32, bfloat16 or float16, any strides, any size from 0 up.

    Args:
        x: The matrix.
        spec: Format, granularity and scale rule.
        fold: float32 [R,1] or [1,C], multiplied into x (in float32) first; see `numerics.recipe` for why.
        order: Memory order of the FP8 data: "rows", "columns" (the transposed copy that FP8 matrix units need to
            contract over R; columns start at multiples of 16 bytes, with zeros in between), or "both" from one read,
            with the column-major data in `ScaledTensor.other_order`.
        amax: Precomputed largest magnitude per scale, float32 of the scales' shape; saves the amax pass.
        scale: Precomputed scales, of the scales' shape and dtype, from an earlier quantization of the same x.
        fuse_with: For torch.compile only: finite float32 [M,1]. Casts of equal shapes for which it is the same tensor,
            as X's scales are for the weights of gate and up, become one kernel. Changes no result.

    The scales have the shape `spec.granularity.scale_shape((R,C))`. If the given amax or scale is too
    small, larger values saturate. Raises ValueError if an operand has a wrong dtype, shape or device.
    """
    if (tensors := signature(x, fold, amax, scale)) is not None:
        key = (spec.text, order, tensors)
        call = _CALLS.get(key)
        if call is None:
            _check_call(x, spec, fold, amax, scale, order)
            call = _CALLS.add(key, Call((spec.text,)))
        if (plan := call.plan(QUANTIZE, x.device, x, spec, fold, amax, scale, order)) is not None:
            q, q_t, s, _ = plan.run(x, fold, None, amax if scale is None else scale, ZEROS.cut)
            return ScaledTensor(q, s, spec, q_t if order == "both" else None)
    else:
        _check_call(x, spec, fold, amax, scale, order)
    outputs = torch.ops.octavo.quantize(x, spec.text, fold, amax, scale, order, fuse_with)
    return reference.unpack_outputs(outputs if scale is None else [*outputs, scale], spec, order)


def quantize_pair(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec, fold_t: Tensor | None
) -> tuple[ScaledTensor, ScaledTensor]:
    """Return `quantize(x, spec, fold)` and `quantize(x, spec_t, fold_t, order="columns")` from one read.

    Raises ValueError as `quantize`, or if the specs differ in format or scale rule.
    """
    if (tensors := signature(x, fold, fold_t)) is not None:
        key = (spec.text, spec_t.text, tensors)
        call = _PAIR_CALLS.get(key)
        if call is None:
            _check_pair(x, spec, fold, spec_t, fold_t)
            call = _PAIR_CALLS.add(key, Call((spec.text, spec_t.text)))
        if (plan := call.plan(QUANTIZE_PAIR, x.device, x, spec, fold, spec_t, fold_t)) is not None:
            q, q_t, s, s_t = plan.run(x, fold, fold_t, None, ZEROS.cut)
            return ScaledTensor(q, s, spec), ScaledTensor(q_t, s_t, spec_t)
    else:
        _check_pair(x, spec, fold, spec_t, fold_t)
    q, s, q_t, s_t = torch.ops.octavo.quantize_pair(x, spec.text, fold, spec_t.text, fold_t)
    return ScaledTensor(q, s, spec), ScaledTensor(q_t.t(), s_t, spec_t)


def plan_quantize(
    x: Tensor, spec: QuantSpec, fold: Tensor | None = None, *, order: Order = "rows", scale: Tensor | None = None
) -> Any:
    """Return the plan of `quantize` for arguments like these, None if its backend makes none. Raises as `quantize`."""
    _check_call(x, spec, fold, None, scale, order)
    return QUANTIZE.choose(x.device, (spec.text,)).plan(x, spec, fold, None, scale, order)


def plan_pair(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec, fold_t: Tensor | None
) -> Any:  # fmt: skip
    """Return the plan of `quantize_pair` for arguments like these; as `plan_quantize`."""
    _check_pair(x, spec, fold, spec_t, fold_t)
    return QUANTIZE_PAIR.choose(x.device, (spec.text, spec_t.text)).plan(x, spec, fold, spec_t, fold_t)


_CALLS: Plans[Call] = Plans()
_PAIR_CALLS: Plans[Call] = Plans()


def _check_call(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, amax: Tensor | None, scale: Tensor | None, order: str
) -> None:
    _check(x, fold=fold)
    if amax is not None or scale is not None:
        if amax is not None and scale is not None:
            raise ValueError("quantize: pass amax or scale, not both")
        shape = spec.granularity.scale_shape((x.shape[0], x.shape[1]))
        for name, value, dtype in (("amax", amax, torch.float32), ("scale", scale, spec.scale_dtype)):
            check_like("quantize", f"{name} for {spec} and x {list(x.shape)}", value, shape, (dtype,), x)
    check_choice("quantize: order", order, get_args(Order))


def _check_pair(x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec, fold_t: Tensor | None) -> None:
    _check(x, fold=fold, fold_t=fold_t)
    if (spec.format, spec.scale_rule) != (spec_t.format, spec_t.scale_rule):
        raise ValueError(
            f"quantize_pair needs specs of one format and scale rule; got {spec} and {spec_t}: call quantize twice"
        )


def _check(x: Tensor, **folds: Tensor | None) -> None:
    check_matrix("quantize", "x", x)
    shapes = (x.shape[0], 1), (1, x.shape[1])
    for name, fold in folds.items():
        if fold is not None and (fold.dtype != torch.float32 or fold.shape not in shapes or fold.device != x.device):
            raise ValueError(
                f"quantize: {name} must be float32 [{x.shape[0]},1] or [1,{x.shape[1]}] on {x.device}; "
                f"got {fold.dtype} {list(fold.shape)} on {fold.device}"
            )


def _inputs(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    return [(*sample(device, 1, torch.bfloat16), QuantSpec.parse(case[0]), None, None, None, "both")]


def _pair_inputs(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    (x, factors), (spec, spec_t) = sample(device, 2), map(QuantSpec.parse, case)
    return [(x.bfloat16(), spec, factors[:1].abs(), spec_t, factors[:, :1].abs())]


_SPECS = sorted({spec.text for r in RECIPES.values() for spec in r.specs.values() if spec is not None})
_PAIRS = sorted({(row.text, column.text) for r in RECIPES.values() for row, column in r.pairs})


QUANTIZE = register(
    "quantize", {text: (text,) for text in _SPECS},
    same_bytes(reference.quantize, _inputs, ("data", "transposed data", "scale")),
    triton_backend("quantize.triton:quantize", plan="plan_of"), reference=reference.quantize,
)  # fmt: skip
QUANTIZE_PAIR = register(
    "quantize_pair", {" and ".join(pair): pair for pair in _PAIRS},
    same_bytes(reference.quantize_pair, _pair_inputs, ("data", "scale", "second data", "second scale")),
    triton_backend("quantize.triton:quantize_pair", plan="pair_plan_of"), reference=reference.quantize_pair,
)  # fmt: skip


def _run(
    x: Tensor, spec: str, fold: Tensor | None, amax: Tensor | None, scale: Tensor | None, order: str,
    fuse_with: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    return QUANTIZE.choose(x.device, (spec,)).run(x, QuantSpec.parse(spec), fold, amax, scale, order)


def _fake(
    x: Tensor, spec: str, fold: object, amax: object, scale: Tensor | None, order: str, fuse_with: object = None
) -> list[Tensor]:
    *data, computed = reference.empty_outputs(x, QuantSpec.parse(spec), order)
    return [*data, computed] if scale is None else data


def _decompose(
    x: Tensor, spec: str, fold: Tensor | None, amax: Tensor | None, scale: Tensor | None, order: str,
    fuse_with: Tensor | None = None,
) -> Any:  # fmt: skip
    parsed = QuantSpec.parse(spec)
    # Whether Inductor compiles casts to FP8 for this device.
    fuses = x.device.type == "cpu" or triton_unsupported(x.device, (spec,)) is None
    reduces_and_transposes = order == "columns" and amax is None and scale is None
    if reduces_and_transposes or not fuses or not decomposed.can_decompose(x, parsed, order != "rows"):
        return NotImplemented
    return decomposed.quantize(x, parsed, fold, amax, scale, order, fuse_with)


def _run_pair(x: Tensor, spec: str, fold: Tensor | None, spec_t: str, fold_t: Tensor | None) -> list[Tensor]:
    backend = QUANTIZE_PAIR.choose(x.device, (spec, spec_t))
    return backend.run(x, QuantSpec.parse(spec), fold, QuantSpec.parse(spec_t), fold_t)


def _fake_pair(x: Tensor, spec: str, fold: Tensor | None, spec_t: str, fold_t: Tensor | None) -> list[Tensor]:
    return [*_fake(x, spec, fold, None, None, "rows"), *_fake(x, spec_t, fold_t, None, None, "columns")]


define("quantize", _run, _fake, _decompose)
define("quantize_pair", _run_pair, _fake_pair)
