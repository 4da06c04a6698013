"""The one way from a model to the memory and the time of its training step, on one of some GPUs.

`octavo.planner.model_plan` makes a `Workload` of a module and a batch, `octavo.train.run_plan` of a configuration.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import nn

from octavo.nn.experts import looks_like_experts
from octavo.numerics.plan import Plan
from octavo.numerics.recipe import Recipe
from octavo.planner import step
from octavo.planner.decide import LinearDecision, break_even
from octavo.planner.devices import Gpu
from octavo.planner.forecast import Forecast, PlannedRun
from octavo.planner.memory_plan import MemoryPlan
from octavo.planner.step_memory import (
    ACTIVATIONS,
    BATCH,
    BLOCK_GRADIENTS,
    GATHERED,
    GRADIENTS,
    KINDS,
    TEMPORARIES,
    StepTrace,
    WholeStep,
    memory_per_rank,
    trace_blocks,
)
from octavo.planner.trace import Stack, Trace, block_kinds, equal_stacks
from octavo.runtime.blocks import find_blocks

T = TypeVar("T")

ALL_BF16 = Plan({})  # The plan of a model in bf16: no decisions
OnSubject = Callable[[str], None]  # Called with the subject of each part of the plan when it begins


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a pipeline; of a model without one, everything."""

    model: nn.Module  # With `Absent` in the place of other stages' blocks
    index: int = 0
    count: int = 1  # Number of stages

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def kind(self, plan: Plan) -> Hashable:
        """What its memory and time depend on under a plan: its ends and blocks."""
        names = {id(module): name for name, module in self.model.named_modules()}
        return self.first, self.last, tuple(block_kinds(find_blocks(self.model), names, plan))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a prediction of a training step needs."""

    model: nn.Module  # On any device including meta; not changed
    stages: Sequence[Stage]
    plan: Plan | None  # How its layers compute, or in bf16 if it does not name them; None: as `trace_step` decides
    step_config: step.StepConfig
    sequences: int  # Sequences of a micro-batch on one GPU
    # Traces a step of a stage with so many blocks of some stacks, by name, and this many sequences.
    trace_step: "Callable[[Workload, Stage, Mapping[str, int], int], StepTrace]"
    extrapolates: bool = False  # Whether a few of equal blocks stand for all
    gpu: Gpu | None = None  # As the following, of a prediction of time
    whole: Trace | None = None  # One forward of the whole model in bf16
    forward: Callable[[Stage], Trace] | None = None  # Traces one forward of a stage as planned
    tokens: int = 0  # Of a micro-batch on one GPU
    offloaded: bool = False  # Whether shards, with their gradients and states, are in host memory
    # Bytes of a micro-batch's hidden states on a GPU of a pipeline, and of the message with them, by sequences.
    message: "Callable[[Workload, int], tuple[int, int]]" = lambda workload, size: (0, 0)
    notes: tuple[str, ...] = ()
    traced: dict[Stage, WholeStep] = field(default_factory=dict, compare=False)  # First steps, of stages of each kind

    def at_bf16(self, **changes: Any) -> "Workload":
        """Return the same step at level bf16, which is traced and runs in other ways."""
        return replace(self, plan=ALL_BF16, step_config=self.step_config.bf16, traced={}, **changes)

    def planned(self, plan: Plan) -> "Workload":
        return replace(self, plan=plan, traced={})

    def predict(self) -> PlannedRun:
        assert self.plan is not None
        memory = self.memory()
        return PlannedRun(plan=self.plan, time=self.time(memory), memory=memory)

    def time(self, memory: MemoryPlan) -> step.StepTime:
        assert self.gpu is not None
        times = self._by_kind(lambda stage: self._stage_time(stage, memory))
        if len(times) == 1:
            return times[0]
        return step.pipeline_time(self.gpu, times, self.step_config, memory.stage_message)

    def _by_kind(self, predict: Callable[[Stage], T]) -> list[T]:
        """Predict something of each stage, of equal ones once."""
        kinds = [stage.kind(self.plan or ALL_BF16) for stage in self.stages]
        predicted = {kind: predict(stage) for kind, stage in dict(zip(kinds, self.stages, strict=True)).items()}
        return [predicted[kind] for kind in kinds]

    def _stage_time(self, stage: Stage, memory: MemoryPlan) -> step.StepTime:
        assert self.gpu is not None and self.plan is not None and self.forward is not None
        gpu, config, trace = self.gpu, self.step_config, self.forward(stage)
        recipes = {name: self.plan[name].recipe for name in trace.calls if name in self.plan.decisions}
        saved = step.bytes_saved_by_fp8_gather(
            trace.calls, recipes, resident=config.resident, trained=config.fp8_gather
        )
        messages = memory.messages[stage.index] if memory.messages else {}
        costs = step.linear_costs(gpu, trace, recipes)
        return step.step_time(gpu, trace, costs, config, self.tokens, saved, messages)

    def memory(self, sequences: int | None = None) -> MemoryPlan:
        """Predict the memory of the GPU that needs most, for the workload's or another number of sequences."""
        size = self.sequences if sequences is None else sequences
        alone = self._by_kind(lambda stage: self._stage_memory(stage, size))
        if len(alone) == 1:
            return alone[0]
        hidden, sent = self.message(self, size)
        beside = held_beside(self.step_config, [own.largest for own in alone], hidden)
        plans = [replace(own, series=own.series.plus(*beside[index])) for index, own in enumerate(alone)]
        messages = tuple(own.messages[0] for own in alone)
        return replace(max(plans, key=lambda plan: plan.peak), messages=messages, stage_message=sent)

    def _stage_memory(self, stage: Stage, size: int) -> MemoryPlan:
        """Trace a step of a stage alone, and take the share of a rank."""
        config, model = self.step_config, stage.model
        stacks: Sequence[Stack] = equal_stacks(model, self.plan or ALL_BF16) if self.extrapolates else ()
        if stage in self.traced:  # for another number of sequences
            stacks = self.traced[stage].stacks
        whole = trace_blocks(lambda counts: self.trace_step(self, stage, counts, size), stacks)
        self.traced.setdefault(stage, whole)
        series, block, blocks = whole.series, whole.traced.block, len(find_blocks(model))
        if config.shards > 1 or self.offloaded:
            # Elements of all parameters over those of a rank that has 1 / `ep` of the experts.
            experts = sum(p.numel() for m in model.modules() if looks_like_experts(m) for p in m.parameters())
            elements = sum(p.numel() for p in model.parameters())
            spread = elements / (elements - experts + experts / config.ep)
            series = memory_per_rank(series, config, blocks, block, whole.rest, offloaded=self.offloaded, spread=spread)
        series = series.merge(BLOCK_GRADIENTS, GRADIENTS)
        if config.copies > 1 and config.shards == 1:  # DDP's buckets hold all gradients a second time
            series = series.plus({GATHERED: blocks * block.gradients + whole.rest.gradients}, {})
        count = whole.stacks[0].few if whole.stacks else blocks
        return MemoryPlan(
            batch=size, tokens=whole.traced.tokens, series=series, traced_blocks=(count, blocks),
            outputs=whole.traced.outputs, messages=(whole.messages,), notes=self.notes, replan=self.memory,
        )  # fmt: skip


