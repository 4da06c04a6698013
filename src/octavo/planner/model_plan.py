"""octavo.plan and octavo.inspect.memory: predict a training step of any model before renting a GPU."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo.nn.convert import apply_plan, rule_plan
from octavo.nn.filters import FilterLike
from octavo.nn.memory_audit import Audit, audit, call
from octavo.nn.report import check_module
from octavo.numerics.plan import Plan
from octavo.numerics.precision import LEVELS, Precision
from octavo.numerics.recipe import Recipe
from octavo.numerics.suggestions import nearest
from octavo.optim.adamw import ADAMW, AdamW
from octavo.planner.decide import candidates, decide_by_rule
from octavo.planner.devices import Gpu, find_gpu, with_measurements
from octavo.planner.fake import batch_errors, fake_batch, fake_device, fake_tensors
from octavo.planner.forecast import Forecast
from octavo.planner.memory_plan import MemoryPlan, with_saved
from octavo.planner.prediction import Stage, Workload, forecast
from octavo.planner.step import CHECKPOINTING, ParallelLayout, StepConfig, check_gathered, is_count, layout_settings
from octavo.planner.step_memory import ALLOCATION_GRANULARITY, StepTrace, follow_step
from octavo.planner.trace import copy_with_blocks, fuse, restrict_plan, trace_model
from octavo.runtime.blocks import find_blocks
from octavo.runtime.torch_compat import tree_leaves

Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None


def plan(
    model: nn.Module, batch: object, seq: int | None = None, *, device: str | Path | Mapping[str, Any] | Gpu = "h100",
    world_size: int = 1, parallel: ParallelLayout | None = None, precision: Precision | None = None,
    recipe: str | Recipe = "auto", skip: Sequence[str] = (), filter: FilterLike | None = None, heads: bool = False,
    compiled: bool = False, checkpointing: str = "none", micro_batches: int = 1, calibration: str | Path | None = None,
) -> Forecast:  # fmt: skip
    """Decide for each linear layer whether FP8 pays on a GPU, and predict the time and memory of a training step.

    Args:
        model: Any module that is not converted yet, on any device including meta; not changed.
        batch: Sequences of one forward on one GPU, with `seq`; or the input of the model, as `octavo.inspect.memory`
            takes it.
        seq: Tokens of a sequence: the model is then called with `input_ids`, and with `labels` if it takes them.
        device: "h100", "h200", "b200", …; a TOML file that describes a GPU; or such a table (`octavo.planner.devices`).
        world_size: Number of GPUs, each with its own batch.
        parallel: How they share the model, an `octavo.parallel.Parallel`; None: all share one copy (FSDP2).
        precision: Replaces `recipe` and `skip`; its `states` and `master` configure an `octavo.AdamW`. Default: fp8.
        recipe: `"auto"` for the fastest one, or the recipe to use wherever it pays.
        skip: Name patterns of layers to leave as they are.
        filter: A filter of `octavo.nn.filters`, or a callable; layers that it does not match stay as they are.
        heads: Decide vocabulary heads by cost too. By default they stay in bf16; the reason states their gain.
        compiled: Predict the time under torch.compile: no host time, and the work between products fused.
        checkpointing: `"none"`, `"selective"` or `"full"` recomputation of blocks. The memory of `"selective"` is only
            predicted for a configuration (`octavo plan`); here it is that without recomputation, with a note.
        micro_batches: Forwards and backwards of a step.
        calibration: A table of `octavo calibrate`, whose times replace predictions; default: this machine's.

    Returns:
        A plan that `octavo.convert(model, plan=...)` carries out: `.rows` with `.name`, `.converted`, `.recipe`,
        `.reason` and `.gain`. With its predictions: `.planned` and `.bf16`, times of a step; `.memory` and
        `.bf16_memory`, `.fits`, `.largest_batch`; `.break_even`; prints as tables; `.to_json()`.

    Raises:
        ValueError: For an unknown GPU or recipe, a calibration of another GPU, GPUs that cannot share the model so, a
            model that cannot run the batch, or one that is already converted or distributed.
        TypeError: For a batch, a device or `parallel` in another form.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8192, 8192, device="meta", dtype=torch.bfloat16))
        >>> octavo.plan(model, ((8192, 8192),), device="h100").rows[0].recipe
        'rowwise'
    """
    _check(model, checkpointing)
    gpu = with_measurements(find_gpu(device), calibration)
    level, recipes = _recipes(precision, recipe, skip)
    step_config = StepConfig(
        **layout_settings(world_size, parallel), micro_batches=micro_batches, eager=not compiled,
        recompute=CHECKPOINTING[checkpointing], optimizer_bytes=ADAMW.step_bytes(level),
    )  # fmt: skip
    shapes = _shapes(model, batch, seq)
    rule = decide_by_rule(model, level, filter, recipes=recipes, heads=heads)
    inputs = _Inputs.of(model, shapes, "cuda", "; or sequences and tokens, such as plan(model, 4, 2048)")
    forward = partial(trace_model, model, lambda copy: call(copy, inputs.make()), inputs.sizes, inputs.place)
    traced = forward()
    fuses = step_config.eager and rule.plan.activations == "fused"
    own = forward(partial(fuse, plan=rule.plan)) if fuses else traced
    best, times = rule.by_cost(gpu, traced.calls, eager=step_config.eager)
    check_gathered(best, parallel)

    step = partial(_planned_step, inputs, checkpointing == "full")
    workload = Workload(
        model=model, stages=(Stage(model=model),), plan=best, step_config=step_config, sequences=inputs.sequences,
        trace_step=partial(step, level), gpu=gpu, whole=traced, forward=lambda _: own, extrapolates=traced.extrapolated,
        tokens=math.prod(inputs.sizes[0]) if seq else max((c.m for cs in traced.calls.values() for c in cs), default=1),
        offloaded=parallel is not None and parallel.cpu_offload,
        notes=(_SELECTIVE_NOTE,) if checkpointing == "selective" else (),
    )  # fmt: skip
    bf16 = workload.at_bf16(trace_step=partial(step, LEVELS["bf16"]), forward=lambda _: traced)
    return forecast(workload, bf16, rule.recipes, times)


def _planned_step(
    inputs: "_Inputs", recomputes: bool, level: Precision, workload: Workload, stage: Stage, blocks: Mapping[str, int],
    size: int,
) -> StepTrace:  # fmt: skip
    """Trace a step of a plan with `octavo.AdamW` on `blocks` of a model's blocks."""
    with fake_tensors() as mode:
        copy = copy_with_blocks(stage.model, blocks, mode, inputs.place)
        part = restrict_plan(workload.plan or Plan({}), copy)
        if part.converted or part.activation_modules:
            apply_plan(copy, part, keep_weights=level.keep_weights)
        for block in find_blocks(copy) if recomputes else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        # 16-bit masters extend bf16 parameters only.
        has_fp16 = any(p.dtype == torch.float16 for p in copy.parameters() if p.requires_grad)
        master: Any = "fp32" if has_fp16 else None if level.master == "none" else level.master
        stepper = _optimizer(partial(AdamW, states=level.states, master=master), copy)
        granularity = ALLOCATION_GRANULARITY["cuda"]
        return trace_step(copy, inputs.make(size), stepper, default_loss, workload.step_config, granularity)


