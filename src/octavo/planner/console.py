"""Memory plans side by side: where one configuration stands beside plain bf16 training and the precision levels."""

from collections.abc import Sequence

from rich.box import ROUNDED
from rich.console import Group
from rich.table import Table

from octavo.planner.memory import KINDS, MemoryPlan


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
