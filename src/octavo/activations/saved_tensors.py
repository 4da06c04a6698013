"""Saved-tensor compression: saves in FP8 what a module's own operations save for backward, where that is safe.

When the module returns, the autograd graph shows which operation saved which tensor, and each is replaced by

    what it can be recomputed from    if its producer saved enough for that (`octavo.activations.recompute`)
    its FP8 copy                      if all operations that saved it allow that (`octavo.activations.exactness`)
    itself                            otherwise

PyTorch calls the innermost pair of hooks only, so these hand what they save to the pair around them.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from octavo.activations.compiled import recomputable_in_graph
from octavo.activations.exactness import created_nodes, is_parameter, may_be_rounded, producer
from octavo.activations.recompute import (
    RECOMPUTABLE,
    Recomputable,
    Rematerializer,
    SavedMatrix,
    UnroundedMatrix,
    dequantize_saved,
    quantize_for_backward,
)
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.runtime import torch_compat
from octavo.runtime.linear_kinds import kind_of
from octavo.runtime.switch import stores, stores_in_graphs
from octavo.runtime.torch_compat import held_for_backward, is_traceable_wrapper_subclass, own_saved_tensors_hooks

T = TypeVar("T")

MIN_COMPRESS_NUMEL = 1024  # Tensors with fewer elements stay as they are

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class PackedTensor:
    """Stands in for a saved tensor in the autograd graph: the tensor itself, until `save` is called."""

    __slots__ = ("_items", "_restore", "_unpack", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self._items: list[Any] = []  # Tensors with their versions, or what the outer hooks returned
        self._unpack: Callable[[Any], Tensor] | None = None
        self._restore: Callable[[list[Any]], Tensor] | None = None

    def keep(self, outer: Hooks | None) -> None:
        self.save([self.tensor], outer, None, self.version)

    def save(
        self, tensors: Sequence[Tensor | None], outer: Hooks | None, restore: Callable[[list[Any]], Tensor] | None,
        version: int | None = None,
    ) -> None:  # fmt: skip
        """Save these, detached, through the outer hooks if there are any; `restore` computes the tensor from them."""
        if outer is None:
            versions = (None if t is None else t._version if version is None else version for t in tensors)
            self._items = [t if t is None else (t.detach(), v) for t, v in zip(tensors, versions, strict=True)]
        else:
            with torch.no_grad():
                self._items = [None if t is None else outer[0](t.detach()) for t in tensors]
            self._unpack = outer[1]
        self.tensor, self._restore = None, restore

    @property
    def present(self) -> list[Tensor]:
        if self.tensor is not None:
            return [self.tensor]
        items = self._items if self._unpack is not None else [item and item[0] for item in self._items]
        return [item for item in items if isinstance(item, Tensor)]

    def unpack(self) -> Tensor:
        """Return the tensor, restored. Raises RuntimeError if a second derivative is requested."""
        if self._restore is None:
            (tensor,) = self._saved()
            return tensor  # type: ignore[no-any-return]
        if torch.is_grad_enabled():  # backward with create_graph=True
            raise RuntimeError(
                "octavo: this tensor was stored in FP8, from which there is no second derivative: compute it inside "
                "octavo.disabled(), or convert without activations='fp8'"
            )
        return self._restore(self._saved())

    def _saved(self) -> list[Any]:
        """Return what was saved. Raises RuntimeError for a tensor that was written to since, as autograd does."""
        if self._unpack is not None:
            return [None if item is None else self._unpack(item) for item in self._items]
        items = self._items if self.tensor is None else [(self.tensor.detach(), self.version)]  # backward in forward
        for item in items:
            if item is not None and item[0]._version != item[1]:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor {list(item[0].shape)} of {item[0].dtype} is at version {item[0]._version}; expected "
                    f"version {item[1]} instead"
                )
        return [item and item[0] for item in items]


class CompressionHooks:
    def __init__(self, module: nn.Module, unrounded: Sequence[str] = ()) -> None:
        self._module, self._unrounded = module, unrounded
        self._pending: list[PackedTensor] = []
        self._hooks = own_saved_tensors_hooks(self._pack, PackedTensor.unpack)
        self._enclosing: CompressionHooks | None = None
        self._outer: Hooks | None = None
        self._first = 0

    def run(self, function: Callable[..., T], *arguments: object, **keywords: object) -> T:
        """Call a function under the hooks, then decide how each tensor it saved is stored."""
        self._enclosing, self._outer = INNERMOST.hooks, _outer_hooks()
        self._first = torch_compat.sequence_number()
        try:
            with self._hooks:
                INNERMOST.hooks = self
                try:
                    outputs = function(*arguments, **keywords)
                finally:
                    INNERMOST.hooks = self._enclosing
            self._decide(outputs)
        except BaseException:
            for saved in self._pending:
                if saved.tensor is not None:
                    saved.keep(None)
            raise
        finally:
            self._pending.clear()
            self._outer = self._enclosing = None
            # The graph holds the hooks, and they this object: it may not hold the graph, as a module with its output.
            del self._hooks, self._module
        return outputs

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend these hooks: inside, those outside of them are in force. Call it only while these are."""
        self._hooks.__exit__()
        enclosing = INNERMOST.hooks = self._enclosing
        try:
            if enclosing is not None and enclosing.in_force:
                with enclosing.suspended():
                    yield
            else:
                yield
        finally:
            INNERMOST.hooks = self
            self._hooks.__enter__()

    @property
    def in_force(self) -> bool:
        """Whether PyTorch calls these hooks: an inner pair, as of checkpointing, would be called instead."""
        return self._hooks.in_force

    def saved_output(self, x: Tensor) -> bool:
        """Whether the operation under these hooks that made a contiguous tensor also saves it whole."""
        if not x.requires_grad or x.is_inference() or not x.is_contiguous() or not x.numel():
            return False
        node = producer(x.grad_fn)
        outputs = [] if node is None else [_saved_by(node, name) for name in ("output", "out", "result")]
        return any(output is not None and element_key(output) == element_key(x) for output in outputs)

    def _pack(self, tensor: Tensor) -> PackedTensor:
        saved = PackedTensor(tensor)
        fits = tensor.dtype in SUPPORTED_DTYPES and tensor.numel() >= MIN_COMPRESS_NUMEL and tensor.requires_grad
        is_weight = tensor.is_leaf and isinstance(tensor, nn.Parameter)
        if fits and not is_weight and not is_traceable_wrapper_subclass(tensor):
            self._pending.append(saved)
        else:
            saved.keep(self._outer)
        return saved

    def _decide(self, outputs: object) -> None:
        if not self._pending:
            return
        # Operations that save one tensor share its storage and version. If one of them needs it exactly, all get it so.
        rounded = self._rounded(outputs)
        keys = {id(saved): element_key(saved.tensor) for saved in self._pending if saved.tensor is not None}
        unrounded = {keys[id(saved)] for saved in self._pending if id(saved) not in rounded}
        copies: dict[Any, SavedMatrix] = {}
        for saved in self._pending:
            tensor, key = saved.tensor, keys[id(saved)]
            assert tensor is not None
            # First choice: what its producer saved anyway. It was registered under the hooks outside of these.
            recomputable = None if key in unrounded else RECOMPUTABLE.find(tensor, self._outer and self._outer[0])
            if recomputable is not None:
                restore = partial(_recompute, recomputable.rematerializer, tensor.shape)
                saved.save(recomputable.tensors, self._outer, restore)
            elif key in unrounded:
                saved.keep(self._outer)
            else:
                if key not in copies:  # one FP8 copy for all that save it, restored to the strides of each
                    copies[key] = quantize_for_backward(as_matrix(tensor))
                restore = partial(_decompress, tensor.dtype, tensor.shape, dense_strides(tensor))
                saved.save(copies[key], self._outer, restore)

    def _rounded(self, outputs: object) -> set[int]:
        """Identities of the pending tensors that may be rounded."""
        own = {id(parameter) for parameter in self._module.parameters()}
        unrounded = {id(p) for name in self._unrounded for p in self._module.get_submodule(name).parameters()}
        is_weight = _is_weight(self._module, unrounded)
        ours = {id(saved): saved for saved in self._pending}
        tensors = [*_tensors(outputs), *(saved.tensor for saved in self._pending if saved.tensor is not None)]
        rounded: set[int] = set()
        for node in created_nodes([tensor.grad_fn for tensor in tensors], self._first):
            for name in may_be_rounded(node, own, is_weight, partial(_saved_by, node)):
                rounded.add(id(held_for_backward(node, name)))
        return {key for key in rounded & ours.keys() if self._is_activation(ours[key], own)}

    def _is_activation(self, saved: PackedTensor, own: set[int]) -> bool:
        """Whether a saved tensor is dense, no parameter, and unchanged since it was saved."""
        tensor = saved.tensor
        if tensor is None or tensor._version != saved.version or is_parameter(tensor, own):
            return False
        return all(stride > 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _recompute(rematerializer: Rematerializer, size: torch.Size, tensors: list[Any]) -> Tensor:
    """Recompute a tensor and register the result, because checkpointing may repeat a part of forward."""
    matrix = rematerializer.matrix(tensors)
    RECOMPUTABLE.add(matrix, Recomputable(tuple(tensors), rematerializer))
    return matrix.view(size)


def _decompress(dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], tensors: list[Any]) -> Tensor:
    """Restore a tensor from its FP8 copy in its original layout; gaps of a view are not restored."""
    data, scale = tensors
    return dequantize_saved(data, scale, dtype).as_strided(size, stride, 0)