_SELECTIVE_NOTE = (
    "Memory is without recomputation, so an overestimate: octavo plan CONFIG --gpu predicts what selective "
    "checkpointing frees."
)


def memory(
    model: nn.Module, batch: object, *,
    optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    precision: Precision | None = None, loss: Loss | None = None, micro_batches: int = 1,
    device: str | torch.device = "cuda",
) -> MemoryPlan:  # fmt: skip
    """Predict the memory of a training step.

    Args:
        model: Any module, on any device including meta; not changed. Put it in training mode to plan training.
        batch: Input of the model: a mapping (keyword arguments), a tuple, or a tensor; of tensors, of which only shape
            and dtype are read, or of shapes, such as `{"input_ids": (4, 2048)}` (int64 for names that end with ids,
            mask or labels; else the dtype of the model's parameters).
        optimizer: A callable that makes an optimizer from the parameters, such as `octavo.AdamW` or a
            `functools.partial` of it; or an optimizer, whose type and defaults are used. None: no states. The states
            exist from the start, as from the second step on. Steps of `octavo.AdamW` need no memory beyond its states;
            for other optimizers temporaries are counted.
        precision: Converts the copy first; leave it out if the model is converted already.
        loss: `loss(model, batch)`; by default the model's `.loss` if it returns one, else the sum of its outputs.
        micro_batches: Forwards and backwards of one step. One runs; with more, the gradients of the earlier ones exist
            already.
        device: Device of the prediction, `"cuda"` or `"cpu"`; it need not be present.

    Returns:
        A `MemoryPlan`: `.peak`, `.at_peak`, `.saved_by_layer`, `.largest_batch(limit_bytes)`; prints as a table.

    Raises:
        ValueError: If the model cannot run the batch, with the reason.
        TypeError: For a batch in another form.

    Examples:
        >>> model = torch.nn.Linear(1024, 1024, dtype=torch.bfloat16, device="meta")
        >>> plan = octavo.inspect.memory(model, ((8192, 1024),), optimizer=octavo.AdamW)
        >>> plan.peak > 8192 * 1024 * 2
        True
    """
    device = torch.device(device)
    if device.type not in ALLOCATION_GRANULARITY:
        raise ValueError(f"memory plans for {' or '.join(ALLOCATION_GRANULARITY)}; got device {str(device)!r}")
    inputs = _Inputs.of(model, batch, device.type)
    audits: list[Audit] = []

    def step(workload: Workload, stage: Stage, blocks: Mapping[str, int], size: int) -> StepTrace:
        with fake_tensors(device.type) as mode:
            copy = copy_with_blocks(model, blocks, mode, inputs.place)
            if precision is not None:
                apply_plan(copy, rule_plan(copy, precision=precision), keep_weights=precision.keep_weights)
            tensors, stepper = inputs.make(size), _optimizer(optimizer, copy)
            with batch_errors(inputs.sizes):
                audits.append(audit(copy, tensors, loss=loss or default_loss))
            granularity = ALLOCATION_GRANULARITY[device.type]
            return trace_step(copy, tensors, stepper, loss or default_loss, workload.step_config, granularity)

    predicted = Workload(
        model=model, stages=(Stage(model=model),), plan=None, sequences=inputs.sequences, trace_step=step,
        step_config=StepConfig(micro_batches=micro_batches),
    ).memory()  # fmt: skip
    label = "as given" if precision is None else precision.label
    return replace(with_saved(predicted, audits[0]), label=label, device=str(device))


