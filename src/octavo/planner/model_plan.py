"""plan: find out, before renting a GPU, which linear layers of a model gain from FP8 on it, in which recipe, what the
step gains, and how much memory it needs.

One forward runs on fake copies of the model, to count the calls of each linear layer, their sizes and the other work.
Steps run on such copies for their memory (`octavo.planner.step_memory`). If the blocks are equal, the copies have two
or three of them and the rest is extrapolated. The model may be on meta. A GPU is read only if the device is this
machine's and `octavo calibrate` has measured it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo.nn.convert import apply_plan, check_unconverted
from octavo.nn.experts import looks_like_experts
from octavo.nn.filters import FilterLike, both, of_precision
from octavo.nn.memory_audit import call
from octavo.nn.report import check_module
from octavo.nn.select import HEAD_REASON, default_plan, is_linear
from octavo.numerics.names import nearest
from octavo.numerics.plan import Plan
from octavo.numerics.precision import LEVELS, Precision
from octavo.numerics.recipe import Recipe
from octavo.optim.adamw import ADAMW, AdamW
from octavo.planner.decide import candidates
from octavo.planner.devices import Gpu, find_gpu, gpu_by_driver_name
from octavo.planner.fake import fake_batch, fake_device, fake_tensors
from octavo.planner.forecast import Forecast, LinearTimes, decide_by_cost, forecast
from octavo.planner.measured import Measurements, read_measurements
from octavo.planner.memory_plan import MemoryPlan
from octavo.planner.model_memory import default_loss, trace_step
from octavo.planner.stacks import copy_with_blocks, equal_stacks, restrict_plan, shortened
from octavo.planner.step import CHECKPOINTING, ParallelLayout, StepConfig, is_count, layout_settings
from octavo.planner.step_memory import StepTrace, predict_memory
from octavo.planner.timeline import ALLOCATION_GRANULARITY
from octavo.planner.trace import Trace, extrapolate_trace, trace
from octavo.runtime.blocks import find_blocks
from octavo.runtime.torch_compat import tree_leaves


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to decide: the recipes to choose from, and the layers in question."""

    recipes: tuple[Recipe, ...]
    precision: Precision
    filter: FilterLike | None
    heads: bool