class _Innermost(threading.local):
    hooks: CompressionHooks | None = None  # that PyTorch calls in this thread


INNERMOST = _Innermost()


def recording() -> bool:
    """Whether modules save FP8 now: under autograd, saved-tensor hooks allowed, no torch.func and forward mode."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return torch.is_grad_enabled() and stores()
    return fusing()


def fusing() -> bool:
    """Whether fused kernels run now: as `recording`, but also without gradients, and not in a graph."""
    if torch.compiler.is_compiling() or not stores() or torch_compat.has_transforms() or torch_compat.in_forward_mode():
        return False
    return torch_compat.saved_tensors_hooks_disabled() is None and torch_compat.tracing_state() is None


def compressed(
    module: nn.Module, unrounded: Sequence[str], function: Callable[..., T], *args: object, **kwargs: object
) -> T:
    """Call a function, and save what its operations save for backward in FP8, where that is safe."""
    if torch.compiler.is_compiling() or not recording():  # a graph has no hooks
        return function(*args, **kwargs)
    return CompressionHooks(module, unrounded).run(function, *args, **kwargs)


def unhooked(function: Callable[..., T], *arguments: object) -> T:
    """Call a function that saves FP8 itself, without the compression hooks in force."""
    hooks = None if torch.compiler.is_compiling() else INNERMOST.hooks
    if hooks is None or not hooks.in_force:
        return function(*arguments)
    with hooks.suspended():
        return function(*arguments)


def recomputable_of(x: Tensor) -> Recomputable | None:
    """Return what to save for a tensor [..., K]: what it is recomputed from, or itself if it is saved anyway."""
    if torch.compiler.is_compiling():
        return recomputable_in_graph(x) if stores_in_graphs() else None
    if INNERMOST.hooks is None and not RECOMPUTABLE.entries:
        return None
    recomputable, hooks = RECOMPUTABLE.find(x, outer_hooks()), INNERMOST.hooks
    if recomputable is None and hooks is not None and hooks.in_force and hooks.saved_output(x):
        return Recomputable((x.detach(),), UnroundedMatrix(x.dtype))
    return recomputable


def outer_hooks() -> object:
    """Identity of the hooks in force, compression hooks aside; None if there are none."""
    hooks = _outer_hooks()
    return None if hooks is None else hooks[0]


def _outer_hooks() -> Hooks | None:
    hooks = INNERMOST.hooks
    if hooks is not None and hooks.in_force:
        return hooks._outer
    return torch_compat.top_saved_tensors_hooks(False)


def _is_weight(module: nn.Module, unrounded: set[int]) -> Callable[[Tensor], bool]:
    """Return a test for weights of linears, convolutions and experts, parametrized ones included, not `unrounded`."""
    weights = [p for p in module.parameters() if p.ndim > 2]
    for part in module.modules():
        all_of = isinstance(part, nn.modules.conv._ConvNd) or kind_of(part) is not None
        if all_of or isinstance(part, nn.MultiheadAttention):
            weights += part.parameters(recurse=all_of)
    rounded = [p for p in weights if id(p) not in unrounded]
    ids, shapes = set(map(id, rounded)), {p.shape for p in rounded if is_traceable_wrapper_subclass(p)}
    return lambda leaf: id(leaf) in ids or leaf.shape in shapes  # of a weight that FSDP has sharded again


def _saved_by(node: Node, name: str) -> Tensor | None:
    saved = held_for_backward(node, name)
    return saved.tensor if isinstance(saved, PackedTensor) else None


def _tensors(outputs: object) -> Iterator[Tensor]:
    """Yield the tensors in a module's output: nested containers, data classes and mappings."""
    for leaf in torch_compat.tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))


