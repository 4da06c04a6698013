"""plan_memory and plan_step: predict memory and time of a run from its configuration alone.

The memory comes from a training step on fake tensors. The real trainer runs the step, so the plan includes conversion,
loss, activation checkpointing, accumulation, masters and moments. It reads no data and no weights: a vocabulary still
to be trained counts as `data.vocab_size`.

`plan_step` forecasts a step on a GPU that this machine need not have (`octavo.planner.forecast`): the time from one
forward of the same model, the memory from steps of the same trainer on two and three of the model's blocks.

Of a hybrid layout, one rank's part of the model is planned. It runs the code of a run: `tensor_parallel`,
`context_parallel`, `expert_parallel` and the stages of a pipeline, in torch's fake process group of the ranks that
share a layer or a sequence. FSDP2 is added by rule (`octavo.planner.sharded_memory`).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from octavo.comm import ADAPTIVE_SPEC
from octavo.comm.encoding import parse_spec, width
from octavo.kernels.registry import FIRST_CAPABILITY
from octavo.nn.causal import decide_head
from octavo.nn.convert import rule_plan
from octavo.nn.experts import looks_like_experts
from octavo.nn.frozen import with_weight_only
from octavo.nn.memory_audit import Audit, SavedStorage, audit
from octavo.numerics.names import nearest
from octavo.numerics.plan import Plan
from octavo.numerics.precision import AUTO, LEVELS
from octavo.parallel.pipeline_model import SCHEDULES, StageModule, check_pipeline_structure, divide, remove_ends
from octavo.planner.auto_convert import plan_on_gpu
from octavo.planner.devices import Gpu, find_gpu
from octavo.planner.fake import fake_device, fake_tensors
from octavo.planner.forecast import ALL_BF16, ConfiguredRun, Forecast, forecast, predict_time
from octavo.planner.memory_plan import MemoryPlan
from octavo.planner.model_memory import make_gradients, make_states, saved_bytes
from octavo.planner.model_plan import (
    check_gathered,
    default_decisions,
    fuse,
    plan_request,
    trace_model,
    with_measurements,
)
from octavo.planner.pipeline_time import most_in_flight, schedule_actions
from octavo.planner.stacks import Stack, copy_with_blocks, equal_stacks, restrict_plan
from octavo.planner.step import CHECKPOINTING, StepConfig, layout_settings
from octavo.planner.step_memory import Beside, StepTrace, follow_step, predict_memory, trace_few_blocks
from octavo.planner.tables import compare_memory, forecast_text, plan_notes
from octavo.planner.timeline import ACTIVATIONS, ALLOCATION_GRANULARITY, BATCH, GATHERED, TEMPORARIES
from octavo.planner.trace import Trace
from octavo.runtime.blocks import Absent, find_block_list, find_blocks
from octavo.runtime.terminal import width as terminal_width
from octavo.runtime.torch_compat import fake_process_group, tree_leaves
from octavo.train.checkpoint.pretrained import one_line
from octavo.train.config.run_config import ConfigError, TrainConfig, load_config, parse_config
from octavo.train.config.sections import ParallelConfig
from octavo.train.config.shrink import change_of
from octavo.train.layout import Layout, check_experts_compute_in_fp8, check_layout, divide_layers
from octavo.train.model import PARAMETER_DTYPES, auto_attention, check_model
from octavo.train.optimizer import step_cost
from octavo.train.packed_attention import is_varlen
from octavo.train.tasks.registry import task_of
from octavo.train.tasks.task import Task
from octavo.train.trainer import Trainer, compiles_blocks, with_activations

TraceStage = Callable[["Stage", StepConfig, Mapping[str, int], int], StepTrace]
"""Traces a step of a stage with so many blocks of some stacks, and this many sequences."""

T = TypeVar("T")


class TraceCache(dict[Any, Any]):
    """Traces that the plans of several layouts of a run share: equal stages of pipelines, on any number of GPUs."""

    def made(self, key: Any, make: Callable[[], T]) -> T:
        """Return the entry of a key, made if there is none."""
        if key not in self:
            self[key] = make()
        made: T = self[key]
        return made


def trace_settings(config: TrainConfig) -> str:
    """Return what a trace of a stage depends on in a configuration, beside sequences and whether there are several
    micro-batches and stages.
    """
    content = config.model_dump(mode="json")
    for section, name in (
        ("parallel", "pp"), ("parallel", "schedule"), ("parallel", "dp_replicate"), ("parallel", "dp_shard"),
        ("parallel", "reshard_after_forward"), ("optim", "batch"), ("optim", "micro_batches"),
    ):  # fmt: skip
        del content[section][name]
    return json.dumps(content, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a pipeline; of a model without one, everything."""

    model: nn.Module  # On meta, with `Absent` in the place of other stages' blocks
    index: int = 0  # Its index
    count: int = 1  # Number of stages

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1