def _check(model: nn.Module, checkpointing: str) -> None:
    """Raise for an argument that is not a model, a frozen or distributed model, or an unknown name."""
    from torch.distributed.tensor import DTensor

    check_module("plan", model, ". For a file: octavo plan CONFIG")
    if checkpointing not in CHECKPOINTING:
        names = " or ".join(map(repr, CHECKPOINTING))
        raise ValueError(f"checkpointing is {names}; got {checkpointing!r}{nearest(checkpointing, CHECKPOINTING)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of this model requires a gradient: plan predicts training, unfreeze a parameter")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            remedy = "plan the model before parallelize, fully_shard or parallelize_module"
            limits = "tensor, sequence, pipeline and expert parallelism are not predicted"
            raise ValueError(f"{name} is a DTensor, distributed over ranks: {remedy}; {limits}")


def _recipes(precision: Precision | None, recipe: str | Recipe, skip: Sequence[str]) -> tuple[Precision, Any]:
    """Return the precision of a request, and the recipes to choose from; None for the precision's."""
    if precision is not None:
        if not isinstance(precision, Precision):
            example = "Precision.level('fp8', recipe='auto')"
            raise TypeError(f"precision is an octavo.Precision, as {example}; got {precision!r}")
        if recipe != "auto" or skip:
            raise ValueError("precision includes recipe and skip: set them there, or pass them without precision")
        return precision, None
    if isinstance(skip, str):
        raise TypeError(f"skip is a list of name patterns; got the string {skip!r}: write skip=[{skip!r}]")
    return Precision(skip=tuple(skip)), candidates(recipe)


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    batch: object  # Tensors or shapes, to be made without storage
    dtype: torch.dtype  # Of floating inputs given as shapes
    place: torch.device
    sizes: Sequence[tuple[int, ...]]  # Shapes of its tensors

    @classmethod
    def of(cls, model: nn.Module, batch: object, device: str, or_else: str = "") -> "_Inputs":
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        inputs = cls(batch=batch, dtype=dtype, place=fake_device(torch.device(device)), sizes=())
        with fake_tensors():
            sizes = [tuple(t.shape) for t in tree_leaves(inputs.make()) if isinstance(t, Tensor)]
        if not sizes:
            remedy = f"Pass tensors, or shapes by name, such as {{'input_ids': (4, 2048)}}{or_else}"
            raise ValueError(f"the batch contains no tensor and no shape: {batch!r}. {remedy}")
        return replace(inputs, sizes=sizes)

    @property
    def sequences(self) -> int:
        return self.sizes[0][0] if self.sizes[0] else 1

    def make(self, size: int | None = None) -> Any:
        return fake_batch(self.batch, None if self.sizes and size == self.sequences else size, self.dtype, self.place)


