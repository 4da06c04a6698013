"""Faults of one linear in training, as context managers that hook it: what inspector and autopilot have to name.

A hook changes the numbers that reach the layer or leave it, not how they are quantized. Enter it before a watch is
entered: hooks run in the order in which they were registered. `step` counts forwards in training.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def outliers(model, layer, *, factor=1000.0):
    """The first input channel so many times larger: operand "x"."""
    with _on_input(model, layer, lambda x, step: torch.cat([x[..., :1] * factor, x[..., 1:]], -1)):
        yield


@contextmanager
def tiny_gradients(model, layer, *, factor=1e-12):
    """The gradient of the output so many times smaller: operands "dgrad_g" and "wgrad_g"."""

    def shrink(module, args, y):
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * factor)

    handle = model.get_submodule(layer).register_forward_hook(shrink)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def infinity(model, layer, *, step=50):
    """One infinite value in the input, in one step (1, 2, …) or in all (None): operand "x"."""
    with _on_input(model, layer, lambda x, now: _with(x, torch.inf) if step in (None, now) else x):
        yield


@contextmanager
def nan_on_rank(model, layer, *, rank, step=1):
    """One NaN in the input, in one step or in all (None), on one rank: operand "x"."""
    here = rank == dist.get_rank()
    with _on_input(model, layer, lambda x, now: _with(x, torch.nan) if here and step in (None, now) else x):
        yield


@contextmanager
def _on_input(model, layer, change):
    steps = 0

    def changed(module, args):
        nonlocal steps
        steps += module.training
        return change(args[0], steps), *args[1:]

    handle = model.get_submodule(layer).register_forward_pre_hook(changed)
    try:
        yield
    finally:
        handle.remove()


def _with(x, value):
    """The tensor with one element replaced, differentiable where it was not."""
    at = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    at[x.numel() // 2] = True
    return x.masked_fill(at.view(x.shape), value)
