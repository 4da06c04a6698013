"""Forecast: a plan made by predicted cost, with the predicted time and memory of a step next to those of bf16.

A `Forecast` is a `Plan`, so `octavo.convert(model, plan=forecast)` carries it out and
`Plan.from_json(forecast.to_json())` reads the decisions back. Every figure is a prediction from the GPU table in
`octavo.planner.devices`, the models in `octavo.planner.roofline` and `octavo.planner.step`, and a run on fake tensors.
Times that `octavo calibrate` measured on such a GPU replace predictions and are marked. docs/planner.md compares
predictions with published measurements.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from octavo.numerics.plan import Decision, Plan
from octavo.numerics.recipe import Recipe
from octavo.planner.collective_cost import bytes_saved_by_fp8_gather
from octavo.planner.decide import break_even, decide
from octavo.planner.devices import Gpu
from octavo.planner.memory_plan import MemoryPlan, merge_kinds
from octavo.planner.pipeline_time import pipeline_time
from octavo.planner.step import StepConfig, StepTime, linear_costs, step_time
from octavo.planner.trace import Trace

ALL_BF16 = Plan({})  # The plan of a model in bf16: no decisions


class LinearTimes(NamedTuple):
    """Predicted seconds of a linear layer, forward and backward: in bf16 and as planned."""

    bf16: float
    planned: float


@dataclass(frozen=True, kw_only=True)
class ConfiguredRun:
    """The plan that a run's own configuration carries out, with the time and memory of its step."""

    plan: Plan
    time: StepTime
    memory: MemoryPlan


@dataclass(frozen=True, kw_only=True, repr=False)
class Forecast(Plan):
    """A plan with its predictions. Prints as three tables.

    `Plan.rows` has each layer's `.name`, `.converted`, `.recipe`, `.reason` and `.gain`.
    """

    gpu: Gpu  # GPU of the prediction
    step_config: StepConfig  # How the step runs
    tokens: int  # Tokens of one micro-batch on one GPU
    parameters: int  # Elements of all parameters
    times: Mapping[str, LinearTimes]  # Times of every linear layer
    planned: StepTime  # Time of the step as planned
    # Time of the same step at precision level bf16: every layer in bf16, float32 moments, no FP8 communication.
    bf16: StepTime
    memory: MemoryPlan  # Memory of one GPU as planned
    bf16_memory: MemoryPlan  # Memory of one GPU at level bf16
    break_even: int | None  # Smallest K = N from which FP8 pays at this number of tokens; None if none does up to 16384
    configured: ConfiguredRun | None = None  # The run as configured; None if the plan was not made from a configuration

    @property
    def gain(self) -> float:
        """Predicted speed-up of the whole step."""
        return self.bf16.seconds / self.planned.seconds

    @property
    def fits(self) -> bool:
        """Whether a step as decided fits in the GPU's memory."""
        return self.memory.peak <= self.gpu.usable

    @property
    def largest_batch(self) -> int:
        """Largest number of sequences of one forward on one GPU that fits; 0 if none does."""
        return self.memory.largest_batch(self.gpu.usable)

    @property
    def summary(self) -> str:
        """One line: the converted layers and the gain."""
        return self.summary_of(self, self.planned)

    def summary_of(self, plan: Plan, time: StepTime) -> str:
        """Return the same line for another plan of this model whose step takes `time`."""
        recipes = ", ".join(sorted({recipe.name for name in plan.converted if (recipe := plan[name].recipe)}))
        linears = sum(name in self.times for name in plan.converted)
        text = f"{linears} of {len(self.times)} linear layers"
        if mixtures := len(plan.converted) - linears:  # of experts
            text += f" and {mixtures} mixture{'s' * (mixtures > 1)} of experts"
        text += f" in {recipes}" * bool(recipes)
        return (
            f"{text}; predicted on {self.step_config.gpus} × {self.gpu.name}: {_duration(time.seconds)} a step, "
            f"{self.bf16.seconds / time.seconds:.2f}× bf16"
        )

    def to_json(self) -> str:
        """Return everything as JSON; `Plan.from_json` reads it as a plan."""
        rows = []
        for row in self.rows:
            rows.append(asdict(row))
            if (times := self.times.get(row.name)) is not None:
                rows[-1] |= {"bf16_ms": 1e3 * times.bf16, "planned_ms": 1e3 * times.planned}
        content: dict[str, Any] = json.loads(super().to_json()) | {
            "gpu": self.gpu.to_json(), "setting": asdict(self.step_config), "tokens": self.tokens,
            "parameters": self.parameters, "gain": self.gain, "break_even": self.break_even,
            "planned": self.planned.to_json() | {"memory": memory_json(self.memory, self.gpu.usable)},
            "bf16": self.bf16.to_json() | {"memory": memory_json(self.bf16_memory, self.gpu.usable)}, "rows": rows,
        }  # fmt: skip
        if (own := self.configured) is not None:
            content["configured"] = json.loads(own.plan.to_json()) | own.time.to_json()
            content["configured"] |= {"memory": memory_json(own.memory, self.gpu.usable)}
        return json.dumps(content, indent=1)

    def __str__(self) -> str:
        from octavo.planner.tables import WIDE_COLUMNS, forecast_text  # which imports this module's names

        return forecast_text(self, WIDE_COLUMNS)