WIDTHS = (4096, 2048, 1024, 512, 256, 128, 64, 32)  # of the matrix for a dense tensor; all give the same groups of 32


def _dims(tensor: Tensor) -> list[tuple[int, int, int]]:
    """Return stride, size and index of the dimensions with more than one element, outermost first."""
    dims = [(tensor.stride(d), tensor.shape[d], d) for d in range(tensor.ndim)]
    return sorted((dim for dim in dims if dim[0] > 0 and dim[1] > 1), key=lambda dim: (-dim[0], dim[2]))


def _merged(tensor: Tensor) -> list[tuple[int, int]]:
    """Return size and stride of the dimensions in memory order, with contiguous dimensions merged."""
    merged: list[tuple[int, int]] = []
    for stride, size, _ in _dims(tensor):
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def element_key(tensor: Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor._version, tensor.dtype, tensor.is_neg(), tensor.storage_offset(), tuple(_merged(tensor))


def as_matrix(tensor: Tensor) -> Tensor:
    """Return the elements in memory order, each once, as a matrix: a view if they are dense or evenly spaced rows."""
    merged = _merged(tensor)
    flat = tensor.detach().as_strided([size for size, _ in merged], [stride for _, stride in merged]).resolve_neg()
    if len(merged) > 1:
        return flat.reshape(-1, merged[-1][0])
    count = flat.numel()
    return flat.reshape(-1, next((width for width in WIDTHS if count % width == 0), count))


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return dense strides in the same order of dimensions; expanded dimensions keep stride 0."""
    strides = [stride if size == 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    step = 1
    for _, size, dim in reversed(_dims(tensor)):
        strides[dim], step = step, step * size
    return tuple(strides)
