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

from octavo.numerics.display import Displayed
from octavo.numerics.names import merged, pattern
from octavo.planner.timeline import ACTIVATIONS, GRADIENTS, TEMPORARIES, Timeline

PARAMETERS, BUFFERS, STATES, BATCH = "parameters", "buffers", "optimizer states", "batch"
KINDS = (PARAMETERS, BUFFERS, STATES, BATCH, GRADIENTS, ACTIVATIONS, TEMPORARIES)
"""Categories, in the order of tables."""

MOST_LAYERS = 12
"""Rows of layers in a printed table; the rest is summed up."""
MOST_SEQUENCES = 2**30
"""Beyond which no larger batch is looked for."""


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryPlan(Displayed):
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
    again: Callable[[int], "MemoryPlan"] | None = field(default=None, compare=False)
    """Plans the same step for another number of sequences: its peak, without what is kept."""

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
        return largest_fitting(
            lambda size: again(size).peak, {self.batch: self.peak}, limit_bytes, of_a_sequence(self.at_peak, self.batch)
        )

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(asdict(replace(self, again=None)) | {"kept": self.kept}, indent=1)

    def __str__(self) -> str:
        from rich.console import Console  # printing is all that needs it

        text = StringIO()
        Console(file=text, width=110).print(*_tables(self), sep="\n")
        return text.getvalue().rstrip()


def largest_fitting(peak: Callable[[int], int], peaks: dict[int, int], limit_bytes: int, slope: float) -> int:
    """The largest batch whose peak is at most `limit_bytes`; 0 where none fits.

    A peak is the largest of sums that grow evenly with the batch, so it grows by no less from each sequence to the
    next: two peaks bound those of other batches, between them from above and outside from below. So few are looked at.

    Args:
        peak: Of a batch.
        peaks: Those that are known, one at least; it gets those that are looked at.
        limit_bytes: What there is.
        slope: About how much a sequence takes.

    Raises:
        ValueError: Where the peak does not grow with the batch.
    """
    while True:
        low, high = _bounds(peaks, limit_bytes)
        if high is not None and high - low <= 1:
            return low
        if low >= MOST_SEQUENCES:
            raise ValueError("the peak does not grow with the batch: every batch fits, or the first dimension is none")
        if len(peaks) == 1:
            ((known, size),) = peaks.items()
            guess = known + int((limit_bytes - size) // max(slope, 1.0))
            guess = max(guess, known + 1) if high is None else min(max(guess, 1), known - 1)
        elif high is None:
            guess = 2 * low
        else:  # where a line alone says what does not fit, what it lets fit is the likeliest
            guess = high - 1 if high not in peaks else (low + high) // 2
        guess = min(guess, MOST_SEQUENCES)
        peaks[guess] = peak(guess)


def _bounds(peaks: Mapping[int, int], limit_bytes: int) -> tuple[int, int | None]:
    """The largest batch that is known to fit, 0 for none, and the smallest that is known not to, None for none."""
    fitting = sorted(size for size, found in peaks.items() if found <= limit_bytes)
    others = sorted(size for size, found in peaks.items() if found > limit_bytes)

    def last(one: int, other: int) -> int | None:
        """The last batch whose peak is within the limit on the line through two; None where it does not rise."""
        grown = peaks[other] - peaks[one]
        return one + (limit_bytes - peaks[one]) * (other - one) // grown if grown > 0 else None

    low = max(fitting, default=0)
    if fitting and others and (between := last(fitting[-1], others[0])) is not None:
        low = max(low, between)
    lasts = [last(*some) for some in (fitting[-2:], others[:2]) if len(some) == 2]
    ends = [*others[:1], *(each + 1 for each in lasts if each is not None)]
    return low, min(ends, default=None)


def of_a_sequence(at_peak: Mapping[str, int], batch: int) -> float:
    """About how many bytes each sequence takes of those at a peak; rather too many."""
    return sum(at_peak[kind] for kind in (ACTIVATIONS, TEMPORARIES)) / batch


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

    table = Table(
        box=ROUNDED,
        title_justify="left",
        title=f"{plan.label}, {plan.batch} sequences, {plan.tokens} tokens, {plan.device}",
    )
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
