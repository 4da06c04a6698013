"""plan_memory and plan_step: predict memory and time of a run from its configuration alone.

The real trainer runs a step on fake tensors, on a few of the model's blocks; `octavo.planner.prediction` forecasts from
that. Of a hybrid layout one rank's part runs, in torch's fake process group of the ranks that share a layer or a
sequence; FSDP2 is added by rule (`octavo.planner.step_memory`).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from octavo.comm import ADAPTIVE_SPEC
from octavo.comm.encoding import parse_spec, width
from octavo.kernels.registry import FIRST_CAPABILITY
from octavo.nn.causal import decide_head
from octavo.nn.convert import rule_plan
from octavo.nn.frozen import with_weight_only
from octavo.nn.memory_audit import Audit, SavedStorage, audit
from octavo.numerics.plan import Plan
from octavo.numerics.precision import AUTO, LEVELS
from octavo.numerics.suggestions import nearest
from octavo.parallel.pipeline_model import SCHEDULES, StageModule, check_pipeline_structure, divide, remove_ends
from octavo.planner.auto_convert import plan_on_gpu
from octavo.planner.decide import candidates, decide_by_rule
from octavo.planner.devices import Gpu, find_gpu, with_measurements
from octavo.planner.fake import fake_device, fake_tensors
from octavo.planner.forecast import Forecast, PlannedRun, forecast_text
from octavo.planner.memory_plan import MemoryPlan, compare_memory, plan_notes, with_saved
from octavo.planner.prediction import ALL_BF16, OnSubject, Stage, Workload, forecast
from octavo.planner.step import CHECKPOINTING, StepConfig, check_gathered, layout_settings
from octavo.planner.step_memory import ALLOCATION_GRANULARITY, StepTrace, follow_step
from octavo.planner.trace import Stack, Trace, copy_with_blocks, fuse, restrict_plan, trace_model
from octavo.runtime.blocks import Absent, find_block_list
from octavo.runtime.terminal import width as terminal_width
from octavo.runtime.torch_compat import fake_process_group
from octavo.train.config.run_config import ConfigError, TrainConfig, load_config, naming, parse_config
from octavo.train.config.sections import ParallelConfig
from octavo.train.config.shrink import change_of
from octavo.train.layout import RankLayout, check_experts_compute_in_fp8, check_layout, divide_layers
from octavo.train.model import PARAMETER_DTYPES, auto_attention, check_model
from octavo.train.optimizer import step_cost
from octavo.train.packed_attention import is_varlen
from octavo.train.tasks.registry import task_of
from octavo.train.tasks.task import Task
from octavo.train.trainer import Trainer, compiles_blocks, with_activations

MIN_CAPABILITY = 10 * FIRST_CAPABILITY[0] + FIRST_CAPABILITY[1]
LEVEL_PARTS = {"precision": ("matmul", "activations", "master"), "optim": ("states",)}  # Each overrides a part of it

_VARLEN_NOTE = "Attention inside packed documents, without a mask; its time is that of one document in each sequence."


def plan_memory(
    config: TrainConfig, *, device: str = "cuda", label: str | None = None,
    models: dict[tuple[str, str], Any] | None = None,
) -> MemoryPlan:  # fmt: skip
    """Predict the memory of a training step of a run on one device, and what a forward saves for backward."""
    # `models`: those of the run's other levels of precision.
    task = planned_task(config)
    name, size = config.parallel.mode
    if name:
        hint = "octavo plan --memory predicts one GPU; for several give --gpu and --gpus"
        raise ConfigError(f"parallel.{name} = {size}: {hint}")
    models, key = {} if models is None else models, (config.precision.parameters, config.precision.loss)
    if key not in models:
        models[key] = _planned_model(task, device)
    stage, sequences = Stage(model=models[key]), config.optim.batch // config.optim.micro_batches
    tokens = sequences * task.positions(stage.model)
    config = with_activations(config, stage.model, tokens, gpu=device == "cuda")
    plan = None  # the trainer's own, which recipe "auto" decides by this machine's GPU
    if device == "cuda" and config.resolved.recipe != AUTO:
        plan = _configured(stage.model, config, None, tokens)
    workload = Workload(
        model=stage.model, stages=(stage,), plan=plan, sequences=sequences,
        trace_step=partial(_trace_step, config, device),
        step_config=StepConfig(micro_batches=config.optim.micro_batches),
        extrapolates=plan is not None and not config.optim.groups,  # which may tell blocks apart
    )  # fmt: skip
    memory = workload.memory()
    stacks = workload.traced[stage].stacks
    one_more = {stack.name: min(stack.few + 1, len(stack.blocks)) for stack in stacks}
    with _trainer(config, plan, device, stage, one_more) as trainer:
        batch = task.empty_batch(sequences, trainer.ranks.device)
        attention = _VARLEN_NOTE if is_varlen(trainer.model) else trainer.attention_note()
        notes = tuple(filter(None, (trainer.loss_note, attention)))
        with trainer.checkpointing.saved_outputs() as outputs, _running(sequences):
            saved = audit(trainer.model, batch, loss=lambda _, tensors: trainer.loss(*tensors))
        saved = Audit(rows=tuple(_repeat_rows([*saved, *outputs], stacks)))
    counted = task.count(*task.empty_batch(sequences, torch.device("cpu")))
    label = label or config.precision_label
    return replace(with_saved(memory, saved), label=label, device=device, notes=notes, tokens=counted)


def _repeat_rows(saved: Sequence[SavedStorage], stacks: Sequence[Stack]) -> Iterator[SavedStorage]:
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
    plans = [plan_memory(config, device=device, label="this config", models=models)]
    for level in LEVELS:
        progress(f"a step at level {level}")
        changes = {} if config.precision.parameters == "bf16" else {"parameters": "bf16", "loss_scale": "none"}
        if level == "bf16":
            changes["loss"] = "whole"
        arm = at_level(config, level, changes)
        same = arm.model_dump() == config.model_dump()
        of_level = partial(plan_memory, arm, device=device, label=level, models=models)
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
    """Predict the time and memory of a training step, as configured, and with the fastest recipe of each linear."""
    own, bf16 = _workloads(config, gpu, gpus, calibration, progress)
    assert own.gpu is not None and own.plan is not None and own.whole is not None
    activations: Any = own.plan.activations  # "auto" resolved
    precision = replace(config.resolved, matmul="fp8", recipe=AUTO, activations=activations)
    gathers = config.parallel.resolved.fp8_comm in ("on", "gather")
    recipes = [recipe for recipe in candidates(AUTO) if recipe.supports_fp8_gather or not gathers]
    rule = decide_by_rule(own.model, precision, recipes=recipes)
    plan, times = rule.by_cost(own.gpu, own.whole.calls, eager=own.step_config.eager)
    return forecast(own.planned(plan), bf16, recipes, times, configured=own, progress=progress)


def plan_configured(config: TrainConfig, *, gpu: str, gpus: int = 1) -> PlannedRun:
    """Predict a training step as configured, and no other: the `.configured` of `plan_step`, in a third of its time."""
    return _workloads(config, gpu, gpus, None, lambda subject: None)[0].predict()


def _workloads(
    config: TrainConfig, gpu: str, gpus: int, calibration: str | Path | None, progress: OnSubject
) -> tuple[Workload, Workload]:
    gpu_spec = with_measurements(find_gpu(gpu), calibration)
    step_config = _step_config(config, gpus)
    check_layout(config.parallel, config.optim, config.data, gpus)
    task, parallel = planned_task(config), config.parallel
    model = _planned_model(task, "cuda")
    sequences, length = config.optim.batch // (step_config.micro_batches * step_config.batches), task.positions(model)
    compiles, kernels = compiles_blocks(config, model), gpu_spec.capability >= MIN_CAPABILITY
    resolved = with_activations(config, model, sequences * length, gpu=kernels)
    (moved, flops), bf16 = step_cost(model, resolved), at_level(resolved, "bf16", {})
    step_config = replace(
        step_config, eager=not compiles, optimizer_bytes=moved, optimizer_flops=flops / parallel.pp,
        bf16_optimizer_bytes=step_cost(model, bf16)[0],
    )  # fmt: skip
    progress(f"the linear layers on {gpu_spec.name}")
    plan = _configured(model, resolved, gpu_spec, sequences * length)
    check_gathered(plan, parallel.resolved)
    fake, loss = fake_device(torch.device("cuda")), None
    if config.data.task != "language" or config.data.packing != "stream":
        task.adapt(model)
        loss = lambda copy: task.loss(copy, *task.empty_batch(sequences, fake))  # noqa: E731

    def traced(own: Plan, stage: Stage) -> Trace:
        with _running(sequences):
            return _trace_forward(resolved, stage, (sequences, length), loss, own)

    in_bf16, planned = (cache(partial(traced, each)) for each in (ALL_BF16, plan))
    whole = in_bf16(Stage(model=model))
    fuses = kernels and not compiles and plan.activations == "fused"
    configured = Workload(
        model=model, stages=stages_of_model(model, parallel), plan=plan, step_config=step_config, sequences=sequences,
        gpu=gpu_spec, whole=whole, forward=planned if fuses else in_bf16, tokens=sequences * length // parallel.cp,
        trace_step=partial(_trace_step, config, "cuda"), message=partial(_message_bytes, config),
        extrapolates=whole.extrapolated and not config.optim.groups, offloaded=parallel.cpu_offload,
        notes=(_VARLEN_NOTE,) if is_varlen(model) else (),
    )  # fmt: skip
    bf16 = without_experts(at_level(config, "bf16", {}))  # experts in bf16 are not distributed
    return configured, configured.at_bf16(trace_step=partial(_trace_step, bf16, "cuda"), forward=in_bf16)


def _step_config(config: TrainConfig, gpus: int) -> StepConfig:
    parallel, layout = config.parallel, config.parallel.resolved
    if parallel.tp * parallel.cp * parallel.ep * parallel.pp > 1:
        with naming("[parallel]", ValueError):
            parallel.sizes(gpus)
            if parallel.ep > 1:
                check_experts_compute_in_fp8("fp8" in (config.resolved.matmul, config.resolved.activations))
        layout = replace(layout, dp_shard=-1)  # of what is left
    return StepConfig(
        **layout_settings(gpus // (parallel.tp * parallel.pp), layout, apart=parallel.tp) | {"gpus": gpus},
        **{name: getattr(parallel, name) for name in ("tp", "cp", "ep", "pp", "schedule")},
        micro_batches=config.optim.micro_batches, recompute=CHECKPOINTING[config.precision.checkpointing],
        resident=config.frozen == "fp8",
    )  # fmt: skip


def planned_task(config: TrainConfig) -> Task:
    import transformers.masking_utils  # noqa: F401  which fake_tensors keeps from taking every batch for a packed one

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


def plans_fp8(plan: Plan | None) -> bool:
    """Whether a plan is of FP8 layers, or of none; not of fused kernels alone."""
    return plan is not None and bool(plan.decisions) and bool(plan.converted or plan.activations != "fused")


def _configured(model: torch.nn.Module, config: TrainConfig, gpu: Gpu | None, tokens: int) -> Plan:
    """The trainer's plan on a GPU, which only recipe "auto" depends on. Raises ValueError as the trainer does."""
    precision = config.resolved
    if precision.matmul != "fp8":
        return Plan({}) if precision.activations == "bf16" else rule_plan(model, precision=precision)
    if precision.recipe == AUTO and config.frozen != "fp8":
        assert gpu is not None
        return plan_on_gpu(model, gpu, precision, None, tokens)
    return with_weight_only(rule_plan(model, precision=precision), config.weight_only, model)


