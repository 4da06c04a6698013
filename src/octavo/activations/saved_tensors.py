"""Saved-tensor compression: what a module's own operations save for backward is kept in FP8 where that is safe.

While a module runs, a pair of saved-tensor hooks takes each tensor that an operation saves. When the module is done,
the autograd graph says which operation saved which, and each tensor becomes

    its source       where what made it stored enough to recompute it: `octavo.activations.recompute`
    its FP8 form     where the operation is one whose gradient stays accurate: `octavo.activations.exactness`
    itself           otherwise: parameters and what is made of them alone, small tensors, what needs no gradient, all
                     that attention saves, results of softmax and the like

The forward is the module's own: hooks see what is saved, and change nothing that is computed. A tensor saved by several
operations is stored once; it is recognised by its storage and version, in whatever shape it is seen. Where one of them
needs it exactly, all of them have it exactly.

PyTorch calls the innermost pair of hooks only. What these keep is therefore handed to the pair around them (activation
checkpointing, offload, a counter of bytes) by name. A tensor that is kept as it is has its version checked in backward,
as autograd does it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from octavo.activations.autograd_graph import created_nodes, is_parameter, producer
from octavo.activations.exactness import may_be_rounded
from octavo.activations.layouts import as_matrix, dense_strides, element_key
from octavo.activations.recompute import RECOMPUTABLE, ExactMatrix, Rematerializer, Recomputable, Stored, restored, stored
from octavo.runtime.switch import stores
from octavo.runtime.torch_compat import own_saved_tensors_hooks

T = TypeVar("T")

FEWEST = 1024
"""Elements below which a tensor is kept as it is: nothing to gain."""
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Held:
    """Tensors kept for backward, through the hooks around our own where there are any.

    Args:
        tensors: What to keep; their gradients are not.
        around: Those hooks.
        version: At which a single tensor was saved; that of now by default.
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
        """The tensors that are held, by us or as they are by the hooks around."""
        items = self._items if self._unpack is not None else [None if item is None else item[0] for item in self._items]
        return [item for item in items if isinstance(item, Tensor)]

    def tensors(self) -> list[Tensor | None]:
        """The tensors again. Raises RuntimeError for one that was written to since, as autograd does."""
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
    """What autograd keeps in the place of a saved tensor. Until `decide` is called, the tensor itself."""

    __slots__ = ("_held", "_restore", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self._held: Held | None = None
        self._restore: Callable[[list[Any]], Tensor] | None = None

    def decide(self, held: Held, restore: Callable[[list[Any]], Tensor]) -> None:
        """Keep these from now on; `restore` makes the tensor of them."""
        self.tensor, self._held, self._restore = None, held, restore

    def keep(self, around: Hooks | None) -> None:
        """Keep the tensor as it is."""
        assert self.tensor is not None
        self._held, self.tensor = Held([self.tensor], around, self.version), None

    @property
    def present(self) -> list[Tensor]:
        """The tensors that are kept."""
        if self._held is not None:
            return self._held.present
        return [] if self.tensor is None else [self.tensor]

    def unpack(self) -> Tensor:
        """The tensor, or what is left of it. Raises RuntimeError where a second derivative is asked for."""
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
        exact: Names of its parts whose products keep their inputs as they are.
    """

    def __init__(self, module: nn.Module, exact: Sequence[str] = ()) -> None:
        self._module, self._exact = module, exact
        self._pending: list[Saved] = []
        self._hooks = own_saved_tensors_hooks(self._pack, _unpack)
        self._enclosing: Scope | None = None
        self._around: Hooks | None = None
        self._first = 0

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Call a function under the hooks, and decide what becomes of what it saved."""
        self._enclosing, self._around = _INNERMOST.scope, _hooks_around()
        self._first = torch._C._autograd._get_sequence_nr()
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
        """Inside, the hooks around this scope, and those it is in, are in force. Only while its own are."""
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
        """Whether its hooks are the ones called: others may have been put on inside, by checkpointing for one."""
        return self._hooks.in_force

    def saved_output(self, x: Tensor) -> bool:
        """Whether the operation in this scope that made a contiguous tensor saves it for itself, to the element."""
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
        """Say of each tensor that is pending what is kept of it."""
        if not self._pending:
            return
        rounded = self._rounded(outputs)
        keys = {id(saved): element_key(saved.tensor) for saved in self._pending if saved.tensor is not None}
        exact = {keys[id(saved)] for saved in self._pending if id(saved) not in rounded}
        copies: dict[Any, Stored] = {}
        for saved in self._pending:
            tensor, key = saved.tensor, keys[id(saved)]
            assert tensor is not None
            source = None if key in exact else RECOMPUTABLE.find(tensor, _pack_of(self._around))
            if source is not None:
                saved.decide(Held(source.tensors, self._around), _Recompute(source.rematerializer, tensor.shape))
            elif key in exact:
                saved.keep(self._around)
            else:
                if key not in copies:
                    copies[key] = stored(as_matrix(tensor))
                restore = _Decompress(tensor.dtype, tensor.shape, dense_strides(tensor))
                saved.decide(Held(copies[key], self._around), restore)

    def _rounded(self, outputs: Any) -> set[int]:
        """Identities of what is pending that may be rounded."""
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
        """Whether what is saved is a dense tensor that is no parameter, and as it was when it was saved."""
        tensor = saved.tensor
        if tensor is None or tensor._version != saved.version or is_parameter(tensor, own):
            return False
        return all(stride > 0 or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class _Recompute:
    """Restores a tensor from its source; it is still known by it, as checkpointing may repeat a part of forward."""

    __slots__ = ("_remake", "_size")

    def __init__(self, rematerializer: Rematerializer, size: torch.Size) -> None:
        self._remake, self._size = rematerializer, size

    def __call__(self, tensors: list[Any]) -> Tensor:
        matrix = self._remake.matrix(tensors)
        RECOMPUTABLE.add_recomputed(matrix, Recomputable(tuple(tensors), self._remake))
        return matrix.view(self._size)


class _Decompress:
    """Restores a tensor from its FP8 form, with the layout that it had; gaps of a view are not brought back."""

    __slots__ = ("_dtype", "_size", "_stride")

    def __init__(self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]) -> None:
        self._dtype, self._size, self._stride = dtype, size, stride

    def __call__(self, tensors: list[Any]) -> Tensor:
        data, scale = tensors
        return restored(data, scale, self._dtype).as_strided(self._size, self._stride, 0)


def _unpack(saved: Saved) -> Tensor:
    return saved.unpack()


class _Innermost(threading.local):
    """The scope whose hooks are called in this thread."""

    scope: Scope | None = None


_INNERMOST = _Innermost()


def recording() -> bool:
    """Whether modules that store FP8 do so now: they are switched on, autograd records, nothing is compiled or traced,
    and nobody has forbidden saved-tensor hooks.
    """
    if not (torch.is_grad_enabled() and stores()):
        return False
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    return forbidden is None and torch._C._get_tracing_state() is None


def compressed(module: nn.Module, exact: Sequence[str], function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call a function; what its operations save for backward is kept in FP8 where that is safe, if anything is saved.

    Args:
        module: Whose parameters are used.
        exact: Names of its parts whose products keep their inputs as they are.
        function: What to call.
        *args: Its arguments.
        **keywords: Its keyword arguments.
    """
    return Scope(module, exact).run(function, *args, **keywords) if recording() else function(*args, **keywords)


def unhooked(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of ours, which saves what it should, without the hooks of the scope around it."""
    scope = None if torch.compiler.is_compiling() else _INNERMOST.scope
    if scope is None or not scope.in_force:
        return function(*arguments)
    with scope.suspended():
        return function(*arguments)


def source_of(x: Tensor) -> Recomputable | None:
    """What may be kept in the place of a tensor [..., K]: what makes it again, or itself where it is kept anyway."""
    if torch.compiler.is_compiling():
        return None
    source, scope = RECOMPUTABLE.find(x, hooks_around()), _INNERMOST.scope
    if source is None and scope is not None and scope.in_force and scope.saved_output(x):
        return Recomputable((x.detach(),), ExactMatrix(x.dtype))
    return source


def hooks_around() -> Any:
    """What tells the hooks in force now from others, those of scopes aside; None where there are none."""
    return _pack_of(_hooks_around())


def _pack_of(hooks: Hooks | None) -> Any:
    return None if hooks is None else hooks[0]


def _hooks_around() -> Hooks | None:
    """The hooks in force now, those of scopes aside."""
    scope = _INNERMOST.scope
    if scope is not None and scope.in_force:
        return scope._around
    top: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top


class _Weights(set[int]):
    """Identities of weights; and shapes of those that FSDP has sharded again by now."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        parameters = list(parameters)
        super().__init__(map(id, parameters))
        self.shapes = {p.shape for p in parameters if is_traceable_wrapper_subclass(p)}

    def covers(self, parameter: Tensor) -> bool:
        """Whether a leaf of the graph is one of them."""
        return id(parameter) in self or parameter.shape in self.shapes


def _weights_of_linears(module: nn.Module, exact: set[int]) -> _Weights:
    """Parameters that inputs are multiplied by: of linears and convolutions, what their weights are made of included,
    and of experts; without those whose products are to be exact.
    """
    weights = [p for p in module.parameters() if p.ndim > 2]
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.modules.conv._ConvNd) or "Conv1D" in type(part).__name__:
            weights += part.parameters()
        elif isinstance(part, nn.MultiheadAttention):
            weights += part.parameters(recurse=False)
    return _Weights(p for p in weights if id(p) not in exact)


def _holder(node: Any, name: str) -> Any:
    """What autograd holds for a tensor that a node saved."""
    return getattr(getattr(node, f"_raw_saved_{name}", None), "data", None)


def _saved_by(node: Any, name: str) -> Tensor | None:
    """A tensor that a node saved, where it is one of ours and pending."""
    saved = _holder(node, name)
    return saved.tensor if isinstance(saved, Saved) else None


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Tensors in what a module returns: nested containers, data classes and mappings."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))
