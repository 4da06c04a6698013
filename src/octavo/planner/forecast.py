"""Forecast: a plan that was made by predicted cost, with the predictions: time and memory of a step, bf16 beside it.

It is a `Plan`, so that what was decided can be carried out (`octavo.convert(model, plan=forecast)`) and stored
(`Plan.from_json(forecast.to_json())` reads the decisions back); what it adds is for people. Everything is a prediction,
from the table of `octavo.planner.devices`, the models of `octavo.planner.roofline` and `octavo.planner.step`, and a
step on tensors without storage, except times that `octavo calibrate` measured on such a GPU, which are marked.
docs/planner.md holds what others measured beside what these models say of it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from typing import Any, NamedTuple

from octavo.numerics.plan import Decision, Plan
from octavo.numerics.recipe import Recipe
from octavo.planner.decide import break_even, decide
from octavo.planner.devices import Gpu
from octavo.planner.footprint import Footprint
from octavo.planner.step import Setting, StepTime, linear_costs, step_time
from octavo.planner.trace import Trace
from octavo.planner.wire import saved_by_gathering

NONE: Mapping[str, Recipe | None] = {}
"""The recipes of a model in bf16."""


class Seconds(NamedTuple):
    """Predicted seconds of a linear, forward and backward: in bf16, and as decided."""

    bf16: float
    planned: float


@dataclass(frozen=True, kw_only=True)
class Configured:
    """What a run's own configuration comes to: the plan that its trainer carries out, and time and memory of a step."""

    plan: Plan
    time: StepTime
    memory: Footprint


