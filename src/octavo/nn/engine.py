"""Find out which gradients the running backward uses.

`ctx.needs_input_grad` tells which inputs require a gradient. `torch.autograd.grad(y, x)` and zero-bubble pipelines use
only some of them, and autograd discards the others. Before a backward with explicit inputs the engine marks the nodes
that it will execute.
"""

from typing import Any

import torch


def required_gradients(ctx: Any, inputs: int) -> tuple[bool, ...]:
    """Return whether this backward uses the gradients of the first inputs of an autograd function.

    Without an answer of the engine (a PyTorch without that private function, torch.compile) returns
    `ctx.needs_input_grad`.

    Args:
        ctx: Context of the running `backward`.
        inputs: Number of leading inputs: tensors, of which the last may be None.
    """
    required: tuple[bool, ...] = ctx.needs_input_grad[:inputs]
    if torch.compiler.is_compiling():
        return required
    will_execute = getattr(torch._C, "_will_engine_execute_node", None)
    if will_execute is None:
        return required
    # One entry per tensor input; the node is None if no gradient is required.
    nodes = ctx.next_functions
    return tuple(needed and _executes(will_execute, nodes[i][0]) for i, needed in enumerate(required))


def _executes(will_execute: Any, node: Any) -> bool:
    try:
        return bool(will_execute(node))
    except RuntimeError:  # no backward, or a leaf whose gradient `torch.autograd.grad` returns
        return True
