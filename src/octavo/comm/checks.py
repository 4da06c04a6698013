"""Checks of arguments that the collectives and point-to-point calls share."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.comm.encoding import parse_spec
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import MessageSpec

Group = dist.ProcessGroup | None


def needs_grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def world_size(group: Group) -> int:
    """The number of ranks in the group. Raises ValueError without a process group, or outside of this one."""
    if not dist.is_initialized():
        raise ValueError("octavo.comm needs a process group: call torch.distributed.init_process_group() first")
    world = dist.get_world_size(group)
    if world < 1:
        raise ValueError("octavo.comm: this process is not a member of the given group")
    return world


def check_args(
    name: str, x: Tensor, spec: str, backward_spec: str | None, async_op: bool
) -> tuple[MessageSpec, dict[str, Any]]:
    """The parsed spec of the message, and both specs of the call that returns its gradient."""
    # Raises ValueError for a dtype, spec or call without support.
    if x.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"{name} takes float32, bfloat16 or float16; got {x.dtype}: use torch.distributed for others")
    if async_op and needs_grad(x):
        raise ValueError(f"{name}: async_op does not support autograd: detach the tensor, or call without async_op")
    if backward_spec is not None:
        parse_spec(backward_spec)
    return parse_spec(spec), {"spec": backward_spec or spec, "backward_spec": spec}


def split_sizes(name: str, sizes: Sequence[int] | None, rows: int | None, world: int) -> list[int]:
    """The rows for each rank, equal parts by default. Raises ValueError if they do not add up."""
    if not sizes:
        if rows is None:
            raise ValueError("all_to_all_single: input_split_sizes needs output_split_sizes, the rows to receive")
        if rows % world:
            raise ValueError(f"all_to_all_single: {rows} rows are not {world} equal parts: pass both split sizes")
        return [rows // world] * world
    if len(sizes) != world or min(sizes) < 0 or (rows is not None and sum(sizes) != rows):
        expected = f"{world} numbers of rows" + ("" if rows is None else f" that add up to {rows}")
        raise ValueError(f"all_to_all_single: {name} is {expected}; got {list(sizes)}")
    return list(sizes)


def gather_objects(value: object, group: Group) -> list[Any]:
    """Return the values of all ranks of a group, in rank order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def has_detailed_checks() -> bool:
    """Whether `TORCH_DISTRIBUTED_DEBUG=DETAIL` is set."""
    torch_distributed: Any = dist
    return bool(torch_distributed.get_debug_level() == torch_distributed.DebugLevel.DETAIL)


def compare_calls(
    name: str, group: Group, same: object, sent: Sequence[int] = (), received: Sequence[int] = ()
) -> None:
    """With `TORCH_DISTRIBUTED_DEBUG=DETAIL`, raise ValueError on all ranks unless their calls fit; else do nothing."""
    # Gloo ends the process of a rank that gets a larger message than it expects, and bytes of another format are read
    # as if they were its own. To compare costs a message that the host waits for.
    if not has_detailed_checks():
        return
    calls = gather_objects((str(same), list(sent), list(received)), group)
    ranks = range(len(sent))
    if len({text for text, _, _ in calls}) > 1 or any(calls[a][1][b] != calls[b][2][a] for a in ranks for b in ranks):
        listed = "; ".join(
            f"rank {rank} {text}" + (f", sends {rows}, receives {others}" if ranks else "")
            for rank, (text, rows, others) in enumerate(calls)
        )
        raise ValueError(
            f"{name}: the calls of the ranks of the group do not fit: {listed}. Give all the same shape, spec and "
            "dtype, and each the number of rows that the other one sends"
        )
