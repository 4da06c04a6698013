"""Functions of activations that store their input in FP8 for backward, and are the source of their output.

Values in forward are exact: what is rounded to FP8 is only what backward computes from. The gradients of each are
those of the function at the stored input. See `octavo.nn.sources` for the stored form, and for what it saves that
outputs are made again.

Norms and gated activations are the ops `rms_norm`, `layer_norm` and `glu`: float32 inside, one rounding at the end,
where many models round in between as well. Plain activations are PyTorch's own kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.kernels import glu, layer_norm, rms_norm
from octavo.kernels.fused import glu_backward, layer_norm_backward, rms_norm_backward
from octavo.kernels.fused.forms import serves
from octavo.nn.saved import recording, unhooked
from octavo.nn.sources import SOURCES, Remake, Source, restored, stored
from octavo.numerics.spec import TENSOR, QuantSpec
from octavo.tensor import ScaledTensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
"""What has an FP8 form."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """What a norm computes.

    Attributes:
        eps: Added to the mean square or the variance; None is what PyTorch adds then, the smallest step at 1 of the
            dtype that it computes in: float32 for bfloat16 and float16.
        offset: Multiplies by 1 + weight.
        center: Takes the mean away first (layer norm).
        promotes: Gives the wider of the input's and the weight's dtype, rather than the input's.
        native: PyTorch's own, whose dtypes autocast decides.
    """

    kind = "norm"
    eps: float | None
    offset: bool = False
    center: bool = False
    promotes: bool = False
    native: bool = False


class _RemadeNorm(Remake):
    """From data, scale, weight and bias (or None)."""

    def __init__(self, dtype: torch.dtype, norm: Norm, eps: float) -> None:
        super().__init__(dtype)
        self.norm, self.eps = norm, eps

    def _inputs(self, tensors: Sequence[Any]) -> list[Tensor]:
        return [restored(tensors[0], tensors[1], self.dtype)]

    def _matrix(self, tensors: Sequence[Any]) -> Tensor:
        y = self._normed(tensors, None, "rows").y
        assert y is not None
        return y

    def _quantized(self, tensors: Sequence[Any], spec: QuantSpec, order: str) -> ScaledTensor | None:
        if spec.granularity == TENSOR or not serves(spec):
            return None
        return self._normed(tensors, spec, order).quantized

    def _normed(self, tensors: Sequence[Any], spec: QuantSpec | None, order: str) -> Any:
        x, weight, bias, keep = self.inputs(tensors)[0], tensors[2], tensors[3], spec is None
        if self.norm.center:
            return layer_norm(x, weight, bias, self.eps, spec, order, keep=keep)  # type: ignore[arg-type]
        return rms_norm(x, weight, self.eps, spec, order, offset=self.norm.offset, keep=keep)  # type: ignore[arg-type]


class _RemadeGlu(Remake):
    """From data and scale of gate, then of up."""

    def __init__(self, dtype: torch.dtype, activation: str) -> None:
        super().__init__(dtype)
        self.activation = activation

    def _matrix(self, tensors: Sequence[Any]) -> Tensor:
        gate, up = self.inputs(tensors)
        h = glu(gate, up, self.activation).h
        assert h is not None
        return h

    def _quantized(self, tensors: Sequence[Any], spec: QuantSpec, order: str) -> ScaledTensor | None:
        if spec.granularity == TENSOR or not serves(spec):
            return None
        gate, up = self.inputs(tensors)
        return glu(gate, up, self.activation, spec, order, keep=False).quantized  # type: ignore[arg-type]


class _RemadeActivation(Remake):
    """From data and scale of its input."""

    def __init__(self, dtype: torch.dtype, activation: str) -> None:
        super().__init__(dtype)
        self.activation = activation

    def _matrix(self, tensors: Sequence[Any]) -> Tensor:
        return _activated(self.inputs(tensors)[0], self.activation)


class _NormFunction(torch.autograd.Function):
    """y [M,K] of x [M,K], whose stored form arrives with it."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight: Tensor, bias: Tensor | None, data: Tensor, scale: Tensor, remake: _RemadeNorm
    ) -> Tensor:
        found = _norm(x_MK, weight, bias, remake.norm, remake.eps)
        ctx.save_for_backward(data, scale, weight, bias, found.rstd, found.mean)
        ctx.remake = remake
        y: Tensor = found.y
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        data, scale, weight, bias, rstd, mean = ctx.saved_tensors
        remake: _RemadeNorm = ctx.remake
        x_MK, dbias = remake.inputs((data, scale))[0], None
        remake.forget()
        if mean is None:
            dx, dweight = rms_norm_backward(grad, x_MK, weight, rstd, offset=remake.norm.offset)
        else:
            dx, dweight, dbias = layer_norm_backward(grad, x_MK, weight, mean, rstd)
        return dx, dweight, None if bias is None else dbias, None, None, None


