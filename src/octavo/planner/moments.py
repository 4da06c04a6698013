"""Moments: bytes by category throughout a training step; and those of a model of many equal blocks from two of few.

A model of n equal blocks does in forward: something first, n times the same, something last; and in backward the same
the other way round. So the events of n + 1 blocks are those of n with one block's put in between, and a moment that
both have, counted from the beginning of forward or backward or from its end, holds at N blocks

    bytes(N) = bytes(n) + (N − n) · (bytes(n + 1) − bytes(n))

of each category. The moments in between are those of other blocks, and change from block to block by the same amount,
so that none of them is above both ends. Nothing is assumed of which moment is the worst, which is not the same for 3
blocks and for 80. What is assumed is checked: that the two lines agree on all events but one block's, byte for byte;
and that what the optimizer does after backward is the worst for all blocks at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.planner.timeline import Line

Bytes = Mapping[str, int]


@dataclass(frozen=True)
class Moment:
    """A time in a step: when, and bytes by category."""

    phase: str
    bytes: Bytes

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.bytes.values())


class Moments:
    """Bytes by category at many times of a step.

    Args:
        kinds: Categories.
        phases: Of each time, when it is.
        table: [times, kinds], int64.
    """

    def __init__(self, kinds: Sequence[str], phases: Sequence[str], table: Tensor) -> None:
        self.kinds, self.phases, self.table = tuple(kinds), tuple(phases), table

    def __iter__(self) -> Iterator[Moment]:
        for phase, row in zip(self.phases, self.table.tolist(), strict=True):
            yield Moment(phase, dict(zip(self.kinds, row, strict=True)))

    @property
    def worst(self) -> Moment:
        """When the sum is largest."""
        at = int(self.table.sum(dim=1).argmax())
        return Moment(self.phases[at], dict(zip(self.kinds, self.table[at].tolist(), strict=True)))


def moments(line: Line) -> Moments:
    """All times of a step, the first of them with everything that is held."""
    kinds = tuple(dict.fromkeys(line.kinds))
    first = max(line.began - 1, 0)
    return Moments(kinds, line.phases[first:], _running(line, kinds)[first:])


def of_more_blocks(few: Line, more: Line, extra: int) -> Moments | None:
    """Times of a step of a model with more blocks.

    Args:
        few: The step of a model of some equal blocks.
        more: The step of the same with one block more.
        extra: How many blocks more than `few` the model has.

    Returns:
        Among all its times the worst, with the bytes of each category; None where the two lines do not differ by one
        block's events.
    """
    kinds = tuple(dict.fromkeys((*few.kinds, *more.kinds)))
    before, after = _running(few, kinds), _running(more, kinds)
    phases: list[str] = []
    rows: list[Tensor] = []
    for start, end, start_more, end_more in (
        (few.began, few.turned, more.began, more.turned), (few.turned, few.ended, more.turned, more.ended),
    ):  # fmt: skip
        ours, theirs = few.changes[start:end], more.changes[start_more:end_more]
        begins, ends = common(ours, theirs), common(ours[::-1], theirs[::-1])
        if begins + ends < len(ours):
            return None
        for here, there, count in ((start, start_more, begins), (end - ends, end_more - ends, ends)):
            rows.append(_grown(before[here : here + count], after[there : there + count], extra))
            phases += few.phases[here : here + count]
    for phase in dict.fromkeys(few.phases[few.ended :]):
        here = _worst(before, few, phase)
        there = _worst(after, more, phase)
        rows.append(_grown(before[here : here + 1], after[there : there + 1], extra))
        phases.append(phase)
    return Moments(kinds, phases, torch.cat(rows))


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many members two sequences begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _running(line: Line, kinds: Sequence[str]) -> Tensor:
    """Bytes by kind after each event: [events, kinds]."""
    place = {kind: index for index, kind in enumerate(kinds)}
    table = torch.zeros(len(line.changes), len(kinds), dtype=torch.int64)
    where = torch.tensor([place[kind] for kind in line.kinds], dtype=torch.int64)
    table[torch.arange(len(line.changes)), where] = torch.tensor(line.changes, dtype=torch.int64)
    return table.cumsum(0)


def _grown(few: Tensor, more: Tensor, extra: int) -> Tensor:
    return few + extra * (more - few)


def _worst(table: Tensor, line: Line, phase: str) -> int:
    at = [i for i in range(line.ended, len(line.phases)) if line.phases[i] == phase]
    return at[int(table[at].sum(dim=1).argmax())]
