"""SpeedPlan: linears decided by predicted cost, and the step that follows from it beside the same step in bf16.

Everything in it is a prediction, from the table of `octavo.planner.devices` and the models of `octavo.planner.roofline`
and `octavo.planner.step`. docs/planner.md holds what others measured beside what these models say of it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from typing import Any

from octavo.numerics.names import merged, pattern
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.recipe import Recipe
from octavo.planner.decide import break_even, decide
from octavo.planner.devices import Gpu
from octavo.planner.step import PARTS, Setting, StepTime, linear_costs, step_time
from octavo.planner.trace import Trace

NONE: Mapping[str, Recipe | None] = {}
"""The recipes of a model in bf16."""


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One linear.

    Attributes:
        name: Fully qualified name.
        converted: Whether it is to compute in FP8.
        recipe: Name of its recipe, or None.
        reason: Why, with the figures.
        gain: Predicted speed-up over bf16, quantizing included; 1 where it stays in bf16.
        bf16_ms: Predicted milliseconds of its forward and backward in bf16.
        planned_ms: The same as decided.
    """

    name: str
    converted: bool
    recipe: str | None
    reason: str
    gain: float
    bf16_ms: float
    planned_ms: float


@dataclass(frozen=True, kw_only=True)
class SpeedPlan:
    """The predicted speed of a training step. Printed, it is two tables.

    Attributes:
        gpu: What it is predicted for.
        setting: How the step is run.
        tokens: Of one micro-batch of one GPU.
        parameters: Elements of all parameters.
        rows: Every linear, in model order.
        plan: The decisions, for `octavo.convert(model, plan=...)`.
        planned: The step as decided.
        bf16: The same with every linear in bf16.
        break_even: Smallest K = N from which on FP8 pays at these tokens; None if it does not up to 16384.
    """

    gpu: Gpu
    setting: Setting
    tokens: int
    parameters: int
    rows: tuple[SpeedRow, ...]
    plan: Plan
    planned: StepTime
    bf16: StepTime
    break_even: int | None

    @property
    def gain(self) -> float:
        """Predicted speed-up of the whole step."""
        return self.bf16.seconds / self.planned.seconds

    @property
    def summary(self) -> str:
        """One line: what is converted, and what it gains."""
        done = [row for row in self.rows if row.converted]
        recipes = ", ".join(sorted({row.recipe or "" for row in done}))
        text = f"{len(done)} of {len(self.rows)} linear layers" + (f" in {recipes}" if done else "")
        return (
            f"{text}; predicted on {self.setting.gpus} × {self.gpu.name}: {1e3 * self.planned.seconds:,.4g} ms a step, "
            f"{self.gain:.2f}× bf16"
        )

    def to_json(self) -> str:
        """Everything as JSON; `plan` in it is what `Plan.from_json` reads."""
        content: dict[str, Any] = {
            "gpu": asdict(self.gpu),
            "setting": asdict(self.setting),
            "tokens": self.tokens,
            "parameters": self.parameters,
            "gain": self.gain,
            "break_even": self.break_even,
            "planned": self.planned.to_json(),
            "bf16": self.bf16.to_json(),
            "rows": [asdict(row) for row in self.rows],
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        from rich.console import Console  # printing is all that needs it

        text = StringIO()
        Console(file=text, width=140).print(*speed_tables(self), sep="\n", highlight=False)
        return text.getvalue().rstrip()


def plan_speed(
    gpu: Gpu, trace: Trace, names: Sequence[str], kept: Mapping[str, str], recipes: Sequence[Recipe],
    setting: Setting, tokens: int,
) -> SpeedPlan:  # fmt: skip
    """Decide every linear of a traced forward, and predict the step.

    Args:
        gpu: Where it will run.
        trace: One forward.
        names: All linears, in model order.
        kept: Those that stay in bf16 whatever they cost, with the reason.
        recipes: To choose from, in the order of preference.
        setting: How the step is run.
        tokens: Of one micro-batch of one GPU.
    """
    rows, decisions, known = [], {}, {}
    for name in names:
        calls = trace.calls.get(name, ())
        if calls not in known:
            known[calls] = decide(gpu, calls, recipes, eager=setting.eager) if calls else None
        verdict = known[calls]
        if verdict is None:
            decisions[name] = Decision(recipe=None, reason="not called by this batch: bf16", gain=1.0)
            bf16 = planned = 0.0
        else:
            bf16, planned = verdict.bf16, verdict.planned
            decisions[name] = verdict.decision
            if name in kept:
                reason = f"{kept[name]}; by cost: {verdict.decision.reason}"
                decisions[name] = replace(verdict.decision, recipe=None, reason=reason, gain=1.0)
                planned = bf16
        decision = decisions[name]
        rows.append(
            SpeedRow(
                name=name,
                converted=decision.recipe is not None,
                recipe=None if decision.recipe is None else decision.recipe.name,
                reason=decision.reason,
                gain=decision.gain or 1.0,
                bf16_ms=1e3 * bf16,
                planned_ms=1e3 * planned,
            )
        )
    chosen = {name: decision.recipe for name, decision in decisions.items()}
    planned_step, bf16_step = (
        step_time(gpu, trace, linear_costs(gpu, trace, arm), setting, tokens) for arm in (chosen, NONE)
    )
    return SpeedPlan(
        gpu=gpu,
        setting=setting,
        tokens=tokens,
        parameters=trace.parameters,
        rows=tuple(rows),
        plan=Plan(decisions),
        planned=planned_step,
        bf16=bf16_step,
        break_even=break_even(gpu, tokens, recipes, eager=setting.eager),
    )


def speed_tables(plan: SpeedPlan) -> list[object]:
    """What a terminal shows: linears, like ones in one row; the step beside bf16; what to know about it."""
    from rich.box import ROUNDED
    from rich.table import Table

    gpu, setting = plan.gpu, plan.setting
    how = "eager" if setting.eager else "compiled"
    layers = Table(box=ROUNDED, title=f"predicted, not measured: {gpu.name}, {plan.tokens:,} tokens a GPU, {how}")
    for heading in ("linear", "recipe", "gain"):
        layers.add_column(heading, overflow="fold", justify="right" if heading == "gain" else "left")
    layers.add_column("why: tokens × in × out, forward and backward")
    for name, row in _grouped(plan.rows):
        layers.add_row(name, row.recipe or "bf16", f"{row.gain:.2f}", row.reason)
    step = Table(box=ROUNDED)
    for heading in ("ms a step", "bf16", "planned"):
        step.add_column(heading, justify="left" if heading == "ms a step" else "right")
    for part in PARTS:
        step.add_row(part, *(f"{1e3 * getattr(time, part):,.2f}" for time in (plan.bf16, plan.planned)))
    step.add_section()
    for heading, form in (
        ("in all", lambda time: f"{1e3 * time.seconds:,.2f}"),
        ("tokens/s", lambda time: f"{time.tokens_per_second:,.0f}"),
        ("MFU of the bf16 peak", lambda time: f"{time.mfu:.1%}"),
        ("× bf16", lambda time: f"{plan.bf16.seconds / time.seconds:.2f}"),
    ):
        step.add_row(heading, form(plan.bf16), form(plan.planned))
    begins = "at no size up to 16384" if plan.break_even is None else f"from K = N = {plan.break_even} on"
    return [
        layers,
        step,
        f"{plan.summary}.",
        f"With {plan.tokens:,} tokens FP8 pays {begins}.",
        f"Rates: {gpu.rates_from}. Efficiencies: {gpu.efficiency_from}.",
    ]


def _grouped(rows: Sequence[SpeedRow]) -> list[tuple[str, SpeedRow]]:
    """Rows that differ only by numbers in their names, merged."""
    groups: dict[tuple[str, str | None, str], list[SpeedRow]] = {}
    for row in rows:
        groups.setdefault((pattern(row.name), row.recipe, row.reason), []).append(row)
    return [(merged([row.name for row in group]) or "(the model)", group[0]) for group in groups.values()]
