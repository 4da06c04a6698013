"""Clip gradients of parameters on several meshes, which `torch.nn.utils.clip_grad_norm_` cannot combine."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from octavo.optim.sharded import any_rank, sum_gradient
from octavo.parallel.agreement import gather_reports
from octavo.tensor import local_tensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that their norm, over all ranks, is at most `max_norm`.

    Call it on every rank, as `torch.nn.utils.clip_grad_norm_`, for parameters that are placed on different meshes.

    Args:
        parameters: Parameters, some without gradients; those that are no DTensors have equal gradients on all ranks.
        max_norm: The largest norm.
        norm_type: The p of the p-norm, infinity included.
        error_if_nonfinite: Raise on every rank if the norm is infinite or NaN.

    Returns:
        The norm before, float, [], the same on every rank.

    Raises:
        RuntimeError: For a norm that is not finite, with `error_if_nonfinite`.
        ValueError: On every rank, if only some of them have a gradient of a DTensor.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.ones(4)
        >>> octavo.parallel.clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(2.), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    groups: dict[Any, list[Tensor]] = {}
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _check_presence(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            sum_gradient(parameter)
            grad = parameter.grad
            groups.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    by_maximum = float(norm_type) == math.inf
    norms = []
    for grads in groups.values():
        norm = get_total_norm([_maximum(grad) for grad in grads] if by_maximum else grads, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in groups.values():
        for grad in grads:
            local_tensor(grad).mul_(factor.to(grad.device))
    return total


def _check_presence(parameters: Sequence[Tensor]) -> None:
    """Raise ValueError on all ranks unless each DTensor has a gradient on all ranks of its mesh, or on none."""
    by_mesh: dict[DeviceMesh, list[tuple[int, DTensor]]] = {}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            by_mesh.setdefault(parameter.device_mesh, []).append((index, parameter))
    for mesh, members in by_mesh.items():
        missing = torch.tensor([parameter.grad is None for _, parameter in members], device="cpu")
        some, all_but_some = any_rank(torch.cat([missing, ~missing]), [members[0][1]]).chunk(2)
        if (differing := (some & all_but_some).nonzero()).numel():
            at = int(differing[0])
            lacking = [rank for rank, lacks in gather_reports((dist.get_rank(), bool(missing[at])), mesh) if lacks]
            index, parameter = members[at]
            raise ValueError(
                f"clip_grad_norm_: parameter {index} of shape {list(parameter.shape)} has no gradient on ranks "
                f"{sorted(lacking)}, and one on the others: run the same modules on all ranks in every step, and clear "
                "gradients on all of them"
            )


def _maximum(grad: Tensor) -> Tensor:
    """Return one element per rank with the same maximum norm: PyTorch has none of a shard without elements."""
    local = local_tensor(grad)
    maximum = local.abs().amax().view(1) if local.numel() else local.new_zeros(1)
    if not isinstance(grad, DTensor):
        return maximum
    placements = [placement if placement.is_replicate() else Shard(0) for placement in grad.placements]
    return DTensor.from_local(maximum, grad.device_mesh, placements, run_check=False)