class _GluFunction(torch.autograd.Function):
    """h [M,N] of gate and up [M,N], whose stored forms arrive with them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, remake: _RemadeGlu, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.remake = remake
        h = glu(gate, up, remake.activation).h
        assert h is not None
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        remake: _RemadeGlu = ctx.remake
        gate, up = remake.inputs(ctx.saved_tensors)
        remake.forget()
        return *glu_backward(grad, gate, up, remake.activation), *[None] * 5


class _JointGluFunction(torch.autograd.Function):
    """The same of [gate, up] side by side, [M,2N]; its gradient is one tensor as well."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, gate_first: bool, remake: _RemadeGlu, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.remake, ctx.gate_first = remake, gate_first
        gate, up = _halves(both, gate_first)
        h = glu(gate, up, remake.activation).h
        assert h is not None
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        remake: _RemadeGlu = ctx.remake
        gate, up = remake.inputs(ctx.saved_tensors)
        remake.forget()
        dgate, dup = glu_backward(grad, gate, up, remake.activation, joined=ctx.gate_first)
        if ctx.gate_first and dgate._base is not None:
            return dgate._base, *[None] * 6
        return torch.cat((dgate, dup) if ctx.gate_first else (dup, dgate), 1), *[None] * 6


class _ActivationFunction(torch.autograd.Function):
    """act(x) of x [M,N], whose stored form arrives with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, remake: _RemadeActivation, data: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(data, scale)
        ctx.remake = remake
        return _activated(x, remake.activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        remake: _RemadeActivation = ctx.remake
        (x,) = remake.inputs(ctx.saved_tensors)
        remake.forget()
        if remake.activation == "silu":
            return torch.ops.aten.silu_backward(grad, x), None, None, None
        approximate = "tanh" if remake.activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward(grad, x, approximate=approximate), None, None, None


def stored_norm(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """A norm over the last dimension of x [..., K] that keeps x in FP8 for backward."""
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
    x_MK = _matrix(x)
    if not (recording() and (x.requires_grad or weight.requires_grad)):
        y: Tensor = _norm(x_MK, weight, bias, norm, eps).y
        return y.reshape(x.shape)
    tensors, remake = stored(x_MK), _RemadeNorm(x.dtype, norm, eps)
    y = unhooked(_NormFunction.apply, x_MK, weight, bias, *tensors, remake).reshape(x.shape)
    SOURCES.add(y, Source((*tensors, weight.detach(), None if bias is None else bias.detach()), remake))
    return y


def stored_glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) · up, of [..., N] each, that keeps both in FP8 for backward; as PyTorch does where they are unlike each
    other or of a dtype without FP8 form.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dtype not in FLOATING:
        return _activated(gate, activation) * up
    gate_MN, up_MN = _matrix(gate), _matrix(up)
    if not (recording() and (gate.requires_grad or up.requires_grad)):
        h = glu(gate_MN, up_MN, activation).h
        assert h is not None
        return h.reshape(gate.shape)
    tensors, remake = (*stored(gate_MN), *stored(up_MN)), _RemadeGlu(gate.dtype, activation)
    h = unhooked(_GluFunction.apply, gate_MN, up_MN, remake, *tensors).reshape(gate.shape)
    SOURCES.add(h, Source(tensors, remake))
    return h


def stored_joint_glu(both: Tensor, activation: str, gate_first: bool) -> Tensor:
    """`stored_glu` of the two halves of [..., 2N]."""
    if both.dtype not in FLOATING or both.shape[-1] % 2:
        first, second = both.chunk(2, dim=-1)
        return stored_glu(first, second, activation) if gate_first else stored_glu(second, first, activation)
    matrix = _matrix(both)
    gate, up = _halves(matrix, gate_first)
    shape = (*both.shape[:-1], gate.shape[1])
    if not (recording() and both.requires_grad):
        h = glu(gate, up, activation).h
        assert h is not None
        return h.reshape(shape)
    tensors, remake = (*stored(gate), *stored(up)), _RemadeGlu(both.dtype, activation)
    h = unhooked(_JointGluFunction.apply, matrix, gate_first, remake, *tensors).reshape(shape)
    SOURCES.add(h, Source(tensors, remake))
    return h


def stored_activation(x: Tensor, activation: str) -> Tensor:
    """act(x) of x [..., N] that keeps x in FP8 for backward."""
    if not (recording() and x.requires_grad):
        return _activated(x, activation)
    matrix = _matrix(x)
    tensors, remake = stored(matrix), _RemadeActivation(x.dtype, activation)
    y: Tensor = unhooked(_ActivationFunction.apply, matrix, remake, *tensors).reshape(x.shape)
    SOURCES.add(y, Source(tensors, remake))
    return y


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _halves(both: Tensor, gate_first: bool) -> Sequence[Tensor]:
    halves = both.detach().chunk(2, dim=1)
    return halves if gate_first else halves[::-1]


def _norm(x_MK: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, eps: float) -> Any:
    if norm.center:
        return layer_norm(x_MK, weight, bias, eps)
    return rms_norm(x_MK, weight, eps, offset=norm.offset)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
