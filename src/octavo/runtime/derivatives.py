"""Errors for derivatives that FP8 does not have: second ones, and those of torch.func, forward mode and batches.

`create_graph=True` raises at once: `once_differentiable` would make a gradient penalty a constant without an error.
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
    """Decorate `backward` of an autograd function: it raises RuntimeError with `create_graph=True`."""

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def checked(ctx: Any, *grads: Any) -> Any:
            if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or is_wrapped(grads[0])):
                return backward(ctx, *grads)
            refuse_transforms(what, *grads, remedy=remedy)
            size = f" with output {list(grads[0].shape)}" if grads[0] is not None else ""
            problem = f"octavo: {what}{size} has no second derivative"
            raise RuntimeError(f"{problem}: leave create_graph=True out, or {remedy}")

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
