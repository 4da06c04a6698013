"""plan: which linears of any model gain from FP8 on a GPU, in what recipe, what the step gains, and what memory it
takes; before renting it.

    plan = octavo.plan(model, 4, 2048, device="h100", world=8)
    print(plan)
    octavo.convert(model, plan=plan)

One forward is run on copies of the model without storage, to see how often and at what sizes each linear is called and
what else there is to do; and steps, for their memory (`octavo.inspect.footprints`). The copies have two and three of
the model's blocks where these are equal, and what 80 do follows from the difference. The model may be on meta; no GPU
is looked for, unless the device is that of this machine and `octavo calibrate` has measured it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from octavo.inspect.footprints import FEW, Followed, are_equal, followed, of_step, part_of, with_blocks
from octavo.inspect.memory import GRANULES, follow, own_loss
from octavo.nn import convert
from octavo.nn.filters import Given, both, of_precision
from octavo.nn.memory_audit import call
from octavo.nn.report import check_module, is_converted
from octavo.nn.select import HEAD_KEPT, default_plan, is_linear
from octavo.numerics.names import nearest
from octavo.numerics.plan import Plan
from octavo.numerics.precision import LEVELS, Precision
from octavo.numerics.recipe import Recipe
from octavo.optim import AdamW
from octavo.planner.decide import candidates
from octavo.planner.devices import Gpu, by_driver, find_gpu
from octavo.planner.fake import fake_batch, fake_tensors, stand_in
from octavo.planner.footprint import Footprint
from octavo.planner.forecast import Decided, Forecast, by_cost, forecast
from octavo.planner.measured import Measurements, read_measurements
from octavo.planner.step import CHECKPOINTING, Layout, Setting, is_count, spread
from octavo.planner.trace import Trace, of_more_blocks, trace
from octavo.runtime.blocks import find_blocks


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be decided: which recipes there are to choose from, and which linears it is about."""

    recipes: tuple[Recipe, ...]
    precision: Precision
    filter: Given | None
    heads: bool


