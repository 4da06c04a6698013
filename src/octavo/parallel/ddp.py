"""DDP with gradients in FP8: a communication hook for `torch.nn.parallel.DistributedDataParallel`.

Each bucket is an FP8 all_reduce (`octavo.comm`): an all-to-all, a sum in float32, and an all-gather of the sum, divided
by the group's size. With error feedback a rank adds the rounding errors of its bucket and of its piece of the sum to
those of the next step, so that nothing is lost in the long run (1-bit SGD, Seide et al. 2014). That costs a float32
copy of the gradients, and 1/W of one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from octavo.comm import DEFAULT_SPEC, all_gather, all_reduce, reduce_scatter
from octavo.comm.encoding import pack, parse_spec, unpack
from octavo.nn.resident import ResidentWeight
from octavo.runtime.torch_compat import ignore_in_ddp


class Fp8AllReduce:
    """State of the hook.

    Args:
        group: Process group; None for the default group.
        spec: FP8 format of the messages.
        error_feedback: Carry rounding errors over to the next step.

    Examples:
        Under `torchrun`, on each rank:

        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> octavo.parallel.Fp8AllReduce(error_feedback=True).register(model)
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, spec: str = DEFAULT_SPEC, error_feedback: bool = False
    ) -> None:
        parse_spec(spec)
        self.group, self.spec, self.error_feedback = group, spec, error_feedback
        self._residuals: dict[int, _Residuals] = {}
        self._stream: torch.cuda.Stream | None = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream that averages buckets."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def register(self, model: DistributedDataParallel) -> None:
        """Use the hook for a model's gradients, from the next backward on."""
        model.register_comm_hook(self, _hook)

    def reduce(self, gradient: Tensor) -> Tensor:
        """Return the average [n] of a bucket over the ranks."""
        result: Tensor = all_reduce(gradient, self.group, op="avg", spec=self.spec)
        return result

    def reduce_with_feedback(self, index: int, gradient: Tensor, contents: tuple[int, ...]) -> Tensor:
        """Return the average of bucket number `index`, with the rounding errors of earlier steps added."""
        world = dist.get_world_size(self.group)
        unit = world * (parse_spec(self.spec).granularity.columns or 1)
        flat = F.pad(gradient.float(), (0, -gradient.numel() % unit)).view(world, -1)
        residuals = self._residuals.get(index)
        if residuals is None or residuals.contents != contents:  # DDP rebuilds its buckets after the first backward
            residuals = self._residuals[index] = _Residuals(
                contents, torch.zeros_like(flat), flat.new_zeros(1, flat.shape[1])
            )
        flat += residuals.bucket
        torch.sub(flat, self._dequantized(flat), out=residuals.bucket)
        piece = reduce_scatter(flat, self.group, op="avg", spec=self.spec) + residuals.piece
        torch.sub(piece, self._dequantized(piece), out=residuals.piece)
        gathered: Tensor = all_gather(piece, self.group, spec=self.spec)
        return gathered.view(-1)[: gradient.numel()].to(gradient.dtype)

    def _dequantized(self, rows: Tensor) -> Tensor:
        """Return a float32 matrix as the other ranks will decode it."""
        quant_spec = parse_spec(self.spec)
        return unpack(pack(rows, quant_spec), rows.shape[1], quant_spec, torch.float32)


@dataclass
class _Residuals:
    """Rounding errors of a bucket's last step: of this rank's gradients, and of its piece of the average."""

    contents: tuple[int, ...]
    bucket: Tensor
    piece: Tensor


def replicate(model: nn.Module, mesh: DeviceMesh, *, fp8: str | None) -> nn.Module:
    """Wrap a model in DDP over the ranks of a mesh, with gradients in this FP8 format or their own dtype."""
    group = mesh.get_group("dp_replicate") if mesh.mesh_dim_names else mesh.get_group()
    resident = {name: w for name, w in model.named_parameters() if isinstance(w, ResidentWeight)}
    for weight in resident.values():  # DDP would send and quantize their values
        for part in (weight.data_.view(torch.uint8), weight.scale):
            dist.broadcast(part, dist.get_global_rank(group, 0), group)
    ignore_in_ddp(model, resident)
    ddp_model = DistributedDataParallel(model, process_group=group)
    if fp8 is not None:
        Fp8AllReduce(group, spec=fp8).register(ddp_model)
    return ddp_model


def _hook(state: Fp8AllReduce, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Average the gradients of a bucket; on a GPU in a stream of its own, while backward continues."""
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
        future.set_result(_average(state, bucket))  # its reader waits for this stream
    return future


def _average(state: Fp8AllReduce, bucket: Any) -> Tensor:
    if not state.error_feedback:
        return state.reduce(bucket.buffer())
    contents = tuple(id(parameter) for parameter in bucket.parameters())
    return state.reduce_with_feedback(bucket.index(), bucket.buffer(), contents)
