"""MemoryPlan: the memory of one training step by category, predicted without allocating anything.

    peak = parameters + buffers + optimizer states + batch        there all the time
         + gradients + activations + temporaries                  at the worst moment

The three of the second line do not reach their largest at the same time: activations fall while gradients grow. So the
sum is not of maxima; the step is run once on tensors without storage (`octavo.planner.timeline`) and its worst moment
taken. Not counted: the CUDA context (0.5 GB), workspaces inside kernels, and what the caching allocator cannot use.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from io import StringIO

import torch

from octavo.numerics.names import merged, pattern
from octavo.planner.timeline import ACTIVATIONS, GRADIENTS, TEMPORARIES, Timeline

PARAMETERS, BUFFERS, STATES, BATCH = "parameters", "buffers", "optimizer states", "batch"
KINDS = (PARAMETERS, BUFFERS, STATES, BATCH, GRADIENTS, ACTIVATIONS, TEMPORARIES)
"""Categories, in the order of tables."""

MOST_LAYERS = 12
"""Rows of layers in a printed table; the rest is summed up."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a training step, in bytes. Printed, it is a table.

    Attributes:
        label: What was planned, as "O1 rowwise".
        device: The device it is for.
        batch: Sequences (first dimension of the batch) of one forward.
        tokens: Elements of the batch's first tensor: tokens of one forward, for a language model.
        peak: Largest sum at any one time.
        phase: When that is: "forward", "backward", "after backward" or "optimizer step".
        at_peak: By category, at the peak.
        largest: The most of each category at any one time.
        kept_by_dtype: What one forward keeps for backward, by dtype.
        kept_by_layer: The same, by the module that keeps it.
        notes: What a reader should know about this prediction.
    """

    label: str
    device: str
    batch: int
    tokens: int
    peak: int
    phase: str
    at_peak: Mapping[str, int]
    largest: Mapping[str, int]
    kept_by_dtype: Mapping[str, int]
    kept_by_layer: Mapping[str, int]
    notes: tuple[str, ...] = ()
    again: Callable[[int], "MemoryPlan"] | None = field(default=None, repr=False, compare=False)
    """Plans the same step for another number of sequences."""

    @property
    def kept(self) -> int:
        """Bytes that one forward keeps for backward."""
        return sum(self.kept_by_dtype.values())

    def largest_batch(self, limit_bytes: int) -> int:
        """The largest number of sequences in one forward whose peak is at most `limit_bytes`; 0 where none fits.

        Found by planning a few sizes: the peak grows with the batch, by nearly the same for each sequence.
        """
        if self.again is None:
            raise ValueError("this plan was read from a file or put together by hand: plan again to vary the batch")
        again = self.again
        return largest_fitting(lambda size: again(size).peak, {self.batch: self.peak}, limit_bytes)

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(asdict(replace(self, again=None)) | {"kept": self.kept}, indent=1)

    def __str__(self) -> str:
        from rich.console import Console  # printing is all that needs it

        text = StringIO()
        Console(file=text, width=110).print(*_tables(self), sep="\n")
        return text.getvalue().rstrip()


def largest_fitting(peak: Callable[[int], int], peaks: dict[int, int], limit_bytes: int) -> int:
    """The largest batch whose peak is at most `limit_bytes`; 0 where none fits.

    Args:
        peak: Of a batch.
        peaks: Those that are known, one at least.
        limit_bytes: What there is.

    Raises:
        ValueError: Where the peak does not grow with the batch.
    """
    known = next(iter(peaks))

    def fits(size: int) -> bool:
        if size not in peaks:
            peaks[size] = peak(size)
        return peaks[size] <= limit_bytes

    if not fits(1):
        return 0
    other = known if known > 1 else 2
    fits(other)
    slope = (peaks[other] - peaks[1]) // (other - 1)
    if slope <= 0:
        raise ValueError("the peak does not grow with the batch: every batch fits, or the first dimension is none")
    low, high = 1, None
    while high is None or high - low > 1:
        step = max((limit_bytes - peaks[low]) // slope, 1)
        guess = low + (step if high is None else min(step, high - low - 1))
        fitting = fits(guess)
        slope = max((peaks[guess] - peaks[low]) // (guess - low), 1)
        low, high = (guess, high) if fitting else (low, guess)
    return low


def summarize(
    timeline: Timeline, *, label: str, device: torch.device, batch: int, tokens: int,
    kept_by_dtype: Mapping[str, int], kept_by_layer: Mapping[str, int], notes: tuple[str, ...],
    again: Callable[[int], MemoryPlan],
) -> MemoryPlan:  # fmt: skip
    """The plan of a step that a timeline has followed."""
    phase, at_peak = timeline.peak()
    largest = timeline.largest()
    return MemoryPlan(
        label=label,
        device=str(device),
        batch=batch,
        tokens=tokens,
        peak=sum(at_peak.values()),
        phase=phase,
        at_peak={kind: at_peak.get(kind, 0) for kind in KINDS},
        largest={kind: largest.get(kind, 0) for kind in KINDS},
        kept_by_dtype=dict(sorted(kept_by_dtype.items(), key=lambda item: -item[1])),
        kept_by_layer=dict(kept_by_layer),
        notes=notes,
        again=again,
    )


def by_kind_of_layer(sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Bytes by layer with like names in one: (name, layers, bytes), largest first."""
    groups: dict[str, list[str]] = {}
    for name in sizes:
        groups.setdefault(pattern(name), []).append(name)
    rows = [(merged(names) or "(the model)", len(names), sum(sizes[n] for n in names)) for names in groups.values()]
    return sorted(rows, key=lambda row: -row[2])


def gib(size: int) -> str:
    """Bytes for a table: in GiB, or in MiB below one."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _tables(plan: MemoryPlan) -> list[object]:
    from rich.box import ROUNDED
    from rich.table import Table

    table = Table(box=ROUNDED, title=f"{plan.label}, {plan.batch} sequences, {plan.tokens} tokens, {plan.device}")
    for heading in ("memory", f"at the peak ({plan.phase})", "at its largest"):
        table.add_column(heading, justify="left" if heading == "memory" else "right")
    for kind in KINDS:
        table.add_row(kind, gib(plan.at_peak[kind]), gib(plan.largest[kind]))
    table.add_section()
    table.add_row("in all", gib(plan.peak), "")
    kept = Table(box=ROUNDED)
    for heading in ("kept for backward", "layers", "in all", "bytes/token"):
        kept.add_column(heading, justify="left" if heading == "kept for backward" else "right")
    rows = by_kind_of_layer(plan.kept_by_layer)
    for name, count, size in rows[:MOST_LAYERS]:
        kept.add_row(name, str(count), gib(size), f"{size / plan.tokens:,.0f}")
    if rest := rows[MOST_LAYERS:]:
        size = sum(row[2] for row in rest)
        kept.add_row("all others", str(sum(row[1] for row in rest)), gib(size), f"{size / plan.tokens:,.0f}")
    kept.add_section()
    for name, size in plan.kept_by_dtype.items():
        kept.add_row(f"as {name}", "", gib(size), f"{size / plan.tokens:,.0f}")
    kept.add_row("in all", "", gib(plan.kept), f"{plan.kept / plan.tokens:,.0f}")
    return [table, kept, *plan.notes]
