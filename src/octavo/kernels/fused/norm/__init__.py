"""rms_norm and layer_norm with FP8 output, and their gradients.

    r = x + residual, rounded to x's dtype and returned as `residual_out`; x without a residual
    rms_norm    y = r·rstd · w                rstd = 1/√(mean(r²) + eps)          w = weight, or 1 + weight
    layer_norm  y = (r - mean)·rstd · w + b   rstd = 1/√(mean((r - mean)²) + eps)

in float32. y is rounded once to x's dtype, then quantized. With n = (r - mean)·rstd and h = grad·w,
gradients are dx = (h - [mean(h)] - n·mean(h·n))·rstd (+ the gradient of `residual_out`), dweight = Σ grad·n,
dbias = Σ grad.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.conformance.mismatches import difference
from octavo.kernels.fused import reference
from octavo.kernels.fused.argument_checks import cases_of_inputs, check_like, check_matrix, check_output, sample
from octavo.kernels.fused.fp8_outputs import empty_outputs, optional_spec, unpack_outputs
from octavo.kernels.library import define
from octavo.kernels.registry import Backend, Case, Op, register, triton_unsupported
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import QuantSpec
from octavo.tensor import Order, ScaledTensor

_F32 = (torch.float32,)


@dataclass(frozen=True, kw_only=True)
class NormOutput:
    """Outputs of a norm of x [R,C].

    Attributes:
        y: Result in x's dtype, [R,C]; None without `return_unquantized`.
        quantized: `quantize(y, spec, order=order)`; None by tensor and without a spec.
        amax: By tensor, the amax of y, float32 [1,1], for `quantize(y, spec, amax=...)`.
        residual_out: x + residual in x's dtype, [R,C]; None without a residual.
        rstd: float32 [R,1], for backward.
        mean: float32 [R,1], for backward; None for rms_norm.
    """

    y: Tensor | None
    quantized: ScaledTensor | None
    amax: Tensor | None
    residual_out: Tensor | None
    rstd: Tensor
    mean: Tensor | None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    spec: QuantSpec | None = None,
    order: Order = "rows",
    residual: Tensor | None = None,
    *,
    add_unit_offset: bool = False,
    return_unquantized: bool = True,
) -> NormOutput:
    """Root-mean-square norm over the last dimension of a matrix (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        x: [R,C], float32, bfloat16 or float16, any strides.
        weight: [C], x's dtype or float32.
        eps: Added to the mean square.
        spec: Spec of the FP8 output, with scales by tensor (returns only the amax, for a later cast), row, or blocks
            of 1x16 to 1x128; None for no FP8 output.
        order: Memory orders of the FP8 data, as in `quantize`. Ignored by tensor.
        residual: [R,C] of x's dtype, added to x first.
        add_unit_offset: Multiply by 1 + weight, as Gemma does.
        return_unquantized: Return y in x's dtype. False saves 2 bytes per element if only products read the result.

    Raises:
        ValueError: An operand has a wrong dtype, shape or device, or no output is requested.
    """
    _check_norm("rms_norm", x, residual, weight, None, spec, order, return_unquantized)
    text = "" if spec is None else spec.text
    outputs = torch.ops.octavo.rms_norm(x, residual, weight, eps, add_unit_offset, text, order, return_unquantized)
    return _normed(outputs, residual is not None, False, spec, order, return_unquantized)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    spec: QuantSpec | None = None,
    order: Order = "rows",
    residual: Tensor | None = None,
    *,
    return_unquantized: bool = True,
) -> NormOutput:
    """Layer norm over the last dimension of a matrix; arguments as `rms_norm`, plus bias [C] of weight's dtype."""
    _check_norm("layer_norm", x, residual, weight, bias, spec, order, return_unquantized)
    text = "" if spec is None else spec.text
    outputs = torch.ops.octavo.layer_norm(x, residual, weight, bias, eps, text, order, return_unquantized)
    return _normed(outputs, residual is not None, True, spec, order, return_unquantized)


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    grad_residual_out: Tensor | None = None,
    *,
    add_unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm`.

    Args:
        grad: ∂L/∂y [R,C] of x's dtype.
        x: Input of the norm: `residual_out` with a residual.
        weight: [C].
        rstd: From the forward result.
        grad_residual_out: ∂L/∂residual_out [R,C] of x's dtype from the residual stream, added to dx.
        add_unit_offset: As in `rms_norm`.

    Returns:
        dx [R,C] (for x and residual) and dweight [C], in x's and weight's dtypes. Deterministic.

    Raises:
        ValueError: An operand has a wrong dtype, shape or device.
    """
    _check_backward("rms_norm_backward", grad, x, weight, rstd, rstd, grad_residual_out)
    dx, dweight = torch.ops.octavo.rms_norm_backward(grad, x, weight, rstd, grad_residual_out, add_unit_offset)
    return dx, dweight


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    grad_residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm`: dx, dweight, dbias; arguments as `rms_norm_backward`."""
    _check_backward("layer_norm_backward", grad, x, weight, rstd, mean, grad_residual_out)
    dx, dweight, dbias = torch.ops.octavo.layer_norm_backward(grad, x, weight, mean, rstd, grad_residual_out)
    return dx, dweight, dbias


def _check_norm(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, spec: QuantSpec | None,
    order: str, return_unquantized: bool,
) -> None:  # fmt: skip
    check_matrix(op, "x", x)
    check_like(op, "residual", residual, tuple(x.shape), (x.dtype,), x)
    check_like(op, "weight", weight, (x.shape[1],), (x.dtype, torch.float32), x)
    check_like(op, "bias", bias, (x.shape[1],), (weight.dtype,), x)
    check_output(op, spec, order, return_unquantized)


def _check_backward(
    op: str, grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor, grad_residual_out: Tensor | None
) -> None:
    check_matrix(op, "x", x)
    shape = tuple(x.shape)
    check_like(op, "grad", grad, shape, (x.dtype,), x)
    check_like(op, "weight", weight, shape[1:], SUPPORTED_DTYPES, x)
    check_like(op, "rstd", rstd, (shape[0], 1), _F32, x)
    check_like(op, "mean", mean, (shape[0], 1), _F32, x)
    check_like(op, "grad_residual_out", grad_residual_out, shape, (x.dtype,), x)


def _normed(
    outputs: list[Tensor], residual: bool, center: bool, spec: QuantSpec | None, order: str, return_unquantized: bool
) -> NormOutput:
    remaining = iter(outputs)
    rstd = next(remaining)
    mean = next(remaining) if center else None
    residual_out = next(remaining) if residual else None
    y = next(remaining) if return_unquantized else None
    quantized, amax = unpack_outputs(list(remaining), spec, order)
    return NormOutput(y=y, quantized=quantized, amax=amax, residual_out=residual_out, rstd=rstd, mean=mean)


def _triton_norm(*arguments: Any) -> list[Tensor]:
    from octavo.kernels.fused.norm import triton  # imports Triton

    return triton.norm(*arguments)


def _triton_backward(*arguments: Any) -> list[Tensor]:
    from octavo.kernels.fused.norm import triton

    return triton.norm_backward(*arguments)


def _probe(backend: Backend, device: torch.device, case: Case) -> str | None:
    """Probe all options at once."""
    kind, text = case
    x, residual, weights = sample(device, 3)
    bias = weights[1] if kind == "layer_norm" else None
    call = (x, residual, weights[0], bias, 1e-5, bias is None, bias is not None, QuantSpec.parse(text))
    return next(
        (d for o in ("rows", "both") if (d := difference(reference.norm(*call, o, True), backend.run(*call, o, True)))),
        None,
    )


def _probe_backward(backend: Backend, device: torch.device, case: Case) -> str | None:
    x, grad, passed, weights = sample(device, 4)
    center = case == ("layer_norm",)
    rstd = 1 + x[:, :1].float().abs()
    call = (grad, x, weights[0], rstd, x[:, 1:2].float() if center else None, passed, not center, center)
    return difference(reference.norm_backward(*call), backend.run(*call))


def _register(kind: str) -> tuple[Op, Op]:
    forward = Op(name=kind, cases={text: (kind, text) for text in cases_of_inputs()}, probe=_probe)
    forward.add(Backend(name="triton", run=_triton_norm, unsupported_reason=triton_unsupported))
    forward.add(Backend(name="reference", run=reference.norm))
    backward = Op(name=f"{kind}_backward", cases={"gradients": (kind,)}, probe=_probe_backward)
    backward.add(Backend(name="triton", run=_triton_backward, unsupported_reason=triton_unsupported))
    backward.add(Backend(name="reference", run=reference.norm_backward))
    return register(forward), register(backward)


RMS_NORM, RMS_NORM_BACKWARD = _register("rms_norm")
LAYER_NORM, LAYER_NORM_BACKWARD = _register("layer_norm")


def _run_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    add_unit_offset: bool,
    spec: str,
    order: str,
    return_unquantized: bool,
) -> list[Tensor]:
    backend = RMS_NORM.choose(x.device, ("rms_norm", spec))
    outputs: list[Tensor] = backend.run(
        x, residual, weight, None, eps, add_unit_offset, False, optional_spec(spec), order, return_unquantized
    )
    return outputs


def _run_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, spec: str, order: str,
    return_unquantized: bool,
) -> list[Tensor]:  # fmt: skip
    backend = LAYER_NORM.choose(x.device, ("layer_norm", spec))
    outputs: list[Tensor] = backend.run(
        x, residual, weight, bias, eps, False, True, optional_spec(spec), order, return_unquantized
    )
    return outputs


def _fake_norm(
    x: Tensor, residual: Tensor | None, center: bool, spec: str, order: str, return_unquantized: bool
) -> list[Tensor]:
    rows, columns = x.shape
    statistics = [x.new_empty((rows, 1), dtype=torch.float32) for _ in range(1 + center)]
    matrices = [x.new_empty((rows, columns)) for _ in range((residual is not None) + return_unquantized)]
    return [*statistics, *matrices, *empty_outputs(x, optional_spec(spec), order)]


def _fake_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    add_unit_offset: bool,
    spec: str,
    order: str,
    return_unquantized: bool,
) -> list[Tensor]:
    return _fake_norm(x, residual, False, spec, order, return_unquantized)


def _fake_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, spec: str, order: str,
    return_unquantized: bool,
) -> list[Tensor]:  # fmt: skip
    return _fake_norm(x, residual, True, spec, order, return_unquantized)


def _run_rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_residual_out: Tensor | None, add_unit_offset: bool
) -> list[Tensor]:
    backend = RMS_NORM_BACKWARD.choose(x.device, ("rms_norm",))
    outputs: list[Tensor] = backend.run(grad, x, weight, rstd, None, grad_residual_out, add_unit_offset, False)
    return outputs


def _run_layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, grad_residual_out: Tensor | None
) -> list[Tensor]:
    backend = LAYER_NORM_BACKWARD.choose(x.device, ("layer_norm",))
    outputs: list[Tensor] = backend.run(grad, x, weight, rstd, mean, grad_residual_out, False, True)
    return outputs


def _fake_rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_residual_out: Tensor | None, add_unit_offset: bool
) -> list[Tensor]:
    return [x.new_empty(x.shape), weight.new_empty(weight.shape)]


def _fake_layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, grad_residual_out: Tensor | None
) -> list[Tensor]:
    return [x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)]


define(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, bool add_unit_offset, str spec, str order, "
    "bool return_unquantized) -> Tensor[]",
    _run_rms_norm,
    _fake_rms_norm,
)
define(
    "layer_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, str spec, str order, "
    "bool return_unquantized) -> Tensor[]",
    _run_layer_norm,
    _fake_layer_norm,
)
define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, Tensor? grad_residual_out, "
    "bool add_unit_offset) -> Tensor[]",
    _run_rms_norm_backward,
    _fake_rms_norm_backward,
)
define(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? grad_residual_out) "
    "-> Tensor[]",
    _run_layer_norm_backward,
    _fake_layer_norm_backward,
)
