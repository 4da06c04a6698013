"""memory: what a training step of any model takes, before a byte is allocated.

    print(octavo.inspect.memory(model, {"input_ids": (4, 2048), "labels": (4, 2048)}, optimizer=octavo.AdamW,
                                precision=octavo.Precision.level("O1")))

The model is copied onto tensors without storage, converted as asked for, and one whole step is run on the copy:
forward, backward, optimizer. A 7B model takes about a second. The model given is not touched, and may be on meta.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from octavo.nn import convert
from octavo.nn.memory_audit import audit, call, dtype_name
from octavo.numerics.precision import Precision
from octavo.optim import AdamW
from octavo.planner.fake import fake_batch, fake_copy, fake_tensors, stand_in
from octavo.planner.memory import BATCH, BUFFERS, PARAMETERS, STATES, MemoryPlan, summarize
from octavo.planner.timeline import Timeline

Loss = Callable[[nn.Module, Any], Tensor]
GRANULES = {"cuda": 512, "cpu": 1}
"""Devices that can be planned for, and the bytes in whole multiples of which their allocators hand out memory."""


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
        model: Any module, on any device including meta; not changed. In training mode if it is to be trained so.
        batch: What the model is called with: a mapping (keyword arguments), a tuple, or a tensor; of tensors, of which
            only shape and dtype are read, or of shapes, as `{"input_ids": (4, 2048)}` (int64 where the name says so:
            ids, mask, labels; else the dtype of the model's parameters).
        optimizer: What makes one from the parameters, as `octavo.AdamW` or a `functools.partial` of it; or one, whose
            type and defaults are taken. None: no states. The states are there from the beginning, as from the second
            step on. Steps of `octavo.AdamW` take no more than its states; of others temporaries are counted.
        precision: Converts the copy first; a model that is converted already needs none.
        loss: `loss(model, batch)`; by default the model's `.loss` where it returns one, else the sum of its outputs.
        micro_batches: Forwards and backwards of one step. One is run; with more, the gradients of those before are
            there already.
        device: `"cuda"`, `"cpu"`: what the prediction is for. None has to be there.

    Returns:
        A `MemoryPlan`: `.peak`, `.at_peak`, `.kept_by_layer`, `.largest_batch(limit_bytes)`; a table when printed.

    Raises:
        ValueError: Where the model cannot run the batch, with the reason.
        TypeError: For a batch in another form.
    """
    device = torch.device(device)
    if device.type not in GRANULES:
        raise ValueError(f"memory is planned for {' or '.join(GRANULES)}; got device {str(device)!r}")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    place = stand_in(device)

    def plan(size: int | None) -> MemoryPlan:
        with fake_tensors() as mode:
            copy = fake_copy(model, mode, place)
            if precision is not None:
                convert(copy, precision=precision, verbose=False)
            inputs = fake_batch(batch, size, dtype, place)
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            if not tensors:
                raise ValueError(f"the batch holds no tensor and no shape: {batch!r}")
            stepper = _optimizer(optimizer, copy)
            kept = _run(lambda: audit(copy, inputs, loss=loss or own_loss), inputs)
            timeline = follow(copy, inputs, stepper, loss or own_loss, micro_batches, GRANULES[device.type])
            return summarize(
                timeline,
                label=_label(precision),
                device=device,
                batch=tensors[0].shape[0] if tensors[0].ndim else 1,
                tokens=max(tensors[0].numel(), 1),
                kept_by_dtype={dtype_name(name): size for name, size in kept.by_dtype.items()},
                kept_by_layer=kept.by_owner,
                notes=(),
                again=plan,
            )

    return plan(None)


def follow(
    model: nn.Module, inputs: Any, stepper: torch.optim.Optimizer | None, loss: Loss, micro_batches: int, granule: int,
    blocks: Iterable[nn.Module] = (),
) -> Timeline:  # fmt: skip
    """The timeline of a step of a model without storage, under FakeTensorMode, gradients of `blocks` told from others.

    Raises:
        ValueError: Where the model cannot run.
    """
    timeline = Timeline(granule)
    timeline.hold(model.parameters(), PARAMETERS)
    timeline.hold(model.buffers(), BUFFERS)
    timeline.hold([leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)], BATCH)
    if stepper is not None:
        timeline.hold(make_states(stepper), STATES)
        if micro_batches > 1:
            timeline.are_gradients(make_gradients(stepper))
    timeline.follow(model, blocks)
    with timeline:
        _run(lambda: loss(model, inputs).backward(), inputs)
        timeline.phase("optimizer step")
        if stepper is not None and not isinstance(stepper, AdamW):
            stepper.step()
    return timeline


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The model's `.loss` where it returns one, else the sum of its outputs that have a gradient."""
    outputs = call(model, batch)
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [leaf for leaf in tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
              if isinstance(leaf, Tensor) and leaf.requires_grad]  # fmt: skip
    if not leaves:
        raise ValueError(
            f"{type(model).__name__} returns nothing that has a gradient: give loss=, or unfreeze something"
        )
    total: Tensor = sum(leaf.sum() for leaf in leaves)  # type: ignore[assignment]
    return total


def _run(step: Callable[[], Any], batch: Any) -> Any:
    """What goes wrong inside is a matter of the model and the batch."""
    try:
        return step()
    except (RuntimeError, TypeError, IndexError) as error:
        shapes = [list(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        reason = " ".join(str(error).split())
        raise ValueError(f"the model cannot run a batch of shapes {shapes}: {reason}") from error


def _optimizer(wanted: Any, model: nn.Module) -> torch.optim.Optimizer | None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if wanted is None or not parameters:
        return None
    if isinstance(wanted, torch.optim.Optimizer):
        known = inspect.signature(type(wanted)).parameters
        made = type(wanted)(parameters, **{k: v for k, v in wanted.defaults.items() if k in known})
    else:
        made = wanted(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer(parameters) makes a torch.optim.Optimizer; it made a {type(made).__name__}")
    return made


def make_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The states of all parameters, made now. Under FakeTensorMode: other optimizers than ours take a step for it."""
    if isinstance(optimizer, AdamW):
        optimizer.make_states()
    else:
        make_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [t for state in optimizer.state.values() for t in tree_leaves(state) if isinstance(t, Tensor)]


def make_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Gradients of all parameters, made now, as an earlier micro-batch leaves them."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    return [param.grad for group in optimizer.param_groups for param in group["params"]]


def _label(precision: Precision | None) -> str:
    if precision is None:
        return "as given"
    return precision.label
