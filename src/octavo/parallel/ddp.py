"""DDP with gradients in FP8: a communication hook for `torch.nn.parallel.DistributedDataParallel`.

Each bucket is an FP8 all_reduce (`octavo.comm`): an all-to-all, a sum in float32, and an all-gather of the sum, divided
by the group's size. With error feedback a rank adds what rounding took, from its bucket and from its piece of the sum,
to those of the next step, so that nothing is lost in the long run (1-bit SGD, Seide et al. 2014); it costs a copy of
the gradients in float32, and 1/W of one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from octavo.comm import WIRE, all_gather, all_reduce, reduce_scatter
from octavo.comm.wire import pack, parse, unpack


class Fp8AllReduce:
    """State of the hook.

    Args:
        group: Process group; the default one where None.
        spec: FP8 form on the wire.
        error_feedback: Carry what rounding takes over to the next step.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, spec: str = WIRE, error_feedback: bool = False
    ) -> None:
        parse(spec)
        self.group, self.spec, self.error_feedback = group, spec, error_feedback
        self._lost: dict[int, _Lost] = {}
        self._stream: torch.cuda.Stream | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Where buckets are averaged."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def register(self, model: DistributedDataParallel) -> None:
        """Use it for a model's gradients, from the next backward on."""
        model.register_comm_hook(self, _hook)

    def reduce(self, gradient: Tensor) -> Tensor:
        """The average [n] of a bucket over the ranks."""
        result: Tensor = all_reduce(gradient, self.group, op="avg", spec=self.spec)
        return result

    def reduce_and_remember(self, index: int, gradient: Tensor, contents: tuple[int, ...]) -> Tensor:
        """The same, with what earlier steps lost, for bucket number `index` with these contents."""
        world = dist.get_world_size(self.group)
        unit = world * (parse(self.spec).granularity.columns or 1)
        flat = F.pad(gradient.float(), (0, -gradient.numel() % unit)).view(world, -1)
        lost = self._lost.get(index)
        if lost is None or lost.contents != contents:  # DDP fills buckets anew after its first backward
            lost = self._lost[index] = _Lost(contents, torch.zeros_like(flat), flat.new_zeros(1, flat.shape[1]))
        flat += lost.bucket
        lost.bucket = flat - self._arriving(flat)
        piece = reduce_scatter(flat, self.group, op="avg", spec=self.spec) + lost.piece
        lost.piece = piece - self._arriving(piece)
        gathered: Tensor = all_gather(piece, self.group, spec=self.spec)
        return gathered.view(-1)[: gradient.numel()].to(gradient.dtype)

    def _arriving(self, rows: Tensor) -> Tensor:
        """What others will read of a float32 matrix."""
        form = parse(self.spec)
        return unpack(pack(rows, form), rows.shape[1], form, torch.float32)


@dataclass
class _Lost:
    """What rounding took in a bucket's last step: from this rank's gradients, and from its piece of the average."""

    contents: tuple[int, ...]
    bucket: Tensor
    piece: Tensor


def replicate(model: nn.Module, mesh: DeviceMesh, *, fp8: str | None) -> nn.Module:
    """A model in DDP over the ranks of a mesh, with gradients in an FP8 form or their own."""
    group = mesh.get_group("dp_replicate") if mesh.mesh_dim_names else mesh.get_group()
    made = DistributedDataParallel(model, process_group=group)
    if fp8 is not None:
        Fp8AllReduce(group, spec=fp8).register(made)
    return made


def _hook(state: Fp8AllReduce, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The gradients of a bucket, averaged: on a GPU in a stream of its own, while backward goes on."""
    gradient = bucket.buffer()
    if gradient.device.type != "cuda":
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(_average(state, bucket))
        return future
    future = torch.futures.Future(devices=[gradient.device])
    stream = state.stream(gradient.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradient.record_stream(stream)
        future.set_result(_average(state, bucket))  # whose reader waits for this stream
    return future


def _average(state: Fp8AllReduce, bucket: Any) -> Tensor:
    if not state.error_feedback:
        return state.reduce(bucket.buffer())
    contents = tuple(id(parameter) for parameter in bucket.parameters())
    return state.reduce_and_remember(bucket.index(), bucket.buffer(), contents)
