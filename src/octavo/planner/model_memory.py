"""memory: predict the memory of a training step of any model before allocating a byte.

It copies the model to fake tensors, converts the copy as requested, and runs one whole step on it: forward, backward,
optimizer. A 7B model takes about a second. The original model is not changed and may be on meta.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.convert import apply_plan, rule_plan
from octavo.nn.memory_audit import Audit, audit, call, dtype_name
from octavo.numerics.precision import Precision
from octavo.optim import Optimizer
from octavo.planner.fake import fake_batch, fake_copy, fake_device, fake_tensors
from octavo.planner.memory_plan import MemoryPlan
from octavo.planner.step import StepConfig
from octavo.planner.step_memory import StepTrace, follow_step, predict_memory
from octavo.planner.timeline import ALLOCATION_GRANULARITY
from octavo.runtime.torch_compat import tree_leaves

Loss = Callable[[nn.Module, Any], Tensor]


def memory(
    model: nn.Module, batch: Any, *,
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
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    place, step_config = fake_device(device), StepConfig(micro_batches=micro_batches)

    with fake_tensors():
        leaves = tree_leaves(fake_batch(batch, None, dtype, place))
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if first is None:
        raise ValueError(f"the batch contains no tensor and no shape: {batch!r}")
    sequences = first.shape[0] if first.ndim else 1

    audits: list[Audit] = []

    def trace(_: Any, size: int) -> StepTrace:
        with fake_tensors(device.type) as mode:
            copy = fake_copy(model, mode, place)
            if precision is not None:
                apply_plan(copy, rule_plan(copy, precision=precision), keep_weights=precision.keep_weights)
            inputs = fake_batch(batch, None if size == sequences else size, dtype, place)
            stepper = _optimizer(optimizer, copy)
            audits.append(_run(lambda: audit(copy, inputs, loss=loss or default_loss), inputs))
            allocation_granularity = ALLOCATION_GRANULARITY[device.type]
            return trace_step(copy, inputs, stepper, loss or default_loss, step_config, allocation_granularity)

    label = "as given" if precision is None else precision.label
    plan = predict_memory(trace, sequences, step_config)
    return replace(plan, label=label, device=str(device), **saved_bytes(audits[0]))


def saved_bytes(saved: Audit) -> dict[str, Any]:
    """Return the fields of a `MemoryPlan` with what a forward saves for backward."""
    by_dtype = sorted(saved.by_dtype.items(), key=lambda item: -item[1])
    sizes = {dtype_name(dtype): size for dtype, size in by_dtype}
    return {"saved_by_dtype": sizes, "saved_by_layer": saved.by_owner}


def trace_step(
    model: nn.Module, inputs: Any, stepper: torch.optim.Optimizer | None, loss: Loss, step_config: StepConfig,
    allocation_granularity: int,
) -> StepTrace:  # fmt: skip
    """Record a step of a fake model under FakeTensorMode."""
    states = [] if stepper is None else make_states(stepper)
    earlier = make_gradients(stepper) if stepper is not None and step_config.micro_batches > 1 else []

    def optimizer_step() -> None:
        if stepper is not None and getattr(stepper, "step_allocates", True):
            stepper.step()

    def forward_backward() -> None:
        _run(lambda: loss(model, inputs).backward(), inputs)

    return follow_step(
        model, inputs, states, earlier, forward_backward, optimizer_step, step_config=step_config,
        allocation_granularity=allocation_granularity,
    )  # fmt: skip


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
    return sum((leaf.sum() for leaf in leaves[1:]), leaves[0].sum())


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
