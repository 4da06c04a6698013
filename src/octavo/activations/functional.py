"""Autograd functions of norms, gated MLPs and activation functions that save their input in FP8, or run fused kernels.

Those that save FP8 receive what the module computed, and return it. Backward computes the gradient at the saved input,
norm statistics included, so that all its operands belong to one set of values. Forward copies the parameters that
recomputation needs: FSDP may have freed them when another layer asks for the output in backward.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.activations.detect import Norm
from octavo.activations.recompute import (
    RECOMPUTABLE,
    Recomputable,
    Rematerializer,
    dequantize_saved,
    quantize_for_backward,
)
from octavo.activations.saved_tensors import outer_hooks, unhooked
from octavo.kernels import glu, layer_norm, rms_norm
from octavo.kernels.fused import glu_backward, layer_norm_backward, rms_norm_backward
from octavo.kernels.fused.reference import supports_output
from octavo.numerics.spec import QuantSpec
from octavo.runtime.derivatives import first_derivative_only
from octavo.runtime.torch_compat import explain_freed_nodes, in_backward
from octavo.tensor import Order

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # By the names of `octavo.activations.detect.ACTIVATIONS`
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}  # fmt: skip


class _NormRematerializer(Rematerializer):
    """Recomputes y from data, scale, weight and bias (or None)."""

    def __init__(self, dtype: torch.dtype, norm: Norm, eps: float) -> None:
        super().__init__(dtype)
        self.norm, self.eps = norm, eps

    def _inputs(self, tensors: Sequence[Any]) -> list[Tensor]:
        return [dequantize_saved(tensors[0], tensors[1], self.dtype)]

    def _matrix(self, tensors: Sequence[Any]) -> Any:
        return self.normed(tensors).y

    def _quantized(self, tensors: Sequence[Any], spec: QuantSpec, order: Order) -> Any:
        return self.normed(tensors, spec, order).quantized if supports_output(spec) else None

    def statistics(self, tensors: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """Return rstd and mean of the stored input, cached if computed before."""
        normed = self._memo.get("normed") or self.normed(tensors)
        return normed.rstd, normed.mean

    def normed(self, tensors: Sequence[Any], spec: QuantSpec | None = None, order: Order = "rows") -> Any:
        normed = _normed(self.inputs(tensors)[0], tensors[2], tensors[3], self.eps, self.norm, spec, order)
        if in_backward():
            self._memo["normed"] = replace(normed, y=None, quantized=None)
        return normed


class _ActivationRematerializer(Rematerializer):
    def __init__(self, dtype: torch.dtype, activation: str) -> None:
        super().__init__(dtype)
        self.activation = activation

    def _matrix(self, tensors: Sequence[Any]) -> Tensor:
        return FUNCTIONS[self.activation](self.inputs(tensors)[0])


class _GluRematerializer(_ActivationRematerializer):
    """Recomputes h from data and scale of gate (without its bias) and up, and the bias or None."""

    def _inputs(self, tensors: Sequence[Any]) -> list[Tensor]:
        *pairs, bias = tensors
        gate, up = super()._inputs(pairs)
        return [gate if bias is None else gate.add_(bias), up]

    def _matrix(self, tensors: Sequence[Any]) -> Any:
        gate, up = self.inputs(tensors)
        return glu(gate, up, self.activation)

    def _quantized(self, tensors: Sequence[Any], spec: QuantSpec, order: Order) -> Any:
        if not supports_output(spec):
            return None
        gate, up = self.inputs(tensors)
        return glu(gate, up, self.activation, spec, order)


class _UnroundedGlu(_GluRematerializer):
    def inputs(self, tensors: Sequence[Any]) -> list[Tensor]:
        return list(tensors)


@explain_freed_nodes
class _NormFunction(torch.autograd.Function):
    """Returns y [..., K], computed by the caller, and FP8 data and scale of x [..., K] (x - mean for a layer norm)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, y: list[Tensor], rematerializer: _NormRematerializer
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_MK = centered = as_rows(x)
        if rematerializer.norm.center:
            centered = x_MK - x_MK.mean(-1, keepdim=True, dtype=torch.float32)
        data, scale = quantize_for_backward(centered)
        ctx.save_for_backward(data, scale, weight, bias)
        ctx.mark_non_differentiable(data, scale)
        ctx.rematerializer = rematerializer
        return y[0], data, scale

    @staticmethod
    @first_derivative_only("a norm that stores its input in FP8")
    def backward(ctx: Any, grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        tensors = data, scale, weight, bias = ctx.saved_tensors
        rematerializer: _NormRematerializer = ctx.rematerializer
        x_MK, (rstd, mean) = rematerializer.inputs((data, scale))[0], rematerializer.statistics(tensors)
        rematerializer.forget()
        dx, dweight, dbias = _norm_gradients(as_rows(grad), x_MK, weight, bias, rstd, mean, rematerializer.norm)
        return dx.view(grad.shape), dweight, dbias, None, None


@explain_freed_nodes
class _FusedNormFunction(torch.autograd.Function):
    """Returns y of x [..., K], both in the order of dimensions `order`, if given; saves x and row statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: Norm, order: list[int] | None
    ) -> Tensor:
        ordered = x if order is None else x.permute(order)
        normed = _normed(as_rows(ordered), weight, bias, eps, norm)
        ctx.save_for_backward(x, weight, bias, normed.rstd, normed.mean)
        ctx.norm, ctx.order = norm, order
        return _shaped(normed.y, ordered.shape)

    @staticmethod
    @first_derivative_only("a fused norm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, rstd, mean = ctx.saved_tensors
        x_MK = as_rows(x if ctx.order is None else x.permute(ctx.order))
        dx, dweight, dbias = _norm_gradients(as_rows(grad), x_MK, weight, bias, rstd, mean, ctx.norm)
        return _in_original_order(dx.view(grad.shape), ctx.order), dweight, dbias, None, None, None


class _GluFunction(torch.autograd.Function):
    """Returns h [..., N], computed by the caller, and saves `tensors`; without `up`, `gate` holds both halves."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, h: list[Tensor], gate_first: bool,
        rematerializer: _GluRematerializer, *tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(*tensors)
        ctx.rematerializer, ctx.is_joint, ctx.gate_first = rematerializer, up is None, gate_first
        return h[0]

    @staticmethod
    @first_derivative_only("a gated MLP that stores or fuses its activations")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rematerializer: _GluRematerializer = ctx.rematerializer
        gate, up = rematerializer.inputs(ctx.saved_tensors)
        rematerializer.forget()
        joined = ctx.is_joint and ctx.gate_first
        dgate, dup = glu_backward(as_rows(grad), gate, up, rematerializer.activation, joined=joined)
        if not ctx.is_joint:
            return dgate.view(grad.shape), dup.view(grad.shape), *[None] * 8
        if joined and dgate._base is not None:
            both = dgate._base
        else:
            both = torch.cat((dgate, dup) if ctx.gate_first else (dup, dgate), 1)
        return both.view(*grad.shape[:-1], 2 * grad.shape[-1]), *[None] * 9


class _ActivationFunction(torch.autograd.Function):
    """Returns act(x) [..., N], computed by the caller, and saves FP8 x, quantized by the caller."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: list[Tensor], rematerializer: _ActivationRematerializer, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.rematerializer = rematerializer
        return y[0]

    @staticmethod
    @first_derivative_only("an activation that stores its input in FP8")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rematerializer: _ActivationRematerializer = ctx.rematerializer
        (x,) = rematerializer.inputs(ctx.saved_tensors)
        rematerializer.forget()
        x, activation = x.reshape(grad.shape), rematerializer.activation
        if activation in ("silu", "quick_gelu"):
            return torch.ops.aten.silu_backward(grad, x if activation == "silu" else 1.702 * x), *[None] * 4
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward(grad, x, approximate=approximate), *[None] * 4


def norm_saving_fp8(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None, norm: Norm
) -> Tensor:
    """Return a norm y of x [..., K] over the last dimension, with x or x - mean saved in FP8 for backward."""
    eps, weight, norm = _complete(y, weight, eps, norm)
    rematerializer = _NormRematerializer(y.dtype, norm, eps)
    out, *tensors = unhooked(_NormFunction.apply, x.to(y.dtype), weight, bias, [y], rematerializer)
    copies = weight.detach().clone(), None if bias is None else bias.detach().clone()
    return _registered(out, (*tensors, *copies), rematerializer)


def fused_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None, norm: Norm) -> Tensor:
    """Return the norm of x [..., K] over the last dimension; saves x and the statistics of its rows for backward."""
    eps, weight, norm = _complete(x, weight, eps, norm)
    order = None if x.is_contiguous() else _memory_order(x)
    y: Tensor = _FusedNormFunction.apply(x, weight, bias, eps, norm, order)
    return _in_original_order(y, order)


def _complete(x: Tensor, weight: Tensor | None, eps: float | None, norm: Norm) -> tuple[float, Tensor, Norm]:
    if weight is None:
        weight, norm = x.new_ones(x.shape[-1:]), replace(norm, add_unit_offset=False)
    return torch.finfo(torch.float32).eps if eps is None else eps, weight, norm


def _normed(
    x_MK: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: Norm, spec: QuantSpec | None = None,
    order: Order = "rows",
) -> Any:  # fmt: skip
    if norm.center:
        return layer_norm(x_MK, weight, bias, eps, spec, order)
    return rms_norm(x_MK, weight, eps, spec, order, add_unit_offset=norm.add_unit_offset)


def _norm_gradients(
    grad_MK: Tensor, x_MK: Tensor, weight: Tensor, bias: Tensor | None, rstd: Tensor, mean: Tensor | None, norm: Norm
) -> tuple[Tensor, Tensor, Tensor | None]:
    if mean is None:
        return *rms_norm_backward(grad_MK, x_MK, weight, rstd, add_unit_offset=norm.add_unit_offset), None
    dx, dweight, dbias = layer_norm_backward(grad_MK, x_MK, weight, mean, rstd)
    return dx, dweight, None if bias is None else dbias


def _memory_order(x: Tensor) -> list[int]:
    """Return the dimensions of x [..., K] in the order in which PyTorch lays out results: q and k may be transposed."""
    strides = x.stride()
    if 0 in strides:  # expanded dimensions stay in place
        strides = torch.empty_like(x, device="meta").stride()
    return [*sorted(range(x.ndim - 1), key=lambda dim: -strides[dim]), x.ndim - 1]


def _in_original_order(x: Tensor, order: list[int] | None) -> Tensor:
    """Undo `x.permute(order)`."""
    return x if order is None else x.permute(sorted(range(len(order)), key=order.__getitem__))


def _shaped(rows: Tensor, shape: torch.Size) -> Tensor:
    # No view: the output of an autograd function that is one cannot be written in place.
    return torch.ops.aten._unsafe_view(rows, shape)  # type: ignore[no-any-return]


def _registered(out: Tensor, tensors: tuple[Tensor | None, ...], rematerializer: Rematerializer) -> Tensor:
    if out.is_contiguous() and out.grad_fn is not None and not torch.is_inference_mode_enabled():
        RECOMPUTABLE.add(out, Recomputable(tensors, rematerializer), outer_hooks())
    return out


def glu_saving_fp8(
    gate: Tensor, up: Tensor, h: Tensor, activation: str, bias: Tensor | None = None, both: Tensor | None = None,
    gate_first: bool = True,
) -> Tensor:  # fmt: skip
    """Return h = act(gate) · up [..., N], gate and up saved in FP8. If they are halves of `both`, so is bias [2N]."""
    if both is not None and bias is not None:
        bias = bias.chunk(2)[0 if gate_first else 1]
    gate_MN, bias = as_rows(gate), None if bias is None else bias.detach().to(gate.dtype, copy=True)
    without_bias = gate_MN if bias is None else gate_MN - bias
    tensors = (*quantize_for_backward(without_bias), *quantize_for_backward(as_rows(up)), bias)
    rematerializer = _GluRematerializer(gate.dtype, activation)
    inputs = (gate, up) if both is None else (both, None)
    out = unhooked(_GluFunction.apply, *inputs, [h], gate_first, rematerializer, *tensors)
    return _registered(out, tensors, rematerializer)


def fused_glu(gate: Tensor, up: Tensor, activation: str, both: Tensor | None, gate_first: bool) -> Tensor:
    """Return h = act(gate) · up [..., N]; gate and up, halves of `both` if that is given, are saved for backward."""
    tensors = [as_rows(half.detach()) for half in (gate, up)]
    h: Any = glu(tensors[0], tensors[1], activation)
    inputs = (gate, up) if both is None else (both, None)
    rematerializer = _UnroundedGlu(gate.dtype, activation)
    out: Tensor = _GluFunction.apply(*inputs, [_shaped(h, gate.shape)], gate_first, rematerializer, *tensors)
    return out


def activation_saving_fp8(x: Tensor, y: Tensor, activation: str) -> Tensor:
    """Return y = act(x) [..., N], with x saved in FP8 for backward."""
    tensors, rematerializer = quantize_for_backward(as_rows(x)), _ActivationRematerializer(x.dtype, activation)
    return _registered(unhooked(_ActivationFunction.apply, x, [y], rematerializer, *tensors), tensors, rematerializer)


def as_rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
