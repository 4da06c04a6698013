"""plan_memory and plan_step: predict memory and time of a run from its configuration alone.

The memory comes from a training step on fake tensors. The real trainer runs the step, so the plan includes conversion,
loss, activation checkpointing, accumulation, masters and moments. It reads no data and no weights: a vocabulary still
to be trained counts as `data.vocab_size`.

`plan_step` forecasts a step on a GPU that this machine need not have (`octavo.planner.forecast`): the time from one
forward of the same model, the memory from steps of the same trainer on two and three of the model's blocks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.nn.causal_head import decide_head
from octavo.nn.convert import rule_plan
from octavo.nn.frozen import with_weight_only
from octavo.nn.memory_audit import Audit, SavedStorage, audit
from octavo.numerics.plan import Plan
from octavo.numerics.precision import AUTO, LEVELS
from octavo.optim.interface import follows_step
from octavo.planner.auto_convert import plan_on_gpu
from octavo.planner.devices import Gpu, find_gpu
from octavo.planner.fake import fake_device, fake_tensors
from octavo.planner.forecast import ConfiguredRun, Forecast, forecast, predict_time
from octavo.planner.memory_plan import MemoryPlan
from octavo.planner.model_memory import make_gradients, make_states
from octavo.planner.model_plan import (
    check_gathered,
    default_decisions,
    plan_request,
    with_measurements,
)
from octavo.planner.step import CHECKPOINTING, StepConfig, layout_settings
from octavo.planner.step_memory import (
    TRACED_BLOCKS,
    StepTrace,
    copy_with_blocks,
    follow_step,
    leading_blocks,
    predict_memory,
    restrict_plan,
)
from octavo.planner.timeline import ALLOCATION_GRANULARITY
from octavo.planner.trace import Trace
from octavo.runtime.blocks import find_blocks
from octavo.runtime.torch_compat import tree_leaves
from octavo.train.checkpoint.pretrained import one_line
from octavo.train.config.run_config import ConfigError, TrainConfig, parse_config
from octavo.train.layout import Layout, check_experts_compute_in_fp8, check_layout, divide_layers
from octavo.train.model import check_model
from octavo.train.parameter_groups import muon_flops
from octavo.train.plan_parts import (
    Stage,
    TraceCache,
    cut_ends,
    message_bytes,
    shared_mesh,
    stage_input,
    stage_memory,
    stage_module,
    stages_of_model,
    trace_settings,
    trace_stage,
    trace_stages,
    without_experts,
)
from octavo.train.tasks.registry import task_of
from octavo.train.tasks.task import Task
from octavo.train.trainer import Trainer

OnSubject = Callable[[str], None]
"""Called with the subject of each part of the plan when it begins."""

LEVEL_PARTS = {"precision": ("matmul", "activations", "master"), "optim": ("states",)}
"""Settings that override a part of the level."""


def _silent(subject: str) -> None:
    """No progress."""


def plan_memory(
    config: TrainConfig, *, device: str = "cuda", label: str | None = None, whole: bool = True
) -> MemoryPlan:  # fmt: skip
    """Predict the memory of a training step of a run."""
    # The step runs one micro-batch. If a step has several, the gradients of earlier ones exist already.
    import transformers.masking_utils  # noqa: F401  which fake_tensors keeps from taking every batch for a packed one

    task = planned_task(config)
    for name in ("tp", "cp", "ep", "pp"):
        if (size := getattr(config.parallel, name)) > 1:
            raise ConfigError(
                f"parallel.{name} = {size}: octavo plan --memory predicts one GPU; for several give --gpu and --gpus"
            )
    fake = fake_device(torch.device(device))
    model = _planned_model(task)

    step_config = StepConfig(micro_batches=config.optim.micro_batches)
    sequences = config.optim.batch // config.optim.micro_batches
    notes: list[str] = []

    plan, leading = None, None
    if not whole and device == "cuda" and config.resolved.recipe != AUTO:
        plan = _configured(model, config, None, sequences * task.positions(model))
        leading = leading_blocks(model, plan)
    names, count = _block_names(model), 0 if leading is None else len(find_blocks(model))

    def trace(blocks: int | None, size: int) -> StepTrace:
        with fake_tensors(device) as mode:
            copy = copy_with_blocks(model, blocks, mode, fake)
            trainer = Trainer(config, task.data, fake, copy, plan=plan and restrict_plan(plan, copy))
            batch = task.empty_batch(size, fake)
            saved = None
            few = (leading or 0) + TRACED_BLOCKS  # traced to compare with one block more
            if size == sequences and blocks != few:  # other sizes are planned for their peaks
                of_loss = partial(audit, trainer.model, batch, loss=lambda _, tensors: trainer.loss(*tensors))
                saved = _run(of_loss, size)
                if blocks is not None:
                    saved = Audit(rows=tuple(_repeat_rows(saved, names, blocks)))
                notes[:] = _notes(trainer)
            return _trace_step(trainer, batch, step_config, ALLOCATION_GRANULARITY[device], saved)

    memory = predict_memory(trace, sequences, step_config, blocks=count, leading=leading)
    tokens = task.count(*task.empty_batch(sequences, torch.device("cpu")))
    return replace(memory, label=label or config.precision_label, device=device, notes=tuple(notes), tokens=tokens)


def _block_names(model: torch.nn.Module) -> list[str]:
    """Names of the blocks of a model, each with a dot at its end."""
    names = {id(module): name for name, module in model.named_modules()}
    return [f"{names[id(block)]}." for block in find_blocks(model)]


def _repeat_rows(saved: Audit, names: list[str], traced: int) -> Iterator[SavedStorage]:
    """What all blocks save, given the first `traced` ones: those not traced save what the last but one does."""
    for row in saved:
        yield row
        if row.owner.startswith(name := names[traced - 2]):
            yield from (replace(row, owner=other + row.owner.removeprefix(name)) for other in names[traced:])


def plan_arms(config: TrainConfig, *, device: str = "cuda", progress: OnSubject = _silent) -> list[MemoryPlan]:
    """Plan the memory of the configuration, then of each level of precision with bf16 parameters."""
    # At level "bf16" the loss uses whole logits, as in plain training; at others it follows the configuration.
    progress("a step of this config")
    plans = [plan_memory(config, device=device, label="this config", whole=False)]
    for level in LEVELS:
        progress(f"a step at level {level}")
        changes = {} if config.precision.parameters == "bf16" else {"parameters": "bf16", "loss_scale": "none"}
        if level == "bf16":
            changes["loss"] = "whole"
        plans.append(plan_memory(at_level(config, level, changes), device=device, label=level, whole=False))
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
    progress: OnSubject = _silent,
) -> Forecast:  # fmt: skip
    """Predict the time and memory of a training step, as configured and with the best plan."""
    # `.configured` converts the same layers as `octavo train` on such a GPU. The best plan uses the fastest recipe for
    # each linear, or bf16 if none gains, with all other settings as configured.
    step = _trace_run(config, gpu, gpus, calibration, progress)
    layout, tokens = config.parallel.resolved, step.tokens
    request = plan_request(replace(config.resolved, matmul="fp8", recipe=AUTO))
    if layout.fp8_comm in ("on", "gather"):
        request = replace(request, recipes=tuple(recipe for recipe in request.recipes if recipe.supports_fp8_gather))
    best, times = default_decisions(step.model, request).by_cost(step.gpu, step.trace, eager=step.config.eager)

    def memory(subject: str, run: TrainConfig, plan: Plan, step_config: StepConfig) -> MemoryPlan:
        progress(f"the memory of {subject}")
        return step.memory(run, plan, step_config)

    own_memory = memory("this configuration", config, step.plan, step.config)
    return forecast(
        best, times, step.gpu, step.trace, request.recipes, step.config, tokens,
        memory=own_memory if _same_decisions(step.plan, best) else memory("the best plan", config, best, step.config),
        bf16_memory=memory("bf16", at_level(config, "bf16", {}), Plan({}), step.config.bf16),
        configured=(step.plan, own_memory), stages=step.stage_traces if config.parallel.pp > 1 else (),
    )  # fmt: skip


def plan_configured(config: TrainConfig, *, gpu: str, gpus: int = 1, cache: TraceCache | None = None) -> ConfiguredRun:
    """Predict a training step as configured, and no other: the `.configured` of `plan_step`, in a third of its time."""
    step = _trace_run(config, gpu, gpus, None, _silent, cache)
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
    stage_traces: tuple[tuple[Trace, Trace], ...] = ()

    def memory(self, run: TrainConfig, plan: Plan, step_config: StepConfig) -> MemoryPlan:
        """Predict the memory of a step of the same model in another configuration."""
        fp8 = bool(plan.decisions) and run.parallel.fp8_comm != "off"

        def message(size: int) -> tuple[int, int]:
            hidden = self.model.config.get_text_config().hidden_size  # type: ignore[operator, union-attr]
            return message_bytes(run.parallel, (size, run.data.sequence_length), hidden, fp8=fp8)

        return stage_memory(
            self.stages, partial(_step_on_blocks, run, plan), plan, self.sequences, step_config,
            extrapolates=self.trace.extrapolated, offloaded=self.offloaded, cache=self.cache,
            settings=trace_settings(run), message=message,
        )  # fmt: skip


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
        states=config.resolved.states, resident=config.frozen == "fp8",
    )  # fmt: skip
    check_layout(parallel, config.optim, config.data, gpus)
    task = planned_task(config)
    fake = fake_device(torch.device("cuda"))
    model = _planned_model(task)
    shape = config.optim.batch // (parts * step_config.batches), task.positions(model)
    compiles = config.run.compile != "none" and not config.uncompilable and bool(find_blocks(model))
    newton_schulz = muon_flops(model, config.optim) / parallel.pp
    step_config = replace(step_config, newton_schulz=newton_schulz, eager=not compiles)
    progress(f"the linear layers on {gpu_spec.name}")
    plan = _configured(model, config, gpu_spec, shape[0] * shape[1])
    check_gathered(plan, layout)

    loss = None
    if config.data.task != "language":
        loss = lambda copy: task.loss(copy, *task.empty_batch(shape[0], fake))  # noqa: E731

    def traced(stage: Stage) -> Trace:
        return _run(partial(trace_stage, config, stage, shape, fake, loss), shape[0])  # type: ignore[no-any-return]

    stages, cache = stages_of_model(model, parallel), cache or TraceCache()
    every = [Stage(model=model), *stages] if parallel.pp > 1 else stages
    trace, *of_stages = trace_stages(every, traced, (trace_settings(config), shape), cache)
    return _TracedRun(
        gpu=gpu_spec, config=step_config, model=model, plan=plan, sequences=shape[0],
        tokens=shape[0] * shape[1] // parallel.cp, trace=trace, offloaded=layout.cpu_offload, stages=stages,
        cache=cache, stage_traces=tuple((t, t) for t in of_stages),
    )  # fmt: skip


def _configured(model: torch.nn.Module, config: TrainConfig, gpu: Gpu | None, tokens: int) -> Plan:
    """The trainer's plan on a GPU, which only recipe "auto" depends on. Raises ValueError as the trainer does."""
    precision = config.resolved
    if precision.matmul != "fp8":
        return rule_plan(model, precision=precision) if precision.activations == "fp8" else Plan({})
    if precision.recipe == AUTO and config.frozen != "fp8":
        assert gpu is not None
        return plan_on_gpu(model, gpu, precision, None, tokens)
    return with_weight_only(rule_plan(model, precision=precision), config.weight_only, model)


