"""Timeline: record every storage that a training step allocates, with real tensors and under FakeTensorMode alike.

A storage starts when the dispatch mode first sees it and ends when its Python object dies. Storages are classified
afterwards: those alive when a backward begins are activations, those that a parameter's `.grad` used gradients.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from octavo.numerics.suggestions import grouped
from octavo.runtime import torch_compat
from octavo.runtime.torch_compat import FakeTensor, TorchDispatchMode, in_backward, tree_leaves

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
