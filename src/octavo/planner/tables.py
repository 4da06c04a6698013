"""Format plans as terminal tables: memory next to bf16 training and the precision levels, and forecasts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from octavo.numerics.display import Table
from octavo.numerics.names import merged, pattern
from octavo.numerics.plan import PlanRow
from octavo.planner.memory_plan import FORECAST_KINDS, MemoryPlan, gib, merge_kinds
from octavo.planner.step import PARTS, StepTime
from octavo.planner.timeline import GATHERED, KINDS

CONFIGURED, BEST = "this configuration", "best plan"  # Headings of a run as configured, and of the best plan for it


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
    """Return the remarks of all plans without repetition."""
    notes = dict.fromkeys(f"{plan.label}: {note}" for plan in plans for note in plan.notes)
    outside = "Not counted: the CUDA context, workspaces inside kernels, and what the allocator cannot use."
    return [*notes, outside]


WIDE_COLUMNS = 140  # Minimum width in columns to print reasons inside the table


def forecast_text(plan: Any, width: int | None = None) -> str:
    """Format a `Forecast`: its layers, like ones in one row; time and memory of the step next to bf16; remarks."""
    gpu, own = plan.gpu, plan.configured
    mode = "eager" if plan.step_config.eager else "compiled"
    has_measured = any("measured" in row.reason for row in plan.rows)
    basis = "predicted; times marked measured are of such a GPU" if has_measured else "predicted, not measured"
    title = f"{basis}: {gpu.name}, {plan.tokens:,} tokens a GPU, {mode}"
    why = "why: tokens × in × out, forward and backward"
    is_wide = width is None or width >= WIDE_COLUMNS
    recipes = [heading.replace(" ", "\n") for heading in ([CONFIGURED, BEST] if own is not None else ["recipe"])]
    rows, reasons = [], []
    for name, row, own_recipe in _merge_like_rows(plan):
        cells = [*([own_recipe] if own is not None else []), row.recipe or "bf16", f"{row.gain or 1.0:.2f}"]
        rows.append((name, *cells, *([row.reason] if is_wide else [])))
        reasons.append(f"  {name}: {row.reason}")
    layers = Table(
        title=title, headings=("linear", *recipes, "gain", *([why] if is_wide else [])),
        align="<" * (1 + len(recipes)) + ">" + "<" * is_wide, rows=rows, shorten=True,
    )  # fmt: skip
    sizes = "at no size up to 16384" if plan.break_even is None else f"from K = N = {plan.break_even} on"
    columns = _columns(plan)[1:]
    summaries = [f"{plan.summary}."]
    if own is not None:
        texts = (plan.summary_of(own.plan, own.time), plan.summary)
        summaries = [f"{name}: {text}." for name, text in zip((CONFIGURED, BEST), texts, strict=True)]
    notes = [
        *summaries,
        f"With {plan.tokens:,} tokens FP8 pays {sizes}.",
        *(_fit_note(plan, memory, f"{name}: " if own is not None else "") for name, _, memory in columns),
        *dict.fromkeys(note for _, _, memory in columns for note in memory.notes),
        f"Peaks: {gpu.rates_from}. Shares of them that kernels reach: {gpu.efficiency_from}.",
    ]
    if has_measured and gpu.measured:
        notes.append(f"Measured: {len(gpu.measured)} times on {gpu.measured.device}; those of these shapes are used.")
    below = [] if is_wide else ["", why, *reasons]
    sent = ["", *_sent(plan).lines()] if plan.planned.sent else []
    return "\n".join([*layers.lines(width), *below, "", *_step(plan).lines(), *sent, "", *notes])


PART_NAMES = {  # Parts of a step for people, where the name of a part is not theirs
    "linears": "linear layers", "products": "other matrix products", "rest": "other operations",
    "waiting": "waiting for the host", "bubble": "pipeline bubble",
}  # fmt: skip


def _columns(plan: Any) -> list[tuple[str, StepTime, MemoryPlan]]:
    """Columns of a forecast: bf16, the configuration if there is one, and the plan by cost."""
    columns = [("bf16", plan.bf16, plan.bf16_memory)]
    if plan.configured is not None:
        columns.append((CONFIGURED, plan.configured.time, plan.configured.memory))
    return [*columns, ("planned" if plan.configured is None else BEST, plan.planned, plan.memory)]


def _step(plan: Any) -> Table:
    rows: list[Sequence[str]] = []
    columns = _columns(plan)
    unit, name = (1.0, "s") if max(time.seconds for _, time, _ in columns) >= 1 else (1e3, "ms")

    def of_time(name: str, form: Callable[[StepTime], str]) -> None:
        rows.append((name, *(form(time) for _, time, _ in columns)))

    def of_memory(name: str, form: Callable[[MemoryPlan], str]) -> None:
        rows.append((name, *(form(memory) for _, _, memory in columns)))

    for part in (part for part in PARTS if part != "bubble" or plan.step_config.pp > 1):
        of_time(f"{PART_NAMES.get(part, part)}, {name}", partial(_part, part, unit))
    rows.append(())
    of_time(f"total, {name}", lambda time: f"{unit * time.seconds:,.2f}")
    of_time("tokens/s", lambda time: f"{time.tokens_per_second:,.0f}")
    of_time("MFU of the bf16 peak", lambda time: f"{time.mfu:.1%}")
    of_time("× bf16", lambda time: f"{plan.bf16.seconds / time.seconds:.2f}")
    rows.append(())
    of_each = " of each GPU" if plan.step_config.gpus > 1 else ""
    at_peaks = [merge_kinds(memory.at_peak) for _, _, memory in columns]
    for kind in (*FORECAST_KINDS, "other"):
        if kind not in (GATHERED, "other") or any(at_peak[kind] for at_peak in at_peaks):
            rows.append((kind, *(gib(at_peak[kind]) for at_peak in at_peaks)))
    rows.append(())
    of_memory(f"memory{of_each}", lambda memory: gib(memory.peak))
    of_memory("peak in", lambda memory: memory.phase)
    of_memory(
        f"fits {gib(plan.gpu.usable)} with {plan.memory.batch} sequences a forward",
        lambda memory: "yes" if memory.peak <= plan.gpu.usable else "no",
    )
    of_memory("largest that fits", lambda memory: str(memory.largest_batch(plan.gpu.usable) or "none"))
    headings = (
        f"a step of {plan.step_config.gpus} × {plan.gpu.name}",
        *(name.replace(" ", "\n") for name, _, _ in columns),
    )
    return Table(headings=headings, align="<" + ">" * len(columns), rows=rows)


def _sent(plan: Any) -> Table:
    """Table of what each GPU sends in a step, by kind and column: GB, and milliseconds as if nothing hid them."""
    columns = _columns(plan)
    sums: dict[str, list[list[float]]] = {}
    for index, (_, time, _) in enumerate(columns):
        for row in time.sent:
            cell = sums.setdefault(row.kind, [[0.0, 0.0] for _ in columns])[index]
            cell[0] += row.bytes / 1e9
            cell[1] += row.seconds * 1e3
    rows = [
        (kind, *(text for cell in cells for text in (f"{cell[0]:,.2f}", f"{cell[1]:,.1f}")))
        for kind, cells in sums.items()
    ]
    headings = (
        "sent by each GPU in a step",
        *(text for name, _, _ in columns for text in (f"{name}\nGB".replace("this ", "this\n"), "ms")),
    )
    return Table(headings=headings, align="<" + ">>" * len(columns), rows=rows)


def _fit_note(plan: Any, memory: MemoryPlan, name: str) -> str:
    usable = plan.gpu.usable
    traced, blocks = memory.traced_blocks
    basis = f" (a step of {traced + 1} of the {blocks} layers, extrapolated)" if traced < blocks else ""
    if memory.peak <= usable:
        return f"{name or 'It '}fits: {gib(memory.peak)} of {gib(usable)}{basis}."
    most = memory.largest_batch(usable)
    remedy = (
        f"the largest forward that fits has {most} sequences on each GPU"
        if most
        else "not even one sequence fits: use more GPUs, a higher precision level, or activation checkpointing"
    )
    return (
        f"{name or 'It '}does not fit: {gib(memory.peak)} of {gib(usable)} with {memory.batch} sequences a forward on "
        f"each GPU{basis}; {remedy}."
    )


def _merge_like_rows(plan: Any) -> list[tuple[str, PlanRow, str]]:
    """Merge rows whose names differ only in numbers; add the configuration's recipe for each."""
    own = {} if plan.configured is None else {row.name: row.recipe for row in plan.configured.plan.rows}
    groups: dict[tuple[str, str | None, str, str], list[PlanRow]] = {}
    for row in plan.rows:
        if row.name in plan.times:
            own_recipe = own.get(row.name) or "bf16"
            groups.setdefault((pattern(row.name), row.recipe, row.reason, own_recipe), []).append(row)
    return [(merged([row.name for row in rows]) or "(the model)", rows[0], key[3]) for key, rows in groups.items()]


def _part(name: str, unit: float, time: StepTime) -> str:
    return f"{unit * getattr(time, name):,.2f}"
