"""Saved-tensor compression: what a module's own operations keep for backward is kept in FP8.

For what no fused module covers: q, k, v and the output of attention, as far as the operations that compute it save
tensors that need a gradient, and what linears keep that are not converted. While such a module runs, a pair of
saved-tensor hooks takes each tensor that an operation saves and keeps

    the source of it          where what made it stored enough to make it again: `octavo.nn.sources`
    its FP8 form              where it is an activation: floating point, of some size, and autograd made it
    itself                    otherwise: parameters and what is made of them alone, masks, rotary tables, softmax
                              statistics, masked scores

Tables, masks and statistics are told apart by needing no gradient, parameters and masked scores by where their graph
leads: `octavo.nn.lineage`. A tensor saved by several operations is stored once; it is recognised by its storage and
version, in whatever shape it is seen, so the output of attention and the input of the output projection are one FP8
copy.

Hooks of PyTorch do not nest by themselves: only the innermost pair is called. What these keep they therefore save
again through autograd with themselves taken off, so that the hooks around them (activation checkpointing, offload, a
counter of bytes) see it, and autograd's version check still finds a weight that was changed in between.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.nn.lineage import is_masked, is_parameter
from octavo.nn.sources import SOURCES, Remake, RestoredMatrix, Source, Stored, restored, stored
from octavo.nn.switch import stores

T = TypeVar("T")

FEWEST = 1024
"""Elements below which a tensor is kept as it is: nothing to gain."""
WIDTHS = (4096, 2048, 1024, 512, 256, 128, 64, 32)
"""Columns of the matrix as which a dense tensor is quantized; any cut gives the same groups of 32."""
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


class _Hold(torch.autograd.Function):
    """Saves tensors through autograd and does nothing else: its node is the handle to them, good for one use, as
    activation checkpointing recomputes a saved tensor once.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing depends on what this returned")


def _held(*tensors: Tensor | None) -> Any:
    with torch.enable_grad():
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        return _Hold.apply(anchor, *(None if t is None else t.detach() for t in tensors)).grad_fn


@dataclass(frozen=True)
class _Itself:
    node: Any

    def unpack(self) -> Tensor:
        tensor: Tensor = self.node.saved_tensors[0]
        return tensor


@dataclass(frozen=True)
class _Again:
    """Made again from its source; and still known by it, as checkpointing may repeat a part of forward on it."""

    node: Any
    remake: Remake
    size: torch.Size

    def unpack(self) -> Tensor:
        tensors = self.node.saved_tensors
        matrix = self.remake.matrix(tensors)
        SOURCES.add_remade(matrix, Source(tensors, self.remake))
        return matrix.view(self.size)


@dataclass(frozen=True)
class _Compressed:
    """In FP8, with the layout that it had; gaps of a view are not brought back."""

    node: Any
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def unpack(self) -> Tensor:
        data, scale = self.node.saved_tensors
        return restored(data, scale, self.dtype).as_strided(self.size, self.stride, 0)


@dataclass(frozen=True)
class _Copy:
    """A stored copy of elements in memory, for as long as their storage lives."""

    storage: StorageWeakRef
    tensors: Stored