@dataclass(frozen=True, kw_only=True, repr=False)
class Forecast(Plan):
    """A plan with its predictions. Printed, it is three tables.

    `Plan.rows` has each linear's `.name`, `.converted`, `.recipe`, `.reason` and `.gain`.

    Attributes:
        gpu: What it is predicted for.
        setting: How the step is run.
        tokens: Of one micro-batch of one GPU.
        parameters: Elements of all parameters.
        times: Of every linear.
        planned: The step as decided.
        bf16: The same run at precision level bf16: every linear in bf16, float32 moments, nothing in FP8 on the wire.
        memory: Of one GPU, as decided.
        bf16_memory: The same at level bf16.
        break_even: Smallest K = N from which on FP8 pays at these tokens; None if it does not up to 16384.
        configured: The run as its configuration has it; None where it is no configuration that was planned.
    """

    gpu: Gpu
    setting: Setting
    tokens: int
    parameters: int
    times: Mapping[str, Seconds]
    planned: StepTime
    bf16: StepTime
    memory: Footprint
    bf16_memory: Footprint
    break_even: int | None
    configured: Configured | None = None

    @property
    def gain(self) -> float:
        """Predicted speed-up of the whole step."""
        return self.bf16.seconds / self.planned.seconds

    @property
    def fits(self) -> bool:
        """Whether a step as decided fits into the memory of the GPU."""
        return self.memory.peak <= self.gpu.usable

    @property
    def largest_batch(self) -> int:
        """Sequences of one forward on one GPU that fit; 0 where none does."""
        return self.memory.largest_batch(self.gpu.usable)

    @property
    def summary(self) -> str:
        """One line: what is converted, and what it gains."""
        return self.summary_of(self, self.planned)

    def summary_of(self, plan: Plan, time: StepTime) -> str:
        """The same of another plan for this model, whose step takes this time."""
        done = [plan[name] for name in plan.converted]
        recipes = ", ".join(sorted({decision.recipe.name for decision in done if decision.recipe}))
        text = f"{len(done)} of {len(self.times)} linear layers" + (f" in {recipes}" if done else "")
        return (
            f"{text}; predicted on {self.setting.gpus} × {self.gpu.name}: {1e3 * time.seconds:,.4g} ms a step, "
            f"{self.bf16.seconds / time.seconds:.2f}× bf16"
        )

    def to_json(self) -> str:
        """Everything as JSON, which `Plan.from_json` reads as a plan."""
        rows = []
        for row in self.rows:
            rows.append(asdict(row))
            if (known := self.times.get(row.name)) is not None:
                rows[-1] |= {"bf16_ms": 1e3 * known.bf16, "planned_ms": 1e3 * known.planned}
        content: dict[str, Any] = json.loads(super().to_json()) | {
            "gpu": self.gpu.to_json(),
            "setting": asdict(self.setting),
            "tokens": self.tokens,
            "parameters": self.parameters,
            "gain": self.gain,
            "break_even": self.break_even,
            "planned": self.planned.to_json() | {"memory": self.memory.to_json(self.gpu.usable)},
            "bf16": self.bf16.to_json() | {"memory": self.bf16_memory.to_json(self.gpu.usable)},
            "rows": rows,
        }
        if (own := self.configured) is not None:
            content["configured"] = json.loads(own.plan.to_json()) | own.time.to_json()
            content["configured"] |= {"memory": own.memory.to_json(self.gpu.usable)}
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        from rich.console import Console  # printing is all that needs it

        from octavo.planner.console import forecast_tables

        text = StringIO()
        Console(file=text, width=140).print(*forecast_tables(self), sep="\n", highlight=False)
        return text.getvalue().rstrip()


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Linears decided by cost: the decisions, and seconds of each linear."""

    decisions: Mapping[str, Decision]
    times: Mapping[str, Seconds]


def by_cost(
    gpu: Gpu, trace: Trace, names: Sequence[str], kept: Mapping[str, str], recipes: Sequence[Recipe], *, eager: bool
) -> Decided:
    """Decide every linear of a traced forward.

    Args:
        gpu: Where it will run.
        trace: One forward.
        names: All linears, in model order.
        kept: Those that stay in bf16 whatever they cost, with the reason.
        recipes: To choose from, in the order of preference.
        eager: Count the host's time per launch, where that is longer.
    """
    decisions, times, known = {}, {}, {}
    for name in names:
        calls = trace.calls.get(name, ())
        if calls not in known:
            known[calls] = decide(gpu, calls, recipes, eager=eager) if calls else None
        verdict = known[calls]
        if verdict is None:
            decisions[name] = Decision(recipe=None, reason="not called by this batch: bf16", gain=1.0)
            times[name] = Seconds(0.0, 0.0)
        elif name in kept:
            reason = f"{kept[name]}; by cost: {verdict.decision.reason}"
            decisions[name] = replace(verdict.decision, recipe=None, reason=reason, gain=1.0)
            times[name] = Seconds(verdict.bf16, verdict.bf16)
        else:
            decisions[name] = verdict.decision
            times[name] = Seconds(verdict.bf16, verdict.planned)
    return Decided(decisions=decisions, times=times)


def forecast(
    plan: Plan, times: Mapping[str, Seconds], gpu: Gpu, trace: Trace, recipes: Sequence[Recipe], setting: Setting,
    tokens: int, *, memory: Footprint, bf16_memory: Footprint, configured: tuple[Plan, Footprint] | None = None,
) -> Forecast:  # fmt: skip
    """Predict the step of a plan.

    Args:
        plan: What was decided.
        times: Of every linear, as `by_cost` gives them.
        gpu: Where it will run.
        trace: One forward.
        recipes: That there were to choose from.
        setting: How the step is run.
        tokens: Of one micro-batch of one GPU.
        memory: Of the step as decided.
        bf16_memory: Of the same at level bf16.
        configured: The plan that the run's configuration asks for, and its memory.
    """

    def timed(recipes: Mapping[str, Recipe | None], how: Setting) -> StepTime:
        costs = linear_costs(gpu, trace, recipes)
        return step_time(gpu, trace, costs, how, tokens, saved_by_gathering(trace.calls, recipes))

    def of(wanted: Plan) -> dict[str, Recipe | None]:
        return {name: wanted[name].recipe for name in times if name in wanted.decisions}

    return Forecast(
        plan.decisions,
        plan.activations,
        gpu=gpu,
        setting=setting,
        tokens=tokens,
        parameters=trace.parameters,
        times=times,
        planned=timed(of(plan), setting),
        bf16=timed(NONE, setting.plain),
        memory=memory,
        bf16_memory=bf16_memory,
        break_even=break_even(gpu, tokens, recipes, eager=setting.eager),
        configured=None if configured is None else Configured(
            plan=configured[0], time=timed(of(configured[0]), setting), memory=configured[1]
        ),
    )  # fmt: skip
