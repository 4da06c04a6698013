"""RecomputableTensors: tensors that need not be kept, because what made them has stored what they can be recomputed from.

The input of q, k and v is the output of a norm, and the norm keeps its own input in FP8. So backward can recompute y,
y' = norm(x stored), instead of keeping y a second time. The same holds for h = silu(gate)·up, the input of a down
projection, and for what follows a plain activation. A producer registers its output here; whoever would keep that
output (a linear, or the saved-tensor hooks of `octavo.activations.saved_tensors`) keeps the producer's tensors instead, which
are counted and held once, and recomputes y' in backward. Producer and readers share one `Rematerializer`, so y' is recomputed
once for q, k and v.

Stored form: e4m3 in groups of 32 along the last dimension with power-of-two scales of one byte, 1.03 bytes per element.

A tensor is recognized by its storage, as long as that lives, and by its version counter: views of it count, a write
into it ends it. What is not seen is a write behind autograd's back, through `.data`. As for quantized
inputs (`octavo.nn.linear`) only tensors that autograd made are registered, and not those of another stream or CUDA
graph capture. Other than there the dispatch mode does not matter: nothing is replayed, and checkpointing a region
that begins between producer and reader must give the same gradients as not checkpointing.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels import dequantize, quantize
from octavo.runtime.execution_context import execution_context
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

STORED = QuantSpec.parse("e4m3/1x32/e8m0")
"""The form in which activations are stored."""

Stored = tuple[Tensor, Tensor]
"""FP8 data and scales of a matrix."""


def stored(x_MK: Tensor) -> Stored:
    """A matrix in the stored form."""
    with torch.no_grad():
        quantized = quantize(x_MK, STORED)
    assert quantized.scale is not None
    return quantized.data, quantized.scale


def restored(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix from its stored form. The largest values of a dtype round up to more than it holds: they stay finite."""
    largest = torch.finfo(dtype).max
    return dequantize(ScaledTensor(data, scale, STORED), dtype).clamp_(-largest, largest)


class Rematerializer:
    """How a tensor y [M,K] is made again from tensors that were stored. Holds none itself, except results in backward,
    from the first reader's to the producer's own, which is always the last: `forget`. Where backward does not get so
    far, as it was asked for some gradients only, they go when it ends.

    Subclasses say what the stored inputs are (`_inputs`), how y is made of them (`_matrix`), and where a kernel can
    make y's FP8 form without y (`_quantized`).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._memo: dict[Any, Any] = {}
        self._task = -1

    def inputs(self, tensors: Sequence[Any]) -> list[Tensor]:
        """What y is made of, in high precision."""
        found: list[Tensor] = self._once("inputs", lambda: self._inputs(tensors))
        return found

    def matrix(self, tensors: Sequence[Any]) -> Tensor:
        """Y' [M,K], contiguous."""
        found: Tensor = self._once("matrix", lambda: self._matrix(tensors))
        return found

    def quantized(self, tensors: Sequence[Any], spec: QuantSpec, order: str, columns: int) -> ScaledTensor:
        """`quantize(y', spec, order=order)`, of y' as a matrix of so many columns: a reader may see it reshaped."""

        def make() -> ScaledTensor:
            other = "matrix" in self._memo or tensors[0].shape[-1] != columns
            fused = None if other else self._quantized(tensors, spec, order)
            return fused or quantize(self.matrix(tensors).reshape(-1, columns), spec, order=order)  # type: ignore[arg-type]

        found: ScaledTensor = self._once((spec, order, columns), make)
        return found

    def forget(self) -> None:
        """Drop results: nobody will ask again, unless backward runs a second time."""
        self._memo.clear()

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        task = torch._C._current_graph_task_id()
        if task == -1:  # not in backward: nobody says when it is over
            return make()
        if not self._memo or self._task != task:  # another one may have failed, and left what it had
            self._memo.clear()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.forget)
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def _inputs(self, tensors: Sequence[Any]) -> list[Tensor]:
        data = tensors[::2], tensors[1::2]
        return [restored(q, s, self.dtype) for q, s in zip(*data, strict=True)]

    def _matrix(self, tensors: Sequence[Any]) -> Tensor:
        raise NotImplementedError

    def _quantized(self, tensors: Sequence[Any], spec: QuantSpec, order: str) -> ScaledTensor | None:
        return None


class ExactMatrix(Rematerializer):
    """A tensor that is kept as it is. Results are not held, as nobody would drop them."""

    def matrix(self, tensors: Sequence[Any]) -> Tensor:
        """As `Rematerializer.matrix`."""
        x: Tensor = tensors[0]
        return x

    def quantized(self, tensors: Sequence[Any], spec: QuantSpec, order: str, columns: int) -> ScaledTensor:
        """As `Rematerializer.quantized`."""
        return quantize(tensors[0].reshape(-1, columns), spec, order=order)  # type: ignore[arg-type]


class Recomputable(NamedTuple):
    """What to keep in the place of a tensor, and how to make it again from that."""

    tensors: tuple[Tensor | None, ...]
    rematerializer: Rematerializer


class _Entry(NamedTuple):
    owner: weakref.ref[Any]
    around: Any
    state: tuple[Any, ...]
    source: Recomputable


class RecomputableTensors:
    """The sources of tensors that are alive."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def add(self, y: Tensor, source: Recomputable, around: Any) -> None:
        """Register a contiguous tensor that autograd made, if it did, under the saved-tensor hooks `around`."""
        if y.grad_fn is not None and not torch.is_inference_mode_enabled():
            self.add_recomputed(y, source, around)

    def add_recomputed(self, y: Tensor, source: Recomputable, around: Any = None) -> None:
        """Register a contiguous tensor that was made from this source."""
        key = _storage(y)

        def remove(dead: weakref.ref[Any]) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry.owner is dead:
                del self._entries[key]

        self._entries[key] = _Entry(weakref.ref(y.untyped_storage(), remove), around, _state(y), source)

    def find(self, x: Tensor, around: Any) -> Recomputable | None:
        """The source of a tensor with the elements of a registered one, in their order: itself, or a view of it.

        Not of one that was registered under hooks other than those `around` now. Such hooks may hand out copies, by
        which checkpointing of the reader alone would not find in backward what it found in forward.
        """
        entry = self._entries.get(_storage(x))
        if entry is None or entry.owner() is not x.untyped_storage():
            return None
        if entry.around is not None and entry.around != around:
            return None
        if entry.state != _state(x) or not x.is_contiguous():
            return None
        return entry.source


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _state(x: Tensor) -> tuple[Any, ...]:
    return x._version, x.numel(), x.dtype, x.is_neg(), x.storage_offset(), *execution_context(x)[1:]


RECOMPUTABLE = RecomputableTensors()
