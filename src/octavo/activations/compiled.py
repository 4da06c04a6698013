"""Activations saved in FP8 under `torch.compile`, where a graph and not autograd decides what forward saves.

    y  = f(x)            without a gradient: the result
    y' = f(x')           with a gradient, at x' = dequantize(quantize(x)): the partitioner moves it into backward
    out = y, ∂out = ∂y'  so that backward depends on x through its FP8 copy only, the smallest cut of the graph

Linears that read `out` compute their weight gradient from y', which the op `restored` finds by the storage of `out`
while AOTAutograd traces. PyTorch's `activation_quantization_aten_pass` would round q, k and attention's output too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.activations.exactness import is_scaled_sum
from octavo.activations.recompute import RECOMPUTABLE, Recomputable, RecomputableTensors, UnroundedMatrix
from octavo.kernels.library import define
from octavo.kernels.quantize import decomposed
from octavo.runtime.torch_compat import FunctionalTensor, is_written


class _Stored(torch.autograd.Function):
    """x [..., K] as its FP8 copy represents it, less its mean if `center`. The gradient passes unchanged.

    For a norm `source` is x, from which tracing knows whether to round.
    """

    @staticmethod
    def forward(ctx: object, x: Tensor, bias: Tensor | None, center: bool, source: Tensor | None) -> Tensor:
        if source is not None:
            centered = x - x.mean(-1, keepdim=True, dtype=torch.float32) if center else x
            return _ROUNDED(centered, x.dtype, source)
        if bias is None:
            return _ROUNDED(x, x.dtype)
        bias = bias.to(x.dtype)
        return _ROUNDED(x - bias, x.dtype) + bias

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


class _Combined(torch.autograd.Function):
    """The values of y and the gradient of y'; readers find y' by `restored`."""

    @staticmethod
    def forward(ctx: object, y: Tensor, restored: Tensor) -> Tensor:
        return _RESTORABLE(y, restored)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad


def stored(x: Tensor, bias: Tensor | None = None, center: bool = False, source: Tensor | None = None) -> Tensor:
    """Return x [..., K] rounded as eager mode stores it for backward; the gradient is that of x."""
    result: Tensor = _Stored.apply(x, None if bias is None else bias.detach(), center, source)
    return result


def stored_for_norm(x: Tensor, center: bool) -> Tensor:
    """As `stored`, less the mean if `center`; but x itself if it is a scaled sum in this graph."""
    with torch.no_grad():
        source = _SCALED_SUM(x)
    return stored(x, None, center, source)


def combined(y: Tensor, restored: Tensor) -> Tensor:
    """Return y, with the gradient of `restored`, which backward recomputes and readers of y use there."""
    result: Tensor = _Combined.apply(y, restored)
    return result


def recomputable_in_graph(x: Tensor) -> Recomputable:
    """Return what a linear saves of its input [..., K] under torch.compile: y' if x is such a y, else x."""
    with torch.no_grad():
        restored = _RESTORED(x)
    return Recomputable((restored,), UnroundedMatrix(x.dtype))


def _round_in_groups(x: Tensor, dtype: torch.dtype, source: Tensor | None = None) -> Tensor:
    if isinstance(source, FunctionalTensor) and _SCALED_SUMS.find(source.elem, None) is not None:
        return source
    columns, largest = x.shape[-1], torch.finfo(dtype).max
    data, exponents = decomposed.quantize_groups(F.pad(x, (0, -columns % 32)) if columns % 32 else x)
    values = decomposed.dequantize_groups(data, exponents)[..., :columns]
    return values.to(dtype).clamp(-largest, largest)


def _mark(x: Tensor) -> Tensor:
    """Trace `scaled_sum`: autograd's graph shows it here, not inside of an autograd function."""
    if isinstance(x, FunctionalTensor) and is_scaled_sum(x):
        _SCALED_SUMS.add(x.elem, Recomputable((), UnroundedMatrix(x.dtype)))
    return x


_SCALED_SUMS = RecomputableTensors()


def _like(x: Tensor, dtype: torch.dtype, source: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _clone(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _register(y: Tensor, restored: Tensor) -> Tensor:
    """Trace `restorable`: note which storage y' belongs to. The entry lives as long as that storage."""
    out = _clone(y)
    if isinstance(out, FunctionalTensor):
        RECOMPUTABLE.add(out.elem, Recomputable((restored,), UnroundedMatrix(y.dtype)))
    return out


def _find(x: Tensor) -> Tensor:
    recomputable = None
    if isinstance(x, FunctionalTensor) and not is_written(x.elem):
        recomputable = RECOMPUTABLE.find(x.elem, None)
    if recomputable is None:
        return x  # the same node, so that its casts are merged with those of forward
    restored = recomputable.tensors[0]
    assert restored is not None
    return restored.reshape(x.shape).detach()


# An op: with dynamic=True Dynamo lifts the format's numbers out of one autograd function, and misses them in the next.
_ROUNDED = define("rounded_in_groups", _round_in_groups, _like, _round_in_groups)
_SCALED_SUM = define("scaled_sum", _clone, _clone, _mark)
_RESTORABLE = define("restorable", _register, lambda y, restored: _clone(y), _register)
_RESTORED = define("restored", _clone, _clone, _find)