def stages_of_model(model: nn.Module, parallel: ParallelConfig) -> list[Stage]:
    """Return the stages of a model on meta. Raises ConfigError if it cannot be cut."""
    if parallel.pp == 1:
        return [Stage(model=model)]
    count = parallel.pp * SCHEDULES[parallel.schedule]
    try:
        check_pipeline_structure(model, count)
    except ValueError as error:
        raise ConfigError(f"parallel.pp: {error}") from None
    members, stages = find_block_list(model), []
    for index, blocks in enumerate(divide(len(members), count)):
        memo: dict[int, Any] = {id(block): Absent() for i, block in enumerate(members) if i not in blocks}
        stages.append(Stage(model=deepcopy(model, memo), index=index, count=count))
    return stages


@contextmanager
def shared_mesh(parallel: ParallelConfig, device: torch.device) -> Iterator[DeviceMesh | None]:
    """A mesh of the ranks that share a layer or a sequence; None if each has all of both."""
    name, size = next(((n, s) for n in ("tp", "cp", "ep") if (s := getattr(parallel, n)) > 1), ("", 1))
    if size == 1:
        yield None
        return
    with fake_process_group(size):
        yield init_device_mesh(device.type, (size,), mesh_dim_names=(name,))


def expert_spread(model: nn.Module, ep: int) -> float:
    """Return the elements of all parameters over those of a rank that has 1 / `ep` of the experts."""
    experts = sum(p.numel() for m in model.modules() if looks_like_experts(m) for p in m.parameters())
    whole = sum(p.numel() for p in model.parameters())
    return whole / (whole - experts + experts / ep)


def stage_memory(
    stages: list[Stage], trace: TraceStage, plan: Plan, size: int, step_config: StepConfig, *,
    extrapolates: bool, offloaded: bool, message: Callable[[int], tuple[int, int]], cache: TraceCache, settings: str,
) -> MemoryPlan:  # fmt: skip
    """Predict the memory of the GPU of a layout that needs most."""
    kinds: dict[Any, Stage] = {}
    keys = [stage_kind(stage, plan) for stage in stages]
    for key, stage in zip(keys, stages, strict=True):
        kinds.setdefault(key, stage)
    several = step_config.micro_batches > 1, len(stages) > 1
    step = step_config.fp8_gather, step_config.fp8_reduce, step_config.reduce_bytes, step_config.ep, *several

    def traced(key: StageKind, blocks: Mapping[str, int], other: int) -> StepTrace:
        stage = kinds[key]
        counts = tuple(blocks.values())  # of the stage's blocks first
        part = replace(key, blocks=key.blocks[: counts[0]]) if counts else key
        return cache.made((settings, step, part, counts[1:], other), lambda: trace(stage, step_config, blocks, other))

    def memory(key: Any, other: int, beside: Beside | None = None) -> MemoryPlan:
        model = kinds[key].model
        return predict_memory(
            lambda blocks, sequences: traced(key, blocks, sequences), other, step_config,
            blocks=len(find_blocks(model)), stacks=equal_stacks(model, plan) if extrapolates else (),
            offloaded=offloaded, spread=expert_spread(model, step_config.ep), beside=beside,
        )  # fmt: skip

    if len(stages) == 1:
        return memory(keys[0], size)

    def worst(other: int) -> MemoryPlan:
        hidden, sent = message(other)
        by_kind = {key: memory(key, other) for key in kinds}
        alone = [by_kind[key] for key in keys]
        plans = []
        for row in schedule_actions(step_config.schedule, step_config.pp, step_config.micro_batches):
            own, most = sorted({action.stage for action in row}), most_in_flight(row)
            for index in own:
                held = {kind: 0 for kind in alone[index].largest}
                for neighbour in (stage for stage in own if stage != index):
                    for kind, value in alone[neighbour].largest.items():
                        held[kind] += value if kind not in (ACTIVATIONS, TEMPORARIES) else 0
                # torch allocates the buffers of all micro-batches: activations, and gradients
                buffers = sum((stage > 0) + (stage < len(stages) - 1) for stage in own)
                held[GATHERED] += step_config.micro_batches * hidden * buffers
                held[BATCH] -= hidden * sum(stage > 0 for stage in own)
                extra = {
                    phase: sum(count * alone[stage].largest[ACTIVATIONS] for stage, count in most[phase, index].items())
                    for phase in "FB"
                }
                plans.append(memory(keys[index], other, Beside(held=held, forward=extra["F"], backward=extra["B"])))
        most_needed = max(plans, key=lambda plan: plan.peak)
        return replace(
            most_needed, messages=tuple(plan.messages[0] for plan in alone), stage_message=sent, replan=worst
        )

    return worst(size)


