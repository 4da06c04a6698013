"""Errors for derivatives that FP8 does not have: second ones, and those of torch.func, forward mode and batches.

Backward reads FP8 copies, which have no derivative. `torch.autograd.function.once_differentiable` notices that a
gradient is differentiated again only if a gradient that arrives requires one. In a gradient penalty
(`torch.autograd.grad(y.sum(), x, create_graph=True)`) none does, and the penalty would be a constant without an error.
Functions whose backward is itself differentiable, such as exchanges between ranks, need none of this.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo.runtime.torch_compat import has_transforms, in_forward_mode, is_wrapped

_DISABLED = "compute it inside octavo.disabled(), in high precision"


def first_derivative_only(what: str, remedy: str = _DISABLED) -> Callable[[Any], Any]:
    """Decorate `backward` of an autograd function: its gradients raise RuntimeError if they are differentiated."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or is_wrapped(grads[0])):
                return backward(ctx, *grads)
            refuse_transforms(what, *grads, remedy=remedy)
            with torch.no_grad():
                gradients = backward(ctx, *grads)
            present = [gradient for gradient in gradients if gradient is not None]
            size = f" with output {list(grads[0].shape)}" if grads[0] is not None else ""
            text = f"octavo: {what}{size} has no second derivative (create_graph=True): {remedy}"
            sources = [grad for grad in grads if grad is not None and grad.requires_grad]
            ends = iter(_DeadEnd.apply(text, len(present), *present, *sources, *_leaves(ctx)))
            return tuple(None if gradient is None else next(ends) for gradient in gradients)

        return checked

    return decorate


def refuse_transforms(what: str, *tensors: Tensor | None, remedy: str = _DISABLED) -> None:
    """Raise RuntimeError under a transform of torch.func, or if a tensor has a forward-mode derivative."""
    if torch.compiler.is_compiling():
        return
    inputs = [tensor for tensor in tensors if tensor is not None]
    if (
        has_transforms()
        or any(map(is_wrapped, inputs))
        or (in_forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs))
    ):
        raise transform_error(what, remedy)


def transform_error(what: str, remedy: str = _DISABLED) -> RuntimeError:
    """Return the error for anything but ordinary backward."""
    return RuntimeError(
        f"octavo: {what} works with ordinary backward only, not with torch.func (grad, vmap, jvp, ...), forward-mode "
        f"derivatives or is_grads_batched: {remedy}"
    )


class _DeadEnd(torch.autograd.Function):
    """The first `count` tensors; its backward raises. The others are there so that autograd reaches it."""

    @staticmethod
    def forward(ctx: Any, text: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.text = text
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(ctx.text)


def _leaves(ctx: Any) -> list[Tensor]:
    """Return all leaves that the inputs of a function were computed from: `torch.autograd.grad` executes only nodes
    from which it reaches what it differentiates by.
    """
    nodes, seen, leaves = [node for node, _ in ctx.next_functions], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [upstream for upstream, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
    return leaves
