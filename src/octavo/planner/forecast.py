"""Forecast: a plan made by predicted cost, with the time and memory of a step next to those of bf16."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.numerics.display import Table
from octavo.numerics.plan import Plan, PlanRow
from octavo.numerics.suggestions import grouped, merged, pattern
from octavo.planner.decide import LinearDecision
from octavo.planner.devices import Gpu
from octavo.planner.memory_plan import FORECAST_KINDS, MemoryPlan, gib, merge_kinds
from octavo.planner.step import PARTS, StepConfig, StepTime
from octavo.planner.step_memory import GATHERED

CONFIGURED, BEST = "this configuration", "best plan"  # Headings of a run as configured, and of the best plan for it
WIDE_COLUMNS = 140  # Minimum width in columns to print reasons inside the table
PART_NAMES = {  # Parts of a step for people, where the name of a part is not theirs
    "linears": "linear layers", "products": "other matrix products", "rest": "other operations",
    "waiting": "waiting for the host", "bubble": "pipeline bubble",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    plan: Plan
    time: StepTime
    memory: MemoryPlan

    def to_json(self, limit_bytes: int) -> dict[str, Any]:
        """Return time and memory as part of a forecast's JSON, for a GPU with this much memory."""
        memory = self.memory
        return self.time.to_json() | {"memory": {
            "peak": memory.peak, "phase": memory.phase, "at_peak": merge_kinds(memory.at_peak),
            "fits": memory.peak <= limit_bytes, "limit": limit_bytes,
            "largest_batch": memory.largest_batch(limit_bytes), "followed_blocks": memory.traced_blocks[0],
            "blocks": memory.traced_blocks[1], "note": " ".join(memory.notes),
        }}  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Forecast(Plan):
    """A plan with its predictions. Prints as three tables.

    `Plan.rows` has each layer's `.name`, `.converted`, `.recipe`, `.reason` and `.gain`.
    """

    gpu: Gpu  # GPU of the prediction
    step_config: StepConfig  # How the step runs
    tokens: int  # Tokens of one micro-batch on one GPU
    parameters: int  # Elements of all parameters
    times: Mapping[str, LinearDecision]  # `.bf16` and `.planned` seconds of every linear layer
    planned: StepTime  # Time of the step as planned
    bf16: StepTime  # Time of the same step at precision level bf16
    memory: MemoryPlan  # Memory of one GPU as planned
    bf16_memory: MemoryPlan  # Memory of one GPU at level bf16
    break_even: int | None  # Smallest K = N from which FP8 pays at this number of tokens; None if none does up to 16384
    configured: PlannedRun | None = None  # The run as configured; None if the plan was not made from a configuration

    @property
    def gain(self) -> float:
        return self.bf16.seconds / self.planned.seconds

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.gpu.usable

    @property
    def largest_batch(self) -> int:
        """Largest number of sequences of one forward on one GPU that fits; 0 if none does."""
        return self.memory.largest_batch(self.gpu.usable)

    @property
    def summary(self) -> str:
        """One line: the converted layers and the gain."""
        return self.summary_of(self, self.planned)

    @property
    def _columns(self) -> dict[str, PlannedRun]:
        # By their headings in tables.
        plain = {"bf16": PlannedRun(plan=self, time=self.bf16, memory=self.bf16_memory)}
        best = PlannedRun(plan=self, time=self.planned, memory=self.memory)
        if self.configured is None:
            return plain | {"planned": best}
        return plain | {CONFIGURED: self.configured, BEST: best}

    def summary_of(self, plan: Plan, time: StepTime) -> str:
        """Return the same line for another plan of this model whose step takes `time`."""
        recipes = ", ".join(sorted({recipe.name for name in plan.converted if (recipe := plan[name].recipe)}))
        linears = sum(name in self.times for name in plan.converted)
        text = f"{linears} of {len(self.times)} linear layers"
        if mixtures := len(plan.converted) - linears:  # of experts
            text += f" and {mixtures} mixture{'s' * (mixtures > 1)} of experts"
        text += f" in {recipes}" * bool(recipes)
        duration = f"{time.seconds:,.1f} s" if time.seconds >= 1 else f"{1e3 * time.seconds:,.4g} ms"
        return (
            f"{text}; predicted on {self.step_config.gpus} × {self.gpu.name}: {duration} a step, "
            f"{self.bf16.seconds / time.seconds:.2f}× bf16"
        )

    def to_json(self) -> str:
        """Return everything as JSON; `Plan.from_json` reads it as a plan."""
        rows = []
        for row in self.rows:
            rows.append(asdict(row))
            if (times := self.times.get(row.name)) is not None:
                rows[-1] |= {"bf16_ms": 1e3 * times.bf16, "planned_ms": 1e3 * times.planned}
        bf16, *own, best = self._columns.values()
        limit = self.gpu.usable
        content: dict[str, Any] = json.loads(super().to_json()) | {
            "gpu": self.gpu.to_json(), "setting": asdict(self.step_config), "tokens": self.tokens,
            "parameters": self.parameters, "gain": self.gain, "break_even": self.break_even,
            "planned": best.to_json(limit), "bf16": bf16.to_json(limit), "rows": rows,
        }  # fmt: skip
        for run in own:
            content["configured"] = json.loads(run.plan.to_json()) | run.to_json(limit)
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        return forecast_text(self, WIDE_COLUMNS)


