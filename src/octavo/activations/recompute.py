"""Recomputable tensors: outputs that backward recomputes from what their producer saved.

A producer (a norm, a gated MLP or an activation function) registers its output here; a reader (a linear, or the hooks
of `octavo.activations.saved_tensors`) then saves the producer's tensors. Both share one `Rematerializer`, so q, k and v
recompute their input once. A tensor is identified by its storage and its version counter: views count as the tensor.
The dispatch mode does not matter: a checkpoint that begins between producer and reader must not change gradients.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from octavo.kernels import dequantize, quantize
from octavo.numerics.spec import QuantSpec
from octavo.runtime.execution_context import execution_context
from octavo.runtime.torch_compat import current_graph_task_id, queue_callback
from octavo.tensor import Order, ScaledTensor

T = TypeVar("T")

ACTIVATION_SPEC = QuantSpec.parse("e4m3/1x32/e8m0")  # The format in which activations are saved
SavedMatrix = tuple[Tensor, Tensor]  # FP8 data and scales


def quantize_for_backward(x_MK: Tensor) -> SavedMatrix:
    with torch.no_grad():
        quantized = quantize(x_MK, ACTIVATION_SPEC)
    assert quantized.scale is not None
    return quantized.data, quantized.scale


def dequantize_saved(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize a matrix. Values that round up beyond the largest of `dtype` are clamped to it."""
    largest = torch.finfo(dtype).max
    return dequantize(ScaledTensor(data, scale, ACTIVATION_SPEC), dtype).clamp_(-largest, largest)


class Rematerializer:
    """Recomputes a tensor y [M,K] from saved tensors. Subclasses define `_inputs`, `_matrix` and `_quantized`."""

    # Caches results during backward only, from the first reader to the producer, whose backward always runs last and
    # calls `forget`; if only some gradients were requested, the cache is cleared when backward ends.

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memo: dict[object, Any] = {}
        self._task = -1

    def inputs(self, tensors: Sequence[Any]) -> list[Tensor]:
        return self._once("inputs", lambda: self._inputs(tensors))

    def matrix(self, tensors: Sequence[Any]) -> Tensor:
        """Return y' [M,K], contiguous."""
        return self._once("matrix", lambda: self._matrix(tensors))

    def quantized(
        self, tensors: Sequence[Any], spec: QuantSpec, order: Order, columns: int, fold: Tensor | None = None
    ) -> ScaledTensor:
        """Return `quantize(y', spec, fold, order=order)`, with y' as a matrix of `columns`, as a reader may see it."""

        def make() -> tuple[Tensor | None, ScaledTensor]:
            from_matrix = "matrix" in self._memo or tensors[0].shape[-1] != columns or fold is not None
            fused = None if from_matrix else self._quantized(tensors, spec, order)
            return fold, fused or quantize(self.matrix(tensors).reshape(-1, columns), spec, fold, order=order)

        # The memo holds the fold, so no other has its id.
        return self._once((spec, order, columns, None if fold is None else id(fold)), make)[1]

    def forget(self) -> None:
        """Clear the cache: no reader follows, unless backward runs a second time."""
        self._memo.clear()

    def _once(self, key: object, make: Callable[[], T]) -> T:
        # Not in backward, or traced by compiled autograd, whose graph shares equal work: nothing would clear the cache.
        if torch.compiler.is_compiling() or (task := current_graph_task_id()) == -1:
            return make()
        if not self._memo or self._task != task:  # an earlier backward may have failed and left its results
            self._memo.clear()
            self._task = task
            queue_callback(self.forget)
        if key not in self._memo:
            self._memo[key] = make()
        result: T = self._memo[key]
        return result

    def _inputs(self, tensors: Sequence[Any]) -> list[Tensor]:
        data = tensors[::2], tensors[1::2]
        return [dequantize_saved(q, s, self.dtype) for q, s in zip(*data, strict=True)]

    def _matrix(self, tensors: Sequence[Any]) -> Tensor:
        raise NotImplementedError

    def _quantized(self, tensors: Sequence[Any], spec: QuantSpec, order: Order) -> ScaledTensor | None:
        return None


class UnroundedMatrix(Rematerializer):
    """A tensor that is saved unchanged. Caches nothing, because nothing would clear the cache."""

    def matrix(self, tensors: Sequence[Any]) -> Tensor:
        x: Tensor = tensors[0]
        return x

    def quantized(
        self, tensors: Sequence[Any], spec: QuantSpec, order: Order, columns: int, fold: Tensor | None = None
    ) -> ScaledTensor:
        x = tensors[0]  # viewed as in forward, so that torch.compile merges equal casts
        x_MK = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), columns)
        return quantize(x_MK, spec, fold, order=order)


class Recomputable(NamedTuple):
    """Tensors to save instead of a tensor, and how to recompute it from them."""

    tensors: tuple[Tensor | None, ...]
    rematerializer: Rematerializer


class _Entry(NamedTuple):
    owner: weakref.ref[torch.UntypedStorage]
    hooks: object
    state: tuple[Any, ...]
    recomputable: Recomputable


class RecomputableTensors:
    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}

    def add(self, y: Tensor, recomputable: Recomputable, hooks: object = None) -> None:
        """Register a contiguous tensor, made by autograd under these saved-tensor hooks or itself recomputed."""
        key: int = y.untyped_storage()._cdata

        def remove(dead: weakref.ref[torch.UntypedStorage]) -> None:
            entry = self.entries.get(key)
            if entry is not None and entry.owner is dead:
                del self.entries[key]

        self.entries[key] = _Entry(weakref.ref(y.untyped_storage(), remove), hooks, _state(y), recomputable)

    def find(self, x: Tensor, hooks: object) -> Recomputable | None:
        """Find what a registered tensor, or a view with all of its elements in order, is recomputed from."""
        # Returns None for a tensor that was registered under hooks other than `hooks`, those in force now: such hooks
        # may hand out copies, so checkpointing of the reader alone would find in forward what it misses in backward.
        entry = self.entries.get(x.untyped_storage()._cdata)
        if entry is None or entry.owner() is not x.untyped_storage():
            return None
        if entry.hooks is not None and entry.hooks != hooks:
            return None
        if entry.state != _state(x) or not x.is_contiguous():
            return None
        return entry.recomputable


def _state(x: Tensor) -> tuple[Any, ...]:
    return x._version, x.numel(), x.dtype, x.is_neg(), x.storage_offset(), *execution_context(x)[1:]


RECOMPUTABLE = RecomputableTensors()
