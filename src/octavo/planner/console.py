"""What a terminal shows of plans: memory beside that of bf16 training and of the precision levels; and a forecast."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import ROUNDED
from rich.table import Table

from octavo.numerics.names import merged, pattern
from octavo.numerics.plan import PlanRow
from octavo.planner.footprint import CATEGORIES, Footprint
from octavo.planner.memory import KINDS, MemoryPlan, gib
from octavo.planner.step import PARTS, StepTime
from octavo.runtime.terminal import Name

CONFIGURED, BEST = "this configuration", "best plan"
"""Headings of a run as its configuration has it, and as it would gain most."""


def side_by_side(plans: Sequence[MemoryPlan], *, baseline: str, fitting: Sequence[int], limit_bytes: int) -> Table:
    """Memory at the peak by category, one column per plan.

    Args:
        plans: Of one batch.
        baseline: Label of the plan that the others are compared with.
        fitting: For each plan the largest number of sequences at a time that fits.
        limit_bytes: Into how much memory.
    """
    first = plans[0]
    size = f"{first.batch} sequences ({first.tokens:,} tokens) at a time"
    unit, name = (2**30, "GiB") if first.peak >= 2**30 else (2**20, "MiB")
    table = Table(box=ROUNDED, title_justify="left", title=f"{name} at the peak of a step, {size}, {first.device}")
    table.add_column("", no_wrap=True)
    for plan in plans:
        table.add_column(plan.label.replace(" ", "\n").replace("+opt", "\n+opt"), justify="right", no_wrap=True)
    for kind in KINDS:
        table.add_row(kind, *(f"{plan.at_peak[kind] / unit:.2f}" for plan in plans))
    table.add_section()
    table.add_row("in all", *(f"{plan.peak / unit:.2f}" for plan in plans), style="bold")
    whole = next(plan.peak for plan in plans if plan.label == baseline)
    table.add_row(f"of {baseline}", *(f"{plan.peak / whole:.0%}" for plan in plans))
    table.add_row("reached in", *(plan.phase for plan in plans))
    table.add_section()
    table.add_row("kept, kB/token", *(f"{plan.kept / plan.tokens / 1000:,.1f}" for plan in plans))
    table.add_row(f"fit in {limit_bytes / 2**30:g} GiB", *(str(most or "none") for most in fitting))
    return table


def notes_of(plans: Sequence[MemoryPlan]) -> list[str]:
    """What a reader should know about each plan, once."""
    notes = dict.fromkeys(f"{plan.label}: {note}" for plan in plans for note in plan.notes)
    outside = "Not counted: the CUDA context, workspaces inside kernels, and what the allocator cannot use."
    return [*notes, outside]


WIDE = 140
"""Columns from which on there is room for reasons inside of the table."""


def forecast_tables(plan: Any, width: int = WIDE) -> list[Table | str]:
    """Of a `Forecast`: linears, like ones in one row; time and memory of the step, bf16 beside them; what to know.

    Args:
        plan: The forecast.
        width: Columns to print in.
    """
    gpu, own = plan.gpu, plan.configured
    how = "eager" if plan.setting.eager else "compiled"
    known = "predicted; times marked measured are of this GPU" if gpu.measured else "predicted, not measured"
    layers = Table(box=ROUNDED, title_justify="left", title=f"{known}: {gpu.name}, {plan.tokens:,} tokens a GPU, {how}")
    layers.add_column("linear")
    for heading in [CONFIGURED, BEST] if own is not None else ["recipe"]:
        layers.add_column(heading.replace(" ", "\n"), no_wrap=True)
    layers.add_column("gain", justify="right", no_wrap=True)
    why = "why: tokens × in × out, forward and backward"
    if width >= WIDE:
        layers.add_column(why)
    reasons = []
    for name, row, given in _grouped(plan):
        cells = [*([given] if own is not None else []), row.recipe or "bf16", f"{row.gain or 1.0:.2f}"]
        layers.add_row(Name(name), *cells, *([row.reason] if width >= WIDE else []))
        reasons.append(f"  {name}: {row.reason}")
    begins = "at no size up to 16384" if plan.break_even is None else f"from K = N = {plan.break_even} on"
    arms = _arms(plan)[1:]
    summaries = [f"{plan.summary}."]
    if own is not None:
        texts = (plan.summary_of(own.plan, own.time), plan.summary)
        summaries = [f"{name}: {text}." for name, text in zip((CONFIGURED, BEST), texts, strict=True)]
    notes = [
        *summaries,
        f"With {plan.tokens:,} tokens FP8 pays {begins}.",
        *(_room(plan, memory, f"{name}: " if own is not None else "") for name, _, memory in arms),
        *dict.fromkeys(memory.note for _, _, memory in arms if memory.note),
        f"Rates: {gpu.rates_from}. Efficiencies: {gpu.efficiency_from}.",
    ]
    if gpu.measured:
        notes.append(f"Measured: {len(gpu.measured)} times of octavo calibrate on {gpu.measured.device}.")
    return [layers, *([] if width >= WIDE else [why, *reasons]), _step(plan), *notes]


def _arms(plan: Any) -> list[tuple[str, StepTime, Footprint]]:
    """Columns of a forecast: bf16, the configuration where there is one, and what was decided by cost."""
    arms = [("bf16", plan.bf16, plan.bf16_memory)]
    if plan.configured is not None:
        arms.append((CONFIGURED, plan.configured.time, plan.configured.memory))
    return [*arms, ("planned" if plan.configured is None else BEST, plan.planned, plan.memory)]


def _step(plan: Any) -> Table:
    """Milliseconds and GiB of each column."""
    table, arms = Table(box=ROUNDED), _arms(plan)
    table.add_column(f"a step of {plan.setting.gpus} × {plan.gpu.name}", no_wrap=True)
    for name, _, _ in arms:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)

    def of_time(name: str, form: Callable[[StepTime], str]) -> None:
        table.add_row(name, *(form(time) for _, time, _ in arms))

    def of_memory(name: str, form: Callable[[Footprint], str]) -> None:
        table.add_row(name, *(form(memory) for _, _, memory in arms))

    for part in PARTS:
        of_time(f"{part}, ms", lambda time, part=part: f"{1e3 * getattr(time, part):,.2f}")  # type: ignore[misc]
    table.add_section()
    of_time("in all, ms", lambda time: f"{1e3 * time.seconds:,.2f}")
    of_time("tokens/s", lambda time: f"{time.tokens_per_second:,.0f}")
    of_time("MFU of the bf16 peak", lambda time: f"{time.mfu:.1%}")
    of_time("× bf16", lambda time: f"{plan.bf16.seconds / time.seconds:.2f}")
    table.add_section()
    of_each = " of each GPU" if plan.setting.gpus > 1 else ""
    for kind in CATEGORIES:
        if kind in CATEGORIES[:5] or any(memory.at_peak[kind] for _, _, memory in arms):
            of_memory(kind, lambda memory, kind=kind: gib(memory.at_peak[kind]))  # type: ignore[misc]
    table.add_section()
    of_memory(f"memory{of_each}", lambda memory: gib(memory.peak))
    of_memory("worst in", lambda memory: memory.phase)
    of_memory(
        f"fits {gib(plan.gpu.usable)} with {plan.memory.batch} sequences a forward",
        lambda memory: "yes" if memory.peak <= plan.gpu.usable else "no",
    )
    of_memory("largest that fits", lambda memory: str(memory.largest_batch(plan.gpu.usable) or "none"))
    return table


def _room(plan: Any, memory: Footprint, name: str) -> str:
    """Whether a step fits, and what to do where it does not."""
    usable = plan.gpu.usable
    followed, blocks = memory.followed
    how = f", from {followed} and {followed + 1} of {blocks} equal blocks" if followed < blocks else ""
    if memory.peak <= usable:
        return f"{name or 'It '}fits: {gib(memory.peak)} of {gib(usable)}{how}."
    most = memory.largest_batch(usable)
    remedy = (
        f"the largest forward that fits has {most} sequences on each GPU"
        if most
        else "not even one sequence does: take more GPUs, a higher level of precision, or activation checkpointing"
    )
    return (
        f"{name or 'It '}does not fit: {gib(memory.peak)} of {gib(usable)} with {memory.batch} sequences a forward on "
        f"each GPU{how}; {remedy}."
    )


def _grouped(plan: Any) -> list[tuple[str, PlanRow, str]]:
    """Rows of linears that differ only by numbers in their names, merged; and what the configuration has there."""
    own = {} if plan.configured is None else {row.name: row.recipe for row in plan.configured.plan.rows}
    groups: dict[tuple[str, str | None, str, str], list[PlanRow]] = {}
    for row in plan.rows:
        if row.name in plan.times:
            given = own.get(row.name) or "bf16"
            groups.setdefault((pattern(row.name), row.recipe, row.reason, given), []).append(row)
    return [(merged([row.name for row in rows]) or "(the model)", rows[0], key[3]) for key, rows in groups.items()]