def memory_json(memory: MemoryPlan, limit_bytes: int) -> dict[str, Any]:
    """Return a memory plan as part of a forecast's JSON, for a GPU with this much memory."""
    return {
        "peak": memory.peak, "phase": memory.phase, "at_peak": merge_kinds(memory.at_peak),
        "fits": memory.peak <= limit_bytes, "limit": limit_bytes, "largest_batch": memory.largest_batch(limit_bytes),
        "followed_blocks": memory.traced_blocks[0], "blocks": memory.traced_blocks[1], "note": " ".join(memory.notes),
    }  # fmt: skip


def decide_by_cost(
    gpu: Gpu, trace: Trace, names: Sequence[str], forced_bf16: Mapping[str, str], recipes: Sequence[Recipe], *,
    eager: bool,
) -> tuple[dict[str, Decision], dict[str, LinearTimes]]:  # fmt: skip
    """Decide for every linear layer of a traced forward; return the decisions and the times by layer."""
    decisions, times, by_calls = {}, {}, {}
    for name in names:
        calls = trace.calls.get(name, ())
        if calls not in by_calls:
            by_calls[calls] = decide(gpu, calls, recipes, eager=eager) if calls else None
        choice = by_calls[calls]
        if choice is None:
            decisions[name] = Decision(recipe=None, reason="not called by this batch: bf16", gain=1.0)
            times[name] = LinearTimes(0.0, 0.0)
        elif name in forced_bf16:
            reason = f"{forced_bf16[name]}; by cost: {choice.decision.reason}"
            decisions[name] = replace(choice.decision, recipe=None, reason=reason, gain=1.0)
            times[name] = LinearTimes(choice.bf16, choice.bf16)
        else:
            decisions[name] = choice.decision
            times[name] = LinearTimes(choice.bf16, choice.planned)
    return decisions, times


def predict_time(
    plan: Plan, gpu: Gpu, stages: Sequence[Trace], step_config: StepConfig, tokens: int, memory: MemoryPlan
) -> StepTime:
    """Predict the time of a step of a plan; linear layers and experts without a decision run in bf16."""
    times = []
    for index, trace in enumerate(stages):
        recipes = {name: plan[name].recipe for name in trace.calls if name in plan.decisions}
        saved = bytes_saved_by_fp8_gather(
            trace.calls, recipes, resident=step_config.resident, trained=step_config.fp8_gather
        )
        messages = memory.messages[index] if memory.messages else ()
        costs = linear_costs(gpu, trace, recipes)
        times.append(step_time(gpu, trace, costs, step_config, tokens, saved, messages))
    return times[0] if len(times) == 1 else pipeline_time(gpu, times, step_config, memory.stage_message)


def forecast(
    plan: Plan, times: Mapping[str, LinearTimes], gpu: Gpu, trace: Trace, recipes: Sequence[Recipe],
    step_config: StepConfig, tokens: int, *, memory: MemoryPlan, bf16_memory: MemoryPlan,
    configured: tuple[Plan, MemoryPlan] | None = None, stages: Sequence[tuple[Trace, Trace]] = (),
) -> Forecast:  # fmt: skip
    """Predict the step of a plan."""
    traces, bf16_traces = zip(*stages, strict=True) if stages else ((trace,), (trace,))

    def time(plan: Plan, memory: MemoryPlan) -> StepTime:
        return predict_time(plan, gpu, traces, step_config, tokens, memory)

    return Forecast(
        plan.decisions,
        plan.activations,
        gpu=gpu,
        step_config=step_config,
        tokens=tokens,
        parameters=trace.parameters,
        times=times,
        planned=time(plan, memory),
        bf16=predict_time(ALL_BF16, gpu, bf16_traces, step_config.bf16, tokens, bf16_memory),
        memory=memory,
        bf16_memory=bf16_memory,
        break_even=break_even(gpu, tokens, recipes, eager=step_config.eager),
        configured=None if configured is None else ConfiguredRun(
            plan=configured[0], time=time(*configured), memory=configured[1]
        ),
    )  # fmt: skip


def _duration(seconds: float) -> str:
    """Format a time: in seconds from one on, else in milliseconds."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1e3 * seconds:,.4g} ms"
