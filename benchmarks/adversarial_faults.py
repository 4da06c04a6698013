"""Faults put into a model in training, for tests of the inspector and the autopilot: what they have to name.

    with adversarial_faults.outliers(model, "layers.3.down"):
        loss(model).backward()

Each is a context manager that hooks one linear and takes the hook off again. It changes the numbers that reach the
layer or leave it, never how they are quantized. Enter it before a watch is: hooks run in the order in which they were
put on, and the watch is to see the fault. `Faulty.steps` counts forwards in training: with one forward per step, steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Faulty:
    """A fault that is in place.

    Attributes:
        steps: Forwards in training so far.
    """

    def __init__(self) -> None:
        self.steps = 0


@contextmanager
def outliers(
    model: nn.Module, layer: str, *, channels: Sequence[int] = (0,), factor: float = 1000.0
) -> Iterator[Faulty]:
    """Input channels of a linear so many times larger: operand "x".

    Args:
        model: Any model.
        layer: Name of a linear in it.
        channels: Features of its input.
        factor: What they are multiplied by.
    """

    def larger(x: Tensor, step: int) -> Tensor:
        gain = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        gain[list(channels)] = factor
        return x * gain

    with _on_input(model, layer, larger) as fault:
        yield fault


@contextmanager
def tiny_gradients(model: nn.Module, layer: str, *, factor: float = 1e-12) -> Iterator[Faulty]:
    """The gradient that arrives at the output of a linear so many times smaller: operands "dgrad_g" and "wgrad_g"."""
    fault = Faulty()

    def shrink(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        fault.steps += module.training
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * factor)

    handle = model.get_submodule(layer).register_forward_hook(shrink)
    try:
        yield fault
    finally:
        handle.remove()


@contextmanager
def infinity(model: nn.Module, layer: str, *, step: int | None = 50) -> Iterator[Faulty]:
    """One infinite value in the input of a linear, in one step (1, 2, …) or in all (None): operand "x"."""
    with _on_input(model, layer, lambda x, now: _with(x, torch.inf) if step in (None, now) else x) as fault:
        yield fault


@contextmanager
def nan_on_rank(model: nn.Module, layer: str, *, rank: int, step: int | None = 1) -> Iterator[Faulty]:
    """One NaN in the input of a linear, in one step or in all (None), on one rank: operand "x". Without ranks, this is
    rank 0.
    """
    here = rank == (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)
    with _on_input(model, layer, lambda x, now: _with(x, torch.nan) if here and step in (None, now) else x) as fault:
        yield fault


@contextmanager
def _on_input(model: nn.Module, layer: str, change: Callable[[Tensor, int], Tensor]) -> Iterator[Faulty]:
    fault = Faulty()

    def changed(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        fault.steps += module.training
        return change(args[0], fault.steps), *args[1:]

    handle = model.get_submodule(layer).register_forward_pre_hook(changed)
    try:
        yield fault
    finally:
        handle.remove()


def _with(x: Tensor, value: float) -> Tensor:
    """The tensor with one element replaced, differentiable where it was not."""
    at = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    at[x.numel() // 2] = True
    return x.masked_fill(at.view(x.shape), value)