def message_bytes(parallel: ParallelConfig, shape: tuple[int, int], hidden: int, *, fp8: bool) -> tuple[int, int]:
    """Return the bytes of bf16 hidden states of a micro-batch on one rank, and those of a message with them."""
    tokens = shape[1] // (parallel.tp if parallel.sequence_parallel else 1)
    bf16 = 2 * shape[0] * tokens * hidden
    spec = parse_spec(ADAPTIVE_SPEC)
    rows, columns = (shape[0], tokens * hidden) if hidden % 128 == 0 else (shape[0] * tokens, hidden)
    return bf16, rows * width(columns, spec) if fp8 else bf16


@dataclass(frozen=True)
class StageKind:
    """What the memory and the time of a stage depend on: its ends, blocks, and decisions beside the blocks."""

    first: bool
    last: bool
    blocks: tuple[Any, ...]
    rest: tuple[Any, ...]


def stage_kind(stage: Stage, plan: Plan) -> StageKind:
    """Return the kind of a stage under a plan."""
    blocks = {
        f"{name}.": (index, module) for index, (name, module) in enumerate(_named_blocks(stage.model, absent=True))
    }
    own = tuple(
        tuple(_module_kind(name, module, plan, prefix, index) for name, module in block.named_modules())
        for prefix, (index, block) in blocks.items()
        if not isinstance(block, Absent)
    )
    rest = tuple(
        (name, decision.recipe, decision.activation_storage)
        for name, decision in plan.decisions.items()
        if not name.startswith(tuple(blocks))
    )
    return StageKind(stage.first, stage.last, own, rest)


def _module_kind(name: str, module: nn.Module, plan: Plan, prefix: str, index: int) -> tuple[Any, ...]:
    """A module of a block: its type, decision, parameters and plain attributes other than the index of its block."""
    decision = plan.decisions.get(f"{prefix}{name}".rstrip("."))
    parameters = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False))
    settings = tuple(
        (n, value)
        for n, value in vars(module).items()
        if isinstance(value, str | bool | int | float | None) and (isinstance(value, bool) or value != index)
    )
    return name, type(module), decision and (decision.recipe, decision.activation_storage), parameters, settings


def _named_blocks(model: nn.Module, *, absent: bool = False) -> list[tuple[str, nn.Module]]:
    """The blocks of a stage with their names; with `absent`, those of other stages too."""
    members = find_block_list(model)
    names = {id(module): name for name, module in model.named_modules()}
    holder = names.get(id(members), "")
    return [(f"{holder}.{i}", m) for i, m in enumerate(members) if absent or not isinstance(m, Absent)]


def trace_stages(
    stages: list[Stage], trace: Callable[[Stage], Trace], settings: Any, cache: TraceCache
) -> list[Trace]:  # fmt: skip
    """Trace the forward of each stage; of equal ones, one."""
    traces = []
    for stage in stages:
        key = settings, stage.count > 1, stage_kind(stage, Plan({}))
        made, traced = cache.made(key, lambda: (stage, trace(stage)))  # noqa: B023  which is called at once
        pairs = zip(_named_blocks(made.model), _named_blocks(stage.model), strict=True)
        renamed = {f"{old}.": f"{new}." for (old, _), (new, _) in pairs}
        calls = {
            next((new + name[len(old) :] for old, new in renamed.items() if name.startswith(old)), name): own
            for name, own in traced.calls.items()
        }
        traces.append(replace(traced, calls=calls))
    return traces


def cut_ends(model: Any, stage: Stage) -> None:
    """Leave out of a model the embedding and the head of other stages."""
    if stage.count > 1:
        remove_ends(model, first=stage.first, last=stage.last)


def stage_module(model: Any, stage: Stage, config: TrainConfig) -> StageModule:
    """Return the module of a stage, of a copy of its model."""
    members = find_block_list(model.base_model)
    own = [index for index, member in enumerate(members) if not isinstance(member, Absent)]
    parallel = config.parallel
    return StageModule(
        model, range(own[0], own[-1] + 1), first=stage.first, last=stage.last,
        token_parts=parallel.tp if parallel.sequence_parallel else 1,
    )  # fmt: skip


def stage_input(model: Any, stage: Stage, config: TrainConfig, ids: Tensor) -> Tensor:
    """Return what a stage reads: ids [B,S], or hidden states of a rank's tokens [B,S,H]."""
    if stage.first:
        return ids
    parallel, hidden = config.parallel, model.config.get_text_config().hidden_size
    tokens = ids.shape[1] // (parallel.tp if parallel.sequence_parallel else 1)
    dtype = torch.float32 if config.precision.parameters == "fp32" else PARAMETER_DTYPES[config.precision.parameters]
    return torch.empty(ids.shape[0], tokens, hidden, dtype=dtype, device=ids.device, requires_grad=True)


