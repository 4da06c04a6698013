"""Extrapolate the memory of a training step of many equal blocks from steps of two models with few blocks.

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


def extrapolate_blocks(few: StorageEvents, more: StorageEvents, extra: int) -> MemorySeries | None:
    """Return times of a step of a model with more blocks, including the time of its peak.

    Args:
        few: Events of a model with a few equal blocks.
        more: Events of the same model with one more block.
        extra: Number of blocks beyond those of `few`.

    Returns:
        The times with the bytes of each category; None if the two steps differ by more than one block's events.
    """
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
