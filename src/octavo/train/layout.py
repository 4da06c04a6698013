"""Apply `[parallel]`: split model, batch and tokens over the ranks of a run.

    setting                  ranks, innermost last              a rank has
    dp_replicate, dp_shard   [dp_replicate, dp_shard]           rows of the batch; a shard, or a copy, of all parameters
    tp                       [dp_replicate, dp_shard, tp]       the rows of its dp rank; heads and features of linear
                                                                layers; with sequence_parallel S/tp tokens of the loss
    cp                       [dp_replicate, dp_shard · cp]      S/cp tokens of the rows that cp ranks share; a shard
    ep                       [efsdp, ep]                        rows of the batch; E/ep experts of each layer; a shard
    pp                       [pp, dp_replicate, dp_shard, tp]   the rows of its dp rank; some blocks of the model

The gradient of a step is that of the mean over all targets that count. FSDP and DDP average gradients over ranks, so a
micro-batch of n such targets weighs n over the mean count of a rank. Fake targets, of a plan, all count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from octavo.nn.causal import IGNORE
from octavo.parallel import context_parallel, expert_parallel, parallelize, tensor_parallel
from octavo.parallel.pipeline_model import SCHEDULES, Pipeline, cut, stage_modules
from octavo.parallel.tensor_parallel import partial_parameters, sum_over
from octavo.runtime.torch_compat import FakeTensor, flattened, set_group_timeout, tree_map
from octavo.train.config.run_config import ConfigError, naming
from octavo.train.config.sections import Data, Optim, ParallelConfig
from octavo.train.ranks import Ranks, SharedError

Inputs = Any  # The inputs of a batch: a tensor, or a mapping of names to tensors


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def split_micro_batches(inputs: Inputs, parts: int) -> Sequence[Inputs]:
    if not isinstance(inputs, Mapping):
        return list(inputs.chunk(parts))
    columns = [tensor.chunk(parts) for tensor in inputs.values()]
    return [dict(zip(inputs, row, strict=True)) for row in zip(*columns, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    forward: Callable[..., Any]  # The module to call: the model, or what wraps it
    rows: tuple[int, int] = (0, 1)  # This rank's part of the rows of a batch: (index, number of parts)
    inputs: tuple[int, int] = (0, 1)  # Its part of their tokens
    labels: tuple[int, int] = (0, 1)  # Its part of the tokens of which it computes the loss
    loss_parts: int = 1  # Number of ranks whose losses add up to that of their rows
    part: tuple[int, int] = (0, 1)  # This rank's part of each layer: (index, number of parts)
    ranks: int = 1  # Ranks that hold this part of the layers
    seed: int = 0  # Distinguishes the ranks that draw different random numbers
    # Names of parameters of whose gradients each rank of `summing` has a summand.
    partial: frozenset[str] = field(default=frozenset())
    summing: DeviceMesh | None = None  # The mesh over which these are added up, or None
    pipeline: Pipeline | None = None  # The stages of this rank, or None
    stages: int = 1  # Ranks of a pipeline
    stage_group: dist.ProcessGroup | None = None  # The ranks that have the same stages, or None for all ranks

    def reduces(self, on: bool) -> AbstractContextManager[Any]:
        """Around a forward and its backward: whether DDP reduces the gradients."""
        # Off also around a forward without a backward, or DDP would reduce those of the next one even if it should not.
        ddp = self.forward
        return ddp.no_sync() if isinstance(ddp, DistributedDataParallel) and not on else nullcontext()

    def own_rows(self, batch: Tensor) -> Tensor:
        return _part(batch, self.rows, 0)

    def own_tokens(self, inputs: Inputs) -> Inputs:
        return tree_map(lambda rows: _part(rows, self.inputs, 1), inputs)

    def positions(self, inputs: Inputs) -> dict[str, Tensor]:
        """`position_ids` of this rank's tokens, if they are a part of their sequence."""
        index, parts = self.inputs
        if parts == 1:
            return {}
        first = index * inputs.shape[1]
        return {"position_ids": torch.arange(first, first + inputs.shape[1], device=inputs.device).unsqueeze(0)}

    def own_labels(self, targets: Tensor) -> Tensor:
        return _part(targets, self.labels, 1)

    def sum_partial(self, gradients: Mapping[str, Tensor]) -> None:
        if self.summing is not None:
            sum_over([gradient for name, gradient in gradients.items() if name in self.partial], self.summing)

    def copies(self, parameter: Any) -> int:
        """Number of ranks that hold the same elements of a parameter."""
        shards = 1
        for dim, placement in enumerate(getattr(parameter, "placements", ())):
            shards *= 1 if placement.is_replicate() else parameter.device_mesh.size(dim)
        return self.ranks // shards