def _same_decisions(one: Plan, other: Plan) -> bool:
    """Whether two plans convert the same layers in the same way."""
    return {
        (n, d.recipe, d.activation_storage) for n, d in one.decisions.items() if d.recipe or d.activation_storage
    } == {(n, d.recipe, d.activation_storage) for n, d in other.decisions.items() if d.recipe or d.activation_storage}


def _step_on_blocks(
    config: TrainConfig, plan: Plan, stage: Stage, step_config: StepConfig, blocks: int | None, size: int
) -> StepTrace:
    """Trace a training step of one micro-batch of `size` sequences on `blocks` of a stage's blocks."""
    fake = fake_device(torch.device("cuda"))
    if step_config.ep == 1:
        config = without_experts(config)
    with shared_mesh(config.parallel, fake) as mesh, fake_tensors() as mode:
        copy = copy_with_blocks(stage.model, blocks, mode, fake)
        task = planned_task(config)

        def divide(model: torch.nn.Module) -> Layout:
            layout = divide_layers(model, config.parallel, mesh, fp8=bool(plan.decisions))
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
    """Run forward and backward of a stage."""
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


def _planned_model(task: Task) -> torch.nn.Module:
    """The model of a run on meta, with the decision how it computes its loss."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = task.build(weights=False)
    if task.config.precision.loss == "chunked" and task.unit == "tokens":
        decide_head(model)
    return model


def _trace_step(
    trainer: Trainer,
    batch: tuple[Tensor, Tensor],
    step_config: StepConfig,
    allocation_granularity: int,
    saved: Audit | None = None,
    forward_backward: Callable[[], Any] | None = None,
) -> StepTrace:
    """Record one step of the trainer."""
    run = forward_backward or (lambda: trainer.accumulate(*batch, targets=batch[1].numel()))
    optimizer = trainer.optimizer
    make_states(optimizer.inner)
    states = [t for t in tree_leaves(optimizer.state_dict()) if isinstance(t, Tensor)]
    earlier = make_gradients(optimizer.inner) if trainer.config.optim.micro_batches > 1 else []

    def optimizer_step() -> None:
        optimizer.gradient_norm(1.0)
        if follows_step(optimizer.inner):
            optimizer.inner.step()  # of masters whose parameters keep their gradients a kernel takes it, in place

    return follow_step(
        trainer.model, batch, states, earlier, run, optimizer_step, step_config=step_config,
        allocation_granularity=allocation_granularity,
        gradients=lambda: list(optimizer.gradients().values()), saved=saved,
    )  # fmt: skip


def _run(step: Any, size: int) -> Any:
    try:
        return step()
    except ConfigError:
        raise
    except Exception as error:  # of no common type
        raise ConfigError(f"the model cannot run a micro-batch of {size} sequences: {one_line(error)}") from error


def _notes(trainer: Trainer) -> tuple[str, ...]:
    notes = [trainer.loss_note, trainer.attention_note()]
    if trainer.config.precision.checkpointing == "selective":
        notes.append("What selective checkpointing holds is in the first table only.")
    return tuple(filter(None, notes))
