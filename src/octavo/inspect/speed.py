"""plan: which linears of any model gain from FP8 on a GPU, in what recipe, and what the step gains; before renting it.

    speed = octavo.inspect.plan(model, 4, 2048, device="h100")
    print(speed)
    octavo.convert(model, plan=speed.plan)

One forward is run on a copy of the model without storage, to see how often and at what sizes each linear is called, and
what else there is to do. The model may be on meta; no GPU is looked for.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from octavo.nn.report import is_converted
from octavo.nn.select import HEAD_KEPT, default_plan, is_linear
from octavo.nn.storage import call
from octavo.numerics.names import nearest
from octavo.numerics.recipe import Recipe
from octavo.planner.decide import candidates
from octavo.planner.devices import Gpu, find_gpu
from octavo.planner.fake import fake_batch, fake_copy, fake_tensors, stand_in
from octavo.planner.speed import SpeedPlan, plan_speed
from octavo.planner.step import CHECKPOINTING, OPTIMIZER_BYTES, Setting
from octavo.planner.trace import Trace, trace


def plan(
    model: nn.Module,
    batch: Any,
    seq: int | None = None,
    *,
    device: str | Path | Mapping[str, Any] | Gpu = "h100",
    gpus: int = 1,
    recipe: str | Recipe = "auto",
    heads: bool = False,
    skip: Sequence[str] = (),
    compiled: bool = False,
    checkpointing: str = "none",
    micro_batches: int = 1,
    states: str = "fp32",
) -> SpeedPlan:
    """Predict, linear by linear, whether FP8 pays on a GPU, and how long a training step takes with and without it.

    Args:
        model: Any module that is not converted yet, on any device including meta; not changed.
        batch: Sequences of one forward, with `seq`; or what the model is called with, as `octavo.memory` takes it.
        seq: Tokens of a sequence: the model is then called with `input_ids`, and `labels` where it takes them.
        device: A GPU: "h100", "h200", "l40s", "rtx4090", "b200", "mi300x", …; the path of a TOML file that describes
            one; such a table. See `octavo.planner.devices`.
        gpus: GPUs that share one copy of the model (FSDP2), each with a batch of its own.
        recipe: `"auto"` for the fastest, or one to be taken wherever it pays.
        heads: Decide vocabulary heads by cost too. By default they stay in bf16, as in `octavo.convert`, for the sake
            of the loss; the reason says what they would gain.
        skip: Name patterns of layers that stay as they are.
        compiled: Predict for torch.compile: no time of the host, and what is between products fused.
        checkpointing: `"none"`, `"selective"` or `"full"` recomputation of blocks.
        micro_batches: Forwards and backwards of a step.
        states: Moments of AdamW, `"fp32"` or `"fp8"`.

    Returns:
        A `SpeedPlan`: `.rows` with `.name`, `.converted`, `.recipe`, `.reason` and `.gain`; `.plan` for `convert`;
        `.planned` and `.bf16`; tables when printed; `.to_json()`.

    Raises:
        ValueError: For an unknown GPU or recipe, a model that cannot run the batch or is converted already.
        TypeError: For a batch or device in another form.
    """
    gpu, recipes = find_gpu(device), candidates(recipe)
    for name, given, known in (
        ("checkpointing", checkpointing, CHECKPOINTING), ("states", states, OPTIMIZER_BYTES),
    ):  # fmt: skip
        if given not in known:
            raise ValueError(f"{name} is {' or '.join(map(repr, known))}; got {given!r}{nearest(str(given), known)}")
    setting = Setting(
        gpus=gpus, micro_batches=micro_batches, eager=not compiled, recompute=CHECKPOINTING[checkpointing],
        states=states,
    )  # fmt: skip
    names, kept = undecided(model, recipes[0], heads=heads, skip=skip)
    shapes = _shapes(model, batch, seq)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    place = stand_in(torch.device("cuda"))
    with fake_tensors() as mode:
        copy = fake_copy(model, mode, place)
        inputs = fake_batch(shapes, None, dtype, place)
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if not tensors:
            raise ValueError(f"the batch holds no tensor and no shape: {batch!r}")
        found = traced(copy, lambda: call(copy, inputs), [tuple(t.shape) for t in tensors])
    tokens = seq * batch if seq is not None else max((c.m for cs in found.calls.values() for c in cs), default=1)
    return plan_speed(gpu, found, names, kept, recipes, setting, tokens)


def undecided(
    model: nn.Module, recipe: Recipe, *, heads: bool, skip: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Names of all linears, and the reasons of those that stay in bf16 whatever they cost."""
    if any(is_converted(module) for module in model.modules()):
        raise ValueError("this model is converted already: octavo.revert(model) first, or plan before converting")
    decisions = default_plan(model, recipe, skip)
    reasons = {name: decisions[name].reason for name in decisions if decisions[name].recipe is None}
    kept = {name: reason for name, reason in reasons.items() if not (heads and reason.startswith(HEAD_KEPT))}
    return list(decisions), kept


def traced(model: nn.Module, forward: Any, shapes: Sequence[tuple[int, ...]]) -> Trace:
    """A forward of a model without storage; a ValueError where it cannot run."""
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    try:
        return trace(model, linears, forward)
    except (RuntimeError, TypeError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the model cannot run a batch of shapes {[list(s) for s in shapes]}: {reason}") from error


def _shapes(model: nn.Module, batch: Any, seq: int | None) -> Any:
    """The batch as `fake_batch` takes it."""
    if seq is None:
        if isinstance(batch, int):
            raise TypeError("plan takes batch and seq, as in plan(model, 4, 2048), or what the model is called with")
        return batch
    for name, value in (("batch", batch), ("seq", seq)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is a number of 1 or more; got {value!r}")
    known = inspect.signature(model.forward).parameters
    return {"input_ids": (batch, seq)} | ({"labels": (batch, seq)} if "labels" in known else {})