def _shapes(model: nn.Module, batch: object, seq: int | None) -> object:
    if seq is None:
        if isinstance(batch, int):
            raise TypeError("plan takes batch and seq, as in plan(model, 4, 2048), or the input of the model")
        return batch
    for name, value in (("batch", batch), ("seq", seq)):
        if not is_count(value):
            raise ValueError(f"{name} is an integer of 1 or more; got {value!r}")
    parameters = inspect.signature(model.forward).parameters
    shapes = {"input_ids": (batch, seq)} | ({"labels": (batch, seq)} if "labels" in parameters else {})
    return shapes | ({"use_cache": False} if "use_cache" in parameters else {})


def trace_step(
    model: nn.Module, inputs: object, stepper: torch.optim.Optimizer | None, loss: Loss, step_config: StepConfig,
    granularity: int,
) -> StepTrace:  # fmt: skip
    """Record a step of a fake model under FakeTensorMode."""

    def forward_backward() -> None:
        with batch_errors([tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]):
            loss(model, inputs).backward()

    return follow_step(model, inputs, stepper, forward_backward, step_config=step_config, granularity=granularity)


def default_loss(model: nn.Module, batch: object) -> Tensor:
    """Return the model's `.loss` if it has one, else the sum of its outputs that require a gradient."""
    outputs = call(model, batch)
    if isinstance(loss := getattr(outputs, "loss", None), Tensor):
        return loss
    leaves = [leaf for leaf in tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
              if isinstance(leaf, Tensor) and leaf.requires_grad]  # fmt: skip
    if not leaves:
        problem = f"{type(model).__name__} returns nothing that requires a gradient"
        raise ValueError(f"{problem}: pass loss=, or unfreeze a parameter")
    return sum((leaf.sum() for leaf in leaves[1:]), leaves[0].sum())


def _optimizer(optimizer: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer | None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None or not parameters:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        names = inspect.signature(type(optimizer)).parameters
        copy = type(optimizer)(parameters, **{k: v for k, v in optimizer.defaults.items() if k in names})
    else:
        copy = optimizer(parameters)
    if not isinstance(copy, torch.optim.Optimizer):
        raise TypeError(f"optimizer(parameters) must return a torch.optim.Optimizer; got a {type(copy).__name__}")
    return copy
