"""Trace: the operations of one forward of a model, recorded on fake tensors, for `octavo.planner.step`."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo.nn.convert import apply_plan
from octavo.nn.experts import experts_shape, looks_like_experts
from octavo.nn.select import is_linear
from octavo.numerics.plan import Plan
from octavo.planner.fake import batch_errors, fake_copy, fake_tensors
from octavo.planner.roofline import LinearCall
from octavo.runtime.blocks import SHORTENED, Absent, find_block_list, find_stacks
from octavo.runtime.torch_compat import FakeTensorMode, TorchDispatchMode, local_part, tree_leaves

# Predict what all blocks of a model do from copies of it with a few of them.
#
# A record of n + 1 equal blocks is that of n with one block's part inserted (`insertion`), and amounts grow by the same
# with each block. What is assumed is checked: blocks and records agree in everything but that part, else all blocks
# run.


M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")
T = TypeVar("T")

TRACED_BLOCKS = 2  # Blocks of the smaller copy: in backward one is the last, and one is neither the last nor the first


# Which blocks are equal


@dataclass(frozen=True)
class Stack:
    """Blocks of a model that are equal but for the first ones."""

    name: str  # Of their list
    blocks: Sequence[str]  # Their names
    few: int  # Blocks of the smaller copies of the model: the first ones and TRACED_BLOCKS; all if others differ

    @property
    def extra(self) -> int:
        """Number of blocks that the smaller copies do not have."""
        return len(self.blocks) - self.few


def equal_stacks(model: nn.Module, plan: Plan) -> list[Stack]:
    """List the stacks of a model, `find_block_list` first; none if no stack's blocks are equal."""
    main, stacks = find_block_list(model), list[Stack]()
    names = {id(module): name for name, module in model.named_modules()}
    firsts = {id(members[0]) for members in find_stacks(model)}
    for name, module in model.named_modules():
        if module is main or (isinstance(module, nn.ModuleList) and len(module) and id(module[0]) in firsts):
            blocks = [block for block in module if not isinstance(block, Absent)]
            leading = leading_blocks(blocks, names, plan)
            few = len(blocks) if leading is None else leading + TRACED_BLOCKS
            few = few if few + 1 < len(blocks) else len(blocks)
            stacks.insert(0 if module is main else len(stacks), Stack(name, [names[id(b)] for b in blocks], few))
    return stacks if any(stack.extra for stack in stacks) else []


def leading_blocks(blocks: Sequence[nn.Module], names: Mapping[int, str], plan: Plan) -> int | None:
    """Return the number of first blocks after which all are equal; None if the last two differ, or share parameters."""
    owned = [id(parameter) for block in blocks for parameter in block.parameters()]
    if not blocks or len(set(map(id, blocks))) < len(blocks) or len(set(owned)) < len(owned):
        return None
    kinds = block_kinds(blocks, names, plan)
    first = next((i + 1 for i in range(len(kinds) - 1, -1, -1) if kinds[i] != kinds[-1]), 0)
    return first if first < len(blocks) - 1 else None


def block_kinds(blocks: Sequence[nn.Module], names: Mapping[int, str], plan: Plan) -> list[Hashable]:
    """Return a key for each block, the same for equal ones: their modules, tensors, settings and decisions."""
    settings = [_settings(block) for block in blocks]
    # A number that grows by one from block to block is the index of the block, which tells no blocks apart.
    offsets: dict[str, list[Any]] = {}
    for index, own in enumerate(settings):
        for name, value in own.items():
            offsets.setdefault(name, []).append(value - index if type(value) is int else None)
    indices = {name for name, own in offsets.items() if len(own) > 1 and None not in own and len(set(own)) == 1}
    kinds: list[Hashable] = []
    for block, own in zip(blocks, settings, strict=True):
        decisions = ((n, type(m), plan.decisions.get(names[id(m)])) for n, m in block.named_modules())
        tensors = (*block.named_parameters(), *block.named_buffers())
        kinds.append((
            tuple((n, kind, d and (d.recipe, d.activation_storage)) for n, kind, d in decisions),
            tuple((n, t.shape, t.dtype, t.requires_grad) for n, t in tensors),
            tuple((n, value if n not in indices else "index") for n, value in own.items()),
        ))  # fmt: skip
    return kinds


