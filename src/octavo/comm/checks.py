"""Checks of arguments that the collectives and point-to-point calls share."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.comm.encoding import parse_spec
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.names import nearest
from octavo.numerics.spec import MessageSpec

Group = dist.ProcessGroup | None


def needs_grad(x: Tensor) -> bool:
    """Whether autograd records a call on this tensor."""
    return torch.is_grad_enabled() and x.requires_grad


def world_size(group: Group) -> int:
    """The number of ranks in the group. Raises ValueError without a process group, or outside of this one."""
    if not dist.is_initialized():
        raise ValueError(
            "octavo.comm needs a process group: call torch.distributed.init_process_group() first, under torchrun"
        )
    world = dist.get_world_size(group)
    if world < 1:
        raise ValueError("octavo.comm: this process is not a member of the given group")
    return world


def check_args(
    name: str, x: Tensor, spec: str, backward_spec: str | None, async_op: bool
) -> tuple[MessageSpec, MessageSpec]:
    """The parsed specs of the message and of its gradient. Raises ValueError for a dtype or a call without support."""
    if x.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"{name} takes float32, bfloat16 or float16; got {x.dtype}: use torch.distributed for others")
    if async_op and needs_grad(x):
        raise ValueError(f"{name}: async_op does not support autograd: detach the tensor, or call without async_op")
    quant_spec = parse_spec(spec)
    return quant_spec, quant_spec if backward_spec is None else parse_spec(backward_spec)


def check_op(op: str) -> None:
    """Raise ValueError unless `op` is "sum" or "avg"."""
    if op not in ("sum", "avg"):
        raise ValueError(f"op is 'sum' or 'avg'; got {op!r}{nearest(str(op), ('sum', 'avg'))}")


def split_sizes(name: str, sizes: Sequence[int] | None, rows: int | None, world: int) -> list[int]:
    """The rows for each rank, equal parts by default. Raises ValueError if they do not add up."""
    if not sizes:
        if rows is None:
            raise ValueError("all_to_all_single: input_split_sizes needs output_split_sizes, the rows to receive")
        if rows % world:
            raise ValueError(
                f"all_to_all_single: {rows} rows are not {world} equal parts: pass input_split_sizes and "
                "output_split_sizes"
            )
        return [rows // world] * world
    if len(sizes) != world or min(sizes) < 0 or (rows is not None and sum(sizes) != rows):
        expected = f"{world} numbers of rows" + ("" if rows is None else f" that add up to {rows}")
        raise ValueError(f"all_to_all_single: {name} is {expected}; got {list(sizes)}")
    return list(sizes)