def plan(
    model: nn.Module,
    batch: Any,
    seq: int | None = None,
    *,
    device: str | Path | Mapping[str, Any] | Gpu = "h100",
    world: int = 1,
    parallel: Layout | None = None,
    precision: Precision | None = None,
    recipe: str | Recipe = "auto",
    skip: Sequence[str] = (),
    filter: Given | None = None,
    heads: bool = False,
    compiled: bool = False,
    checkpointing: str = "none",
    micro_batches: int = 1,
    calibration: str | Path | None = None,
) -> Forecast:
    """Decide, linear by linear, whether FP8 pays on a GPU, and predict the time and memory of a training step.

    Args:
        model: Any module that is not converted yet, on any device including meta; not changed.
        batch: Sequences of one forward on one GPU, with `seq`; or what the model is called with, as
            `octavo.inspect.memory` takes it.
        seq: Tokens of a sequence: the model is then called with `input_ids`, and `labels` where it takes them.
        device: A GPU: "h100", "h200", "l40s", "rtx4090", "b200", "mi300x", …; the path of a TOML file that describes
            one; such a table. See `octavo.planner.devices`.
        world: GPUs, each with a batch of its own.
        parallel: How they share the model, an `octavo.parallel.Parallel`; None: all of them share one copy (FSDP2).
            Tensor, sequence, pipeline and expert parallelism are not predicted.
        precision: The whole request at once, instead of `recipe` and `skip`. Its `states` and `master` are those of an
            `octavo.AdamW`. By default level O1.
        recipe: `"auto"` for the fastest, or one to be taken wherever it pays.
        skip: Name patterns of layers that stay as they are.
        filter: A rule of `octavo.nn.filters`, or a callable: layers that it does not match stay as they are.
        heads: Decide vocabulary heads by cost too. By default they stay in bf16, as in `octavo.convert`, for the sake
            of the loss; the reason says what they would gain.
        compiled: Predict the time for torch.compile: no time of the host, and what is between products fused.
        checkpointing: `"none"`, `"selective"` or `"full"` recomputation of blocks. The memory of `"selective"` is
            predicted for a configuration only (`octavo plan`); here it is that without any, and printed so.
        micro_batches: Forwards and backwards of a step.
        calibration: A table of `octavo calibrate`, for times that go before predicted ones; by default this machine's.

    Returns:
        A plan that `octavo.convert(model, plan=...)` carries out: `.rows` with `.name`, `.converted`, `.recipe`,
        `.reason` and `.gain`. With its predictions: `.planned` and `.bf16`, times of a step; `.memory` and
        `.bf16_memory`, `.fits`, `.largest_batch`; `.break_even`; tables when printed; `.to_json()`.

    Raises:
        ValueError: For an unknown GPU or recipe, a calibration of another GPU, GPUs that cannot share the model so, a
            model that cannot run the batch, or is converted or spread over ranks already.
        TypeError: For a batch, a device or `parallel` in another form.
    """
    _check(model, checkpointing)
    gpu = with_measurements(find_gpu(device), calibration)
    asked = _asked(precision, recipe, skip, filter, heads)
    setting = Setting(
        **spread(world, parallel), micro_batches=micro_batches, eager=not compiled,
        recompute=CHECKPOINTING[checkpointing], states=asked.precision.states,
    )  # fmt: skip
    shapes = _shapes(model, batch, seq)
    rule, kept = undecided(model, asked)
    found, size = _trace(model, shapes, batch)
    tokens = seq * batch if seq is not None else max((c.m for cs in found.calls.values() for c in cs), default=1)
    cost = by_cost(gpu, found, linears_of(model, rule), kept, asked.recipes, eager=setting.eager)
    decided = decided_plan(rule, cost)
    check_gathered(decided, parallel)
    offloaded = parallel is not None and parallel.cpu_offload

    def memory(wanted: Plan, level: Precision, how: Setting) -> Footprint:
        steps = partial(_followed, model, shapes, wanted, level, checkpointing, how)
        equal = are_equal(model, wanted)
        found = of_step(steps, len(find_blocks(model)), how, size, equal=equal, offloaded=offloaded)
        return replace(found, note=_ALL_KEPT) if checkpointing == "selective" else found

    return forecast(
        decided, cost.times, gpu, found, asked.recipes, setting, tokens,
        memory=memory(decided, asked.precision, setting), bf16_memory=memory(Plan({}), LEVELS["bf16"], setting.plain),
    )  # fmt: skip


_ALL_KEPT = (
    "Memory is that without recomputation, so too much: what selective checkpointing frees is predicted for a "
    "configuration, by octavo plan CONFIG --gpu."
)


def check_gathered(decided: Plan, parallel: Layout | None) -> None:
    """Raises ValueError where weights are to be gathered in FP8 whose recipe has no such form, as parallelize does."""
    asked = parallel is not None and parallel.fp8_comm in ("on", "gather")
    recipes = {row.recipe.name for row in decided.decisions.values() if row.recipe and not row.recipe.gathers_w}
    if asked and recipes and parallel is not None:
        raise ValueError(
            f"fp8_comm={parallel.fp8_comm!r} with recipe {', '.join(sorted(recipes))}: its weights cannot be gathered "
            "in FP8. Nearest: recipe 'rowwise'; or fp8_comm='off'"
        )


def _check(model: nn.Module, checkpointing: str) -> None:
    """Raises for what is no model, one that nothing trains, one of which this process has a part; and for a name."""
    from torch.distributed.tensor import DTensor

    check_module("plan", model, ". For a file: octavo plan CONFIG")
    if checkpointing not in CHECKPOINTING:
        known = " or ".join(map(repr, CHECKPOINTING))
        raise ValueError(f"checkpointing is {known}; got {checkpointing!r}{nearest(checkpointing, CHECKPOINTING)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of this model requires a gradient: a plan is for training, unfreeze something")
    parts = (name for name, p in model.named_parameters() if isinstance(p, DTensor))
    if (name := next(parts, None)) is not None:
        raise ValueError(
            f"{name} is a DTensor, a part of which is on each rank: plan the model before it is spread (parallelize, "
            "fully_shard, parallelize_module); tensor, sequence, pipeline and expert parallelism are not predicted"
        )


