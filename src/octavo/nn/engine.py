"""Which gradients the backward that runs now will use.

`ctx.needs_input_grad` says which inputs require a gradient at all. `torch.autograd.grad(y, x)` and zero-bubble
pipelines ask for some of them only, and what a function computes for the others is thrown away. The engine knows:
before a backward with explicit inputs it marks the nodes that it will execute.
"""

from typing import Any

import torch


def wanted_gradients(ctx: Any, inputs: int) -> tuple[bool, ...]:
    """Whether this backward uses the gradients of the first inputs of an autograd function.

    Where the engine does not answer (no such private function, a graph that torch.compile makes), it uses all that are
    required.

    Args:
        ctx: Context of the `backward` that runs.
        inputs: How many inputs to ask about: the leading tensors, of which the last may be None.
    """
    required: tuple[bool, ...] = ctx.needs_input_grad[:inputs]
    if torch.compiler.is_compiling():
        return required
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    if ask is None:
        return required
    # One entry for each input that is a tensor; the node is None where no gradient is required.
    nodes = ctx.next_functions
    return tuple(needed and _executes(ask, nodes[i][0]) for i, needed in enumerate(required))


def _executes(ask: Any, node: Any) -> bool:
    try:
        return bool(ask(node))
    except RuntimeError:  # no backward, or a leaf whose gradient `torch.autograd.grad` returns
        return True
