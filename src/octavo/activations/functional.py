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

    def gradients(self, grad: Tensor, tensors: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return ∂x, ∂weight and ∂bias; the producer's backward runs last."""
        x_MK, (rstd, mean) = self.inputs(tensors)[0], self.statistics(tensors)
        self._memo.clear()  # as `forget`
        dx, dweight, dbias = _norm_gradients(as_rows(grad), x_MK, tensors[2], tensors[3], rstd, mean, self.norm)
        return dx.view(grad.shape), dweight, dbias


class _ActivationRematerializer(Rematerializer):
    def __init__(self, dtype: torch.dtype, activation: str, is_joint: bool = False, gate_first: bool = True) -> None:
        super().__init__(dtype)
        self.activation, self.is_joint, self.gate_first = activation, is_joint, gate_first  # the last two of a GLU

    def _matrix(self, tensors: Sequence[Any]) -> Tensor:
        return FUNCTIONS[self.activation](self.inputs(tensors)[0])

    def gradients(self, grad: Tensor, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        x = self.inputs(tensors)[0].reshape(grad.shape)
        self._memo.clear()  # as `forget`
        if self.activation in ("silu", "quick_gelu"):
            return (torch.ops.aten.silu_backward(grad, x if self.activation == "silu" else 1.702 * x),)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return (torch.ops.aten.gelu_backward(grad, x, approximate=approximate),)


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

    def gradients(self, grad: Tensor, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return ∂gate and ∂up, or those of the product that has both as halves."""
        gate, up = self.inputs(tensors)
        self._memo.clear()  # as `forget`
        joined = self.is_joint and self.gate_first
        dgate, dup = glu_backward(as_rows(grad), gate, up, self.activation, joined=joined)
        if not self.is_joint:
            return dgate.view(grad.shape), dup.view(grad.shape)
        if joined and dgate._base is not None:
            both = dgate._base
        else:
            both = torch.cat((dgate, dup) if self.gate_first else (dup, dgate), 1)
        return (both.view(*grad.shape[:-1], 2 * grad.shape[-1]),)


class _UnroundedGlu(_GluRematerializer):
    def inputs(self, tensors: Sequence[Any]) -> list[Tensor]:
        return list(tensors)


class _StoringFunction(torch.autograd.Function):
    """Returns y, computed by the caller, and saves tensors from which a rematerializer computes gradients of inputs."""

    @staticmethod
    def forward(
        ctx: Any, y: list[Tensor], rematerializer: Any, tensors: Sequence[Tensor | None], *inputs: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.rematerializer = rematerializer
        return y[0]

    @staticmethod
    @first_derivative_only("a norm, an activation or a gated MLP that stores or fuses its activations")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.rematerializer.gradients(grad, ctx.saved_tensors)


# By their names graphs tell what an output is, as to `octavo.activations.exactness`.
@explain_freed_nodes
class _NormFunction(_StoringFunction): ...


class _GluFunction(_StoringFunction): ...


class _ActivationFunction(_StoringFunction): ...


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


def norm_saving_fp8(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None, norm: Norm
) -> Tensor:
    """Return a norm y of x [..., K] over the last dimension, with x or x - mean saved in FP8 for backward."""
    eps, weight, norm = _complete(y, weight, eps, norm)
    x, rematerializer = x.to(y.dtype), _NormRematerializer(y.dtype, norm, eps)
    centered = as_rows(x.detach())
    if norm.center:
        centered = centered - centered.mean(-1, keepdim=True, dtype=torch.float32)
    tensors = quantize_for_backward(centered)
    out = unhooked(_NormFunction.apply, [y], rematerializer, (*tensors, weight, bias), x, weight, bias)
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
    rematerializer = _GluRematerializer(gate.dtype, activation, both is not None, gate_first)
    inputs = (gate, up) if both is None else (both,)
    out = unhooked(_GluFunction.apply, [h], rematerializer, tensors, *inputs)
    return _registered(out, tensors, rematerializer)


def fused_glu(gate: Tensor, up: Tensor, activation: str, both: Tensor | None, gate_first: bool) -> Tensor:
    """Return h = act(gate) · up [..., N]; gate and up, halves of `both` if that is given, are saved for backward."""
    tensors = [as_rows(half.detach()) for half in (gate, up)]
    h: Any = glu(tensors[0], tensors[1], activation)
    inputs = (gate, up) if both is None else (both,)
    rematerializer = _UnroundedGlu(gate.dtype, activation, both is not None, gate_first)
    out: Tensor = _GluFunction.apply([_shaped(h, gate.shape)], rematerializer, tensors, *inputs)
    return out


def activation_saving_fp8(x: Tensor, y: Tensor, activation: str) -> Tensor:
    """Return y = act(x) [..., N], with x saved in FP8 for backward."""
    tensors, rematerializer = quantize_for_backward(as_rows(x)), _ActivationRematerializer(x.dtype, activation)
    return _registered(unhooked(_ActivationFunction.apply, [y], rematerializer, tensors, x), tensors, rematerializer)


def as_rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