_PLAIN = (str, bool, int, float, type(None), FunctionType, BuiltinFunctionType)


def _settings(block: nn.Module) -> dict[str, Any]:
    """Collect plain attributes of the modules of a block, such as its kind of attention."""
    return {
        f"{fqn}.{name}": value
        for fqn, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value))
    }


# Copies with a few of them


def copy_with_blocks(model: M, counts: Mapping[str, int], mode: FakeTensorMode, place: torch.device) -> M:
    """Copy a model to fake tensors with so many first blocks of some stacks."""
    ends: dict[str, int] = {}
    removed: list[nn.Module] = []
    for name, count in counts.items():
        members: Any = model.get_submodule(name)
        here = [index for index, member in enumerate(members) if not isinstance(member, Absent)]
        ends[name] = here[count] if count < len(here) else len(members)
        removed += members[ends[name] :]
    copy = fake_copy(model, mode, place, without=removed)
    for name, end in ends.items():
        shortened: Any = copy.get_submodule(name)
        whole = len(shortened)
        del shortened[end:]
        if name == next(iter(ends)):
            setattr(shortened, SHORTENED, True)
        # Transformers counts hidden states from the end of as many blocks as the configuration says.
        parents = [copy, *(copy.get_submodule(name[:i]) for i, letter in enumerate(name) if letter == ".")]
        for config in {id(config): config for m in parents if (config := getattr(m, "config", None))}.values():
            if getattr(config, "num_hidden_layers", None) == whole:
                config.num_hidden_layers = end
    return copy


def restrict_plan(plan: Plan, model: nn.Module) -> Plan:
    """Return the decisions for modules that the model has."""
    names = {name for name, _ in model.named_modules()}
    decisions = {name: decision for name, decision in plan.decisions.items() if name in names}
    return Plan(decisions, plan.activations, plan.partial)


# What they have in common


def from_few_blocks(
    stacks: Sequence[Stack], trace: Callable[[Mapping[str, int]], T],
    combine: Callable[[Sequence[Stack], T, Sequence[T]], R | None],
) -> R | None:  # fmt: skip
    """Combine a record of few blocks with one of a block more of each stack; None if none is a basis for all blocks."""
    # `trace` takes numbers of blocks by stack. First all stacks, then each one short with all others whole.
    short = [stack for stack in stacks if stack.extra]
    tries = [stacks] if stacks else []
    for stack in short if len(short) > 1 else ():
        tries.append([other if other is stack else replace(other, few=len(other.blocks)) for other in stacks])
    for some in tries:
        counts = {stack.name: stack.few for stack in some}
        try:
            few, *more = map(trace, (counts, *(counts | {stack.name: stack.few + 1} for stack in some if stack.extra)))
        except ValueError:  # some towers are read at a block by its number
            continue
        if (combined := combine(some, few, more)) is not None:
            return combined
    return None


@dataclass(frozen=True)
class Insertion:
    """What one block more adds to a sequence."""

    at: int  # Index in the sequence of few blocks
    part: Sequence[Any]
    source: int | None  # Index of the same part in that sequence, next to it; None if it is not there


def insertion(few: Sequence[Any], more: Sequence[Any]) -> Insertion | None:
    """Return what `more` has beyond `few`; None if they differ in several places."""
    length, last = len(more) - len(few), _common_prefix(few, more)
    first = len(few) - _common_prefix(few[::-1], more[::-1])
    if first > last:
        return None
    # Between the two any index will do: try those after and before which the same block may stand.
    choices = []
    for at, source in ((last, last - length), (first, first)):
        part = more[at : at + length]
        choices.append(Insertion(at, part, source if source >= 0 and few[source : source + length] == part else None))
    return next((choice for choice in choices if choice.source is not None), choices[0])