def forecast_text(plan: Forecast, width: int | None = None) -> str:
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
    runs = {f"{name}: " if own is not None else "": run for name, run in plan._columns.items() if name != "bf16"}
    notes = [
        *(f"{name}{plan.summary_of(run.plan, run.time)}." for name, run in runs.items()),
        f"With {plan.tokens:,} tokens FP8 pays {sizes}.",
        *(_fit_note(plan, run.memory, name or "It ") for name, run in runs.items()),
        *dict.fromkeys(note for run in runs.values() for note in run.memory.notes),
        f"Peaks: {gpu.rates_from}. Shares of them that kernels reach: {gpu.efficiency_from}.",
    ]
    if has_measured and gpu.measured:
        notes.append(f"Measured: {len(gpu.measured)} times on {gpu.measured.device}; those of these shapes are used.")
    below = [] if is_wide else ["", why, *reasons]
    sent = ["", *_sent(plan).lines()] if plan.planned.sent else []
    return "\n".join([*layers.lines(width), *below, "", *_step(plan).lines(), *sent, "", *notes])


def _step(plan: Forecast) -> Table:
    columns, limit = plan._columns, plan.gpu.usable
    times, memories = [run.time for run in columns.values()], [run.memory for run in columns.values()]
    unit, name = (1.0, "s") if max(time.seconds for time in times) >= 1 else (1e3, "ms")
    at_peaks = [merge_kinds(memory.at_peak) for memory in memories]
    kinds = [*FORECAST_KINDS, "other"]
    parts = [part for part in PARTS if part != "bubble" or plan.step_config.pp > 1]
    of_each = " of each GPU" if plan.step_config.gpus > 1 else ""
    rows: list[Sequence[str]] = [
        *((f"{PART_NAMES.get(part, part)}, {name}", *(f"{unit * getattr(time, part):,.2f}" for time in times))
          for part in parts),
        (),
        (f"total, {name}", *(f"{unit * time.seconds:,.2f}" for time in times)),
        ("tokens/s", *(f"{time.tokens_per_second:,.0f}" for time in times)),
        ("MFU of the bf16 peak", *(f"{time.mfu:.1%}" for time in times)),
        ("× bf16", *(f"{plan.bf16.seconds / time.seconds:.2f}" for time in times)),
        (),
        *((kind, *(gib(at_peak[kind]) for at_peak in at_peaks)) for kind in kinds
          if kind not in (GATHERED, "other") or any(at_peak[kind] for at_peak in at_peaks)),
        (),
        (f"memory{of_each}", *(gib(memory.peak) for memory in memories)),
        ("peak in", *(memory.phase for memory in memories)),
        (f"fits {gib(limit)} with {plan.memory.batch} sequences a forward",
         *("yes" if memory.peak <= limit else "no" for memory in memories)),
        ("largest that fits", *(str(memory.largest_batch(limit) or "none") for memory in memories)),
    ]  # fmt: skip
    headings = (f"a step of {plan.step_config.gpus} × {plan.gpu.name}", *(name.replace(" ", "\n") for name in columns))
    return Table(headings=headings, align="<" + ">" * len(columns), rows=rows)


def _sent(plan: Forecast) -> Table:
    """Table of what each GPU sends in a step, by kind and column: GB, and milliseconds as if nothing hid them."""
    columns = plan._columns
    sums: dict[str, list[list[float]]] = {}
    for index, run in enumerate(columns.values()):
        for row in run.time.sent:
            cell = sums.setdefault(row.kind, [[0.0, 0.0] for _ in columns])[index]
            cell[0] += row.bytes / 1e9
            cell[1] += row.seconds * 1e3
    rows = [
        (kind, *(text for cell in cells for text in (f"{cell[0]:,.2f}", f"{cell[1]:,.1f}")))
        for kind, cells in sums.items()
    ]
    of_columns = (text for name in columns for text in (f"{name}\nGB".replace("this ", "this\n"), "ms"))
    headings = ("sent by each GPU in a step", *of_columns)
    return Table(headings=headings, align="<" + ">>" * len(columns), rows=rows)


def _fit_note(plan: Forecast, memory: MemoryPlan, name: str) -> str:
    usable = plan.gpu.usable
    traced, blocks = memory.traced_blocks
    basis = f" (a step of {traced + 1} of the {blocks} layers, extrapolated)" if traced < blocks else ""
    sizes = f"{gib(memory.peak)} of {gib(usable)}"
    if memory.peak <= usable:
        return f"{name}fits: {sizes}{basis}."
    remedy = "not even one sequence fits: use more GPUs, a higher precision level, or activation checkpointing"
    if most := memory.largest_batch(usable):
        remedy = f"the largest forward that fits has {most} sequences on each GPU"
    return f"{name}does not fit: {sizes} with {memory.batch} sequences a forward on each GPU{basis}; {remedy}."


def _merge_like_rows(plan: Forecast) -> list[tuple[str, PlanRow, str]]:
    """Merge rows whose names differ only in numbers; add the configuration's recipe for each."""
    own = {} if plan.configured is None else {row.name: row.recipe for row in plan.configured.plan.rows}
    linears = [row for row in plan.rows if row.name in plan.times]
    groups = grouped(((pattern(r.name), r.recipe, r.reason, own.get(r.name) or "bf16"), r) for r in linears)
    return [(merged([row.name for row in rows]) or "(the model)", rows[0], key[3]) for key, rows in groups.items()]
