"""MemoryPlan: the memory of one GPU in a training step, by category, predicted without allocating anything."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from octavo.nn.memory_audit import Audit, dtype_name
from octavo.numerics.display import Displayed, Table
from octavo.numerics.suggestions import grouped, merged, pattern
from octavo.planner.step_memory import (
    ACTIVATIONS,
    BATCH,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    KINDS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    MemorySample,
    MemorySeries,
)

FORECAST_KINDS = (PARAMETERS, STATES, GRADIENTS, ACTIVATIONS, TEMPORARIES, GATHERED)
"""Categories of memory in a forecast; buffers and the batch are "other"."""
_NOTHING = dict.fromkeys((*KINDS, GATHERED), 0)
MOST_LAYERS = 12  # Maximum rows of layers in a printed table; the rest is summed
MOST_OUTPUTS = 5_000  # Tensors that the operations of a step may return for it to be traced as a check
MOST_SEQUENCES = 2**30  # Upper bound on the batch in searches


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class MemoryPlan(Displayed):
    """Memory of one GPU in a training step, in bytes. Prints as a table."""

    label: str = ""  # What was planned, such as "fp8 rowwise"
    device: str = "cuda"  # Type of the device of the prediction
    batch: int  # Sequences (first dimension of the batch) of one forward
    tokens: int  # Elements of the batch's first tensor: for a language model, tokens of one forward
    series: (
        MemorySeries  # Bytes by category (`octavo.planner.step_memory.KINDS`) and "gathered" at all times of the step
    )
    saved_by_dtype: Mapping[str, int] = field(default_factory=dict)  # Saved by a forward; empty in a forecast
    saved_by_layer: Mapping[str, int] = field(default_factory=dict)  # The same by the module that saves them
    notes: tuple[str, ...] = ()  # Remarks for the reader
    outputs: int = 0  # Number of tensors that the operations of the traced step return
    traced_blocks: tuple[int, int] = (0, 0)  # Number of blocks that were run, and of all blocks
    # What a GPU hands to collectives of tokens in a micro-batch, for each stage of a pipeline.
    messages: Sequence[Mapping[tuple[str, bool], int]] = ()
    stage_message: int = 0  # Bytes of one message between stages
    replan: "Callable[[int], MemoryPlan] | None" = field(default=None, compare=False)
    """Plans the peak of the same step for another number of sequences."""
    _fitting: dict[int, int] = field(default_factory=dict, compare=False)  # Largest batches that were searched for

    @cached_property
    def _peaks(self) -> dict[str, MemorySample]:
        return self.series.peaks

    @cached_property
    def _at_peak(self) -> MemorySample:
        return max(self._peaks.values(), key=lambda peak: peak.total)

    @property
    def peak(self) -> int:
        """Largest sum at any one time."""
        return self._at_peak.total

    @property
    def phase(self) -> str:
        """Phase of the peak: "forward", "backward", "after backward" or "optimizer step"."""
        return self._at_peak.phase

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Bytes by category at the peak; "gathered" is the memory for communication with other GPUs."""
        return _NOTHING | self._at_peak.bytes

    @cached_property
    def largest(self) -> Mapping[str, int]:
        """Maximum of each category over time."""
        return _NOTHING | self.series.largest

    @property
    def saved(self) -> int:
        """Bytes that one forward saves for backward."""
        return sum(self.saved_by_dtype.values())

    def largest_batch(self, limit_bytes: int) -> int:
        """Return the largest number of sequences in one forward whose peak is at most `limit_bytes`; 0 if none fits.

        Raises:
            ValueError: If the plan was built by hand, or the peak does not grow with the batch.
        """
        # Plans another batch, twice this one or a smaller one that may fit, and follows the line of each phase of the
        # step to the limit. One more plan checks the answer, unless its step has too many operations, as of a model
        # that runs its images one by one.
        if self.replan is None:
            raise ValueError("this plan was built by hand: make a new plan to vary the batch")
        if limit_bytes not in self._fitting:
            self._fitting[limit_bytes] = self._search_largest(self.replan, limit_bytes)
        return self._fitting[limit_bytes]

    def _search_largest(self, replan: "Callable[[int], MemoryPlan]", limit_bytes: int) -> int:
        slope = (self.at_peak[ACTIVATIONS] + self.at_peak[TEMPORARIES]) / self.batch
        fits = self.peak <= limit_bytes
        if not fits and self.batch == 1:
            return 0
        excess = math.ceil((self.peak - limit_bytes) / max(slope, 1.0))
        other = replan(2 * self.batch if fits else min(max(self.batch - excess, 1), self.batch - 1))
        if other.batch == 1 and other.peak > limit_bytes:
            return 0
        peaks, extra = {plan.batch: plan.peak for plan in (self, other)}, other.batch - self.batch
        # Bytes that `extra` sequences add in each phase, so that a smaller batch has fewer in both.
        known = [(peak.total, other._peaks[phase].total - peak.total) for phase, peak in self._peaks.items()]
        lasts = [self.batch + (limit_bytes - size) * extra // grown for size, grown in known if grown * extra > 0]
        most = min(lasts, default=0)
        if most > 0 and self.outputs + (other.outputs - self.outputs) / extra * (most - self.batch) > MOST_OUTPUTS:
            return most
        return largest_fitting(lambda size: replan(size).peak, peaks, limit_bytes)

    def to_json(self) -> str:
        names = ("label", "device", "batch", "tokens", "peak", "phase", "at_peak", "largest",
                 "saved", "saved_by_dtype", "saved_by_layer", "notes")  # fmt: skip
        content = {name: getattr(self, name) for name in names}
        return json.dumps(content | {name: _of_use(content[name]) for name in ("at_peak", "largest")}, indent=1)

    def __str__(self) -> str:
        at_peak, saved = _tables(self)
        below = ["", *saved.lines()] if self.saved_by_dtype else []
        return "\n".join([*at_peak.lines(), *below, *(f"\n{note}" for note in self.notes)])


def with_saved(plan: MemoryPlan, saved: Audit) -> MemoryPlan:
    """Return a plan with what a forward saves for backward."""
    sizes = {dtype_name(dtype): size for dtype, size in sorted(saved.by_dtype.items(), key=lambda item: -item[1])}
    return replace(plan, saved_by_dtype=sizes, saved_by_layer=saved.by_owner)


def largest_fitting(peak: Callable[[int], int], peaks: dict[int, int], limit_bytes: int) -> int:
    """Return the largest batch whose peak is at most `limit_bytes`; 0 if none fits. `peaks` has two or more."""
    # A peak is a maximum of sums that are linear in the batch, so it is convex: two known peaks bound all others, from
    # above between them and from below outside. A few evaluations suffice.
    while True:
        low, high = _bounds(peaks, limit_bytes)
        if high is not None and high - low <= 1:
            return low
        if low >= MOST_SEQUENCES:
            reason = "every batch fits, or the first dimension is not the batch"
            raise ValueError(f"the peak does not grow with the batch: {reason}")
        # If `high` comes from extrapolation only, high - 1 is the most likely answer.
        guess = 2 * low if high is None else high - 1 if high not in peaks else (low + high) // 2
        guess = min(guess, MOST_SEQUENCES)
        peaks[guess] = peak(guess)


def _bounds(peaks: Mapping[int, int], limit_bytes: int) -> tuple[int, int | None]:
    """Return the largest batch known to fit, 0 for none, and the smallest known not to fit, None for none."""
    fitting = sorted(size for size, peak_bytes in peaks.items() if peak_bytes <= limit_bytes)
    others = sorted(size for size, peak_bytes in peaks.items() if peak_bytes > limit_bytes)

    def last(one: int, other: int) -> int | None:
        """Return the last batch within the limit on the line through two known ones; None if the line does not rise."""
        grown = peaks[other] - peaks[one]
        return one + (limit_bytes - peaks[one]) * (other - one) // grown if grown > 0 else None

    low = max(fitting, default=0)
    if fitting and others and (between := last(fitting[-1], others[0])) is not None:
        low = max(low, between)
    lasts = [last(*some) for some in (fitting[-2:], others[:2]) if len(some) == 2]
    ends = [*others[:1], *(batch + 1 for batch in lasts if batch is not None)]
    return low, min(ends, default=None)


def merge_kinds(at_peak: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of a `MemoryPlan` in the categories of forecasts: buffers and the batch are "other"."""
    return {kind: at_peak[kind] for kind in FORECAST_KINDS} | {"other": at_peak[BUFFERS] + at_peak[BATCH]}


def merge_like_layers(sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Merge layers with like names: (name, layers, bytes), largest first."""
    groups = grouped((pattern(name), name) for name in sizes)
    rows = [(merged(names) or "(the model)", len(names), sum(sizes[n] for n in names)) for names in groups.values()]
    return sorted(rows, key=lambda row: -row[2])


def _of_use(sizes: Mapping[str, int]) -> dict[str, int]:
    """Leave out memory for communication if there is none."""
    return {kind: size for kind, size in sizes.items() if size or kind != GATHERED}


def gib(size: int) -> str:
    """Format bytes for a table: in GiB, or in MiB below one GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _tables(plan: MemoryPlan) -> tuple[Table, Table]:
    """Return the memory at the peak by category, and what is saved for backward by layer and by dtype."""

    def of_tokens(name: str, layers: str, size: int) -> tuple[str, ...]:
        return name, layers, gib(size), f"{size / plan.tokens:,.0f}"

    at_peak = Table(
        title=f"{plan.label}, {plan.batch} sequences, {plan.tokens} tokens, {plan.device}",
        headings=("memory", f"at the peak ({plan.phase})", "at its largest"),
        align="<>>",
        rows=[*((kind, gib(size), gib(plan.largest[kind])) for kind, size in _of_use(plan.at_peak).items()), (),
              ("total", gib(plan.peak), "")],
    )  # fmt: skip
    rows = merge_like_layers(plan.saved_by_layer)
    layers = [of_tokens(name, str(count), size) for name, count, size in rows[:MOST_LAYERS]]
    if rest := rows[MOST_LAYERS:]:
        layers.append(of_tokens("all others", str(sum(row[1] for row in rest)), sum(row[2] for row in rest)))
    dtypes = [of_tokens(f"as {name}", "", size) for name, size in plan.saved_by_dtype.items()]
    saved = Table(
        headings=("saved for backward", "layers", "total", "bytes/token"),
        align="<>>>",
        rows=[*layers, (), *dtypes, of_tokens("total", "", plan.saved)],
    )
    return at_peak, saved


def compare_memory(plans: Sequence[MemoryPlan], *, baseline: str, fitting: Sequence[int], limit_bytes: int) -> Table:
    """Return a table of memory at the peak by category, one column per plan."""
    first = plans[0]
    size = f"{first.batch} sequences ({first.tokens:,} tokens) at a time"
    unit, name = (2**30, "GiB") if first.peak >= 2**30 else (2**20, "MiB")
    whole = next(plan.peak for plan in plans if plan.label == baseline)
    return Table(
        title=f"{name} at the peak of a step, {size}, {first.device}",
        headings=("", *(plan.label.replace(" ", "\n").replace("+", "\n+") for plan in plans)),
        align="<" + ">" * len(plans),
        rows=[
            *((kind, *(f"{plan.at_peak[kind] / unit:.2f}" for plan in plans)) for kind in KINDS),
            (),
            ("total", *(f"{plan.peak / unit:.2f}" for plan in plans)),
            (f"of {baseline}", *(f"{plan.peak / whole:.0%}" for plan in plans)),
            ("reached in", *(plan.phase for plan in plans)),
            (),
            ("saved, kB/token", *(f"{plan.saved / plan.tokens / 1000:,.1f}" for plan in plans)),
            (f"fit in {limit_bytes / 2**30:g} GiB", *(str(most or "none") for most in fitting)),
        ],
    )


def plan_notes(plans: Sequence[MemoryPlan]) -> list[str]:
    notes = dict.fromkeys(f"{plan.label}: {note}" for plan in plans for note in plan.notes)
    outside = "Not counted: the CUDA context, workspaces inside kernels, and what the allocator cannot use."
    return [*notes, outside]