def with_measurements(gpu: Gpu, calibration: str | Path | None) -> Gpu:
    """A GPU with what was measured on it: in a file, or on this machine where this is its GPU.

    Raises:
        ValueError: For a file that cannot be read, or whose times are of another GPU.
    """
    if calibration is not None:
        found = read_measurements(Path(calibration))
        theirs = by_driver(found.device)
        if theirs is not None and theirs.name != gpu.name:
            raise ValueError(
                f"{calibration} was measured on {found.device}, not on {gpu.name}: give the table of that GPU, or "
                f"plan for {theirs.name}"
            )
        return replace(gpu, measured=found)
    if torch.cuda.is_available():
        from octavo.kernels import calibration as tables

        name, here = torch.cuda.get_device_name(), torch.device("cuda", torch.cuda.current_device())
        if by_driver(name) == gpu and (entries := tables.entries(here)):
            return replace(gpu, measured=Measurements(name, entries))
    return gpu


def undecided(model: nn.Module, asked: Asked) -> tuple[Plan, dict[str, str]]:
    """What the default rules say of a model, and the reasons of linears that stay in bf16 whatever they cost."""
    if any(is_converted(module) for module in model.modules()):
        raise ValueError("this model is converted already: octavo.revert(model) first, or plan before converting")
    rule = _by_rule(model, asked, asked.filter)
    reasons = {name: rule[name].reason for name in linears_of(model, rule) if rule[name].recipe is None}
    return rule, {name: why for name, why in reasons.items() if not (asked.heads and why.startswith(HEAD_KEPT))}


def linears_of(model: nn.Module, rule: Plan) -> list[str]:
    """Names of the linears in a plan, which may also name what stores activations."""
    return [name for name in rule if is_linear(model.get_submodule(name))]


def decided_plan(rule: Plan, cost: Decided) -> Plan:
    """The plan of linears decided by cost, with what stores activations beside them."""
    decisions = dict(rule.decisions)
    for name, decision in cost.decisions.items():
        decisions[name] = replace(decision, storage=decisions[name].storage)
    return Plan(decisions, rule.activations)


def traced(
    model: nn.Module, forward: Callable[[nn.Module], Any], shapes: Sequence[tuple[int, ...]], place: torch.device
) -> Trace:
    """One forward of a model, run on copies without storage: of a few of its blocks where these are equal.

    Args:
        model: On any device; not changed.
        forward: Runs a copy.
        shapes: Of what it is called with.
        place: Where copies are said to be.

    Raises:
        ValueError: Where the model cannot run.
    """

    def of_copy(count: int | None) -> Trace:
        with fake_tensors() as mode:
            copy = with_blocks(model, count, mode, place)
            linears = {name: module for name, module in copy.named_modules() if is_linear(module)}
            try:
                return trace(copy, linears, lambda: forward(copy))
            except (RuntimeError, TypeError, IndexError) as error:
                reason = " ".join(str(error).split())
                wanted = [list(shape) for shape in shapes]
                raise ValueError(f"the model cannot run a batch of shapes {wanted}: {reason}") from error

    if are_equal(model, Plan({})):
        names = {id(module): name for name, module in model.named_modules()}
        blocks = [names[id(block)] for block in find_blocks(model)]
        if len(blocks) > FEW + 1 and (found := of_more_blocks(of_copy(FEW), of_copy(FEW + 1), FEW, blocks)):
            return found
    return of_copy(None)