def without_experts(config: TrainConfig) -> TrainConfig:
    """Return the configuration without expert parallelism."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"ep": 1})})


def share_experts(trace: Trace, ranks: int) -> Trace:
    """Return the trace of a rank with 1 / `ranks` of the experts, to which all ranks send rows."""
    calls = {
        name: tuple(replace(call, experts=call.experts // ranks) if call.experts > 1 else call for call in own)
        for name, own in trace.calls.items()
    }
    elsewhere = trace.experts - trace.experts // ranks
    return replace(
        trace, calls=calls, parameters=trace.parameters - elsewhere, trained=trace.trained - elsewhere,
        experts=trace.experts // ranks,
    )  # fmt: skip


def trace_stage(
    config: TrainConfig, stage: Stage, shape: tuple[int, int], fake: torch.device,
    loss: Callable[[nn.Module], Any] | None = None, plan: Plan = ALL_BF16,
) -> Trace:  # fmt: skip
    """Trace one forward of what a rank has of a stage, in bf16, with the fused kernels of a plan; `loss` runs a whole
    model of more than text.
    """
    parallel, layouts = config.parallel, dict[nn.Module, Layout]()
    if parallel.ep > 1:  # experts in bf16 are not distributed: each rank has as many rows, of fewer experts
        trace = trace_stage(without_experts(config), stage, shape, fake, loss, plan)
        return share_experts(trace, parallel.ep)

    with shared_mesh(parallel, fake) as mesh:

        def prepare(copy: torch.nn.Module) -> None:
            fuse(copy, plan)
            layouts[copy] = divide_layers(copy, parallel, mesh, fp8=False)
            cut_ends(copy, stage)

        def forward(copy: torch.nn.Module) -> Any:
            ids = torch.zeros(shape, dtype=torch.int64, device=fake)
            layout = layouts[copy]
            inputs, labels = layout.own_tokens(ids), layout.own_labels(ids)
            with torch.autocast(fake.type, torch.bfloat16, enabled=config.precision.parameters == "fp32"):
                if stage.count > 1:
                    return stage_module(copy, stage, config)(stage_input(copy, stage, config, inputs), labels=labels)
                if loss is not None:
                    return loss(copy)
                positions = layout.positions(inputs)
                return copy(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False, **positions)

        return trace_model(stage.model, forward, [shape], fake, prepare, packed=masks_documents(config, stage.model))


MIN_CAPABILITY = 10 * FIRST_CAPABILITY[0] + FIRST_CAPABILITY[1]


def masks_documents(config: TrainConfig, model: Any) -> bool:
    """Whether attention reads a mask of all pairs of positions that keeps packed documents apart."""
    packed = config.data.task == "language" and config.data.packing != "stream"
    return packed and config.model.attention in ("auto", "sdpa", "eager") and not is_varlen(model)


_VARLEN_NOTE = "Attention inside packed documents, without a mask; its time is that of one document in each sequence."

OnSubject = Callable[[str], None]  # Called with the subject of each part of the plan when it begins

LEVEL_PARTS = {"precision": ("matmul", "activations", "master"), "optim": ("states",)}
"""Settings that override a part of the level."""


def plan_memory(
    config: TrainConfig, *, device: str = "cuda", label: str | None = None, whole: bool = True,
    models: dict[tuple[str, str], Any] | None = None,
) -> MemoryPlan:  # fmt: skip
    """Predict the memory of a training step of a run. `models`: those of its other levels of precision."""
    # The step runs one micro-batch. If a step has several, the gradients of earlier ones exist already.
    import transformers.masking_utils  # noqa: F401  which fake_tensors keeps from taking every batch for a packed one

    task = planned_task(config)
    name, size = config.parallel.mode
    if name:
        raise ConfigError(
            f"parallel.{name} = {size}: octavo plan --memory predicts one GPU; for several give --gpu and --gpus"
        )
    fake = fake_device(torch.device(device))
    key, models = (config.precision.parameters, config.precision.loss), {} if models is None else models
    if key not in models:
        models[key] = _planned_model(task, device)
    model = models[key]
    step_config = StepConfig(micro_batches=config.optim.micro_batches)
    sequences = config.optim.batch // config.optim.micro_batches
    config = with_activations(config, model, sequences * task.positions(model), gpu=device == "cuda")

    plan: Plan | None = None
    stacks: Sequence[Stack] = ()
    if not whole and device == "cuda" and config.resolved.recipe != AUTO:
        plan = _configured(model, config, None, sequences * task.positions(model))
        stacks = () if config.optim.groups else equal_stacks(model, plan)  # which may tell blocks apart

    @contextmanager
    def trainer_of(blocks: Mapping[str, int]) -> Iterator[Trainer]:
        with fake_tensors(device, packed=masks_documents(config, model)) as mode:
            copy = copy_with_blocks(model, blocks, mode, fake)
            yield Trainer(config, task.data, fake, copy, plan=plan and restrict_plan(plan, copy))

    def trace(blocks: Mapping[str, int], size: int) -> StepTrace:
        with trainer_of(blocks) as trainer:
            batch = task.empty_batch(size, fake)
            step = partial(_trace_step, trainer, batch, step_config, ALLOCATION_GRANULARITY[device])
            return cast(StepTrace, _run(step, size))

    few = trace_few_blocks(trace, sequences, stacks)
    memory = predict_memory(trace, sequences, step_config, blocks=len(find_blocks(model)), known=few)
    stacks = () if few is None else few.stacks
    with trainer_of({stack.name: min(stack.few + 1, len(stack.blocks)) for stack in stacks}) as trainer:
        batch, notes = task.empty_batch(sequences, fake), _notes(trainer)
        of_loss = partial(audit, trainer.model, batch, loss=lambda _, tensors: trainer.loss(*tensors))
        saved = Audit(rows=tuple(_repeat_rows(_run(of_loss, sequences), stacks)))
    tokens = task.count(*task.empty_batch(sequences, torch.device("cpu")))
    return replace(
        memory, label=label or config.precision_label, device=device, notes=notes, tokens=tokens, **saved_bytes(saved)
    )


def _repeat_rows(saved: Audit, stacks: Sequence[Stack]) -> Iterator[SavedStorage]:
    """What all blocks save, given few and one: those not traced save what the last but one does."""
    repeated = {stack.blocks[stack.few - 1]: stack.blocks[stack.few + 1 :] for stack in stacks}
    for row in saved:
        yield row
        for name, others in repeated.items():
            if f"{row.owner}.".startswith(f"{name}."):
                yield from (replace(row, owner=other + row.owner.removeprefix(name)) for other in others)


def plan_arms(
    config: TrainConfig, *, device: str = "cuda", progress: OnSubject = lambda subject: None
) -> list[MemoryPlan]:
    """Plan the memory of the configuration, then of each level of precision with bf16 parameters."""
    # At level "bf16" the loss uses whole logits, as in plain training; at others it follows the configuration.
    progress("a step of this config")
    models: dict[tuple[str, str], Any] = {}
    plans = [plan_memory(config, device=device, label="this config", whole=False, models=models)]
    for level in LEVELS:
        progress(f"a step at level {level}")
        changes = {} if config.precision.parameters == "bf16" else {"parameters": "bf16", "loss_scale": "none"}
        if level == "bf16":
            changes["loss"] = "whole"
        arm = at_level(config, level, changes)
        same = arm.model_dump() == config.model_dump()
        of_level = partial(plan_memory, arm, device=device, label=level, whole=False, models=models)
        plans.append(replace(plans[0], label=level) if same else of_level())
    return plans


def at_level(config: TrainConfig, level: str, changes: Mapping[str, Any]) -> TrainConfig:
    """The configuration at another level of precision, without overrides of its parts, and with `changes`."""
    tables = config.model_dump(exclude_none=True)
    for section, parts in LEVEL_PARTS.items():
        tables[section] = {key: value for key, value in tables[section].items() if key not in parts}
    tables["precision"] |= {"level": level, "autopilot": False, **changes}
    return parse_config(tables)


def plan_step(
    config: TrainConfig, *, gpu: str, gpus: int = 1, calibration: str | Path | None = None,
    progress: OnSubject = lambda subject: None,
) -> Forecast:  # fmt: skip
    """Predict the time and memory of a training step, as configured and with the best plan."""
    # `.configured` converts the same layers as `octavo train` on such a GPU. The best plan uses the fastest recipe for
    # each linear, or bf16 if none gains, with all other settings as configured.
    step = _trace_run(config, gpu, gpus, calibration, progress)
    layout, tokens = config.parallel.resolved, step.tokens
    activations: Any = step.plan.activations  # "auto" resolved
    request = plan_request(replace(config.resolved, matmul="fp8", recipe=AUTO, activations=activations))
    if layout.fp8_comm in ("on", "gather"):
        request = replace(request, recipes=tuple(recipe for recipe in request.recipes if recipe.supports_fp8_gather))
    best, times = default_decisions(step.model, request).by_cost(step.gpu, step.trace, eager=step.config.eager)

    def memory(subject: str, run: TrainConfig, plan: Plan, step_config: StepConfig) -> MemoryPlan:
        progress(f"the memory of {subject}")
        return step.memory(run, plan, step_config)

    own_memory = memory("this configuration", config, step.plan, step.config)
    own, fastest = (
        {(n, d.recipe, d.activation_storage) for n, d in plan.decisions.items() if d.recipe or d.activation_storage}
        for plan in (step.plan, best)
    )
    return forecast(
        best, times, step.gpu, step.trace, request.recipes, step.config, tokens,
        memory=own_memory if own == fastest else memory("the best plan", config, best, step.config),
        bf16_memory=memory("bf16", at_level(config, "bf16", {}), Plan({}), step.config.bf16),
        configured=(step.plan, own_memory), stages=step.stage_traces,
    )  # fmt: skip


def plan_configured(config: TrainConfig, *, gpu: str, gpus: int = 1, cache: TraceCache | None = None) -> ConfiguredRun:
    """Predict a training step as configured, and no other: the `.configured` of `plan_step`, in a third of its time."""
    step = _trace_run(config, gpu, gpus, None, lambda subject: None, cache)
    memory, stages = step.memory(config, step.plan, step.config), [own for own, _ in step.stage_traces] or [step.trace]
    time = predict_time(step.plan, step.gpu, stages, step.config, step.tokens, memory)
    return ConfiguredRun(plan=step.plan, time=time, memory=memory)


@dataclass(frozen=True, kw_only=True)
class _TracedRun:
    """A forward of a run's model, and what its steps need to be predicted on a GPU."""

    gpu: Gpu
    config: StepConfig
    model: torch.nn.Module
    plan: Plan
    trace: Trace
    sequences: int
    tokens: int
    offloaded: bool
    stages: list[Stage]
    cache: TraceCache
    stage_traces: tuple[tuple[Trace, Trace], ...] = ()  # As configured and in bf16, if these differ or are several

    def memory(self, run: TrainConfig, plan: Plan, step_config: StepConfig) -> MemoryPlan:
        """Predict the memory of a step of the same model in another configuration."""
        fp8 = plans_fp8(plan) and run.parallel.fp8_comm != "off"

        def message(size: int) -> tuple[int, int]:
            config: Any = self.model.config
            hidden = config.get_text_config().hidden_size
            return message_bytes(run.parallel, (size, run.data.sequence_length), hidden, fp8=fp8)

        predicted = stage_memory(
            self.stages, partial(_step_on_blocks, run, plan), plan, self.sequences, step_config,
            extrapolates=self.trace.extrapolated and not run.optim.groups, offloaded=self.offloaded, cache=self.cache,
            settings=trace_settings(run), message=message,
        )  # fmt: skip
        return replace(predicted, notes=(_VARLEN_NOTE,)) if is_varlen(self.model) else predicted


