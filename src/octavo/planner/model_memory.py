"""memory: predict the memory of a training step of any model before allocating a byte.

    print(octavo.inspect.memory(model, {"input_ids": (4, 2048), "labels": (4, 2048)}, optimizer=octavo.AdamW,
                                precision=octavo.Precision.level("fp8")))

It copies the model to fake tensors, converts the copy as requested, and runs one whole step on it: forward, backward,
optimizer. A 7B model takes about a second. The original model is not changed and may be on meta.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from octavo.nn.convert import apply_plan, rule_plan
from octavo.nn.memory_audit import audit, call, dtype_name
from octavo.numerics.precision import Precision
from octavo.optim import Optimizer
from octavo.optim.interface import follows_step
from octavo.planner.fake import fake_batch, fake_copy, fake_device, fake_tensors
from octavo.planner.memory_plan import BATCH, BUFFERS, PARAMETERS, STATES, MemoryPlan, summarize
from octavo.planner.timeline import Timeline

Loss = Callable[[nn.Module, Any], Tensor]
ALLOCATION_GRANULARITY = {"cuda": 512, "cpu": 1}
"""Supported devices, and the granularity of their allocators in bytes."""


def memory(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | torch.optim.Optimizer | None = None,
    precision: Precision | None = None,
    loss: Loss | None = None,
    micro_batches: int = 1,
    device: str | torch.device = "cuda",
) -> MemoryPlan:
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
        A `MemoryPlan`: `.peak`, `.at_peak`, `.kept_by_layer`, `.largest_batch(limit_bytes)`; prints as a table.

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
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    place = fake_device(device)

    def plan(size: int | None) -> MemoryPlan:
        with fake_tensors() as mode:
            copy = fake_copy(model, mode, place)
            if precision is not None:
                apply_plan(copy, rule_plan(copy, precision=precision), keep_weights=precision.keep_weights)
            inputs = fake_batch(batch, size, dtype, place)
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            if not tensors:
                raise ValueError(f"the batch contains no tensor and no shape: {batch!r}")
            stepper = _optimizer(optimizer, copy)
            saved = _run(lambda: audit(copy, inputs, loss=loss or default_loss), inputs)
            timeline = trace_step_memory(
                copy, inputs, stepper, loss or default_loss, micro_batches, ALLOCATION_GRANULARITY[device.type]
            )
            return summarize(
                timeline,
                label=_label(precision),
                device=device,
                batch=tensors[0].shape[0] if tensors[0].ndim else 1,
                tokens=max(tensors[0].numel(), 1),
                kept_by_dtype={dtype_name(name): size for name, size in saved.by_dtype.items()},
                kept_by_layer=saved.by_owner,
                notes=(),
                replan=plan,
            )

    return plan(None)


def trace_step_memory(
    model: nn.Module, inputs: Any, stepper: torch.optim.Optimizer | None, loss: Loss, micro_batches: int, granule: int,
    blocks: Iterable[nn.Module] = (),
) -> Timeline:  # fmt: skip
    """Record the timeline of a step of a fake model under FakeTensorMode, with the gradients of `blocks` labelled
    separately.

    Raises:
        ValueError: If the model cannot run.
    """
    states = [] if stepper is None else make_states(stepper)
    earlier = make_gradients(stepper) if stepper is not None and micro_batches > 1 else []

    def optimizer_step() -> None:
        if stepper is not None and follows_step(stepper):
            stepper.step()

    def forward_backward() -> None:
        _run(lambda: loss(model, inputs).backward(), inputs)

    return follow_step(
        model, inputs, states, earlier, forward_backward, optimizer_step, granule=granule, blocks=blocks
    )  # fmt: skip


def follow_step(
    model: nn.Module, batch: Any, states: Sequence[Tensor], earlier_gradients: Sequence[Tensor],
    forward_backward: Callable[[], Any], optimizer_step: Callable[[], Any], *, granule: int,
    blocks: Iterable[nn.Module] = (), gradients: Callable[[], Sequence[Tensor]] = tuple,
) -> Timeline:  # fmt: skip
    """Record the timeline of a step of a fake model under FakeTensorMode.

    Args:
        model: The model.
        batch: Its input.
        states: Tensors of the optimizer.
        earlier_gradients: Gradients of earlier micro-batches.
        forward_backward: Runs forward and backward.
        optimizer_step: Runs the rest of the step.
        granule: Granularity of the allocator in bytes.
        blocks: Modules whose gradients are labelled separately.
        gradients: Returns gradients that are not those of the model's parameters, after backward.
    """
    timeline = Timeline(granule)
    timeline.label(model.parameters(), PARAMETERS)
    timeline.label(model.buffers(), BUFFERS)
    timeline.label([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)], BATCH)
    timeline.label(states, STATES)
    timeline.label_gradients(earlier_gradients)
    timeline.follow(model, blocks)
    with timeline:
        forward_backward()
        timeline.label_gradients(gradients())
        timeline.set_phase("optimizer step")
        optimizer_step()
    return timeline


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the model's `.loss` if it has one, else the sum of its outputs that require a gradient."""
    outputs = call(model, batch)
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [leaf for leaf in tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
              if isinstance(leaf, Tensor) and leaf.requires_grad]  # fmt: skip
    if not leaves:
        raise ValueError(
            f"{type(model).__name__} returns nothing that requires a gradient: pass loss=, or unfreeze a parameter"
        )
    total: Tensor = sum(leaf.sum() for leaf in leaves)  # type: ignore[assignment]
    return total


def _run(step: Callable[[], Any], batch: Any) -> Any:
    """Run a step; report errors inside it as errors of the model and the batch."""
    try:
        return step()
    except (RuntimeError, TypeError, IndexError) as error:
        shapes = [list(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        reason = " ".join(str(error).split())
        raise ValueError(f"the model cannot run a batch of shapes {shapes}: {reason}") from error


def _optimizer(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer | None:
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


def make_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Allocate the states of all parameters and return them. Optimizers other than Octavo's take a step, so call it
    under FakeTensorMode.
    """
    if isinstance(optimizer, Optimizer):
        optimizer.make_states()
    else:
        make_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [t for state in optimizer.state.values() for t in tree_leaves(state) if isinstance(t, Tensor)]


def make_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Allocate gradients of all parameters, as an earlier micro-batch leaves them."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


def _label(precision: Precision | None) -> str:
    if precision is None:
        return "as given"
    return precision.label