class Scope:
    """The hooks of one call of a module.

    Args:
        module: Its parameters are never compressed, whatever their class.
    """

    def __init__(self, module: nn.Module) -> None:
        self._own = {id(parameter) for parameter in module.parameters()}
        self._copies: dict[Any, _Copy] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._around: Scope | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, what operations save goes through the hooks."""
        self._around = _INNERMOST.scope
        with self._hooks:
            _INNERMOST.scope = self
            try:
                yield
            finally:
                _INNERMOST.scope = self._around
                self._copies.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the hooks around this scope are in force. Only while its own are."""
        self._hooks.__exit__()
        _INNERMOST.scope = self._around
        try:
            yield
        finally:
            _INNERMOST.scope = self
            self._hooks.__enter__()

    @property
    def in_force(self) -> bool:
        """Whether its hooks are the ones called: others may have been put on inside, by checkpointing for one."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[0] == self._pack

    def copy_of(self, x: Tensor) -> Source | None:
        """A source for a contiguous tensor whose elements an operation in this scope saved."""
        if not x.requires_grad or x.is_inference() or not x.is_contiguous() or not x.numel():
            return None
        copy = self._copies.get(_key(x))
        if copy is None or copy.storage.expired():
            return None
        shape = (x.numel() // x.shape[-1], x.shape[-1])
        return Source(copy.tensors, RestoredMatrix(x.dtype, shape))

    def _pack(self, tensor: Tensor) -> Any:
        with self.suspended():
            if tensor.dtype not in _FLOATING or tensor.numel() < FEWEST or not tensor.requires_grad:
                return _Itself(_held(tensor))
            source = SOURCES.find(tensor)
            if source is not None:
                return _Again(_held(*source.tensors), source.remake, tensor.shape)
            if is_parameter(tensor, self._own) or is_masked(tensor):
                return _Itself(_held(tensor))
            return self._compressed(tensor)

    def _compressed(self, tensor: Tensor) -> _Compressed:
        key = _key(tensor)
        copy = self._copies.get(key)
        if copy is None or copy.storage.expired():
            tensors = stored(_as_matrix(tensor))
            copy = self._copies[key] = _Copy(StorageWeakRef(tensor.untyped_storage()), tensors)
        return _Compressed(_held(*copy.tensors), tensor.dtype, tensor.shape, _dense_strides(tensor))


def _unpack(packed: _Itself | _Again | _Compressed) -> Tensor:
    if torch.is_grad_enabled() and not isinstance(packed, _Itself):  # backward with create_graph=True
        raise RuntimeError(
            "octavo: this tensor was stored in FP8, from which there is no second derivative: compute it inside "
            "octavo.disabled(), or convert without activations='fp8'"
        )
    return packed.unpack()


class _Innermost(threading.local):
    """The scope whose hooks are called in this thread."""

    scope: Scope | None = None


_INNERMOST = _Innermost()


def recording() -> bool:
    """Whether modules that store FP8 do so now: they are switched on, autograd records, and nothing is compiled."""
    return torch.is_grad_enabled() and stores()


@contextmanager
def compressing(module: nn.Module) -> Iterator[None]:
    """Inside, what operations save for backward is kept in FP8, if anything is recorded."""
    if not recording():
        yield
        return
    with Scope(module).active():
        yield


def unhooked(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of ours, which saves what it should, without the hooks of the scope around it."""
    scope = None if torch.compiler.is_compiling() else _INNERMOST.scope
    if scope is None or not scope.in_force:
        return function(*arguments)
    with scope.suspended():
        return function(*arguments)


def source_of(x: Tensor) -> Source | None:
    """What may be kept in the place of a tensor [..., K]."""
    if torch.compiler.is_compiling():
        return None
    source, scope = SOURCES.find(x), _INNERMOST.scope
    return scope.copy_of(x) if source is None and scope is not None and scope.in_force else source


def _dims(tensor: Tensor) -> list[tuple[int, int, int]]:
    """Stride, size and index of the dimensions that say where elements are, outermost first."""
    dims = [(tensor.stride(d), tensor.shape[d], d) for d in range(tensor.ndim)]
    return sorted((dim for dim in dims if dim[0] > 0 and dim[1] > 1), key=lambda dim: (-dim[0], dim[2]))


def _merged(tensor: Tensor) -> list[tuple[int, int]]:
    """Size and stride of the elements in memory order, dimensions that follow one another taken as one."""
    found: list[tuple[int, int]] = []
    for stride, size, _ in _dims(tensor):
        if found and found[-1][1] == stride * size:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


def _key(tensor: Tensor) -> Any:
    """Equal for tensors with the same elements in memory."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor._version, tensor.dtype, tensor.is_neg(), tensor.storage_offset(), tuple(_merged(tensor))


def _as_matrix(tensor: Tensor) -> Tensor:
    """The elements in memory order, each once, as a matrix: a view where they are dense or evenly spaced rows."""
    merged = _merged(tensor)
    flat = tensor.detach().as_strided([size for size, _ in merged], [stride for _, stride in merged]).resolve_neg()
    if len(merged) > 1:
        return flat.reshape(-1, merged[-1][0])
    count = flat.numel()
    return flat.reshape(-1, next((width for width in WIDTHS if count % width == 0), count))


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the tensor once its elements are dense: the same order of dimensions, and repeated ones stay so."""
    strides = [stride if size == 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    step = 1
    for _, size, dim in reversed(_dims(tensor)):
        strides[dim], step = step, step * size
    return tuple(strides)
