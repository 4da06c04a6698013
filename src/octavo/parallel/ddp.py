"""DDP with gradients in FP8: a communication hook for `torch.nn.parallel.DistributedDataParallel`.

With error feedback a rank adds the rounding errors of its bucket, and of its piece of the sum, to those of the next
step (1-bit SGD, Seide et al. 2014), but none of a step that was not taken: its average was not finite, or no parameter
of the bucket has changed since. That costs two float32 copies of the gradients, and 2/W of one.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from octavo.comm import DEFAULT_SPEC, all_gather, all_reduce, reduce_scatter
from octavo.comm.encoding import pack, parse_spec, unpack
from octavo.nn.equalized import equalized_layers
from octavo.nn.resident import ResidentWeight
from octavo.parallel.agreement import broadcast_values, checksums
from octavo.runtime.torch_compat import GradBucket, divides_by_active_ranks, ignore_in_ddp, is_under_join


class Fp8AllReduce:
    """State of the hook.

    Args:
        group: Process group; None for that of the model it is registered for.
        spec: FP8 format of the messages.
        error_feedback: Carry rounding errors over to the next step. Accumulate gradients under `no_sync()`: the errors
            of an average after which no parameter changes are dropped, as those of a skipped step.

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
        self._finite: list[Tensor] = []  # of the averages of this backward, by bucket
        self._last_finite: Tensor | None = None  # of all averages of the last one
        self._stream: torch.cuda.Stream | None = None  # that averages buckets on a GPU
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._joined = 1  # backwards since the last forward, if any: of the other ranks, under `model.join()`
        self._factor: Tensor | None = None  # of the average, if not 1

    def register(self, model: DistributedDataParallel) -> None:
        """Use the hook for a model's gradients, from the next backward on.

        Raises:
            ValueError: If it is registered for another model already.
        """
        if self._model() not in (None, model):
            raise ValueError(
                "this Fp8AllReduce is registered for another model, whose group and rounding errors it holds: create "
                "one for each model"
            )
        self.group = model.process_group if self.group is None else self.group
        self._model = weakref.ref(model)
        model.register_forward_pre_hook(lambda *_: setattr(self, "_joined", 0))
        model.register_comm_hook(self, _hook)

    def average(self, bucket: GradBucket) -> Tensor:
        """Return the average [n] of a bucket over the ranks, which DDP hands over in the order of their indices."""
        gradient, model = bucket.buffer(), self._model()
        if bucket.index() == 0:
            self._factor = None
            if model is not None and divides_by_active_ranks(model):
                active = gradient.new_full((1,), float(self._joined == 0), dtype=torch.float32)
                dist.all_reduce(active, group=self.group)
                self._factor = dist.get_world_size(self.group) / active
        if self.error_feedback:
            result = self.reduce_with_feedback(bucket.index(), gradient, bucket.parameters())
        else:
            result = all_reduce(gradient, self.group, op="avg", spec=self.spec)
        self._joined += bucket.is_last()
        return result if self._factor is None else result.mul_(self._factor)

    def reduce_with_feedback(self, index: int, gradient: Tensor, parameters: list[Tensor]) -> Tensor:
        """Return the average of bucket number `index`, with the rounding errors of earlier steps added."""
        if index == 0 and self._finite:
            self._last_finite, self._finite = torch.stack(self._finite).all(), []
        world = dist.get_world_size(self.group)
        unit = world * (parse_spec(self.spec).granularity.columns or 1)
        flat = F.pad(gradient.float(), (0, -gradient.numel() % unit)).view(world, -1)
        residuals = self._residuals.get(index)
        contents = tuple(id(parameter) for parameter in parameters)
        if residuals is None or residuals.contents != contents:  # DDP rebuilds its buckets after the first backward
            errors = torch.zeros_like(flat), flat.new_zeros(1, flat.shape[1])
            residuals = self._residuals[index] = _Residuals(contents, errors, tuple(map(torch.clone, errors)))
        # A rank without inputs takes no steps, and sends its errors once.
        bucket, piece = residuals.begin(checksums(parameters) + self._joined, self._last_finite)
        flat += bucket
        self._store_error(flat, residuals.pending[0])
        average = reduce_scatter(flat, self.group, op="avg", spec=self.spec) + piece
        self._store_error(average, residuals.pending[1])
        gathered: Tensor = all_gather(average, self.group, spec=self.spec)
        self._finite.append(gathered.isfinite().all())
        return gathered.view(-1)[: gradient.numel()].to(gradient.dtype)

    def _store_error(self, rows: Tensor, error: Tensor) -> None:
        """Store the rounding error of a float32 matrix; zeros where it is not finite."""
        spec = parse_spec(self.spec)
        decoded = unpack(pack(rows, spec), rows.shape[1], spec, torch.float32)  # as by the other ranks
        torch.sub(rows, decoded, out=error).nan_to_num_(0.0, 0.0, 0.0)


