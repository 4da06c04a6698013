"""rms_norm and layer_norm, with their result in FP8 or not, and their gradients.

    rms_norm    y = x·rstd · w                rstd = 1/√(mean(x²) + eps)          w = weight, or 1 + weight
    layer_norm  y = (x - mean)·rstd · w + b   rstd = 1/√(mean((x - mean)²) + eps)

in float32. y is rounded once to x's dtype, then quantized. With n = (x - mean)·rstd and h = grad·w,
gradients are dx = (h - [mean(h)] - n·mean(h·n))·rstd, dweight = Σ grad·n, dbias = Σ grad.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.fused import reference
from octavo.kernels.fused.reference import cases_of_inputs, check_output, empty_outputs, optional_spec
from octavo.kernels.library import check_like, check_matrix, define, sample
from octavo.kernels.quantize.reference import unpack_outputs
from octavo.kernels.registry import Case, register, same_bytes, triton_backend
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import QuantSpec
from octavo.tensor import Order, ScaledTensor

_F32 = (torch.float32,)


@dataclass(frozen=True, kw_only=True)
class NormOutput:
    y: Tensor | None  # Result in x's dtype, [R,C]; None with a spec
    quantized: ScaledTensor | None  # `quantize(y, spec, order=order)`; None without a spec
    rstd: Tensor  # float32 [R,1], for backward
    mean: Tensor | None  # float32 [R,1], for backward; None for rms_norm


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, spec: QuantSpec | None = None, order: Order = "rows", *,
    add_unit_offset: bool = False,
) -> NormOutput:  # fmt: skip
    """Root-mean-square norm over the last dimension of x [R,C], any strides (Zhang and Sennrich, arXiv 1910.07467).

    The weight [C] is of x's dtype or float32; `add_unit_offset` multiplies by 1 + weight, as Gemma does. Spec and order
    are those of `glu`. Raises ValueError for other specs, or an operand of a wrong dtype, shape or device.
    """
    _check_norm("rms_norm", x, weight, None, spec, order)
    text = "" if spec is None else spec.text
    return _normed(torch.ops.octavo.rms_norm(x, weight, eps, add_unit_offset, text, order), False, spec, order)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, spec: QuantSpec | None = None, order: Order = "rows"
) -> NormOutput:
    """Layer norm over the last dimension of a matrix; arguments as `rms_norm`, plus bias [C] of weight's dtype."""
    _check_norm("layer_norm", x, weight, bias, spec, order)
    text = "" if spec is None else spec.text
    return _normed(torch.ops.octavo.layer_norm(x, weight, bias, eps, text, order), True, spec, order)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, add_unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`, deterministic: dx [R,C] and dweight [C], in x's and weight's dtypes; grad is of x's."""
    _check_backward("rms_norm_backward", grad, x, weight, rstd, rstd)
    dx, dweight = torch.ops.octavo.rms_norm_backward(grad, x, weight, rstd, add_unit_offset)
    return dx, dweight


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm`: dx, dweight, dbias; arguments as `rms_norm_backward`."""
    _check_backward("layer_norm_backward", grad, x, weight, rstd, mean)
    dx, dweight, dbias = torch.ops.octavo.layer_norm_backward(grad, x, weight, mean, rstd)
    return dx, dweight, dbias


def _check_norm(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, spec: QuantSpec | None, order: str) -> None:
    check_matrix(op, "x", x)
    check_like(op, "weight", weight, (x.shape[1],), (x.dtype, torch.float32), x)
    check_like(op, "bias", bias, (x.shape[1],), (weight.dtype,), x)
    check_output(op, spec, order)


def _check_backward(op: str, grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor) -> None:
    check_matrix(op, "x", x)
    shape = tuple(x.shape)
    check_like(op, "grad", grad, shape, (x.dtype,), x)
    check_like(op, "weight", weight, shape[1:], SUPPORTED_DTYPES, x)
    check_like(op, "rstd", rstd, (shape[0], 1), _F32, x)
    check_like(op, "mean", mean, (shape[0], 1), _F32, x)


def _normed(outputs: list[Tensor], center: bool, spec: QuantSpec | None, order: str) -> NormOutput:
    rstd, mean, rest = outputs[0], outputs[1] if center else None, outputs[1 + center :]
    if spec is None:
        return NormOutput(y=rest[0], quantized=None, rstd=rstd, mean=mean)
    return NormOutput(y=None, quantized=unpack_outputs(rest, spec, order), rstd=rstd, mean=mean)


def _inputs(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    kind, text = case
    x, weights = sample(device, 2, torch.bfloat16)
    bias = weights[1] if kind == "layer_norm" else None
    call = (x, weights[0], bias, 1e-5, bias is None, bias is not None, optional_spec(text))
    return [(*call, order) for order in ("rows", "both")[: 1 + bool(text)]]


def _backward_inputs(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    x, grad, weights = sample(device, 3, torch.bfloat16)
    center = case == ("layer_norm",)
    rstd, mean = 1 + x[:, :1].float().abs(), x[:, 1:2].float() if center else None
    return [(grad, x, weights[0], rstd, mean, not center, center)]


RMS_NORM, LAYER_NORM = (
    register(
        kind, {text or kind: (kind, text) for text in cases_of_inputs()}, same_bytes(reference.norm, _inputs),
        triton_backend("fused.triton:norm"), reference=reference.norm,
    )
    for kind in ("rms_norm", "layer_norm")
)  # fmt: skip
RMS_NORM_BACKWARD, LAYER_NORM_BACKWARD = (
    register(
        f"{kind}_backward", {"gradients": (kind,)}, same_bytes(reference.norm_backward, _backward_inputs),
        triton_backend("fused.triton:norm_backward"), reference=reference.norm_backward,
    )
    for kind in ("rms_norm", "layer_norm")
)  # fmt: skip


def _run_rms_norm(x: Tensor, weight: Tensor, eps: float, add_unit_offset: bool, spec: str, order: str) -> list[Tensor]:
    backend = RMS_NORM.choose(x.device, ("rms_norm", spec))
    return backend.run(x, weight, None, eps, add_unit_offset, False, optional_spec(spec), order)


def _run_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, spec: str, order: str) -> list[Tensor]:
    backend = LAYER_NORM.choose(x.device, ("layer_norm", spec))
    return backend.run(x, weight, bias, eps, False, True, optional_spec(spec), order)


def _fake_norm(x: Tensor, center: bool, spec: str, order: str) -> list[Tensor]:
    statistics = [x.new_empty((x.shape[0], 1), dtype=torch.float32) for _ in range(1 + center)]
    return [*statistics, *empty_outputs(x, optional_spec(spec), order)]


def _run_rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add_unit_offset: bool
) -> list[Tensor]:
    return RMS_NORM_BACKWARD.choose(x.device, ("rms_norm",)).run(grad, x, weight, rstd, None, add_unit_offset, False)


def _run_layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> list[Tensor]:
    return LAYER_NORM_BACKWARD.choose(x.device, ("layer_norm",)).run(grad, x, weight, rstd, mean, False, True)


def _fake_backward(*operands: Tensor) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in operands]


define("rms_norm", _run_rms_norm, lambda x, weight, eps, offset, spec, order: _fake_norm(x, False, spec, order))
define("layer_norm", _run_layer_norm, lambda x, weight, bias, eps, spec, order: _fake_norm(x, True, spec, order))
define("rms_norm_backward", _run_rms_norm_backward, lambda g, x, w, rstd, offset: _fake_backward(x, w))
define("layer_norm_backward", _run_layer_norm_backward, lambda g, x, w, mean, rstd: _fake_backward(x, w, w))