def insert(few: Sequence[T], insertions: Sequence[tuple[Insertion, int]]) -> list[T]:
    """Return a sequence with parts inserted, each so many times."""
    whole, done = list[T](), 0
    for added, times in sorted(insertions, key=lambda pair: pair[0].at):
        whole += [*few[done : added.at], *list(added.part) * times]
        done = added.at
    return [*whole, *few[done:]]


def _common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


LOOKUPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")
"""Operations that read only as many bytes of their first input as they write."""

FUSED = ("octavo::rms_norm", "octavo::layer_norm", "octavo::glu")
"""Fused norms and gates."""

PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_grouped_mm": 0}
"""Matrix products, with the index of the leave operand, whose last dimension is contracted."""

VARLEN = "torch_attn::_varlen_attn"
"""PyTorch's variable-length attention, causal or with a window."""


@dataclass(frozen=True, kw_only=True)
class Work:
    flops: float
    bytes: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    calls: Mapping[str, tuple[LinearCall, ...]]  # Calls of linear layers by module name
    attention: float  # Operations of fused attention
    products: tuple[Work, ...]  # Matrix products outside of linear layers
    rest: tuple[float, ...]  # Bytes of each other operation
    regions: tuple[float, ...]  # Bytes of the same, compiled: one kernel for what is between two products
    parameters: int  # Elements of all parameters, tied ones once
    trained: int  # Elements of those that require a gradient
    experts: int = 0  # Elements of experts' parameters
    fused: int = 0  # Calls of fused norms and gates, part of `rest`
    extrapolated: bool = field(default=False, compare=False)  # Whether a few blocks ran for all


def trace(model: nn.Module, linears: Mapping[str, nn.Module], forward: Callable[[], Any]) -> Trace:
    tracer = _Tracer()
    with ExitStack() as stack:
        for name, module in linears.items():
            enter, leave = partial(tracer.enter, name), tracer.leave
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(tracer)
        forward()
    parameters = [local_part(p) for p in model.parameters()]
    experts = (m for m in model.modules() if looks_like_experts(m))
    return Trace(
        calls={name: tuple(calls) for name, calls in tracer.calls.items()}, attention=tracer.attention,
        products=tuple(tracer.products), rest=tuple(tracer.rest), regions=tuple(tracer.regions()),
        parameters=sum(p.numel() for p in parameters), fused=tracer.fused,
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        experts=sum(p.numel() for module in experts for p in module.parameters()),
    )  # fmt: skip


def trace_model(
    model: nn.Module, forward: Callable[[nn.Module], Any], shapes: Sequence[tuple[int, ...]], place: torch.device,
    prepare: Callable[[nn.Module], Any] = lambda copy: None, *, packed: bool = False,
) -> Trace:  # fmt: skip
    """Trace one forward of a model on fake copies, with only a few of its blocks if these are equal."""
    # `packed`: as `fake_tensors` takes it.

    def trace_copy(counts: Mapping[str, int]) -> Trace:
        with fake_tensors(packed=packed) as mode:
            copy = copy_with_blocks(model, counts, mode, place)
            prepare(copy)
            linears = {n: m for n, m in copy.named_modules() if is_linear(m) or looks_like_experts(m)}
            with batch_errors(shapes):
                return trace(copy, linears, lambda: forward(copy))

    return from_few_blocks(equal_stacks(model, Plan({})), trace_copy, extrapolate_trace) or trace_copy({})


def fuse(copy: nn.Module, plan: Plan) -> None:
    """Make a copy of a planned model run the fused kernels of the plan, and products in high precision."""
    decisions = restrict_plan(plan, copy).decisions.items() if plan.activations == "fused" else ()
    fused = {name: replace(decision, recipe=None) for name, decision in decisions if decision.activation_storage}
    if fused:
        apply_plan(copy, Plan(fused, plan.activations, partial=True))


