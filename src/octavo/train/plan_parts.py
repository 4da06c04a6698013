"""What one rank of a hybrid layout has of a model, on fake tensors: for `octavo.train.run_plan`.

The rank runs the code of a run: `tensor_parallel`, `context_parallel`, `expert_parallel` and the stages of a pipeline,
in torch's fake process group of the ranks that share a layer or a sequence. FSDP2 is added by rule
(`octavo.planner.sharded_memory`).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from octavo.comm import ADAPTIVE_SPEC
from octavo.comm.encoding import parse_spec, width
from octavo.nn.experts import looks_like_experts
from octavo.numerics.plan import Plan
from octavo.parallel.pipeline_model import SCHEDULES, StageModule, check_pipeline_structure, divide, remove_ends
from octavo.planner.memory_plan import MemoryPlan
from octavo.planner.model_plan import trace_model
from octavo.planner.pipeline_time import most_in_flight, schedule_actions
from octavo.planner.step import StepConfig
from octavo.planner.step_memory import Beside, StepTrace, leading_blocks, predict_memory
from octavo.planner.timeline import ACTIVATIONS, BATCH, GATHERED, TEMPORARIES
from octavo.planner.trace import Trace
from octavo.runtime.blocks import Absent, find_block_list, find_blocks
from octavo.runtime.torch_compat import fake_process_group
from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.config.sections import ParallelConfig
from octavo.train.layout import Layout, divide_layers
from octavo.train.model import PARAMETER_DTYPES

TraceStage = Callable[["Stage", StepConfig, int | None, int], StepTrace]
"""Traces a step of a stage with this many blocks, or all, and this many sequences."""

T = TypeVar("T")


@dataclass(frozen=True)
class TraceCache:
    """Traces that the plans of several layouts of a run share: equal stages of other pipelines, on other numbers of
    GPUs.
    """

    entries: dict[Any, Any] = field(default_factory=dict)

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Return the entry of a key, made if there is none."""
        if key not in self.entries:
            self.entries[key] = make()
        entry: T = self.entries[key]
        return entry


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

    def traced(key: StageKind, blocks: int | None, other: int) -> StepTrace:
        stage = kinds[key]
        part = replace(key, blocks=key.blocks[:blocks])
        return cache.get((settings, step, part, other), lambda: trace(stage, step_config, blocks, other))

    def memory(key: Any, other: int, beside: Beside | None = None) -> MemoryPlan:
        model = kinds[key].model
        return predict_memory(
            lambda blocks, sequences: traced(key, blocks, sequences), other, step_config,
            blocks=len(find_blocks(model)), leading=leading_blocks(model, plan) if extrapolates else None,
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


def _with_stage(stage: Stage, trace: Callable[[Stage], Trace]) -> tuple[Stage, Trace]:
    return stage, trace(stage)


def trace_stages(
    stages: list[Stage], trace: Callable[[Stage], Trace], settings: Any, cache: TraceCache
) -> list[Trace]:  # fmt: skip
    """Trace the forward of each stage; of equal ones, one."""
    traces = []
    for stage in stages:
        key = settings, stage.count > 1, stage_kind(stage, Plan({}))
        made, traced = cache.get(key, partial(_with_stage, stage, trace))
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
    loss: Callable[[nn.Module], Any] | None = None,
) -> Trace:  # fmt: skip
    """Trace one forward of what a rank has of a stage, in bf16; `loss` runs a whole model of more than text."""
    parallel, layouts = config.parallel, dict[nn.Module, Layout]()
    if parallel.ep > 1:  # experts in bf16 are not distributed: each rank has as many rows, of fewer experts
        trace = trace_stage(without_experts(config), stage, shape, fake, loss)
        return share_experts(trace, parallel.ep)

    with shared_mesh(parallel, fake) as mesh:

        def prepare(copy: torch.nn.Module) -> None:
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

        return trace_model(stage.model, forward, [shape], fake, prepare)
