"""Send a tensor from one rank to another in FP8, as pipeline stages do. Autograd does not record these calls."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.comm.checks import Group, check_args, world_size
from octavo.comm.collectives import AsyncResult
from octavo.comm.encoding import DEFAULT_SPEC, as_rows, pack, parse_spec, unpack, width
from octavo.numerics.formats import SUPPORTED_DTYPES


def send(x: Tensor, dst: int, group: Group = None, *, spec: str = DEFAULT_SPEC, tag: int = 0) -> None:
    """Send a tensor; return when the message may be freed. See `isend`.

    Examples:
        >>> rank = dist.get_rank()      # on two ranks, under torchrun
        >>> if rank == 0:
        ...     octavo.comm.send(torch.ones(4, 64), dst=1)
        ... else:
        ...     received = octavo.comm.recv((4, 64), src=0, dtype=torch.bfloat16)
    """
    isend(x, dst, group, spec=spec, tag=tag).wait()


def recv(
    shape: Sequence[int], src: int, group: Group = None, *, dtype: torch.dtype, device: torch.device | str = "cpu",
    spec: str = DEFAULT_SPEC, tag: int = 0,
) -> Tensor:  # fmt: skip
    """Receive a tensor. See `irecv`.

    Examples:
        >>> rank = dist.get_rank()      # on two ranks, under torchrun
        >>> if rank == 1:
        ...     octavo.comm.send(torch.ones(4, 64), dst=0)
        ... else:
        ...     received = octavo.comm.recv((4, 64), src=1, dtype=torch.float32)
    """
    return irecv(shape, src, group, dtype=dtype, device=device, spec=spec, tag=tag).wait()


def isend(x: Tensor, dst: int, group: Group = None, *, spec: str = DEFAULT_SPEC, tag: int = 0) -> AsyncResult[None]:
    """Start to send a tensor of any shape to the global rank `dst`, which calls `recv` with this shape and spec.

    The `AsyncResult` has to be waited for before the program ends; x may be changed at once. `tag` distinguishes
    several messages in flight (Gloo). Other arguments and errors are those of `octavo.comm.all_gather`.

    Examples:
        >>> rank = dist.get_rank()      # on two ranks, under torchrun
        >>> sending = octavo.comm.isend(torch.ones(4, 64), dst=1 - rank)
        >>> received = octavo.comm.recv((4, 64), src=1 - rank, dtype=torch.float32)
        >>> sending.wait()
    """
    world_size(group)
    quant_spec, _ = check_args("send", x.detach(), spec, None, False)
    message = pack(as_rows(x.detach()), quant_spec)
    work = dist.isend(message, dst, group=group, tag=tag)
    return AsyncResult(work, partial(lambda _: None, message))  # keeps the message alive until then


def irecv(
    shape: Sequence[int], src: int, group: Group = None, *, dtype: torch.dtype, device: torch.device | str = "cpu",
    spec: str = DEFAULT_SPEC, tag: int = 0,
) -> AsyncResult[Tensor]:  # fmt: skip
    """Start to receive a tensor from the global rank `src`; `wait()` of the `AsyncResult` returns it.

    `shape`, `spec` and `tag` are the sender's. Over Gloo another shape ends this process if the message is larger, and
    leaves the rest of the result undefined if it is smaller. `dtype` (float32, bfloat16 or float16) and `device` are
    those of the result. Errors are those of `isend`.

    Examples:
        >>> rank = dist.get_rank()      # on two ranks, under torchrun
        >>> receiving = octavo.comm.irecv((4, 64), src=1 - rank, dtype=torch.float32)
        >>> octavo.comm.send(torch.full((4, 64), 2.0), dst=1 - rank)
        >>> receiving.wait()[0, 0]
        tensor(2.)
    """
    world_size(group)
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"recv returns float32, bfloat16 or float16; got {dtype}")
    quant_spec = parse_spec(spec)
    rows = as_rows(torch.empty(tuple(shape), device="meta"))
    message = torch.empty((rows.shape[0], width(rows.shape[1], quant_spec)), dtype=torch.uint8, device=device)
    work = dist.irecv(message, src, group=group, tag=tag)
    return AsyncResult(work, lambda: unpack(message, rows.shape[1], quant_spec, dtype).view(tuple(shape)))
