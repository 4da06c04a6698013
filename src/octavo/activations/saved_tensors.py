"""Saved-tensor compression: saves in FP8 what a module's own operations save for backward, where that is safe.

While a module runs, a pair of saved-tensor hooks takes each tensor that an operation saves. When the module returns,
the autograd graph shows which operation saved which tensor, and each is replaced by

    what it can be recomputed from    if its producer saved enough for that (`octavo.activations.recompute`)
    its FP8 copy                      if the operation's gradient stays accurate (`octavo.activations.exactness`)
    itself                            otherwise: parameters and results of parameters alone, small tensors, tensors
                                      without gradient, all that attention saves, results of softmax and the like

Hooks see what is saved and change nothing that forward computes. A tensor that several operations save is stored once;
its storage and version identify it, in whatever shape it is seen. If one of the operations needs it exactly, all get it
exactly.

PyTorch calls the innermost pair of hooks only. These hooks therefore hand what they save to the pair around them
(activation checkpointing, offload, a counter of bytes) by name. Backward checks the version of a tensor that is saved
as it is, as autograd does.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo.activations.autograd_graph import created_nodes, is_parameter, producer
from octavo.activations.exactness import may_be_rounded
from octavo.activations.layouts import as_matrix, dense_strides, element_key
from octavo.activations.recompute import (
    RECOMPUTABLE,
    ExactMatrix,
    Recomputable,
    Rematerializer,
    Stored,
    restored,
    stored,
)
from octavo.runtime import torch_compat
from octavo.runtime.switch import stores
from octavo.runtime.torch_compat import is_traceable_wrapper_subclass, own_saved_tensors_hooks, tree_leaves

T = TypeVar("T")

FEWEST = 1024
"""Tensors with fewer elements stay as they are."""
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Held:
    """Tensors saved for backward, detached, through the hooks around if there are any.

    Args:
        tensors: The tensors.
        around: Those hooks.
        version: The version at which a single tensor was saved; by default the current one.
    """

    __slots__ = ("_items", "_unpack")

    def __init__(self, tensors: Sequence[Tensor | None], around: Hooks | None, version: int | None = None) -> None:
        self._unpack = None if around is None else around[1]
        if around is None:
            self._items: list[Any] = [
                None if t is None else (t.detach(), t._version if version is None else version) for t in tensors
            ]
        else:
            with torch.no_grad():
                self._items = [None if t is None else around[0](t.detach()) for t in tensors]

    @property
    def present(self) -> list[Tensor]:
        """Return the tensors held here or, unchanged, by the hooks around."""
        items = self._items if self._unpack is not None else [None if item is None else item[0] for item in self._items]
        return [item for item in items if isinstance(item, Tensor)]

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors. Raises RuntimeError for one that was written to since, as autograd does."""
        if self._unpack is not None:
            return [None if item is None else self._unpack(item) for item in self._items]
        for item in self._items:
            if item is not None and item[0]._version != item[1]:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor {list(item[0].shape)} of {item[0].dtype} is at version {item[0]._version}; expected "
                    f"version {item[1]} instead"
                )
        return [None if item is None else item[0] for item in self._items]


