"""Footprint: the memory of one GPU at the peak of a training step, by category.

`octavo.planner.memory_plan` runs a whole step and lists what each layer saves. This module needs less: two runs of a
few blocks stand for all blocks if these are equal (`octavo.planner.memory_extrapolation`), and one rank stands for all
ranks that share a model (`octavo.planner.sharded_memory`). 80 layers on 64 GPUs take less than a second.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from octavo.planner.memory_extrapolation import MemorySeries
from octavo.planner.memory_plan import BATCH, BUFFERS, PARAMETERS, STATES, bytes_per_sequence, largest_fitting
from octavo.planner.sharded_memory import GATHERED, Shards, memory_per_rank
from octavo.planner.timeline import ACTIVATIONS, BLOCK_GRADIENTS, GRADIENTS, TEMPORARIES

CATEGORIES = (PARAMETERS, STATES, GRADIENTS, ACTIVATIONS, TEMPORARIES, GATHERED, "other")
"""Categories in the order of tables. "gathered" is memory for communication with other ranks; "other" is buffers and
the batch.
"""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Predicted bytes of one GPU.

    Attributes:
        batch: Sequences of one forward.
        at_peak: Bytes by category (`CATEGORIES`) at the peak.
        phase: Phase of the peak.
        traced_blocks: Number of blocks that were run, and of all blocks: (2, 80), or (80, 80) if all were run.
        replan: Predicts the same step for another number of sequences.
        note: Remark for the reader.
    """

    batch: int
    at_peak: Mapping[str, int]
    phase: str
    traced_blocks: tuple[int, int]
    replan: "Callable[[int], Footprint]" = field(repr=False, compare=False)
    note: str = ""
    _fitting: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(self.at_peak.values())

    def largest_batch(self, limit_bytes: int) -> int:
        """Return the largest number of sequences of one forward that fits; 0 if none does. Plans a few sizes."""
        if limit_bytes not in self._fitting:
            self._fitting[limit_bytes] = largest_fitting(
                lambda size: self.replan(size).peak, {self.batch: self.peak}, limit_bytes,
                bytes_per_sequence(self.at_peak, self.batch),
            )  # fmt: skip
        return self._fitting[limit_bytes]

    def to_json(self, limit_bytes: int) -> dict[str, Any]:
        """Return a plain dictionary, for a GPU with this much memory."""
        return {
            "peak": self.peak,
            "phase": self.phase,
            "at_peak": dict(self.at_peak),
            "fits": self.peak <= limit_bytes,
            "limit": limit_bytes,
            "largest_batch": self.largest_batch(limit_bytes),
            "followed_blocks": self.traced_blocks[0],
            "blocks": self.traced_blocks[1],
            "note": self.note,
        }


def footprint(
    series: MemorySeries, shards: Shards | None, *, batch: int, traced_blocks: tuple[int, int],
    replan: Callable[[int], Footprint], buckets: int = 0,
) -> Footprint:  # fmt: skip
    """Return the footprint of one GPU from the memory series of one process with the whole model.

    `buckets` are the bytes of DDP's buckets, which hold all gradients a second time.
    """
    sample = (series if shards is None else memory_per_rank(series, shards)).peak
    at_peak = dict.fromkeys(CATEGORIES, 0) | {GATHERED: buckets}
    for kind, size in sample.bytes.items():
        category = {BLOCK_GRADIENTS: GRADIENTS, BUFFERS: "other", BATCH: "other"}.get(kind, kind)
        at_peak[category] += size
    return Footprint(batch=batch, at_peak=at_peak, phase=sample.phase, traced_blocks=traced_blocks, replan=replan)
