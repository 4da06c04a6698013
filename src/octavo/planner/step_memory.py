"""The memory of a training step: recorded on fake tensors, extrapolated to all blocks, divided over ranks.

By the rules of torch 2.13's FSDP2, a rank of many holds, of what one process with the whole model holds:

    held                 parameters, optimizer states and finished gradients: 1 / ranks of each
    gathered             parameters outside the blocks (embedding, head), throughout; the weights of the current block;
                         and those of the next block, prefetched, if there is one
    whole gradients      of parameters outside the blocks, until backward ends; of the current block
    in flight            gradients of the previous block, in the dtype of the reduction
    activations, …       as in one process with the same batch
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from octavo.nn.linear_subclasses import is_converted
from octavo.nn.resident import as_resident
from octavo.numerics.suggestions import grouped
from octavo.optim import Optimizer
from octavo.planner.step import FP8_BYTES_PER_ELEMENT, StepConfig
from octavo.planner.trace import Insertion, Stack, from_few_blocks, insert, insertion
from octavo.runtime import torch_compat
from octavo.runtime.blocks import find_blocks
from octavo.runtime.torch_compat import FakeTensor, TorchDispatchMode, in_backward, local_part, tree_leaves

# Timeline: record every storage that a training step allocates, with real tensors and under FakeTensorMode alike.
#
# A storage starts when the dispatch mode first sees it and ends when its Python object dies. Storages are classified
# afterwards: those alive when a backward begins are activations, those that a parameter's `.grad` used gradients.


PARAMETERS, BUFFERS, STATES, BATCH = "parameters", "buffers", "optimizer states", "batch"
GRADIENTS, ACTIVATIONS, TEMPORARIES = "gradients", "activations", "temporaries"
KINDS = (PARAMETERS, BUFFERS, STATES, BATCH, GRADIENTS, ACTIVATIONS, TEMPORARIES)
"""Categories of memory, in the order of tables."""
GATHERED = "gathered"  # Category of the memory for communication with other ranks
BLOCK_GRADIENTS = "gradients of blocks"  # Gradients of blocks, while they are distinguished from the rest
ALLOCATION_GRANULARITY = {"cuda": 512, "cpu": 1}  # Devices with a known allocator, and its granularity in bytes


@dataclass(frozen=True)
class MemorySample:
    """Bytes by category at one time of a step."""

    phase: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


_COLLECTIVES = {  # Operations of c10d, and the position of what they send
    "_allgather_base_": ("all-gather", 1), "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1), "allreduce_": ("all-reduce", 0),
}  # fmt: skip


class MemorySeries:
    """Bytes by category at many times of a step: `table` [times, kinds]."""

    def __init__(self, kinds: Sequence[str], phases: Sequence[str], table: Tensor) -> None:
        self.kinds, self.phases, self.table = tuple(kinds), tuple(phases), table

    def __iter__(self) -> Iterator[MemorySample]:
        return (self._sample(at) for at in range(len(self.phases)))

    @property
    def peak(self) -> MemorySample:
        """The first time with the largest sum."""
        return self._sample(int(self.table.sum(dim=1).argmax()))

    @property
    def peaks(self) -> dict[str, MemorySample]:
        rows = grouped((phase, at) for at, phase in enumerate(self.phases))
        return {phase: MemorySeries(self.kinds, [phase] * len(at), self.table[at]).peak for phase, at in rows.items()}

    @property
    def largest(self) -> dict[str, int]:
        return dict(zip(self.kinds, self.table.amax(dim=0).tolist(), strict=True))

    def merge(self, kind: str, into: str) -> "MemorySeries":
        """Return the series with the bytes of one category added to those of another."""
        if kind not in self.kinds:
            return self
        kinds = [*dict.fromkeys(into if name == kind else name for name in self.kinds)]
        columns = torch.tensor([kinds.index(into if name == kind else name) for name in self.kinds], device="cpu")
        zeros = torch.zeros(len(self.phases), len(kinds), dtype=torch.int64, device="cpu")
        return MemorySeries(kinds, self.phases, zeros.index_add(1, columns, self.table))

    def plus(self, held: Mapping[str, int], by_phase: Mapping[str, Mapping[str, int]]) -> "MemorySeries":
        """Return the series with more bytes by category: all the time, and during some phases."""
        kinds = tuple(dict.fromkeys((*self.kinds, *held, *(kind for more in by_phase.values() for kind in more))))
        table = torch.zeros(len(self.phases), len(kinds), dtype=torch.int64, device="cpu")
        table[:, : len(self.kinds)] = self.table
        for phase, more in (("", held), *by_phase.items()):
            rows = torch.tensor([not phase or own == phase for own in self.phases], device="cpu")
            for kind, size in more.items():
                table[:, kinds.index(kind)] += rows * size
        return MemorySeries(kinds, self.phases, table)

    def _sample(self, at: int) -> MemorySample:
        return MemorySample(self.phases[at], dict(zip(self.kinds, self.table[at].tolist(), strict=True)))


class Event(NamedTuple):
    """A storage that begins or ends."""

    kind: str  # Category of the storage
    change: int  # Change of its size in bytes
    phase: str  # Phase of the step


@dataclass(frozen=True, kw_only=True)
class StorageEvents:
    held: Mapping[str, int]  # Bytes before the step, by category
    forward: Sequence[Event]
    backward: Sequence[Event]
    after: Sequence[Event]  # Those after backward

    @property
    def series(self) -> MemorySeries:
        """All times of the step; the first is the one before it."""
        return memory_series(self.held, [*self.forward, *self.backward, *self.after])

    @property
    def peaks_after_backward(self) -> dict[str, dict[str, int]]:
        """Bytes by category at the peak of each phase after backward."""
        series, start = self.series, 1 + len(self.forward) + len(self.backward)
        after = MemorySeries(series.kinds, series.phases[start:], series.table[start:])
        return {phase: peak.bytes for phase, peak in after.peaks.items()}


def memory_series(held: Mapping[str, int], events: Sequence[Event]) -> MemorySeries:
    """Return the bytes by category before some events, and after each of them."""
    kinds = tuple(dict.fromkeys((*held, *(event.kind for event in events))))
    column = {kind: index for index, kind in enumerate(kinds)}
    table = torch.zeros(1 + len(events), len(kinds), dtype=torch.int64, device="cpu")
    table[0, : len(held)] = torch.tensor([*held.values()], dtype=torch.int64, device="cpu")
    columns = torch.tensor([column[event.kind] for event in events], dtype=torch.int64, device="cpu")
    changes = torch.tensor([event.change for event in events], dtype=torch.int64, device="cpu")
    table[torch.arange(1, 1 + len(events), device="cpu"), columns] = changes
    return MemorySeries(kinds, ["", *(event.phase for event in events)], table.cumsum(0))


class Timeline(TorchDispatchMode):
    def __init__(self, allocation_granularity: int = 1) -> None:
        TorchDispatchMode.__init__(self)
        self._granularity = allocation_granularity
        self._numbers = WeakIdKeyDictionary()
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._events: list[tuple[int, int, str]] = []  # storage, change in bytes, phase
        self._alive: dict[int, weakref.ref[Any]] = {}
        # Bytes handed to collectives, by operation and whether that is in backward.
        self.messages: dict[tuple[str, bool], int] = {}
        self.outputs = 0
        self._phase = ""
        self._in_backward = False
        self._marks: dict[str, int] = {}

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the category of tensors that have none yet."""
        for tensor in _unwrapped(tensors):
            self._kinds.setdefault(self._number(tensor), kind)

    def relabel(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the category of tensors, replacing any earlier one."""
        for tensor in _unwrapped(tensors):
            self._kinds[self._number(tensor)] = kind

    def set_phase(self, name: str) -> None:
        self._phase = name

    def follow(self, model: nn.Module, blocks: Iterable[nn.Module] = ()) -> None:
        """Hook a model to mark the start of forward, and to label gradients; those of `blocks` as `BLOCK_GRADIENTS`."""
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}

        def label_gradient(parameter: Tensor) -> None:
            assert parameter.grad is not None
            # With a chunked loss the head's gradient exists before backward begins and looks like an activation.
            self.relabel([parameter.grad], BLOCK_GRADIENTS if id(parameter) in inside else GRADIENTS)

        model.register_forward_pre_hook(lambda *_: self.set_phase("forward"))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(label_gradient)

    def events(self) -> StorageEvents:
        """Return the events so far; of a finished step, those until its end."""
        end = self._marks.get("step end", len(self._events))
        events = [
            Event(self._kinds.get(number, TEMPORARIES), change, phase) for number, change, phase in self._events[:end]
        ]
        start, backward, after = (self._marks.get(f"{name} start", end) for name in ("step", "backward", "after"))
        after = after if after >= backward else end  # of an earlier backward: nothing followed the last one
        held: dict[str, int] = {}
        for event in events[:start]:
            held[event.kind] = held.get(event.kind, 0) + event.change
        return StorageEvents(
            held=held, forward=events[start:backward], backward=events[backward:after], after=events[after:]
        )

    def __enter__(self) -> "Timeline":
        self._mark("step start")
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        TorchDispatchMode.__exit__(self, *error)
        self._mark("step end")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs on its inner tensors, which arrive here
        backward = in_backward()
        if backward and not self._in_backward:
            for number in self._alive:
                self._kinds.setdefault(number, ACTIVATIONS)
        if backward != self._in_backward:
            self._in_backward = backward
            self._mark("backward start" if backward else "after start")
            self._phase = "backward" if backward else "after backward"
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # the autograd engine asks for it more often than all operations run
        if func.namespace == "c10d" and (name := func._schema.name.partition("::")[2]) in _COLLECTIVES:
            op, position = _COLLECTIVES[name]
            size = sum(t.nbytes for t in tree_leaves(args[position]))
            self.messages[op, backward] = self.messages.get((op, backward), 0) + size
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.outputs += 1
                self._number(leaf)
        return out

    def _mark(self, name: str) -> None:
        self._marks[name] = len(self._events)  # the last time counts: a chunked loss runs its own backward earlier

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; a new storage starts now."""
        storage = tensor.untyped_storage()
        number: int | None = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self._sizes)
            self._alive[number] = weakref.ref(storage, partial(self._end, number))
            self._change(number, math.ceil(storage.nbytes() / self._granularity) * self._granularity)
        return number

    def _change(self, number: int, size: int) -> None:
        self._events.append((number, size - self._sizes.get(number, 0), self._phase))
        self._sizes[number] = size

    def _end(self, number: int, _: object) -> None:
        del self._alive[number]
        self._change(number, 0)