def masks_documents(config: TrainConfig, model: nn.Module) -> bool:
    """Whether attention reads a mask of all pairs of positions that keeps packed documents apart."""
    packed = config.data.task == "language" and config.data.packing != "stream"
    return packed and config.model.attention in ("auto", "sdpa", "eager") and not is_varlen(model)


def _running(size: int) -> AbstractContextManager[None]:
    return naming(f"the model cannot run a micro-batch of {size} sequences")


@contextmanager
def shared_mesh(parallel: ParallelConfig, device: torch.device) -> Iterator[DeviceMesh | None]:
    """A mesh of the ranks that share a layer or a sequence; None if each has all of both."""
    name, size = next(((n, s) for n in ("tp", "cp", "ep") if (s := getattr(parallel, n)) > 1), ("", 1))
    if size == 1:
        yield None
        return
    with fake_process_group(size):
        yield init_device_mesh(device.type, (size,), mesh_dim_names=(name,))


def stages_of_model(model: nn.Module, parallel: ParallelConfig) -> list[Stage]:
    if parallel.pp == 1:
        return [Stage(model=model)]
    count = parallel.pp * SCHEDULES[parallel.schedule]
    with naming("parallel.pp", ValueError):
        check_pipeline_structure(model, count)
    members, stages = find_block_list(model), []
    for index, blocks in enumerate(divide(len(members), count)):
        memo: dict[int, Any] = {id(block): Absent() for i, block in enumerate(members) if i not in blocks}
        stages.append(Stage(model=deepcopy(model, memo), index=index, count=count))
    return stages