def _trace_run(
    config: TrainConfig, gpu: str, gpus: int, calibration: str | Path | None, progress: OnSubject,
    cache: TraceCache | None = None,
) -> _TracedRun:  # fmt: skip
    import transformers.masking_utils  # noqa: F401  which fake_tensors keeps from taking every batch for a packed one

    parallel = config.parallel
    gpu_spec, layout = with_measurements(find_gpu(gpu), calibration), parallel.resolved
    if parallel.tp * parallel.cp * parallel.ep * parallel.pp > 1:
        try:
            parallel.sizes(gpus)
            if parallel.ep > 1:
                check_experts_compute_in_fp8("fp8" in (config.resolved.matmul, config.resolved.activations))
        except ValueError as error:
            raise ConfigError(f"[parallel]: {error}") from None
        layout = replace(layout, dp_shard=-1)  # of what is left
    parts = config.optim.micro_batches
    step_config = StepConfig(
        **layout_settings(gpus // (parallel.tp * parallel.pp), layout, apart=parallel.tp) | {"gpus": gpus},
        **{name: getattr(parallel, name) for name in ("tp", "cp", "ep", "pp", "schedule")},
        micro_batches=parts, recompute=CHECKPOINTING[config.precision.checkpointing],
        resident=config.frozen == "fp8",
    )  # fmt: skip
    check_layout(parallel, config.optim, config.data, gpus)
    task = planned_task(config)
    fake = fake_device(torch.device("cuda"))
    model = _planned_model(task, "cuda")
    shape = config.optim.batch // (parts * step_config.batches), task.positions(model)
    compiles, kernels = compiles_blocks(config, model), gpu_spec.capability >= MIN_CAPABILITY
    config = with_activations(config, model, shape[0] * shape[1], gpu=kernels)
    (moved, flops), bf16 = step_cost(model, config), at_level(config, "bf16", {})
    step_config = replace(
        step_config, eager=not compiles, optimizer_bytes=moved, optimizer_flops=flops / parallel.pp,
        bf16_optimizer_bytes=step_cost(model, bf16)[0],
    )  # fmt: skip
    progress(f"the linear layers on {gpu_spec.name}")
    plan = _configured(model, config, gpu_spec, shape[0] * shape[1])
    check_gathered(plan, layout)

    loss = None
    if config.data.task != "language" or config.data.packing != "stream":
        task.adapt(model)
        loss = lambda copy: task.loss(copy, *task.empty_batch(shape[0], fake))  # noqa: E731

    def traced(own: Plan, stage: Stage) -> Trace:
        result: Trace = _run(partial(trace_stage, config, stage, shape, fake, loss, own), shape[0])
        return result

    stages, cache = stages_of_model(model, parallel), TraceCache() if cache is None else cache
    every = [Stage(model=model), *stages] if parallel.pp > 1 else stages
    settings, fused = (
        (trace_settings(config), shape),
        plan if kernels and not compiles and plan.activations == "fused" else None,
    )
    trace, *of_stages = trace_stages(every, partial(traced, ALL_BF16), settings, cache)
    bf16_stages = of_stages or [trace]
    if fused is not None:
        of_stages = trace_stages(stages, partial(traced, fused), (*settings, "fused"), cache)
    return _TracedRun(
        gpu=gpu_spec, config=step_config, model=model, plan=plan, sequences=shape[0],
        tokens=shape[0] * shape[1] // parallel.cp, trace=trace, offloaded=layout.cpu_offload, stages=stages,
        cache=cache, stage_traces=tuple(zip(of_stages, bf16_stages, strict=False)),
    )  # fmt: skip


def plans_fp8(plan: Plan) -> bool:
    """Return whether a plan is of FP8 layers, or of none; not of fused kernels alone."""
    return bool(plan.decisions) and bool(plan.converted or plan.activations != "fused")


def _configured(model: torch.nn.Module, config: TrainConfig, gpu: Gpu | None, tokens: int) -> Plan:
    """The trainer's plan on a GPU, which only recipe "auto" depends on. Raises ValueError as the trainer does."""
    precision = config.resolved
    if precision.matmul != "fp8":
        return Plan({}) if precision.activations == "bf16" else rule_plan(model, precision=precision)
    if precision.recipe == AUTO and config.frozen != "fp8":
        assert gpu is not None
        return plan_on_gpu(model, gpu, precision, None, tokens)
    return with_weight_only(rule_plan(model, precision=precision), config.weight_only, model)


def _step_on_blocks(
    config: TrainConfig, plan: Plan, stage: Stage, step_config: StepConfig, blocks: Mapping[str, int], size: int
) -> StepTrace:
    """Trace a training step of one micro-batch of `size` sequences on `blocks` of a stage's blocks."""
    fake = fake_device(torch.device("cuda"))
    if step_config.ep == 1:
        config = without_experts(config)
    packed = masks_documents(config, stage.model)
    with shared_mesh(config.parallel, fake) as mesh, fake_tensors(packed=packed) as mode:
        copy = copy_with_blocks(stage.model, blocks, mode, fake)
        task = planned_task(config)

        def divide(model: torch.nn.Module) -> Layout:
            layout = divide_layers(model, config.parallel, mesh, fp8=plans_fp8(plan))
            cut_ends(model, stage)
            return layout if stage.count == 1 else replace(layout, forward=stage_module(model, stage, config))

        trainer = Trainer(config, task.data, fake, copy, plan=restrict_plan(plan, copy), divide=divide)
        inputs, targets = task.empty_batch(size, fake)
        batch = trainer.layout.own_tokens(inputs), trainer.layout.own_labels(targets)
        if stage.count > 1:
            batch = stage_input(copy, stage, config, batch[0]), batch[1]
        granularity = ALLOCATION_GRANULARITY["cuda"]
        of_stage = None if stage.count == 1 else partial(_run_stage, trainer, batch)
        trace: StepTrace = _run(
            lambda: _trace_step(trainer, batch, step_config, granularity, forward_backward=of_stage), size
        )
        return trace


def _run_stage(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> None:
    inputs, labels = batch
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=trainer.config.precision.parameters == "fp32"):
        output = trainer.layout.forward(inputs, labels=labels)
    output.backward(torch.empty_like(output))
    trainer.optimizer.accumulate()


def planned_task(config: TrainConfig) -> Task:
    """The task of a run, with data as far as a plan needs it. Raises ConfigError as `check_model`."""
    kind = task_of(config)
    check_model(config.model, kind.kind)
    return kind(config, kind.stand_in(config))


def _planned_model(task: Task, device: str) -> Any:
    """The model of a run on meta, with the decisions how it computes attention and its loss."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = task.build(weights=False)
    auto_attention(model, task.config, device)
    if task.config.precision.loss == "chunked" and task.unit == "tokens":
        decide_head(model)
    return model


def _trace_step(
    trainer: Trainer, batch: tuple[Tensor, Tensor], step_config: StepConfig, allocation_granularity: int,
    forward_backward: Callable[[], Any] | None = None,
) -> StepTrace:  # fmt: skip
    run = forward_backward or (lambda: trainer.accumulate(*batch, targets=batch[1].numel()))
    optimizer = trainer.optimizer
    make_states(optimizer.inner)
    states = [t for t in tree_leaves(optimizer.state_dict()) if isinstance(t, Tensor)]
    earlier = make_gradients(optimizer.inner) if trainer.config.optim.micro_batches > 1 else []

    def optimizer_step() -> None:
        optimizer.gradient_norm(1.0)
        if getattr(optimizer.inner, "step_allocates", True):
            optimizer.inner.step()  # of masters whose parameters keep their gradients a kernel takes it, in place

    return follow_step(
        trainer.model, batch, states, earlier, run, optimizer_step, step_config=step_config,
        allocation_granularity=allocation_granularity,
        gradients=lambda: list(optimizer.gradients().values()),
    )  # fmt: skip


def _run(step: Any, size: int) -> Any:
    try:
        return step()
    except ConfigError:
        raise
    except Exception as error:  # of no common type
        raise ConfigError(f"the model cannot run a micro-batch of {size} sequences: {one_line(error)}") from error


def _notes(trainer: Trainer) -> tuple[str, ...]:
    notes = [trainer.loss_note, _VARLEN_NOTE if is_varlen(trainer.model) else trainer.attention_note()]
    if trainer.config.precision.checkpointing == "selective":
        notes.append("What selective checkpointing holds is in the first table only.")
    return tuple(filter(None, notes))


def console(
    path: Path, overrides: Sequence[str], *, memory: bool, gpu: str | None, gpus: int, calibration: Path | None,
    device: str, limit: float | None, layers: bool, as_json: bool, shrink: bool = False,
) -> None:  # fmt: skip
    """Print the output of `octavo plan`. Raises ValueError for wrong options; `limit`: GiB, None for an 80 GB GPU."""
    if not memory and gpu is None:
        raise ValueError("nothing to plan: give octavo plan --memory CONFIG, or octavo plan CONFIG --gpu h100")
    if calibration is not None and gpu is None:
        raise ValueError("--calibration needs --gpu, the GPU that was measured: octavo plan CONFIG --gpu h100")
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"--limit is the memory of the device in GiB, above 0; got {limit:g}")
    for option, is_set in (("--limit", limit is not None), ("--layers", layers)):
        if is_set and not memory:
            raise ValueError(f"{option} is for --memory: octavo plan --memory CONFIG")
    if memory and gpu is not None and as_json:
        raise ValueError("--json is for one of them at a time: --memory, or --gpu")
    note = partial(Console(stderr=True).print, "note:", markup=False, highlight=False, soft_wrap=True)
    config = load_config(path, overrides, change=change_of(shrink, note))
    if gpu is not None:
        with plan_progress() as progress:
            step = plan_step(config, gpu=gpu, gpus=gpus, calibration=calibration, progress=progress)
        if as_json:
            print(step.to_json())
        else:
            print(forecast_text(step, terminal_width()))
    if memory:
        _show_memory(config, device=device, limit=limit or 79.0, layers=layers, as_json=as_json)


def _show_memory(config: TrainConfig, *, device: str, limit: float, layers: bool, as_json: bool) -> None:
    if device not in ALLOCATION_GRANULARITY:
        raise ValueError(
            f"device is {' or '.join(ALLOCATION_GRANULARITY)}; got {device!r}{nearest(device, ALLOCATION_GRANULARITY)}"
        )
    limit_bytes, fitting = int(limit * 2**30), []
    with plan_progress() as progress:
        plans = plan_arms(config, device=device, progress=progress)
        for plan in () if as_json else plans:
            progress(f"the largest batch of {plan.label}")
            fitting.append(plan.largest_batch(limit_bytes))
    if as_json:
        print(json.dumps([json.loads(plan.to_json()) for plan in plans], indent=1))
        return
    if layers:
        print(plans[0])
    table = compare_memory(plans, baseline="bf16", fitting=fitting, limit_bytes=limit_bytes)
    print("\n".join([*table.lines(), *plan_notes(plans)]))


@contextmanager
def plan_progress() -> Iterator[OnSubject]:
    """Report progress on stderr: one changing line in a terminal, else one line per subject."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda subject: console.print(f"planning {subject} …", markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("planning") as status:
        yield lambda subject: status.update(f"planning {subject}")