def extrapolate_trace(stacks: Sequence[Stack], few: Trace, more: Sequence[Trace]) -> Trace | None:
    """Return the trace of all blocks, from one with few of each stack, and for each short stack one with one more."""
    short = [stack for stack in stacks if stack.extra]
    calls = list(few.calls.items())
    for other, stack in zip(more, short, strict=True):
        block = f"{stack.blocks[stack.few]}."
        if any(not f"{name}.".startswith(block) for name in other.calls.keys() - few.calls.keys()):
            return None  # the block makes another one run
        before, added = (_block_calls(other, stack.blocks[index]) for index in (stack.few - 1, stack.few))
        if not added or before != added or any(other.calls.get(name) != own for name, own in few.calls.items()):
            return None
        last = stack.blocks[stack.few - 1]
        after = max((i + 1 for i, (name, _) in enumerate(calls) if f"{name}.".startswith(f"{last}.")), default=0)
        others = [(block + name, own) for block in stack.blocks[stack.few :] for name, own in added.items()]
        calls[after:after] = others
    extra, sequences = [stack.extra for stack in short], {}
    for name in ("products", "rest", "regions"):
        parts = [insertion(getattr(few, name), getattr(other, name)) for other in more]
        repeated = [part for part in parts if part is not None and part.source is not None]
        if len(repeated) < len(parts):
            return None
        sequences[name] = tuple(insert(getattr(few, name), list(zip(repeated, extra, strict=True))))

    def amount(name: str) -> Any:
        grows = (getattr(other, name) - getattr(few, name) for other in more)
        return getattr(few, name) + sum(n * grow for n, grow in zip(extra, grows, strict=True))

    numbers = {name: amount(name) for name in ("attention", "parameters", "trained", "experts", "fused")}
    return Trace(calls=dict(calls), **sequences, **numbers, extrapolated=True)  # type: ignore[arg-type]


def _block_calls(trace: Trace, block: str) -> dict[str, tuple[LinearCall, ...]]:
    """Return the calls of a block's linear layers, by their names within the block."""
    return {name[len(block) :]: calls for name, calls in trace.calls.items() if f"{name}.".startswith(f"{block}.")}


