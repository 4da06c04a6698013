"""Extrapolate the memory of a training step of many equal blocks from steps of models with few blocks.

One step of three blocks suffices if two of them have the same events in forward, and in backward, and nothing follows
backward: these events then repeat for every further block (`repeat_block`). The trace of forward has shown that nothing
outside of the blocks depends on their number (`octavo.planner.trace.extrapolate_trace`). Otherwise two steps are
compared (`extrapolate_blocks`):

A model of n equal blocks runs some first operations, n times the same block, and some last operations in forward, and
the reverse in backward. So the storage events of n + 1 blocks are those of n with one block's events inserted. An event
that both have, counted from the start or from the end of forward or backward, holds at N blocks

    bytes(N) = bytes(n) + (N − n) · (bytes(n + 1) − bytes(n))

of each category. Events in between belong to other blocks and change from block to block by the same amount, so none of
them exceeds both ends. The peak may fall on different events for 3 blocks and for 80; nothing is assumed about it. The
assumptions are checked: the two event sequences agree, byte for byte, on all events but one block's, and the
optimizer's events after backward peak for all blocks at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.planner.timeline import MemorySeries, StorageEvents


def repeat_block(step: StorageEvents, extra: int) -> StorageEvents | None:
    """Return the events of a step of the same model with more blocks, all of them."""
    blocks = step.last_blocks
    if blocks is None or step.backward_end < len(step.changes):
        return None
    order: list[int] = []
    for index in range(step.step_start):
        order += [index] * (1 + extra if index in blocks.held else 1)
    starts = [len(order)]
    for begin, end, (first, length) in (
        (step.step_start, step.backward_start, blocks.forward),
        (step.backward_start, step.backward_end, blocks.backward),
    ):
        labelled = list(zip(step.changes[first:end], step.kinds[first:end], strict=True))
        repeated = _first_repeated(labelled, length)
        if repeated is None:
            return None
        block = range(first + repeated, first + repeated + length)
        order += [*range(begin, block.start), *(1 + extra) * [*block], *range(block.stop, end)]
        starts.append(len(order))
    return StorageEvents(
        kinds=[step.kinds[index] for index in order],
        changes=[step.changes[index] for index in order],
        phases=[step.phases[index] for index in order],
        step_start=starts[0],
        backward_start=starts[1],
        backward_end=starts[2],
    )


def _first_repeated(values: Sequence[Any], length: int) -> int | None:
    """Return the first index at which a part of this length occurs twice in a row; None if there is none."""
    equal = 0
    for index in range(len(values) - length):
        equal = equal + 1 if values[index] == values[index + length] else 0
        if equal == length > 0:
            return index - length + 1
    return None


def extrapolate_blocks(few: StorageEvents, more: StorageEvents, extra: int) -> MemorySeries | None:
    """Return times of a step of a model with more blocks, including the time of its peak."""
    kinds = tuple(dict.fromkeys((*few.kinds, *more.kinds)))
    few_table, more_table = few.cumulative(kinds), more.cumulative(kinds)
    phases: list[str] = []
    rows: list[Tensor] = []
    for start, end, start_more, end_more in (
        (few.step_start, few.backward_start, more.step_start, more.backward_start),
        (few.backward_start, few.backward_end, more.backward_start, more.backward_end),
    ):
        few_changes, more_changes = few.changes[start:end], more.changes[start_more:end_more]
        prefix = common_prefix(few_changes, more_changes)
        suffix = common_prefix(few_changes[::-1], more_changes[::-1])
        if prefix + suffix < len(few_changes):
            return None
        for i, j, count in ((start, start_more, prefix), (end - suffix, end_more - suffix, suffix)):
            rows.append(_extrapolate(few_table[i : i + count], more_table[j : j + count], extra))
            phases += few.phases[i : i + count]
    for phase in dict.fromkeys(few.phases[few.backward_end :]):
        i, j = _peak_index(few_table, few, phase), _peak_index(more_table, more, phase)
        rows.append(_extrapolate(few_table[i : i + 1], more_table[j : j + 1], extra))
        phases.append(phase)
    return MemorySeries(kinds, phases, torch.cat(rows))


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _extrapolate(few: Tensor, more: Tensor, extra: int) -> Tensor:
    return few + extra * (more - few)


def _peak_index(table: Tensor, events: StorageEvents, phase: str) -> int:
    """Return the event after backward with the largest sum in a phase."""
    indices = [i for i in range(events.backward_end, len(events.phases)) if events.phases[i] == phase]
    return indices[int(table[indices].sum(dim=1).argmax())]
