"""Timeline: every storage that a training step makes, from its first operation to its death, and the peak of their sum.

A dispatch mode sees the outputs of every operation, below autograd, with real tensors and under FakeTensorMode alike. A
storage that is new begins; the end of the Python object that stands for it is its end; between them it may be resized,
which is how FSDP2 frees what it has gathered, and which no operation shows: the method itself is followed. Subclasses
that wrap tensors (DTensor) are seen as what they hold. What a storage was for is decided afterwards, which is why the
whole line is kept (some thousand events for a 7B model) rather than a running sum:

    what was held before        as it was named: parameters, optimizer, batch
    gradients                   what a parameter's `.grad` was seen to be
    activations                 alive when a backward begins: kept for it, by autograd or by anything else
    temporaries                 the rest

`torch.distributed._tools.mem_tracker` counts the same bytes (the tests hold the two peaks equal) but calls everything
made in forward an activation, so that what backward waits for and what a forward used up in passing are one number.
Seen by neither: what a kernel takes inside itself, the CUDA context, and fragmentation.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from octavo.runtime.torch_compat import in_backward

GRADIENTS, ACTIVATIONS, TEMPORARIES = "gradients", "activations", "temporaries"
OF_BLOCKS = "gradients of blocks"
"""Gradients of what belongs to a block, where these are told from the rest's."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Every event of a timeline, and where the parts of a step begin among them.

    Attributes:
        kinds: What the storage of each event was for.
        changes: By how many bytes it grew or shrank.
        phases: When that was.
        began: Index of the first event of the step; those before are of what was held.
        turned: Index of the first event of backward.
        ended: Index of the first event after backward.
    """

    kinds: Sequence[str]
    changes: Sequence[int]
    phases: Sequence[str]
    began: int
    turned: int
    ended: int


class Timeline(TorchDispatchMode):
    """Follows storages while it is active.

    Args:
        granule: Bytes in whole multiples of which an allocator hands out memory: 512 on CUDA.
    """

    def __init__(self, granule: int = 1) -> None:
        super().__init__()
        self._granule = granule
        self._numbers = WeakIdKeyDictionary()
        self._sizes: list[int] = []
        self._kinds: dict[int, str] = {}
        self._events: list[tuple[int, int, str]] = []  # storage, change in bytes, phase
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._phase = ""
        self._in_backward = False
        self._marks: dict[str, int] = {}

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Names tensors that are there from the beginning; one that has a name already keeps it."""
        for tensor in _inside(tensors):
            self._kinds.setdefault(self._number(tensor), kind)

    def rename(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Names tensors, whatever they were taken for."""
        for tensor in _inside(tensors):
            self._kinds[self._number(tensor)] = kind

    def are_gradients(self, tensors: Iterable[Tensor], kind: str = GRADIENTS) -> None:
        """Names tensors as gradients, whatever they were taken for: that of a head whose loss is computed in chunks is
        there before backward begins.
        """
        self.rename(tensors, kind)

    def phase(self, name: str) -> None:
        """What happens from now on, for the peak to be told by."""
        self._phase = name

    def follow(self, model: nn.Module, blocks: Iterable[nn.Module] = ()) -> None:
        """Puts hooks on a model that tell when its forward begins and recognise gradients as they arrive; those of the
        parameters of `blocks` as `OF_BLOCKS`.
        """
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}

        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.are_gradients([parameter.grad], OF_BLOCKS if id(parameter) in inside else GRADIENTS)

        model.register_forward_pre_hook(lambda *_: self.phase("forward"))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(arrived)

    def line(self) -> "Line":
        """The step event by event, for `octavo.planner.moments`. One that had a backward, once it is over."""
        events = self._events[: self._marks["over"]]
        return Line(
            kinds=[self._kinds.get(number, TEMPORARIES) for number, _, _ in events],
            changes=[change for _, change, _ in events],
            phases=[phase for _, _, phase in events],
            began=self._marks["began"],
            turned=self._marks["turned"],
            ended=self._marks.get("ended", len(events)),
        )

    def largest(self) -> dict[str, int]:
        """The most bytes of each kind at any one time."""
        now: dict[str, int] = {}
        most: dict[str, int] = {}
        for number, change, _ in self._events:
            kind = self._kinds.get(number, TEMPORARIES)
            now[kind] = now.get(kind, 0) + change
            most[kind] = max(most.get(kind, 0), now[kind])
        return most

    def peak(self) -> tuple[str, dict[str, int]]:
        """When the sum was largest (the phase), and bytes by kind at that time."""
        total, highest, at, phase = 0, 0, 0, ""
        for index, (_, change, during) in enumerate(self._events):
            total += change
            if total > highest:
                highest, at, phase = total, index, during
        kinds: dict[str, int] = {}
        for number, change, _ in self._events[: at + 1]:
            kind = self._kinds.get(number, TEMPORARIES)
            kinds[kind] = kinds.get(kind, 0) + change
        return phase, {kind: size for kind, size in kinds.items() if size}

    def __enter__(self) -> "Timeline":
        original: Any = torch.UntypedStorage.resize_
        self._resize = original

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if (number := self._numbers.get(storage)) is not None:
                self._change(number, self._rounded(storage))
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        self._mark("began")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._mark("over")
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it takes itself apart, and what it holds comes by here
        backward = in_backward()
        if backward and not self._in_backward:
            for number in self._alive:
                self._kinds.setdefault(number, ACTIVATIONS)
        if backward != self._in_backward:
            self._in_backward = backward
            self._mark("turned" if backward else "ended")
            self._phase = "backward" if backward else "after backward"
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._number(leaf)
        return out

    def _mark(self, name: str) -> None:
        self._marks[name] = len(self._events)  # the last time counts: a loss in chunks goes backward by itself before

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage, which begins now if it is new."""
        storage = tensor.untyped_storage()
        number: int | None = self._numbers.get(storage)
        if number is None:
            number = len(self._sizes)
            self._numbers[storage] = number
            self._sizes.append(0)
            self._alive[number] = weakref.ref(storage, self._ending(number))
            self._change(number, self._rounded(storage))
        return number

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return math.ceil(storage.nbytes() / self._granule) * self._granule

    def _change(self, number: int, size: int) -> None:
        self._events.append((number, size - self._sizes[number], self._phase))
        self._sizes[number] = size

    def _ending(self, number: int) -> Callable[[Any], None]:
        def end(_: Any) -> None:
            del self._alive[number]
            self._change(number, 0)

        return end


def _inside(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Plain tensors that tensors are, or are made of."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            parts = [getattr(tensor, name) for name in names]
            yield from _inside(part for part in parts if isinstance(part, Tensor))  # a DTensor's mesh is none
        else:
            yield tensor