class _Tracer(TorchDispatchMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.calls: dict[str, list[LinearCall]] = {}
        self.attention = 0.0
        self.fused = 0
        self.products: list[Work] = []
        self.rest: list[float] = []
        self._inside = 0
        self._in_experts = 0
        self._input: Any = None
        self._region = 0  # odd numbers are products
        self._alive: list[Any] = []  # keeps storages alive so that their ids stay unique
        self._sizes: dict[int, float] = {}
        self._written: dict[int, int] = {}
        self._read: dict[int, set[int]] = {}

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the call of a linear layer, or the two of a mixture of experts."""
        calls = self.calls.setdefault(name, [])
        if looks_like_experts(module):
            hidden, index = (*args, *kwargs.values())[:2]
            count, k, both, inner = experts_shape(module)
            wgrad = any(p.requires_grad for p in module.parameters())
            for features, outputs, dgrad in ((k, both, hidden.requires_grad), (inner, k, True)):
                sizes = {"m": index.numel(), "k": features, "n": outputs}
                calls.append(LinearCall(**sizes, dgrad=dgrad, wgrad=wgrad, experts=count))
            self._in_experts += 1
            return
        given, weight = args[0], module.weight  # a rank's part of a DTensor does not say whether that needs a gradient
        x, part = local_part(given), local_part(weight)
        assert isinstance(x, Tensor) and isinstance(part, Tensor)
        calls.append(
            LinearCall(
                m=x.numel() // max(x.shape[-1], 1), k=x.shape[-1], n=part.numel() // max(x.shape[-1], 1),
                dgrad=given.requires_grad, wgrad=weight.requires_grad,  # type: ignore[arg-type]
                first=given is not self._input or given.grad_fn is None,
            )
        )  # fmt: skip
        self._input = given
        self._inside += 1
        self._region += 1
        self._reads([x])

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        if looks_like_experts(module):
            self._in_experts -= 1
            return
        self._writes([output])
        self._inside -= 1
        self._region += 1

    def regions(self) -> Iterator[float]:
        """Yield the bytes of each region between products."""
        moved: dict[int, float] = {}
        for storage, readers in self._read.items():
            writer = self._written.get(storage)
            outside = readers - {writer}
            for region in outside:
                moved[region] = moved.get(region, 0.0) + self._sizes[storage]
            if writer is not None and outside:
                moved[writer] = moved.get(writer, 0.0) + self._sizes[storage]
        yield from (size for region, size in sorted(moved.items()) if region % 2 == 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs on its inner tensors, which arrive here
        out = func(*args, **(kwargs or {}))
        if self._inside or func.namespace == "c10d":
            return out  # the time of collectives is that of the links
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        input_storages = {t.untyped_storage()._cdata for t in inputs}
        created = [t for t in outputs if t.untyped_storage()._cdata not in input_storages]
        name = func._schema.name
        if not created and not func._schema.is_mutable:
            return out  # a view
        if "scaled_dot_product" in name or name in PRODUCTS or name == VARLEN or name == "aten::convolution":
            self._product(func, args, kwargs or {}, inputs, outputs)
            return out
        moved = sum(_size(t) for t in created) or sum(_size(t) for t in outputs)
        moved += moved if name in LOOKUPS else sum(_size(t) for t in inputs)
        if inputs:
            self.rest.append(moved)
            self.fused += name in FUSED
        self._reads(created if name in LOOKUPS else inputs)
        self._writes(created)
        return out

    def _product(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self._region += 1
        self._reads(inputs)
        self._writes(outputs)
        self._region += 1
        name = func._schema.name
        if "scaled_dot_product" in name:
            q, k, v = inputs[:3]
            names = [argument.name for argument in func._schema.arguments]
            arguments = dict(zip(names, args, strict=False)) | kwargs
            fraction = 0.5 if arguments.get("is_causal") and q.shape[-2] == k.shape[-2] else 1.0
            scores = q.numel() // q.shape[-1] * k.shape[-2]  # per head of q; k may have fewer heads
            self.attention += fraction * 2 * scores * (q.shape[-1] + v.shape[-1])
            return
        if name == VARLEN:  # as of one document in each sequence: how long documents are, only offsets hold
            q, _, v = inputs[:3]
            length, window = args[6], args[9][0] + 1 or args[6]
            window = min(window, length)
            keys = window - window**2 / (2 * length)  # of a query, on average
            self.attention += 2 * q.shape[0] * q.shape[1] * keys * (q.shape[-1] + v.shape[-1])
            return
        contracted = args[1][0].numel() if name == "aten::convolution" else args[PRODUCTS[name]].shape[-1]
        if self._in_experts:  # counted as calls
            return
        flops = 2.0 * outputs[0].numel() * contracted
        self.products.append(Work(flops=flops, bytes=sum(_size(t) for t in (*inputs, *outputs))))

    def _reads(self, tensors: Iterable[Tensor]) -> None:
        for tensor in map(local_part, tensors):
            self._read.setdefault(self._storage_id(tensor), set()).add(self._region)

    def _writes(self, tensors: object) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor := local_part(tensor), Tensor):
                self._written.setdefault(self._storage_id(tensor), self._region)

    def _storage_id(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number: int = storage._cdata
        if number not in self._sizes:
            self._alive.append(storage)
            self._sizes[number] = _size(tensor)
        return number


def _size(tensor: Tensor) -> float:
    """Return the bytes that reading or writing a tensor moves; an expanded tensor counts as its base."""
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))