def _own_part(
    model: Any, config: TrainConfig, mesh: DeviceMesh | None, stage: Stage, *, fp8: bool = False
) -> RankLayout:
    """Leave in a model what a rank has of its layers, in place, and not the embedding and head of other stages."""
    layout = divide_layers(model, config.parallel, mesh, fp8=fp8)
    if stage.count == 1:
        return layout
    remove_ends(model, first=stage.first, last=stage.last)
    own = [index for index, member in enumerate(find_block_list(model.base_model)) if not isinstance(member, Absent)]
    ends, blocks = {"first": stage.first, "last": stage.last}, range(own[0], own[-1] + 1)
    return replace(layout, forward=StageModule(model, blocks, **ends, token_parts=_token_parts(config)))


def _token_parts(config: TrainConfig) -> int:
    return config.parallel.tp if config.parallel.sequence_parallel else 1


def stage_input(model: Any, stage: Stage, config: TrainConfig, ids: Tensor) -> Tensor:
    """What a stage reads: ids [B,S], or hidden states of a rank's tokens [B,S,H]."""
    if stage.first:
        return ids
    hidden, tokens = model.config.get_text_config().hidden_size, ids.shape[1] // _token_parts(config)
    dtype = PARAMETER_DTYPES[config.precision.parameters]
    return torch.empty(ids.shape[0], tokens, hidden, dtype=dtype, device=ids.device, requires_grad=True)