def asked_of(precision: Precision, filter: Given | None = None, *, heads: bool = False) -> Asked:
    """What a precision asks to be decided."""
    recipes = candidates(precision.recipe if precision.matmul == "fp8" else "auto")
    return Asked(recipes=recipes, precision=precision, filter=both(of_precision(precision), filter), heads=heads)


def _asked(
    precision: Precision | None, recipe: str | Recipe, skip: Sequence[str], filter: Given | None, heads: bool
) -> Asked:
    if precision is not None:
        if not isinstance(precision, Precision):
            raise TypeError(
                f"precision is an octavo.Precision, as Precision.level('O1', recipe='auto'); got {precision!r}"
            )
        if recipe != "auto" or skip:
            raise ValueError("precision holds the recipe and what to skip: set them there, or give them alone")
        return asked_of(precision, filter, heads=heads)
    if isinstance(skip, str):
        raise TypeError(f"skip is a list of name patterns; got the string {skip!r}: write skip=[{skip!r}]")
    return replace(asked_of(Precision(skip=tuple(skip)), filter, heads=heads), recipes=candidates(recipe))


def _by_rule(model: nn.Module, asked: Asked, filter: Given | None) -> Plan:
    recipe = asked.recipes[0] if asked.precision.matmul == "fp8" else None
    return default_plan(model, recipe, asked.precision.skip, filter, asked.precision.activations)


def _trace(model: nn.Module, shapes: Any, batch: Any) -> tuple[Trace, int]:
    """One forward, and how many sequences it has."""
    dtype, place = _dtype(model), stand_in(torch.device("cuda"))
    with fake_tensors():
        tensors = [leaf for leaf in tree_leaves(fake_batch(shapes, None, dtype, place)) if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError(
            f"the batch holds no tensor and no shape: {batch!r}. Give tensors, or shapes by name, as "
            "{'input_ids': (4, 2048)}; or sequences and tokens, as plan(model, 4, 2048)"
        )
    sizes = [tuple(t.shape) for t in tensors]
    found = traced(model, lambda copy: call(copy, fake_batch(shapes, None, dtype, place)), sizes, place)
    return found, sizes[0][0] if sizes[0] else 1


def _followed(
    model: nn.Module, shapes: Any, plan: Plan, precision: Precision, checkpointing: str, setting: Setting,
    blocks: int | None, size: int,
) -> Followed:  # fmt: skip
    place = stand_in(torch.device("cuda"))
    with fake_tensors() as mode:
        copy = with_blocks(model, blocks, mode, place)
        part = part_of(plan, copy)
        if part.converted or part.storing:
            convert(copy, plan=part, keep_weights=precision.keep_weights, verbose=False)
        if checkpointing == "full":
            for block in find_blocks(copy):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        parameters = [p for p in copy.parameters() if p.requires_grad]
        # Masters of 16 bits more are bf16's.
        master: Any = "fp32" if any(p.dtype == torch.float16 for p in parameters) else precision.master
        make = partial(AdamW, states=precision.states, master=None if precision.master == "none" else master)
        inputs = fake_batch(shapes, size, _dtype(model), place)
        stepper = make(parameters) if parameters else None
        timeline = follow(copy, inputs, stepper, own_loss, setting.micro_batches, GRANULES["cuda"], find_blocks(copy))
        return followed(copy, timeline, setting)


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _shapes(model: nn.Module, batch: Any, seq: int | None) -> Any:
    """The batch as `fake_batch` takes it."""
    if seq is None:
        if isinstance(batch, int):
            raise TypeError("plan takes batch and seq, as in plan(model, 4, 2048), or what the model is called with")
        return batch
    for name, value in (("batch", batch), ("seq", seq)):
        if not is_count(value):
            raise ValueError(f"{name} is a number of 1 or more; got {value!r}")
    known = inspect.signature(model.forward).parameters
    found = {"input_ids": (batch, seq)} | ({"labels": (batch, seq)} if "labels" in known else {})
    return found | ({"use_cache": False} if "use_cache" in known else {})