class Saved:
    """Stands in for a saved tensor in the autograd graph: the tensor itself, until `decide` is called."""

    __slots__ = ("_held", "_restore", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self._held: Held | None = None
        self._restore: Callable[[list[Any]], Tensor] | None = None

    def decide(self, held: Held, restore: Callable[[list[Any]], Tensor]) -> None:
        """Save these instead; `restore` computes the tensor from them."""
        self.tensor, self._held, self._restore = None, held, restore

    def keep(self, around: Hooks | None) -> None:
        """Save the tensor as it is."""
        assert self.tensor is not None
        self._held, self.tensor = Held([self.tensor], around, self.version), None

    @property
    def present(self) -> list[Tensor]:
        """Return the tensors that are saved."""
        if self._held is not None:
            return self._held.present
        return [] if self.tensor is None else [self.tensor]

    def unpack(self) -> Tensor:
        """Return the tensor, restored. Raises RuntimeError if a second derivative is requested."""
        held = self._held
        if held is None:  # backward inside of forward
            held = Held([self.tensor], None, self.version)
        if self._restore is None:
            (tensor,) = held.tensors()
            assert tensor is not None
            return tensor
        if torch.is_grad_enabled():  # backward with create_graph=True
            raise RuntimeError(
                "octavo: this tensor was stored in FP8, from which there is no second derivative: compute it inside "
                "octavo.disabled(), or convert without activations='fp8'"
            )
        return self._restore(held.tensors())


class Scope:
    """The hooks of one call of a module.

    Args:
        module: Its parameters are never compressed, whatever their class.
        exact: Names of its parts whose products save their inputs unrounded.
    """

    def __init__(self, module: nn.Module, exact: Sequence[str] = ()) -> None:
        self._module, self._exact = module, exact
        self._pending: list[Saved] = []
        self._hooks = own_saved_tensors_hooks(self._pack, _unpack)
        self._enclosing: Scope | None = None
        self._around: Hooks | None = None
        self._first = 0

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Call a function under the hooks, then decide how each tensor it saved is stored."""
        self._enclosing, self._around = _INNERMOST.scope, _hooks_around()
        self._first = torch_compat.sequence_number()
        try:
            with self._hooks:
                _INNERMOST.scope = self
                try:
                    outputs = function(*arguments, **keywords)
                finally:
                    _INNERMOST.scope = self._enclosing
            self._decide(outputs)
        except BaseException:
            for saved in self._pending:
                if saved.tensor is not None:
                    saved.keep(None)
            raise
        finally:
            self._pending.clear()
            self._around = self._enclosing = None
            del self._hooks  # which have this scope: no cycle is left for the garbage collector
        return outputs

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the hooks of this scope: inside, those around it are in force. Only while its own are."""
        self._hooks.__exit__()
        enclosing = _INNERMOST.scope = self._enclosing
        try:
            if enclosing is not None and enclosing.in_force:
                with enclosing.suspended():
                    yield
            else:
                yield
        finally:
            _INNERMOST.scope = self
            self._hooks.__enter__()

    @property
    def in_force(self) -> bool:
        """Whether PyTorch calls these hooks: an inner pair, as of checkpointing, would be called instead."""
        return self._hooks.in_force

    def saved_output(self, x: Tensor) -> bool:
        """Whether the operation in this scope that made a contiguous tensor also saves it whole."""
        if not x.requires_grad or x.is_inference() or not x.is_contiguous() or not x.numel():
            return False
        node = producer(x.grad_fn)
        outputs = [] if node is None else [_saved_by(node, name) for name in ("output", "out", "result")]
        return any(output is not None and element_key(output) == element_key(x) for output in outputs)

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        other = tensor.dtype not in _FLOATING or tensor.numel() < FEWEST or is_traceable_wrapper_subclass(tensor)
        if other or not tensor.requires_grad or (tensor.is_leaf and isinstance(tensor, nn.Parameter)):
            saved.keep(self._around)
        else:
            self._pending.append(saved)
        return saved

    def _decide(self, outputs: Any) -> None:
        """Decide for each pending tensor how it is stored."""
        if not self._pending:
            return
        rounded = self._rounded(outputs)
        keys = {id(saved): element_key(saved.tensor) for saved in self._pending if saved.tensor is not None}
        exact = {keys[id(saved)] for saved in self._pending if id(saved) not in rounded}
        copies: dict[Any, Stored] = {}
        for saved in self._pending:
            tensor, key = saved.tensor, keys[id(saved)]
            assert tensor is not None
            recomputable = None if key in exact else RECOMPUTABLE.find(tensor, _pack_of(self._around))
            if recomputable is not None:
                saved.decide(
                    Held(recomputable.tensors, self._around), _Recompute(recomputable.rematerializer, tensor.shape)
                )
            elif key in exact:
                saved.keep(self._around)
            else:
                if key not in copies:
                    copies[key] = stored(as_matrix(tensor))
                restore = _Decompress(tensor.dtype, tensor.shape, dense_strides(tensor))
                saved.decide(Held(copies[key], self._around), restore)

    def _rounded(self, outputs: Any) -> set[int]:
        """Identities of the pending tensors that may be rounded."""
        own = {id(parameter) for parameter in self._module.parameters()}
        exact = {id(p) for name in self._exact for p in self._module.get_submodule(name).parameters()}
        weights = _weights_of_linears(self._module, exact)
        ours = {id(saved): saved for saved in self._pending}
        tensors = [*_tensors(outputs), *(saved.tensor for saved in self._pending if saved.tensor is not None)]
        rounded: set[int] = set()
        for node in created_nodes([tensor.grad_fn for tensor in tensors], self._first):
            for name in may_be_rounded(node, own, weights.covers, partial(_saved_by, node)):
                rounded.add(id(_holder(node, name)))
        return {key for key in rounded & ours.keys() if self._is_activation(ours[key], own)}

    def _is_activation(self, saved: Saved, own: set[int]) -> bool:
        """Whether a saved tensor is dense, no parameter, and unchanged since it was saved."""
        tensor = saved.tensor
        if tensor is None or tensor._version != saved.version or is_parameter(tensor, own):
            return False
        return all(stride > 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class _Recompute:
    """Recomputes a tensor and registers the result, because checkpointing may repeat a part of forward."""

    __slots__ = ("_rematerializer", "_size")

    def __init__(self, rematerializer: Rematerializer, size: torch.Size) -> None:
        self._rematerializer, self._size = rematerializer, size

    def __call__(self, tensors: list[Any]) -> Tensor:
        matrix = self._rematerializer.matrix(tensors)
        RECOMPUTABLE.add_recomputed(matrix, Recomputable(tuple(tensors), self._rematerializer))
        return matrix.view(self._size)


class _Decompress:
    """Restores a tensor from its FP8 copy in its original layout; gaps of a view are not restored."""

    __slots__ = ("_dtype", "_size", "_stride")

    def __init__(self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]) -> None:
        self._dtype, self._size, self._stride = dtype, size, stride

    def __call__(self, tensors: list[Any]) -> Tensor:
        data, scale = tensors
        return restored(data, scale, self._dtype).as_strided(self._size, self._stride, 0)


def _unpack(saved: Saved) -> Tensor:
    return saved.unpack()


class _Innermost(threading.local):
    """The scope whose hooks PyTorch calls in this thread."""

    scope: Scope | None = None


_INNERMOST = _Innermost()


def recording() -> bool:
    """Whether modules save FP8 now: switched on, under autograd, not traced, and saved-tensor hooks allowed."""
    if not (torch.is_grad_enabled() and stores()):
        return False
    forbidden = torch_compat.saved_tensors_hooks_disabled()
    return forbidden is None and torch_compat.tracing_state() is None


def compressed(module: nn.Module, exact: Sequence[str], function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call a function, and save what its operations save for backward in FP8, where that is safe.

    Args:
        module: The module whose parameters the function uses.
        exact: Names of its parts whose products save their inputs unrounded.
        function: The function.
        *args: Its arguments.
        **keywords: Its keyword arguments.
    """
    return Scope(module, exact).run(function, *args, **keywords) if recording() else function(*args, **keywords)


def unhooked(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of this package, which saves FP8 itself, without the hooks of the scope around it."""
    scope = None if torch.compiler.is_compiling() else _INNERMOST.scope
    if scope is None or not scope.in_force:
        return function(*arguments)
    with scope.suspended():
        return function(*arguments)


def recomputable_of(x: Tensor) -> Recomputable | None:
    """Return what to save for a tensor [..., K]: what it is recomputed from, or itself if it is saved anyway."""
    if torch.compiler.is_compiling():
        return None
    recomputable, scope = RECOMPUTABLE.find(x, hooks_around()), _INNERMOST.scope
    if recomputable is None and scope is not None and scope.in_force and scope.saved_output(x):
        return Recomputable((x.detach(),), ExactMatrix(x.dtype))
    return recomputable


def hooks_around() -> Any:
    """Identity of the hooks in force, those of scopes aside; None if there are none."""
    return _pack_of(_hooks_around())


def _pack_of(hooks: Hooks | None) -> Any:
    return None if hooks is None else hooks[0]


def _hooks_around() -> Hooks | None:
    """The hooks in force, those of scopes aside."""
    scope = _INNERMOST.scope
    if scope is not None and scope.in_force:
        return scope._around
    top: Hooks | None = torch_compat.top_saved_tensors_hooks(False)
    return top


class _Weights(set[int]):
    """Identities of weights, and shapes of those that FSDP has sharded again."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        parameters = list(parameters)
        super().__init__(map(id, parameters))
        self.shapes = {p.shape for p in parameters if is_traceable_wrapper_subclass(p)}

    def covers(self, parameter: Tensor) -> bool:
        """Whether a leaf of the graph is one of them."""
        return id(parameter) in self or parameter.shape in self.shapes


def _weights_of_linears(module: nn.Module, exact: set[int]) -> _Weights:
    """Return weights of linears, convolutions and experts, parametrized ones included, without those in `exact`."""
    weights = [p for p in module.parameters() if p.ndim > 2]
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.modules.conv._ConvNd) or "Conv1D" in type(part).__name__:
            weights += part.parameters()
        elif isinstance(part, nn.MultiheadAttention):
            weights += part.parameters(recurse=False)
    return _Weights(p for p in weights if id(p) not in exact)


def _holder(node: Any, name: str) -> Any:
    """Return what autograd holds for a tensor that a node saved."""
    return getattr(getattr(node, f"_raw_saved_{name}", None), "data", None)


def _saved_by(node: Any, name: str) -> Tensor | None:
    """Return a tensor that a node saved, if it is pending here."""
    saved = _holder(node, name)
    return saved.tensor if isinstance(saved, Saved) else None


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output: nested containers, data classes and mappings."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))
