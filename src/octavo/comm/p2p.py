"""A tensor from one rank to another in FP8, as pipeline stages hand on activations and their gradients.

The receiver says shape and dtype, as with `torch.distributed`. Not recorded by autograd: pipeline engines send the
gradient themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.comm.collectives import Group, Pending, _checked, _world
from octavo.comm.wire import DTYPES, WIRE, as_rows, pack, parse, unpack, width


def send(x: Tensor, dst: int, group: Group = None, *, spec: str = WIRE, tag: int = 0) -> None:
    """Send a tensor; returns when the message may be dropped. See `isend`."""
    isend(x, dst, group, spec=spec, tag=tag).wait()


def recv(
    shape: Sequence[int],
    src: int,
    group: Group = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    spec: str = WIRE,
    tag: int = 0,
) -> Tensor:
    """Receive a tensor. See `irecv`."""
    return irecv(shape, src, group, dtype=dtype, device=device, spec=spec, tag=tag).wait()


def isend(x: Tensor, dst: int, group: Group = None, *, spec: str = WIRE, tag: int = 0) -> Pending[None]:
    """Begin to send a tensor.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        dst: Global rank that calls `recv` with this shape and spec.
        group: Process group; the default one where None.
        spec: FP8 form on the wire.
        tag: Told apart by, where several are under way (Gloo).

    Returns:
        What to wait for before the program ends; x may be changed at once.

    Raises:
        ValueError: For a wrong dtype or spec, or no process group.
    """
    _world(group)
    form, _ = _checked("send", x.detach(), spec, None, False)
    message = pack(as_rows(x.detach()), form)
    work: Any = dist.isend(message, dst, group=group, tag=tag)

    def sent(message: Tensor = message) -> None:  # which is kept until then
        return None

    return Pending(work, sent)


def irecv(
    shape: Sequence[int],
    src: int,
    group: Group = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    spec: str = WIRE,
    tag: int = 0,
) -> Pending[Tensor]:
    """Begin to receive a tensor.

    Args:
        shape: Shape that the sender has.
        src: Global rank of the sender.
        group: Process group; the default one where None.
        dtype: Of the result: float32, bfloat16 or float16; it may differ from the sender's.
        device: Of the result.
        spec: FP8 form on the wire, the sender's.
        tag: The sender's.

    Returns:
        A `Pending` whose `wait()` gives the tensor.

    Raises:
        ValueError: For a wrong dtype or spec, or no process group.
    """
    _world(group)
    if dtype not in DTYPES:
        raise ValueError(f"recv gives float32, bfloat16 or float16; got {dtype}")
    form = parse(spec)
    rows = as_rows(torch.empty(tuple(shape), device="meta"))
    message = torch.empty((rows.shape[0], width(rows.shape[1], form)), dtype=torch.uint8, device=device)
    work: Any = dist.irecv(message, src, group=group, tag=tag)
    return Pending(work, lambda: unpack(message, rows.shape[1], form, dtype).view(tuple(shape)))