Sizes = Mapping[str, int]  # Bytes by category


def held_beside(
    config: step.StepConfig, alone: Sequence[Sizes], hidden: int
) -> dict[int, tuple[Sizes, Mapping[str, Sizes]]]:
    """Return what a GPU of a pipeline holds beside a micro-batch of each of its stages: all the time, and by phase."""
    beside: dict[int, tuple[Sizes, Mapping[str, Sizes]]] = {}
    for row in step.schedule_actions(config.schedule, config.pp, config.micro_batches):
        own, most = sorted({action.stage for action in row}), step.most_in_flight(row)
        for index in own:
            # What its other stages hold all the time …
            held = dict.fromkeys((*KINDS, GATHERED), 0)
            for neighbour in (stage for stage in own if stage != index):
                for kind, size in alone[neighbour].items():
                    held[kind] += size if kind not in (ACTIVATIONS, TEMPORARIES) else 0
            # … torch's buffers of all micro-batches, for activations and for gradients …
            buffers = sum((stage > 0) + (stage < len(alone) - 1) for stage in own)
            held[GATHERED] += config.micro_batches * hidden * buffers
            held[BATCH] -= hidden * sum(stage > 0 for stage in own)
            # … and the activations of micro-batches that are under way.
            forward, backward = (
                {ACTIVATIONS: sum(count * alone[stage][ACTIVATIONS] for stage, count in most[key, index].items())}
                for key in "FB"
            )
            beside[index] = held, {"forward": forward, "backward": backward}
    return beside


def forecast(
    best: Workload, bf16: Workload, recipes: Sequence[Recipe], times: Mapping[str, LinearDecision], *,
    configured: Workload | None = None, progress: OnSubject = lambda subject: None,
) -> Forecast:  # fmt: skip
    """Predict the step of the best plan by cost, at level bf16, and as configured."""
    assert best.gpu is not None and best.plan is not None and best.whole is not None
    own = None
    if configured is not None:
        progress("the memory of this configuration")
        own = configured.predict()
    if own is not None and _changes(own.plan) == _changes(best.plan):
        memory = own.memory
    else:
        progress("the memory of the best plan")
        memory = best.memory()
    progress("the memory of bf16")
    plain = bf16.predict()
    return Forecast(
        best.plan.decisions, best.plan.activations, gpu=best.gpu, step_config=best.step_config, tokens=best.tokens,
        parameters=best.whole.parameters, times=times, planned=best.time(memory), memory=memory, bf16=plain.time,
        bf16_memory=plain.memory, configured=own,
        break_even=break_even(best.gpu, best.tokens, recipes, eager=best.step_config.eager),
    )  # fmt: skip


def _changes(plan: Plan) -> set[tuple[object, ...]]:
    """The decisions of a plan that change a layer."""
    rows = plan.decisions.items()
    return {(n, d.recipe, d.activation_storage) for n, d in rows if d.recipe or d.activation_storage}
