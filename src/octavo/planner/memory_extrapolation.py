"""Extrapolate the memory of a training step of many equal blocks from steps of models with few.

A model of n equal blocks runs some first operations, n times the same block, and some last operations in forward, and
the reverse in backward. So the storage events of n + 1 blocks are those of n with one block's events inserted
(`growth`), and so are those of N (`grown`). Before forward and after backward, each block adds the same bytes:

    bytes(N) = bytes(n) + (N − n) · (bytes(n + 1) − bytes(n))

A vision tower and a decoder grow independently of each other. The peak may fall on different events for 3 blocks and
for 80; nothing is assumed about it. The assumptions are checked: the two event sequences agree, byte for byte, on all
events but one block's. Where these repeat the events before them, the step of few blocks suffices for another batch
(`growth_of`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.planner.timeline import Event, MemorySeries, StorageEvents, cumulative


@dataclass(frozen=True, kw_only=True)
class Inserted:
    """The events of one block more, in forward or in backward."""

    at: int  # Index in the step of few blocks
    events: Sequence[Event]
    source: int | None  # Index of the same events in that step, next to it; None if they are not


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What one block more adds to a step of few blocks."""

    held: Mapping[str, int]  # Bytes before the step, by category
    inserted: Sequence[Inserted]  # In forward and in backward
    after: Mapping[str, Mapping[str, int]]  # Bytes at the peak of each phase after backward, by category


def growth(few: StorageEvents, more: StorageEvents) -> Growth | None:
    """Compare two steps of models that differ by a block; None if they differ elsewhere, too."""
    inserted = []
    for (start, end), (start_more, end_more) in zip(few.passes, more.passes, strict=True):
        one = [event[:2] for event in few.events[start:end]]
        other = [event[:2] for event in more.events[start_more:end_more]]
        last, length = common_prefix(one, other), len(other) - len(one)
        first = len(one) - common_prefix(one[::-1], other[::-1])
        if first > last:
            return None
        # Between the two any index will do: try those after and before which the same block may stand.
        parts = []
        for at, source in ((last, last - length), (first, first)):
            added = other[at : at + length]
            known = source >= 0 and one[source : source + length] == added
            events = more.events[start_more + at : start_more + at + length]
            parts.append(Inserted(at=start + at, events=events, source=start + source if known else None))
        inserted.append(next((part for part in parts if part.source is not None), parts[0]))
    if not inserted[0].events or inserted[0].source is None:  # it did not run, or not as the one before it
        return None
    after_few, after_more = few.peaks_after_backward, more.peaks_after_backward
    return Growth(
        held=_difference(few.held, more.held),
        inserted=inserted,
        after={phase: _difference(peak, after_more.get(phase, peak)) for phase, peak in after_few.items()},
    )


def growth_of(step: StorageEvents, few: StorageEvents, known: Growth) -> Growth | None:
    """Return the growth of a step with another batch than `few`, whose growth is known; None if that takes a trace."""
    inserted = []
    if step.events[step.backward_end :] != few.events[few.backward_end :]:  # of parameters, whatever the batch
        return None
    for part, (start, _), (start_few, _) in zip(known.inserted, step.passes, few.passes, strict=True):
        if part.source is None:
            return None
        moved, length = start - start_few, len(part.events)
        last = max(part.at, part.source + length)  # of what follows, such as a loss in chunks, nothing is assumed
        kinds = [(event.kind, event.phase) for event in step.events[start : last + moved]]
        if kinds != [(event.kind, event.phase) for event in few.events[start_few:last]]:
            return None
        events = step.events[part.source + moved : part.source + moved + length]
        inserted.append(Inserted(at=part.at + moved, events=events, source=part.source + moved))
    return replace(known, inserted=inserted)


def grown(few: StorageEvents, growths: Sequence[tuple[Growth, int]]) -> MemorySeries:
    """Return the times of a step with so many more blocks of each kind; after backward, the peak of each phase."""
    start = few.step_start
    held = [Event(kind, extra * size, "") for growth, extra in growths for kind, size in growth.held.items()]
    events, done = [*held, *few.events[:start]], start
    first = max(len(events) - 1, 0)
    added = [(part.at, list(part.events) * extra) for growth, extra in growths for part in growth.inserted]
    for at, block in sorted(added, key=lambda part: part[0]):
        events += [*few.events[done:at], *block]
        done = at
    events += few.events[done : few.backward_end]
    kinds = tuple(dict.fromkeys(event.kind for event in (*events, *few.events)))
    tables, phases = [cumulative(events, kinds)[first:]], [event.phase for event in events[first:]]
    for phase, peak in few.peaks_after_backward.items():
        sums = [peak.get(kind, 0) + sum(n * g.after[phase].get(kind, 0) for g, n in growths) for kind in kinds]
        tables.append(torch.tensor([sums], dtype=torch.int64, device="cpu"))
        phases.append(phase)
    return MemorySeries(kinds, phases, torch.cat(tables))


def common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _difference(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {kind: other.get(kind, 0) - one.get(kind, 0) for kind in {**one, **other}}
