"""Sharded parameters: the DTensors of FSDP2 and of tensor parallelism. Of other tensors, the local rows are all rows.

Every state is allocated for the local rows and wrapped like its parameter, so DCP reshards it.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.runtime.torch_compat import is_dtensor, local_part
from octavo.tensor import local_tensor, placed_like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def splits_groups(param: Tensor, group: int) -> bool:
    """Whether some rank has a part of a group of a parameter's columns, or of its row without being a matrix."""
    splits = column_splits(param)
    return splits > 1 and (param.ndim != 2 or param.shape[1] % (splits * group) != 0)


def column_splits(param: Tensor) -> int:
    """Return the number of ranks that share the elements of a row."""
    # Placements that shard a dimension, strided or not, name it `dim`; others do not.
    owner: Any = param
    places = enumerate(placements_of(param))
    return math.prod(owner.device_mesh.size(at) for at, placement in places if getattr(placement, "dim", None))


def row_group(param: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that share the rows of a matrix; None where this rank has whole matrices."""
    owner: Any = param
    places = placements_of(param)
    sharded_dims = [dim for dim, placement in enumerate(places) if not placement.is_replicate()]
    if not sharded_dims or (param.ndim == 3 and all(getattr(places[dim], "dim", None) == 0 for dim in sharded_dims)):
        return None
    if param.ndim == 2 and len(sharded_dims) == 1 and places[sharded_dims[0]].is_shard(0):
        group: dist.ProcessGroup = owner.device_mesh.get_group(sharded_dims[0])
        return group
    raise ValueError(
        f"Muon needs whole matrices, and gathers rows over one dimension of a mesh; a parameter {list(param.shape)} is "
        f"placed as {places}: use FSDP2 (dp_shard, dp_replicate) without tensor parallelism, or AdamW for it"
    )


def first_row(param: Tensor) -> int:
    return 0 if all(placement.is_replicate() for placement in placements_of(param)) else _offset(param)[0]


def _offset(param: Any) -> tuple[int, ...]:
    mesh = param.device_mesh
    return _offset_at(param.shape, mesh, param.placements, tuple(mesh.get_coordinate()))


@lru_cache(maxsize=4096)
def _offset_at(
    shape: torch.Size, mesh: "DeviceMesh", placements: tuple[Any, ...], rank: tuple[int, ...]
) -> tuple[int, ...]:
    # `rank` is the coordinate in the mesh that PyTorch reads, too.
    from octavo.runtime.torch_compat import compute_local_shape_and_global_offset  # slow import

    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[1])


def shard_like(param: Tensor, rows: Tensor) -> Tensor:
    """Wrap a state of the local rows as a tensor sharded like the parameter."""
    if not is_dtensor(param):
        return rows
    shape: Sequence[int] = param.shape
    if rows.shape != local_part(param).shape:
        shape = param.shape[0], *(size * column_splits(param) for size in rows.shape[1:2]), *rows.shape[2:]
    sharded: Tensor = placed_like(param, rows, shape)
    return sharded


def local_rows(param: Tensor, value: Tensor) -> Tensor:
    """Return the local rows of a value of a parameter's shape, whole or sharded like it."""
    if is_dtensor(value) or not is_dtensor(param) or not value.ndim:
        return local_tensor(value)
    for dim, (start, size) in enumerate(zip(_offset(param), local_tensor(param).shape, strict=True)):
        value = value.narrow(dim, start, size)
    return value


def sum_gradient(param: Tensor) -> None:
    """Place the gradient of a DTensor as its parameter: autograd leaves sums over ranks to whoever reads it."""
    grad: Any = param.grad
    if is_dtensor(param) and is_dtensor(grad) and placements_of(grad) != placements_of(param):
        param.grad = grad.redistribute(placements=placements_of(param))


def any_rank(flags: Tensor, params: Iterable[Any]) -> Tensor:
    """Return which flags are set on any rank that has shards or copies of the parameters."""
    groups: dict[dist.ProcessGroup, str] = {}
    for param in params:
        for dim in range(len(placements_of(param))):
            if param.device_mesh.size(dim) > 1:
                groups[param.device_mesh.get_group(dim)] = param.device_mesh.device_type
    for group, device in groups.items():
        counts = flags.to(device, torch.int32)
        dist.all_reduce(counts, dist.ReduceOp.MAX, group)
        flags = counts.bool().cpu()
    return flags


def placements_of(param: Tensor) -> tuple[Any, ...]:
    """Return how a parameter is placed on each dimension of its mesh; () if it is no DTensor."""
    return getattr(param, "placements", ())