def _unwrapped(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield plain tensors, and the inner tensors of wrapper subclasses."""
    for tensor in tensors:
        if torch_compat.is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts = [getattr(tensor, name) for name in names]
            yield from _unwrapped(part for part in parts if isinstance(part, Tensor))  # a DTensor's mesh is not
        else:
            yield tensor


Sent = Mapping[tuple[str, bool], int]
"""Bytes handed to collectives, by operation and whether that is in backward."""


# A step, recorded


@dataclass(frozen=True, kw_only=True)
class ShardGroup:
    """Parameters that FSDP2 gathers together, in bytes."""

    gathered: int  # Their weights, in the form in which they are gathered
    gradients: int  # Their whole gradients
    reduced: int  # Their gradients in the dtype of the reduction
    elements: int = 0  # Number of their trained elements


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    events: StorageEvents  # Its storage events
    tokens: int  # Elements of the batch's first tensor
    block: ShardGroup  # Parameters of the largest block
    rest: ShardGroup  # Parameters outside the blocks
    messages: Sent = field(default_factory=dict)
    outputs: int = 0  # Number of tensors that its operations return

    @property
    def amounts(self) -> Counter[tuple[Any, ...]]:
        """All numbers that grow by the same with each block."""
        rows: dict[Any, Any] = {"held": self.events.held, "sent": self.messages, "rest": asdict(self.rest)}
        rows |= {("after", phase): peak for phase, peak in self.events.peaks_after_backward.items()}
        return Counter({(row, key): size for row, sizes in rows.items() for key, size in sizes.items()})


def follow_step(
    model: nn.Module, batch: object, stepper: torch.optim.Optimizer | None, forward_backward: Callable[[], object], *,
    step_config: StepConfig, granularity: int, states: Callable[[], Any] | None = None,
    gradients: Callable[[], Sequence[Tensor]] = tuple, before_step: Callable[[], Any] = lambda: None,
) -> StepTrace:  # fmt: skip
    """Record a step of a fake model under FakeTensorMode. `states`: what holds those of the optimizer, and masters."""
    made = [] if stepper is None else make_states(stepper)
    earlier = make_gradients(stepper) if stepper is not None and step_config.micro_batches > 1 else []
    timeline, blocks = Timeline(granularity), find_blocks(model)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    timeline.label(model.parameters(), PARAMETERS)
    timeline.label(model.buffers(), BUFFERS)
    timeline.label(tensors, BATCH)
    timeline.label((t for t in tree_leaves(states() if states else made) if isinstance(t, Tensor)), STATES)
    timeline.relabel(earlier, GRADIENTS)
    timeline.follow(model, blocks)
    timeline.set_phase("forward")
    with timeline:
        forward_backward()
        timeline.relabel(gradients(), GRADIENTS)
        timeline.set_phase("optimizer step")
        before_step()
        # A step in place, by a kernel, allocates nothing.
        if stepper is not None and getattr(stepper, "step_allocates", True):
            stepper.step()
    inside = {id(p): p for block in blocks for p in block.parameters()}
    timeline.relabel([p.grad for p in inside.values() if p.grad is not None], BLOCK_GRADIENTS)
    layers = [m for m in model.modules() if is_converted(m) and m.recipe.supports_fp8_gather]
    in_fp8 = {id(layer.weight) for layer in layers if step_config.fp8_gather}
    by_block = [list(block.parameters()) for block in blocks]
    largest = max(by_block, key=lambda parameters: sum(local_part(p).numel() for p in parameters), default=[])
    outside = [p for p in model.parameters() if id(p) not in inside]
    # Bytes of a gradient's element that is being reduced: of a block, and of parameters outside.
    reduced = (0.0, FP8_BYTES_PER_ELEMENT) if step_config.fp8_reduce else (step_config.reduce_bytes,) * 2
    return StepTrace(
        events=timeline.events(), tokens=max(tensors[0].numel(), 1), block=_group(largest, in_fp8, reduced[0]),
        rest=_group(outside, in_fp8, reduced[1]), messages=timeline.messages, outputs=timeline.outputs,
    )  # fmt: skip


def _gathered_bytes(parameter: nn.Parameter, in_fp8: set[int]) -> int:
    weight: Tensor = local_part(parameter)
    if id(parameter) in in_fp8:
        return weight.numel() + 4 * weight.shape[0]
    resident = as_resident(parameter)
    return weight.nbytes if resident is None else resident.data_.nbytes + resident.scale.nbytes


def _group(parameters: list[nn.Parameter], in_fp8: set[int], reduced: float) -> ShardGroup:
    granularity = ALLOCATION_GRANULARITY["cuda"]
    trained = [local_part(p) for p in parameters if p.requires_grad]
    elements = sum(p.numel() for p in trained)
    return ShardGroup(
        gathered=sum(_gathered_bytes(p, in_fp8) for p in parameters), elements=elements,
        gradients=sum(-(-p.nbytes // granularity) * granularity for p in trained), reduced=int(reduced * elements),
    )  # fmt: skip


def make_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Allocate the states of all parameters, under FakeTensorMode: optimizers other than Octavo's take a step."""
    if isinstance(optimizer, Optimizer):
        optimizer.make_states()
    else:
        make_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [t for state in optimizer.state.values() for t in tree_leaves(state) if isinstance(t, Tensor)]


def make_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Allocate gradients of all parameters, as an earlier micro-batch leaves them."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


# The step of all blocks, from steps of a few


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """A step of all blocks of a model."""

    traced: StepTrace  # The step that was traced
    stacks: Sequence[Stack] = ()  # Of which it has few blocks
    series: MemorySeries
    messages: Sent
    rest: ShardGroup  # Parameters outside the blocks of the first stack


def trace_blocks(trace: Callable[[Mapping[str, int]], StepTrace], stacks: Sequence[Stack]) -> WholeStep:
    """Trace a step with few blocks of each stack, by name; with all of them if few do not show what all add."""
    if (whole := from_few_blocks(stacks, trace, extrapolate_step)) is not None:
        return whole
    step = trace({})
    return WholeStep(traced=step, series=step.events.series, messages=step.messages, rest=step.rest)


def extrapolate_step(stacks: Sequence[Stack], few: StepTrace, more: Sequence[StepTrace]) -> WholeStep | None:
    """Return the step of all blocks, from one with few of each stack, and for each short stack one with one more."""
    forward, backward = list[tuple[Insertion, int]](), list[tuple[Insertion, int]]()
    first = few.amounts
    amounts = Counter(first)
    for other, extra in zip(more, (stack.extra for stack in stacks if stack.extra), strict=True):
        ahead = insertion(few.events.forward, other.events.forward)
        back = insertion(few.events.backward, other.events.backward)
        if ahead is None or back is None or not ahead.part or ahead.source is None:
            return None  # more than a block differs; or the block did not run, or not as the one before it
        if {event.phase for event in few.events.after} != {event.phase for event in other.events.after}:
            return None
        forward.append((ahead, extra))
        backward.append((back, extra))
        grown = other.amounts
        amounts.update({key: extra * (grown[key] - first[key]) for key in first | grown})
    rows: dict[Any, dict[Any, int]] = {"sent": {}}
    for (row, key), size in amounts.items():
        rows.setdefault(row, {})[key] = size
    # After backward, the peak of each phase.
    peaks = {row[1]: peak for row, peak in rows.items() if row[0] == "after"}
    kinds = dict.fromkeys((kind for peak in peaks.values() for kind in peak), 0)
    events = [*insert(few.events.forward, forward), *insert(few.events.backward, backward)]
    series = memory_series(kinds | rows["held"], events)
    table = torch.tensor([[peak.get(kind, 0) for kind in series.kinds] for peak in peaks.values()], device="cpu")
    table = torch.cat([series.table, table.reshape(-1, len(series.kinds)).long()])
    series = MemorySeries(series.kinds, [*series.phases, *peaks], table)
    rest = ShardGroup(**rows["rest"])
    return WholeStep(traced=few, stacks=stacks, series=series, messages=rows["sent"], rest=rest)


# What one of several GPUs holds


def memory_per_rank(
    whole: MemorySeries, config: StepConfig, blocks: int, block: ShardGroup, rest: ShardGroup, *,
    offloaded: bool = False, spread: float = 1.0, widened: int = 1,
) -> MemorySeries:  # fmt: skip
    """Convert the memory series of one process into that of a rank with the same batch; `block` is the largest."""
    # `spread`: bytes of all parameters over those of the traced process, which has a part of the experts. `widened`:
    # bytes of a sharded gradient's element over a whole one's, 2 for float32 shards of a model that computes in bf16.

    def split(size: Tensor) -> Tensor:
        total = (size * spread).long() if spread != 1 else size
        return torch.zeros_like(size) if offloaded else -(-total // config.shards)

    kinds = tuple(kind for kind in whole.kinds if kind != BLOCK_GRADIENTS)
    columns = {kind: whole.table[:, index] for index, kind in enumerate(whole.kinds)}
    zeros = torch.zeros(len(whole.phases), dtype=torch.int64, device="cpu")
    of_blocks = columns.pop(BLOCK_GRADIENTS, zeros)
    backward, computing = (
        torch.tensor([phase in names for phase in whole.phases], device="cpu")
        for names in (("backward",), ("forward", "backward"))
    )
    result = {kind: split(size) if kind in (PARAMETERS, STATES) else size for kind, size in columns.items()}
    result[TEMPORARIES] = torch.where(computing, columns[TEMPORARIES], split(columns[TEMPORARIES]))
    all_gradients = columns.get(GRADIENTS, zeros) + of_blocks
    of_block = max(block.gradients, 1)
    finished = of_blocks >= blocks * of_block  # gradients of all blocks
    current = torch.where((of_blocks > 0) & ~finished, (of_blocks - 1) % of_block + 1, 0)
    if config.pp > 1:  # whole gradients stay until the end of the step, in the dtype of the reduction
        accumulated = config.reduce_bytes * (blocks * block.elements + rest.elements)
        gradients = torch.full_like(all_gradients, accumulated) + backward * block.gradients
        in_flight, finished = torch.zeros_like(backward), torch.zeros_like(computing)
        prefetching = finished
    elif config.micro_batches > 1:  # those of earlier micro-batches exist already
        gradients = split(all_gradients * widened) + backward * (rest.gradients + block.gradients)
        in_flight, prefetching, finished = backward, computing, torch.zeros_like(computing)
    else:
        gradients = columns.get(GRADIENTS, zeros) + current + split((of_blocks - current) * widened)
        # The previous block's, until this block's are complete and scattered in their turn.
        in_flight = (of_blocks > block.gradients) & (current < block.gradients)
        prefetching = computing & (of_blocks < (blocks - 1) * block.gradients)
    keeps = config.keeps_gathered or config.pp > 1  # until backward has used them
    result[GRADIENTS] = torch.where(computing, gradients, split(all_gradients * widened))
    result[GATHERED] = (
        computing * rest.gathered
        + (computing & ~finished) * block.gathered * (blocks if keeps else 1)
        + (prefetching * block.gathered if not keeps else 0)
        + (computing & in_flight) * block.reduced
    )
    names = (*kinds, *(kind for kind in (TEMPORARIES, GRADIENTS, GATHERED) if kind not in kinds))
    # At the end of backward, gradients outside the blocks are scattered.
    last = {kind: result[kind][-1] for kind in names} | {
        TEMPORARIES: zeros[0], GRADIENTS: split(all_gradients[-1] * widened) + rest.gradients,
        GATHERED: zeros[0] + rest.reduced,
    }  # fmt: skip
    table = torch.stack([torch.cat([result[kind], last[kind][None]]) for kind in names], dim=1)
    return MemorySeries(names, [*whole.phases, "end of backward"], table)