def without_experts(config: TrainConfig) -> TrainConfig:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"ep": 1})})


def share_experts(trace: Trace, ranks: int) -> Trace:
    """The trace of a rank with 1 / `ranks` of the experts, to which all ranks send rows."""
    calls = {
        name: tuple(replace(call, experts=call.experts // ranks) if call.experts > 1 else call for call in own)
        for name, own in trace.calls.items()
    }
    elsewhere = trace.experts - trace.experts // ranks
    return replace(
        trace, calls=calls, parameters=trace.parameters - elsewhere, trained=trace.trained - elsewhere,
        experts=trace.experts // ranks,
    )  # fmt: skip


def _message_bytes(config: TrainConfig, workload: Workload, size: int) -> tuple[int, int]:
    """The bytes of bf16 hidden states of `size` sequences on one rank, and those of a message with them."""
    model: Any = workload.model
    hidden, tokens = model.config.get_text_config().hidden_size, config.data.sequence_length // _token_parts(config)
    bf16 = 2 * size * tokens * hidden
    rows, columns = (size, tokens * hidden) if hidden % 128 == 0 else (size * tokens, hidden)
    fp8 = plans_fp8(workload.plan) and config.parallel.fp8_comm != "off"
    return bf16, rows * width(columns, parse_spec(ADAPTIVE_SPEC)) if fp8 else bf16


def _trace_forward(
    config: TrainConfig, stage: Stage, shape: tuple[int, int], loss: Callable[[nn.Module], Any] | None, plan: Plan
) -> Trace:
    """Trace one forward of what a rank has of a stage, in bf16, with the fused kernels of a plan."""
    # `loss` runs a whole model of more than text.
    parallel, layouts, fake = config.parallel, dict[nn.Module, RankLayout](), fake_device(torch.device("cuda"))
    if parallel.ep > 1:  # experts in bf16 are not distributed: each rank has as many rows, of fewer experts
        trace = _trace_forward(without_experts(config), stage, shape, loss, plan)
        return share_experts(trace, parallel.ep)

    with shared_mesh(parallel, fake) as mesh:

        def prepare(copy: torch.nn.Module) -> None:
            fuse(copy, plan)
            layouts[copy] = _own_part(copy, config, mesh, stage)

        def forward(copy: torch.nn.Module) -> Any:
            ids = torch.zeros(shape, dtype=torch.int64, device=fake)
            layout = layouts[copy]
            inputs, labels = layout.own_tokens(ids), layout.own_labels(ids)
            with torch.autocast(fake.type, torch.bfloat16, enabled=config.precision.parameters == "fp32"):
                if stage.count > 1:
                    return layout.forward(stage_input(copy, stage, config, inputs), labels=labels)
                if loss is not None:
                    return loss(copy)
                positions = layout.positions(inputs)
                return copy(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False, **positions)

        return trace_model(stage.model, forward, [shape], fake, prepare, packed=masks_documents(config, stage.model))


@contextmanager
def _trainer(
    config: TrainConfig, plan: Plan | None, device: str, stage: Stage, blocks: Mapping[str, int]
) -> Iterator[Trainer]:
    """The trainer of a rank, on a fake copy with `blocks` of a stage's blocks; without a plan it makes its own."""
    fake, task = fake_device(torch.device(device)), planned_task(config)
    packed = masks_documents(config, stage.model)
    with shared_mesh(config.parallel, fake) as mesh, fake_tensors(device, packed=packed) as mode:
        copy = copy_with_blocks(stage.model, blocks, mode, fake)
        divide = partial(_own_part, config=config, mesh=mesh, stage=stage, fp8=plans_fp8(plan))
        yield Trainer(config, task.data, fake, copy, plan=plan and restrict_plan(plan, copy), divide=divide)


def _trace_step(
    config: TrainConfig, device: str, workload: Workload, stage: Stage, blocks: Mapping[str, int], size: int
) -> StepTrace:
    with _trainer(config, workload.plan, device, stage, blocks) as trainer:
        inputs, targets = trainer.task.empty_batch(size, trainer.ranks.device)
        inputs, labels = trainer.layout.own_tokens(inputs), trainer.layout.own_labels(targets)
        forward_backward: Callable[[], Any] = partial(trainer.accumulate, inputs, labels, targets=labels.numel())
        if stage.count > 1:
            inputs = stage_input(trainer.model, stage, config, inputs)
            forward_backward = partial(_run_stage, trainer, inputs, labels)
        optimizer = trainer.optimizer
        with _running(size):
            return follow_step(
                trainer.model, (inputs, labels), optimizer.inner, forward_backward, step_config=workload.step_config,
                granularity=ALLOCATION_GRANULARITY[device], states=optimizer.state_dict,
                gradients=lambda: list(optimizer.gradients().values()),
                before_step=partial(optimizer.gradient_norm, 1.0),
            )  # fmt: skip


def _run_stage(trainer: Trainer, inputs: Tensor, labels: Tensor) -> None:
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=trainer.config.precision.parameters == "fp32"):
        output = trainer.layout.forward(inputs, labels=labels)
    output.backward(torch.empty_like(output))
    trainer.optimizer.accumulate()


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
        print(step.to_json() if as_json else forecast_text(step, terminal_width()))
    if memory:
        _show_memory(config, device=device, limit=limit or 79.0, layers=layers, as_json=as_json)


def _show_memory(config: TrainConfig, *, device: str, limit: float, layers: bool, as_json: bool) -> None:
    if device not in (known := ALLOCATION_GRANULARITY):
        raise ValueError(f"device is {' or '.join(known)}; got {device!r}{nearest(device, known)}")
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
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda subject: console.print(f"planning {subject} …", markup=False, highlight=False, soft_wrap=True)
        return
    with console.status("planning") as status:
        yield lambda subject: status.update(f"planning {subject}")
