"""Sharded parameters: the DTensors of FSDP2.

Every state is allocated for the local rows and wrapped like its parameter: moments, their scales (one row per row) and
remainders are sharded over the same ranks. So `torch.distributed.checkpoint` saves and loads them on any number of
ranks, and `dcp_to_torch_save` writes them to one file. (Its `full_state_dict` option gathers tensors instead, and
neither Gloo nor NCCL supports the 16-bit integers of remainders.) For other tensors, the local rows are all rows.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.tensor import local_tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def has_whole_rows(param: Tensor) -> bool:
    """Whether every rank has whole rows of a parameter."""
    return all(placement.is_replicate() or placement.is_shard(0) for placement in _placements(param))


def first_row(param: Tensor) -> int:
    """Return the index of the first local row in the whole parameter."""
    owner: Any = param
    sharded_dims = [dim for dim, placement in enumerate(_placements(param)) if not placement.is_replicate()]
    if not sharded_dims:
        return 0
    if len(sharded_dims) == 1 and owner.placements[sharded_dims[0]].is_shard(0):
        piece = -(-owner.shape[0] // owner.device_mesh.size(sharded_dims[0]))
        return int(min(owner.device_mesh.get_local_rank(sharded_dims[0]) * piece, owner.shape[0]))
    from octavo.runtime.torch_compat import compute_local_shape_and_global_offset  # slow import

    _, offset = compute_local_shape_and_global_offset(owner.shape, owner.device_mesh, owner.placements)
    return int(offset[0])


def shard_like(param: Tensor, rows: Tensor) -> Tensor:
    """Wrap a state of the local rows as a tensor sharded like the parameter."""
    if not is_sharded(param):
        return rows
    owner: Any = param
    shape = torch.Size((param.shape[0], *rows.shape[1:])) if rows.ndim else rows.shape
    sharded: Tensor = owner.from_local(
        rows,
        owner.device_mesh,
        owner.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return sharded


def local_rows(param: Tensor, value: Tensor) -> Tensor:
    """Return the local rows of a value with the parameter's rows, whole or sharded like it."""
    if is_sharded(value) or not is_sharded(param) or not value.ndim:
        return local_tensor(value)
    first = first_row(param)
    return value[first : first + local_tensor(param).shape[0]]


def any_rank(flags: Tensor, params: Iterable[Tensor]) -> Tensor:
    """Return which flags are set on any rank that shares the parameters; one all_reduce per mesh dimension.

    Args:
        flags: bool [n] on the CPU, with the same length on all these ranks.
        params: Parameters that determine the ranks.
    """
    groups: dict[dist.ProcessGroup, str] = {}
    for param in params:
        for dim, placement in enumerate(_placements(param)):
            if not placement.is_replicate():
                mesh: Any = param.device_mesh  # type: ignore[attr-defined]
                groups[mesh.get_group(dim)] = mesh.device_type
    for group, device in groups.items():
        counts = flags.to(device, torch.int32)
        dist.all_reduce(counts, dist.ReduceOp.MAX, group)
        flags = counts.bool().cpu()
    return flags


def _placements(param: Tensor) -> tuple[Any, ...]:
    return getattr(param, "placements", ())