@dataclass
class _Residuals:
    """Rounding errors of a bucket: of this rank's gradients, and of its piece of the average."""

    contents: tuple[int, ...]  # The bucket's parameters
    taken: tuple[Tensor, ...]  # Errors up to the last step that was taken
    pending: tuple[Tensor, ...]  # Errors after the last backward, for when its step is taken
    checksums: Tensor | None = None  # Those of the parameters at the last backward

    def begin(self, checksums: Tensor, finite: Tensor | None) -> tuple[Tensor, ...]:
        """Return the errors to add in this backward; nothing here waits for the device."""
        if self.checksums is not None:
            was_taken = (checksums != self.checksums).any()
            if finite is not None:
                was_taken &= finite
            for taken, pending in zip(self.taken, self.pending, strict=True):
                torch.where(was_taken, pending, taken, out=taken)
        self.checksums = checksums
        return self.taken


def replicate(model: nn.Module, mesh: DeviceMesh, *, fp8: str | None) -> nn.Module:
    """Wrap a model in DDP over the ranks of a mesh, with gradients in this FP8 format or their own dtype."""
    group = mesh.get_group("dp_replicate") if mesh.mesh_dim_names else mesh.get_group()
    resident = {name: w for name, w in model.named_parameters() if isinstance(w, ResidentWeight)}
    # DDP would send and quantize their values.
    broadcast_values(resident.values(), group, torch.device(mesh.device_type))
    ignore_in_ddp(model, resident)
    ddp_model = DistributedDataParallel(model, process_group=group)
    # Sent before every forward, so only where training changes some, as running means do. (The argument for it has
    # another name in newer versions of PyTorch.)
    ddp_model.broadcast_buffers = bool(saved_buffers(model))
    if fp8 is not None:
        Fp8AllReduce(group, spec=fp8).register(ddp_model)

    def refuse_join(model: nn.Module, inputs: object) -> None:
        if is_under_join(model) and any(equalized_layers(model)):
            raise ValueError(
                "model.join() with equalization: each forward exchanges scales with all ranks, and "
                "those without inputs run none. Give all ranks equally many inputs, or take recipe 'rowwise'"
            )

    ddp_model.register_forward_pre_hook(refuse_join)
    return ddp_model


def saved_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that checkpoints hold, which training may change; others are computed from the model's config."""
    owners = ((module, *own) for module in model.modules() for own in module.named_buffers(recurse=False))
    return [buffer for module, name, buffer in owners if name not in module._non_persistent_buffers_set]


def _hook(state: Fp8AllReduce, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the gradients of a bucket; on a GPU in a stream of its own, while backward continues."""
    gradient = bucket.buffer()
    if gradient.device.type != "cuda":
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(state.average(bucket))
        return future
    future = torch.futures.Future(devices=[gradient.device])
    stream = state._stream = state._stream or torch.cuda.Stream(gradient.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradient.record_stream(stream)
        future.set_result(state.average(bucket))  # its reader waits for this stream
    return future
