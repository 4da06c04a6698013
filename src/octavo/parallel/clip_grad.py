"""Clip gradients of parameters on several meshes, which `torch.nn.utils.clip_grad_norm_` cannot combine.

The norm of each mesh's gradients is PyTorch's: of DTensors over the mesh, shards added up, copies counted once. The
norm of those norms is that of all gradients:

    ‖g‖ = ‖(‖g on mesh 1‖, ‖g on mesh 2‖, …, ‖plain gradients‖)‖        also for the maximum norm
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from octavo.optim.sharded import sum_gradient
from octavo.tensor import local_tensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that their norm, over all ranks, is at most `max_norm`.

    Call it on every rank, as `torch.nn.utils.clip_grad_norm_`, for parameters that FSDP2 and tensor parallelism placed
    on different meshes.

    Args:
        parameters: Parameters, some without gradients; those that are no DTensors have equal gradients on all ranks.
        max_norm: The largest norm.
        norm_type: The p of the p-norm, infinity included.
        error_if_nonfinite: Raise on every rank if the norm is infinite or NaN.

    Returns:
        The norm before, float, [], the same on every rank.

    Raises:
        RuntimeError: For a norm that is not finite, with `error_if_nonfinite`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.ones(4)
        >>> octavo.parallel.clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(2.), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    groups: dict[Any, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            sum_gradient(parameter)
            grad = parameter.grad
            groups.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    by_maximum = float(norm_type) == math.inf
    norms = [
        _whole(get_total_norm([_maximum(grad) for grad in grads] if by_maximum else grads, norm_type))
        for grads in groups.values()
    ]
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in groups.values():
        for grad in grads:
            local_tensor(grad).mul_(factor.to(grad.device))
    return total


def _maximum(grad: Tensor) -> Tensor:
    """Return one element per rank with the same maximum norm: PyTorch has none of a shard without elements."""
    local = local_tensor(grad)
    maximum = local.abs().amax().view(1) if local.numel() else local.new_zeros(1)
    if not isinstance(grad, DTensor):
        return maximum
    placements = [placement if placement.is_replicate() else Shard(0) for placement in grad.placements]
    return DTensor.from_local(maximum, grad.device_mesh, placements, run_check=False)


def _whole(norm: Any) -> Tensor:
    whole: Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return whole
