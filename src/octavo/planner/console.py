"""What a terminal shows of plans: memory beside that of bf16 training and of the precision levels; and a forecast."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import ROUNDED
from rich.console import Group
from rich.table import Table

from octavo.numerics.names import merged, pattern
from octavo.numerics.plan import PlanRow
from octavo.planner.footprint import CATEGORIES, Footprint
from octavo.planner.memory import KINDS, MemoryPlan, gib
from octavo.planner.step import PARTS, StepTime


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
    table = Table(box=ROUNDED, title=f"{name} at the peak of a step, {size}, {first.device}")
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


def with_notes(table: Table, plans: Sequence[MemoryPlan]) -> Group:
    """The table, and under it what a reader should know about each plan, once."""
    notes = dict.fromkeys(f"{plan.label}: {note}" for plan in plans for note in plan.notes)
    outside = "Not counted: the CUDA context, workspaces inside kernels, and what the allocator cannot use."
    return Group(table, *notes, outside)


def forecast_tables(plan: Any) -> list[object]:
    """Of a `Forecast`: linears, like ones in one row; time and memory of the step, bf16 beside them; what to know."""
    gpu, setting = plan.gpu, plan.setting
    how = "eager" if setting.eager else "compiled"
    known = "predicted; times marked measured are of this GPU" if gpu.measured else "predicted, not measured"
    layers = Table(box=ROUNDED, title=f"{known}: {gpu.name}, {plan.tokens:,} tokens a GPU, {how}")
    for heading in ("linear", "recipe", "gain"):
        layers.add_column(heading, overflow="fold", justify="right" if heading == "gain" else "left")
    layers.add_column("why: tokens × in × out, forward and backward")
    for name, row in _grouped([row for row in plan.rows if row.name in plan.times]):
        layers.add_row(name, row.recipe or "bf16", f"{row.gain or 1.0:.2f}", row.reason)
    begins = "at no size up to 16384" if plan.break_even is None else f"from K = N = {plan.break_even} on"
    notes = [
        f"{plan.summary}.",
        f"With {plan.tokens:,} tokens FP8 pays {begins}.",
        _room(plan),
        *([plan.memory.note] if plan.memory.note else []),
        f"Rates: {gpu.rates_from}. Efficiencies: {gpu.efficiency_from}.",
    ]
    if gpu.measured:
        notes.append(f"Measured: {len(gpu.measured)} times of octavo calibrate on {gpu.measured.device}.")
    return [layers, _step(plan), *notes]


def _step(plan: Any) -> Table:
    """Milliseconds and GiB, bf16 and as planned."""
    table = Table(box=ROUNDED)
    for heading in (f"a step of {plan.setting.gpus} × {plan.gpu.name}", "bf16", "planned"):
        table.add_column(heading, justify="left" if heading.startswith("a step") else "right")

    def of_time(name: str, form: Callable[[StepTime], str]) -> None:
        table.add_row(name, form(plan.bf16), form(plan.planned))

    def of_memory(name: str, form: Callable[[Footprint], str]) -> None:
        table.add_row(name, form(plan.bf16_memory), form(plan.memory))

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
        if kind in CATEGORIES[:5] or plan.memory.at_peak[kind] or plan.bf16_memory.at_peak[kind]:
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


def _room(plan: Any) -> str:
    """Whether the step fits, and what to do where it does not."""
    memory, usable = plan.memory, plan.gpu.usable
    followed, blocks = memory.followed
    how = f", from {followed} and {followed + 1} of {blocks} equal blocks" if followed < blocks else ""
    if plan.fits:
        return f"It fits: {gib(memory.peak)} of {gib(usable)}{how}."
    most = plan.largest_batch
    remedy = (
        f"the largest forward that fits has {most} sequences on each GPU"
        if most
        else "not even one sequence does: take more GPUs, a higher level of precision, or activation checkpointing"
    )
    return (
        f"It does not fit: {gib(memory.peak)} of {gib(usable)} with {memory.batch} sequences a forward on each GPU"
        f"{how}; {remedy}."
    )


def _grouped(rows: Sequence[PlanRow]) -> list[tuple[str, PlanRow]]:
    """Rows that differ only by numbers in their names, merged."""
    groups: dict[tuple[str, str | None, str], list[PlanRow]] = {}
    for row in rows:
        groups.setdefault((pattern(row.name), row.recipe, row.reason), []).append(row)
    return [(merged([row.name for row in group]) or "(the model)", group[0]) for group in groups.values()]
