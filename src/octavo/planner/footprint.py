"""Footprint: the memory of one GPU in a training step, by category, at its worst moment; for tables beside times.

`octavo.planner.memory` follows a whole step and says what each layer keeps; here a few blocks stand for all of them
where they are equal (`octavo.planner.moments`), and one rank for all that share a model (`octavo.planner.shards`), so
that the answer for 80 layers on 64 GPUs takes less than a second.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from octavo.planner.memory import BATCH, BUFFERS, PARAMETERS, STATES, largest_fitting, of_a_sequence
from octavo.planner.moments import Moments
from octavo.planner.shards import GATHERED, Shards, per_rank
from octavo.planner.timeline import ACTIVATIONS, GRADIENTS, OF_BLOCKS, TEMPORARIES

CATEGORIES = (PARAMETERS, STATES, GRADIENTS, ACTIVATIONS, TEMPORARIES, GATHERED, "other")
"""In the order of tables; "gathered" is what is there for other ranks' sake, "other" are buffers and the batch."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Predicted bytes of one GPU.

    Attributes:
        batch: Sequences of one forward.
        at_peak: By category (`CATEGORIES`), at the worst moment.
        phase: When that is.
        followed: Blocks that were followed, of so many: (2, 80); (80, 80) where all were.
        again: The same with another number of sequences.
        note: What a reader should know about this prediction.
    """

    batch: int
    at_peak: Mapping[str, int]
    phase: str
    followed: tuple[int, int]
    again: "Callable[[int], Footprint]" = field(repr=False, compare=False)
    note: str = ""
    _fitting: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return sum(self.at_peak.values())

    def largest_batch(self, limit_bytes: int) -> int:
        """The most sequences of one forward that fit; 0 where none does. Found by planning a few sizes."""
        if limit_bytes not in self._fitting:
            self._fitting[limit_bytes] = largest_fitting(
                lambda size: self.again(size).peak, {self.batch: self.peak}, limit_bytes,
                of_a_sequence(self.at_peak, self.batch),
            )  # fmt: skip
        return self._fitting[limit_bytes]

    def to_json(self, limit_bytes: int) -> dict[str, Any]:
        """Plain dictionary, for a GPU with so much memory."""
        return {
            "peak": self.peak,
            "phase": self.phase,
            "at_peak": dict(self.at_peak),
            "fits": self.peak <= limit_bytes,
            "limit": limit_bytes,
            "largest_batch": self.largest_batch(limit_bytes),
            "followed_blocks": self.followed[0],
            "blocks": self.followed[1],
            "note": self.note,
        }


def footprint(
    moments: Moments, shards: Shards | None, *, batch: int, followed: tuple[int, int],
    again: Callable[[int], Footprint], buckets: int = 0,
) -> Footprint:  # fmt: skip
    """The footprint of a step whose moments, of one process with the whole model, are known; `buckets` are DDP's, which
    hold all gradients once more.
    """
    worst = (moments if shards is None else per_rank(moments, shards)).worst
    found = dict.fromkeys(CATEGORIES, 0) | {GATHERED: buckets}
    for kind, size in worst.bytes.items():
        place = {OF_BLOCKS: GRADIENTS, BUFFERS: "other", BATCH: "other"}.get(kind, kind)
        found[place] += size
    return Footprint(batch=batch, at_peak=found, phase=worst.phase, followed=followed, again=again)
