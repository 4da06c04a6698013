"""Parameters of which a rank has some rows: the DTensors of FSDP2, whole to whoever asks their shape.

Every state is made for the rows that are here and wrapped as its parameter is: moments, their scales (one row for each
row) and remainders are sharded over the same ranks. So `torch.distributed.checkpoint` saves and loads them on any
number of ranks, as it does parameters, and `dcp_to_torch_save` makes one file of them. (Its `full_state_dict` option
gathers tensors instead, and neither Gloo nor NCCL has the 16-bit integers of remainders.) A parameter that is no
DTensor is its own rows.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.tensor import plain


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def rows_only(param: Tensor) -> bool:
    """Whether every rank has whole rows of a parameter."""
    return all(placement.is_replicate() or placement.is_shard(0) for placement in _placements(param))


def first_row(param: Tensor) -> int:
    """The row of the whole parameter that the rows which are here begin with."""
    owner: Any = param
    cut = [dim for dim, placement in enumerate(_placements(param)) if not placement.is_replicate()]
    if not cut:
        return 0
    if len(cut) == 1 and owner.placements[cut[0]].is_shard(0):
        piece = -(-owner.shape[0] // owner.device_mesh.size(cut[0]))
        return int(min(owner.device_mesh.get_local_rank(cut[0]) * piece, owner.shape[0]))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # which takes long

    _, offset = compute_local_shape_and_global_offset(owner.shape, owner.device_mesh, owner.placements)
    return int(offset[0])


def like(param: Tensor, rows: Tensor) -> Tensor:
    """A state of the rows that are here, as a tensor that is sharded as the parameter is."""
    if not is_sharded(param):
        return rows
    owner: Any = param
    shape = torch.Size((param.shape[0], *rows.shape[1:])) if rows.ndim else rows.shape
    made: Tensor = owner.from_local(
        rows,
        owner.device_mesh,
        owner.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return made


def rows_of(param: Tensor, value: Tensor) -> Tensor:
    """The rows that are here of something that has the parameter's rows, whole or sharded as it is."""
    if is_sharded(value) or not is_sharded(param) or not value.ndim:
        return plain(value)
    first = first_row(param)
    return value[first : first + plain(param).shape[0]]


def anywhere(flags: Tensor, params: Iterable[Tensor]) -> Tensor:
    """Which of some flags are set on any rank that has a part of the parameters; one all_reduce for each mesh.

    Args:
        flags: bool [n] on the CPU, of the same length on these ranks.
        params: What the flags are about.
    """
    groups: dict[dist.ProcessGroup, str] = {}
    for param in params:
        for dim, placement in enumerate(_placements(param)):
            if not placement.is_replicate():
                mesh: Any = param.device_mesh  # type: ignore[attr-defined]
                groups[mesh.get_group(dim)] = mesh.device_type
    for group, device in groups.items():
        found = flags.to(device, torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        flags = found.bool().cpu()
    return flags


def _placements(param: Tensor) -> tuple[Any, ...]:
    return getattr(param, "placements", ())