def plan(
    model: nn.Module, batch: Any, seq: int | None = None, *, device: str | Path | Mapping[str, Any] | Gpu = "h100",
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
    request = _request(precision, recipe, skip, filter, heads)
    step_config = StepConfig(
        **layout_settings(world_size, parallel), micro_batches=micro_batches, eager=not compiled,
        recompute=CHECKPOINTING[checkpointing], optimizer_bytes=ADAMW.step_bytes(request.precision),
    )  # fmt: skip
    shapes = _shapes(model, batch, seq)
    rule = default_decisions(model, request)
    traced, own, size = _trace(model, shapes, batch, rule.plan if step_config.eager else Plan({}))
    tokens = seq * batch if seq is not None else max((c.m for cs in traced.calls.values() for c in cs), default=1)
    best, times = rule.by_cost(gpu, traced, eager=step_config.eager)
    check_gathered(best, parallel)
    offloaded = parallel is not None and parallel.cpu_offload

    def memory(plan: Plan, level: Precision, step_config: StepConfig) -> MemoryPlan:
        trace_blocks = partial(_trace_blocks, model, shapes, plan, level, checkpointing, step_config)
        blocks, stacks = len(find_blocks(model)), equal_stacks(model, plan) if traced.extrapolated else ()
        predicted = predict_memory(trace_blocks, size, step_config, blocks=blocks, stacks=stacks, offloaded=offloaded)
        return replace(predicted, notes=(_SELECTIVE_NOTE,) if checkpointing == "selective" else ())

    return forecast(
        best, times, gpu, traced, request.recipes, step_config, tokens,
        memory=memory(best, request.precision, step_config),
        bf16_memory=memory(Plan({}), LEVELS["bf16"], step_config.bf16), stages=((own, traced),),
    )  # fmt: skip


_SELECTIVE_NOTE = (
    "Memory is without recomputation, so an overestimate: octavo plan CONFIG --gpu predicts what selective "
    "checkpointing frees."
)


def check_gathered(plan: Plan, parallel: ParallelLayout | None) -> None:
    """Raise ValueError if weights shall be gathered in FP8 but their recipe cannot, as parallelize does."""
    gathers = parallel is not None and parallel.fp8_comm in ("on", "gather")
    recipes = {row.recipe.name for row in plan.decisions.values() if row.recipe and not row.recipe.supports_fp8_gather}
    if gathers and recipes and parallel is not None:
        raise ValueError(
            f"fp8_comm={parallel.fp8_comm!r} with recipe {', '.join(sorted(recipes))}: its weights cannot be gathered "
            "in FP8. Nearest: recipe 'rowwise'; or fp8_comm='off'"
        )


def _check(model: nn.Module, checkpointing: str) -> None:
    """Raise for an argument that is not a model, a frozen or distributed model, or an unknown name."""
    from torch.distributed.tensor import DTensor

    check_module("plan", model, ". For a file: octavo plan CONFIG")
    if checkpointing not in CHECKPOINTING:
        names = " or ".join(map(repr, CHECKPOINTING))
        raise ValueError(f"checkpointing is {names}; got {checkpointing!r}{nearest(checkpointing, CHECKPOINTING)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of this model requires a gradient: plan predicts training, unfreeze a parameter")
    parts = (name for name, p in model.named_parameters() if isinstance(p, DTensor))
    if (name := next(parts, None)) is not None:
        raise ValueError(
            f"{name} is a DTensor, distributed over ranks: plan the model before parallelize, fully_shard or "
            "parallelize_module; tensor, sequence, pipeline and expert parallelism are not predicted"
        )


def with_measurements(gpu: Gpu, calibration: str | Path | None) -> Gpu:
    """Add measured times to a GPU: those of a file, or this machine's if this is its GPU."""
    if calibration is not None:
        measured = read_measurements(Path(calibration))
        measured_gpu = gpu_by_driver_name(measured.device)
        if measured_gpu is not None and measured_gpu.name != gpu.name:
            raise ValueError(
                f"{calibration} was measured on {measured.device}, not on {gpu.name}: pass the table of that GPU, or "
                f"plan for {measured_gpu.name}"
            )
        return replace(gpu, measured=measured)
    if torch.cuda.is_available():
        from octavo.kernels import calibration as tables

        name, local = torch.cuda.get_device_name(), torch.device("cuda", torch.cuda.current_device())
        if gpu_by_driver_name(name) == gpu and (entries := tables.entries(local)):
            return replace(gpu, measured=Measurements(name, entries))
    return gpu


@dataclass(frozen=True, kw_only=True)
class DefaultDecisions:
    """The decisions of the rules about a model, which predicted cost may change."""

    plan: Plan  # The decisions
    linears: tuple[str, ...]  # Names of the linear layers in it, which may also list modules that store activations
    forced_bf16: Mapping[str, str]  # Layers that stay in bf16 whatever they cost, with the reason
    recipes: tuple[Recipe, ...]  # The recipes to choose from

    def by_cost(self, gpu: Gpu, traced: Trace, *, eager: bool) -> tuple[Plan, dict[str, LinearTimes]]:
        """Decide each linear layer by its time on a GPU."""
        by_cost, times = decide_by_cost(gpu, traced, self.linears, self.forced_bf16, self.recipes, eager=eager)
        stored = {
            name: replace(decision, activation_storage=self.plan[name].activation_storage)
            for name, decision in by_cost.items()
        }
        return Plan({**self.plan.decisions, **stored}, self.plan.activations), times


def default_decisions(model: nn.Module, request: PlanRequest) -> DefaultDecisions:
    """Decide by the rules of `octavo.nn.select`. Raises ValueError if a layer is converted already."""
    check_unconverted(model)
    precision = request.precision
    recipe = request.recipes[0] if precision.matmul == "fp8" else None
    plan = default_plan(model, recipe, precision.skip, request.filter, precision.activations)
    linears = tuple(name for name in plan if is_linear(model.get_submodule(name)))
    reasons = {name: plan[name].reason for name in linears if plan[name].recipe is None}
    forced = {name: why for name, why in reasons.items() if not (request.heads and why.startswith(HEAD_REASON))}
    return DefaultDecisions(plan=plan, linears=linears, forced_bf16=forced, recipes=request.recipes)


def trace_model(
    model: nn.Module, forward: Callable[[nn.Module], Any], shapes: Sequence[tuple[int, ...]], place: torch.device,
    prepare: Callable[[nn.Module], Any] = lambda copy: None, *, packed: bool = False,
) -> Trace:  # fmt: skip
    """Trace one forward of a model on fake copies, with only a few of its blocks if these are equal."""
    # `packed`: as `fake_tensors` takes it.

    def trace_copy(counts: Mapping[str, int]) -> Trace:
        with fake_tensors(packed=packed) as mode:
            copy = copy_with_blocks(model, counts, mode, place)
            prepare(copy)
            linears = {
                n: module for n, module in copy.named_modules() if is_linear(module) or looks_like_experts(module)
            }
            try:
                return trace(copy, linears, lambda: forward(copy))
            except (RuntimeError, TypeError, IndexError) as error:
                reason = " ".join(str(error).split())
                listed = [list(shape) for shape in shapes]
                raise ValueError(f"the model cannot run a batch of shapes {listed}: {reason}") from error

    for some in shortened(equal_stacks(model, Plan({}))):
        counts, short = {stack.name: stack.few for stack in some}, [stack for stack in some if stack.extra]
        try:
            few, *more = map(trace_copy, (counts, *(counts | {stack.name: stack.few + 1} for stack in short)))
        except ValueError:
            continue
        if traced := extrapolate_trace(few, more, short):
            return traced
    return trace_copy({})


def plan_request(precision: Precision, filter: FilterLike | None = None, *, heads: bool = False) -> PlanRequest:
    """Return the plan request of a precision."""
    recipes = candidates(precision.recipe if precision.matmul == "fp8" else "auto")
    return PlanRequest(recipes=recipes, precision=precision, filter=both(of_precision(precision), filter), heads=heads)


def _request(
    precision: Precision | None, recipe: str | Recipe, skip: Sequence[str], filter: FilterLike | None, heads: bool
) -> PlanRequest:
    if precision is not None:
        if not isinstance(precision, Precision):
            raise TypeError(
                f"precision is an octavo.Precision, as Precision.level('fp8', recipe='auto'); got {precision!r}"
            )
        if recipe != "auto" or skip:
            raise ValueError("precision includes recipe and skip: set them there, or pass them without precision")
        return plan_request(precision, filter, heads=heads)
    if isinstance(skip, str):
        raise TypeError(f"skip is a list of name patterns; got the string {skip!r}: write skip=[{skip!r}]")
    return replace(plan_request(Precision(skip=tuple(skip)), filter, heads=heads), recipes=candidates(recipe))


def fuse(copy: nn.Module, plan: Plan) -> None:
    """Make a copy of a planned model run the fused kernels of the plan, and products in high precision."""
    decisions = restrict_plan(plan, copy).decisions.items() if plan.activations == "fused" else ()
    fused = {name: replace(decision, recipe=None) for name, decision in decisions if decision.activation_storage}
    if fused:
        apply_plan(copy, Plan(fused, plan.activations, partial=True))


def _trace(model: nn.Module, shapes: Any, batch: Any, plan: Plan) -> tuple[Trace, Trace, int]:
    """Trace one forward, in bf16 and with the fused kernels of a plan; return also its number of sequences."""
    dtype, place = _dtype(model), fake_device(torch.device("cuda"))
    with fake_tensors():
        tensors = [leaf for leaf in tree_leaves(fake_batch(shapes, None, dtype, place)) if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError(
            f"the batch contains no tensor and no shape: {batch!r}. Pass tensors, or shapes by name, such as "
            "{'input_ids': (4, 2048)}; or sequences and tokens, such as plan(model, 4, 2048)"
        )
    sizes = [tuple(t.shape) for t in tensors]
    run = partial(trace_model, model, lambda copy: call(copy, fake_batch(shapes, None, dtype, place)), sizes, place)
    traced = run()
    fused = run(partial(fuse, plan=plan)) if plan.activations == "fused" else traced
    return traced, fused, sizes[0][0] if sizes[0] else 1


def _trace_blocks(
    model: nn.Module, shapes: Any, plan: Plan, precision: Precision, checkpointing: str, step_config: StepConfig,
    blocks: Mapping[str, int], size: int,
) -> StepTrace:  # fmt: skip
    place = fake_device(torch.device("cuda"))
    with fake_tensors() as mode:
        copy = copy_with_blocks(model, blocks, mode, place)
        part = restrict_plan(plan, copy)
        if part.converted or part.activation_modules:
            apply_plan(copy, part, keep_weights=precision.keep_weights)
        if checkpointing == "full":
            for block in find_blocks(copy):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        parameters = [p for p in copy.parameters() if p.requires_grad]
        # 16-bit masters extend bf16 parameters only.
        master: Any = "fp32" if any(p.dtype == torch.float16 for p in parameters) else precision.master
        master = None if precision.master == "none" else master
        inputs = fake_batch(shapes, size, _dtype(model), place)
        stepper = AdamW(parameters, states=precision.states, master=master) if parameters else None
        return trace_step(copy, inputs, stepper, default_loss, step_config, ALLOCATION_GRANULARITY["cuda"])


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _shapes(model: nn.Module, batch: Any, seq: int | None) -> Any:
    """Return the batch as `fake_batch` takes it."""
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
