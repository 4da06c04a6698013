"""Trace: what one forward of a model does, read off a run on tensors without storage, for `octavo.planner.step`.

Every operation is one of

    a linear's product   a call of a module that was named: its sizes, its gradients, whether its input is new
    attention            a fused one: its operations, half of them where it is causal
    another product      of matrices, or a convolution: its operations and bytes
    the rest             bytes read and written, of each operation as eager code runs it

and, as a compiler runs the rest, bytes by region: operations between two products become one kernel, which reads what
comes from outside of it and writes what is read after it. What an inductor fuses is less regular than that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.planner.moments import common
from octavo.planner.roofline import Linear

LOOKUPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")
"""Operations that read as much of their first input as they write."""

PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_grouped_mm": 0}
"""Matrix products, and which argument is the left operand, whose last dimension is contracted."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations and bytes of a product."""

    flops: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One forward of a model.

    Attributes:
        calls: Calls of linears by the module's name.
        attention: Operations of fused attention.
        products: Matrix products outside of linears.
        rest: Bytes of each other operation.
        regions: Bytes of the same, fused between products.
        parameters: Elements of all parameters, tied ones once.
        trained: Elements of those with a gradient.
    """

    calls: Mapping[str, tuple[Linear, ...]]
    attention: float
    products: tuple[Work, ...]
    rest: tuple[float, ...]
    regions: tuple[float, ...]
    parameters: int
    trained: int


def trace(model: nn.Module, linears: Mapping[str, nn.Module], forward: Callable[[], Any]) -> Trace:
    """Follow one forward.

    Args:
        model: The model; on tensors without storage nothing is computed.
        linears: Modules with a weight [N,K] (or [K,N], told by the input) to be taken for linears, by name.
        forward: Runs it.
    """
    tracer = _Tracer()
    with _hooked(tracer, linears), tracer:
        forward()
    parameters = list(model.parameters())
    return Trace(
        calls={name: tuple(calls) for name, calls in tracer.calls.items()},
        attention=tracer.attention,
        products=tuple(tracer.products),
        rest=tuple(tracer.rest),
        regions=tuple(tracer.regions()),
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
    )


def of_more_blocks(few: Trace, more: Trace, count: int, blocks: Sequence[str]) -> Trace | None:
    """One forward of a model of many equal blocks, from those of two copies with few: what following all of them gives.

    Args:
        few: Of a copy that has the first blocks.
        more: Of one that has one block more.
        count: Blocks of `few`.
        blocks: Names of all blocks of the model.

    Returns:
        The trace; None where the two differ by something else than one block like the one before.
    """
    before, added = (_of_block(more, blocks[at]) for at in (count - 1, count))
    if before != added or any(more.calls.get(name) != calls for name, calls in few.calls.items()):
        return None
    extra = len(blocks) - count
    parts = {name: _lengthened(getattr(few, name), getattr(more, name), extra) for name in _PARTS}
    if None in parts.values():
        return None
    numbers = {name: getattr(few, name) + extra * (getattr(more, name) - getattr(few, name)) for name in _NUMBERS}
    others = {block + name: calls for block in blocks[count + 1 :] for name, calls in added.items()}
    return Trace(calls={**more.calls, **others}, **parts, **numbers)  # type: ignore[arg-type]


_PARTS, _NUMBERS = ("products", "rest", "regions"), ("attention", "parameters", "trained")


def _of_block(found: Trace, block: str) -> dict[str, tuple[Linear, ...]]:
    """Calls of a block's linears, by what their names have after the block's."""
    return {name[len(block) :]: calls for name, calls in found.calls.items() if f"{name}.".startswith(f"{block}.")}


def _lengthened(few: tuple[Any, ...], more: tuple[Any, ...], extra: int) -> tuple[Any, ...] | None:
    """`few` with what `more` has between two parts of it put there so many times."""
    begins, ends = common(few, more), common(few[::-1], more[::-1])
    if begins + ends < len(few):
        return None
    return (*few[:begins], *more[begins : begins + len(more) - len(few)] * extra, *few[begins:])


@contextmanager
def _hooked(tracer: "_Tracer", linears: Mapping[str, nn.Module]) -> Iterator[None]:
    handles = []
    for name, module in linears.items():
        handles.append(module.register_forward_pre_hook(tracer.entering(name)))
        handles.append(module.register_forward_hook(tracer.left, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Tracer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Linear]] = {}
        self.attention = 0.0
        self.products: list[Work] = []
        self.rest: list[float] = []
        self._inside = 0
        self._input: Tensor | None = None
        self._region = 0  # odd ones are products
        self._alive: list[Any] = []  # so that no two storages have one id
        self._sizes: dict[int, float] = {}
        self._made: dict[int, int] = {}
        self._read: dict[int, set[int]] = {}

    def entering(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            x, weight = inputs[0], module.weight
            assert isinstance(x, Tensor) and isinstance(weight, Tensor)
            k = x.shape[-1]
            call = Linear(
                m=x.numel() // max(k, 1),
                k=k,
                n=weight.numel() // max(k, 1),
                dgrad=x.requires_grad,
                wgrad=weight.requires_grad,
                first=x is not self._input or x.grad_fn is None,
            )
            self.calls.setdefault(name, []).append(call)
            self._input = x
            self._inside += 1
            self._region += 1
            self._reads([x])

        return enter

    def left(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._makes([output])
        self._inside -= 1
        self._region += 1

    def regions(self) -> Iterator[float]:
        """Bytes of each region of operations that are no products."""
        moved: dict[int, float] = {}
        for storage, readers in self._read.items():
            made = self._made.get(storage)
            outside = readers - {made}
            for region in outside:
                moved[region] = moved.get(region, 0.0) + self._sizes[storage]
            if made is not None and outside:
                moved[made] = moved.get(made, 0.0) + self._sizes[storage]
        yield from (size for region, size in sorted(moved.items()) if region % 2 == 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._inside:
            return out
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        known = {t.untyped_storage()._cdata for t in inputs}
        made = [t for t in outputs if t.untyped_storage()._cdata not in known]
        name = func._schema.name
        if not made and not func._schema.is_mutable:
            return out  # a view
        if "scaled_dot_product" in name or name in PRODUCTS or name == "aten::convolution":
            self._product(func, args, kwargs or {}, inputs, outputs)
            return out
        moved = sum(_size(t) for t in made) or sum(_size(t) for t in outputs)
        moved += moved if name in LOOKUPS else sum(_size(t) for t in inputs)
        if inputs:
            self.rest.append(moved)
        self._reads(made if name in LOOKUPS else inputs)
        self._makes(made)
        return out

    def _product(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self._region += 1
        self._reads(inputs)
        self._makes(outputs)
        self._region += 1
        name = func._schema.name
        if "scaled_dot_product" in name:
            q, k, v = inputs[:3]
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            share = 0.5 if given.get("is_causal") and q.shape[-2] == k.shape[-2] else 1.0
            scores = q.numel() // q.shape[-1] * k.shape[-2]  # of every head of q, however many k has
            self.attention += share * 2 * scores * (q.shape[-1] + v.shape[-1])
            return
        contracted = args[1][0].numel() if name == "aten::convolution" else args[PRODUCTS[name]].shape[-1]
        flops = 2.0 * outputs[0].numel() * contracted
        self.products.append(Work(flops=flops, bytes=sum(_size(t) for t in (*inputs, *outputs))))

    def _reads(self, tensors: Any) -> None:
        for tensor in tensors:
            self._read.setdefault(self._known(tensor), set()).add(self._region)

    def _makes(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._made.setdefault(self._known(tensor), self._region)

    def _known(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self._sizes:
            self._alive.append(storage)
            self._sizes[number] = _size(tensor)
        return number


def _size(tensor: Tensor) -> float:
    """Bytes that are read or written of a tensor; an expanded one is no larger than what it is expanded from."""
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))