def _part(tensor: Tensor, part: tuple[int, int], dim: int) -> Tensor:
    index, parts = part
    return tensor if parts == 1 else tensor.chunk(parts, dim)[index].contiguous()


def check_layout(parallel: ParallelConfig, optim: Optim, data: Data, world: int) -> None:
    batch, parts = optim.batch, optim.micro_batches
    ranks = world // (parallel.tp * parallel.cp * parallel.pp)
    if batch % (parts * ranks):
        suggestion = -(-batch // (parts * ranks)) * parts * ranks
        fewer = 0 if batch % ranks else max(n for n in range(1, parts + 1) if batch // ranks % n == 0)
        problem = f"optim.batch = {batch} sequences in {parts} micro-batches cannot be shared by {ranks} processes"
        hint = f", or optim.micro_batches = {fewer}" if fewer else ""
        raise ConfigError(f"{problem} evenly: set optim.batch to a multiple of {parts * ranks}, as {suggestion}{hint}")
    needed = parallel.pp * (SCHEDULES[parallel.schedule] if parallel.schedule == "DualPipeV" else 1)
    if parallel.pp > 1 and parts < needed:
        what = f"optim.micro_batches = {parts} do not fill a pipeline of parallel.pp = {parallel.pp}"
        raise ConfigError(f"{what} with schedule {parallel.schedule}: set it to {needed} or more")
    name, tokens = ("tp", parallel.tp) if parallel.sequence_parallel and parallel.tp > 1 else ("cp", parallel.cp)
    if data.sequence_length % tokens:
        suggestion = -(-data.sequence_length // tokens) * tokens
        hint = ", or parallel.sequence_parallel = false" if name == "tp" else ""
        problem = f"data.sequence_length = {data.sequence_length} is not divided by parallel.{name} = {tokens}"
        raise ConfigError(f"{problem}: set it to a multiple, as {suggestion}{hint}")


def distribute(
    model: nn.Module, settings: ParallelConfig, device: torch.device, *, fp8: bool, micro_batches: int
) -> RankLayout:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    sends_fp8 = fp8 and settings.fp8_comm != "off"
    alone: dict[str, Any] = {"ranks": world, "rows": (rank, world), "seed": rank}
    try:
        if settings.tp > 1 or settings.pp > 1:
            return _on_hybrid_mesh(model, settings, device, sends_fp8, micro_batches)
        if settings.ep > 1:
            check_experts_compute_in_fp8(fp8)
            mesh = _mesh(settings, device, (world // settings.ep, settings.ep), ("efsdp", "ep"))
            _share_layers(model, settings, mesh["ep"], sends_fp8)
            return RankLayout(forward=parallelize(model, mesh, **_comm(settings)), **alone)
        if settings.cp > 1:
            mesh = _mesh(settings, device, (world // settings.cp, settings.cp), ("data", "cp"))
            _share_layers(model, settings, mesh["cp"], sends_fp8)
            part = rank % settings.cp, settings.cp
            alone |= {"rows": (rank // settings.cp, world // settings.cp), "inputs": part, "labels": part}
        sizes = settings.sizes(world)
        mesh = _mesh(settings, device, (sizes[0], sizes[1] * settings.cp), ("dp_replicate", "dp_shard"))
        if mesh.size(1) == 1 and mesh.size(0) > 1:
            model.to(device)
        return RankLayout(forward=parallelize(model, mesh, **_comm(settings)), **alone)
    except ValueError as error:
        raise SharedError(f"[parallel]: {error}") from None


def _on_hybrid_mesh(
    model: nn.Module, settings: ParallelConfig, device: torch.device, sends_fp8: bool, micro_batches: int
) -> RankLayout:
    world, rank, tp, pp = dist.get_world_size(), dist.get_rank(), settings.tp, settings.pp
    sizes = settings.sizes(world)
    mesh = _mesh(settings, device, (pp, *sizes, tp), ("pp", "dp_replicate", "dp_shard", "tp"))
    divides = settings.sequence_parallel and tp > 1
    stages = cut(model, mesh["pp"], settings.schedule) if pp > 1 else []
    if tp > 1:
        _share_layers(model, settings, mesh["tp"], sends_fp8)
    partial = partial_parameters(model)
    parts = stage_modules(model, stages, pp, settings.schedule, token_parts=tp if divides else 1)
    forward: Callable[..., Any] = model
    if math.prod(sizes) > 1:
        data_mesh = mesh["dp_shard"] if sizes[0] == 1 else mesh["dp_replicate", "dp_shard"]
        for module in parts.values() or [model]:
            forward = parallelize(module, data_mesh, **_comm(settings))
    else:
        model.to(device)
    pipeline, stage_group = None, None
    if pp > 1:
        pipeline = Pipeline(
            parts, mesh["pp"], settings.schedule, device, micro_batches=micro_batches, fp8_comm=sends_fp8
        )  # fmt: skip
        stage_group = flattened(mesh["dp_replicate", "dp_shard", "tp"], "stage").get_group()
    rows = rank // tp % math.prod(sizes), math.prod(sizes)
    return RankLayout(
        forward=forward, rows=rows, labels=(rank % tp, tp) if divides else (0, 1), loss_parts=tp if divides else 1,
        part=(rank % tp, tp), ranks=world // pp, seed=rank if divides else rank // tp, partial=partial,
        summing=mesh["tp"] if partial else None, pipeline=pipeline, stages=pp, stage_group=stage_group,
    )  # fmt: skip


def _mesh(settings: ParallelConfig, device: torch.device, sizes: Sequence[int], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks; its groups, which do not inherit it, get the timeout of the run."""
    mesh = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=names)
    for group in mesh.get_all_groups():
        if dist.get_world_size(group) < dist.get_world_size():
            set_group_timeout(timedelta(seconds=settings.timeout), group)
    return mesh


def _comm(settings: ParallelConfig) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("fp8_comm", "reshard_after_forward", "cpu_offload")}


def divide_layers(model: nn.Module, settings: ParallelConfig, mesh: DeviceMesh | None, *, fp8: bool) -> RankLayout:
    """Leave in a model what one rank has of each layer, in place, and nothing of its data parallelism: for a plan."""
    if mesh is not None:
        with naming("[parallel]", ValueError):
            _share_layers(model, settings, mesh, fp8 and settings.fp8_comm != "off")
    loss_parts = settings.tp if settings.sequence_parallel else 1
    labels = loss_parts if loss_parts > 1 else settings.cp
    return RankLayout(forward=model, inputs=(0, settings.cp), labels=(0, labels), loss_parts=loss_parts)


def _share_layers(model: nn.Module, settings: ParallelConfig, mesh: DeviceMesh, sends_fp8: bool) -> None:
    """Divide the layers, the sequences or the experts of a model over a mesh of one dimension, in place."""
    if settings.tp > 1:
        divides = settings.sequence_parallel
        formats: dict[str, Any] = {"gather": "fp8" if sends_fp8 else "bf16"}
        formats["reduce"] = "fp8" if sends_fp8 and settings.fp8_comm == "on" and divides else "bf16"
        tensor_parallel(model, mesh, sequence_parallel=divides, **formats)
    elif settings.cp > 1:
        context_parallel(model, mesh, fp8_comm=sends_fp8)
    elif settings.ep > 1:
        expert_parallel(model, mesh, fp8_comm=sends_fp8)


def check_experts_compute_in_fp8(fp8: bool) -> None:
    if not fp8:
        problem = 'ep distributes experts that compute in FP8, and precision.level = "bf16" has none'
        raise ValueError(f"{problem}: leave ep out, and dp_shard shards the experts")


def targets_per_rank(targets: Tensor, ranks: Ranks, *, uneven: bool) -> float:
    """How many targets of a step count, on the average of all ranks. `targets`: those of this rank."""
    if not uneven or isinstance(targets, FakeTensor):
        return targets.numel()
    (count,) = ranks.all_reduce((targets != IGNORE).sum())
    return count.item() / ranks.world_size


def counted(targets: Tensor, *, uneven: bool) -> tuple[int, Tensor]:
    """How many targets of a micro-batch count, and targets of which at least one does."""
    # The mean over no target is not a number, even with a weight of zero.
    if not uneven or isinstance(targets, FakeTensor):
        return targets.numel(), targets
    if not (count := int((targets != IGNORE).sum())):
        targets = targets.clone()
        targets.view(-1)[0] = 0
    return count, targets
