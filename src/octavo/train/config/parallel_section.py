"""The section `[parallel]` of a run's configuration."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from octavo.parallel import Parallel
from octavo.parallel.pipeline_model import ZERO_BUBBLE
from octavo.train.config.sections import Count, Section


class ParallelConfig(Section):
    """`[parallel]`: how the processes of torchrun share the work; not for a single process."""

    dp_replicate: Count = 1
    """Copies of the model, each sharded or not (with dp_shard = 1: DDP)."""
    dp_shard: Annotated[int, Field(ge=-1)] = -1
    """Processes that share one copy (FSDP2); -1 for all that are left."""
    reshard_after_forward: bool = True
    """Free gathered weights between forward and backward (ZeRO-3), or keep them (ZeRO-2)."""
    cpu_offload: bool = False
    """Shards, gradients and optimizer states in host memory: models larger than the device."""
    fp8_comm: Literal["auto", "on", "gather", "off"] = "auto"
    """FP8 communication: weights and gradients ("on"), weights ("gather"), none ("off"), or by cost ("auto")."""
    tp: Count = 1
    """Processes that share each linear layer (tensor parallelism), by the plan of the model's config. Neighbours in
    rank, so that they are on one machine. `fp8_comm` "off" sends tokens in bf16, "on" also sums in FP8."""
    sequence_parallel: bool = True
    """With `tp`: each process has S/tp tokens outside of attention and MLP, and computes the loss of these."""
    cp: Count = 1
    """Processes that share each sequence (Ulysses context parallelism): S/cp tokens each, and some heads inside
    attention. Weights are sharded over them as over `dp_shard`."""
    ep: Count = 1
    """Processes that share the experts of each layer, each with rows of its own (expert parallelism). Experts are
    sharded over the others."""
    pp: Count = 1
    """Stages' ranks of a pipeline: each has some blocks of the model. `optim.micro_batches` go through it."""
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Schedule of the pipeline, torch's; from "Interleaved1F1B" on each rank has two stages."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in host memory."""
    timeout: Annotated[float, Field(gt=0, le=1e9)] = 600.0
    """Seconds that a process waits for the others before it raises an error."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "ParallelConfig":
        _ = self.resolved
        if len(several := [name for name in ("tp", "cp", "ep") if getattr(self, name) > 1]) > 1:
            raise ValueError(
                f"parallel.{several[0]} = {getattr(self, several[0])} with parallel.{several[1]} = "
                f"{getattr(self, several[1])}: these are not supported together; keep one of {', '.join(several)}, and "
                "leave the other processes to dp_shard"
            )
        if self.pp > 1 and self.ep * self.cp > 1:
            name = "ep" if self.ep > 1 else "cp"
            raise ValueError(
                f"parallel.pp = {self.pp} with parallel.{name} = {getattr(self, name)}: a pipeline joins tp and data "
                f"parallelism; leave {name} out"
            )
        if self.ep > 1 and self.dp_replicate > 1:
            raise ValueError(
                f"parallel.ep = {self.ep} with parallel.dp_replicate = {self.dp_replicate}: experts are sharded over "
                "all processes that hold the same ones; leave dp_replicate out"
            )
        if self.tp * self.pp > 1 and self.dp_shard == 1 and self.dp_replicate > 1:
            name = "tp" if self.tp > 1 else "pp"
            raise ValueError(
                f"parallel.{name} = {getattr(self, name)} with dp_replicate = {self.dp_replicate} and dp_shard = 1: it "
                "does not join DDP; set parallel.dp_replicate = 1 and leave dp_shard out"
            )
        if self.pp > 1 and self.schedule in ZERO_BUBBLE and self.dp_shard != 1 and self.reshard_after_forward:
            raise ValueError(
                f"parallel.schedule = {self.schedule!r} loses gradients of weights that are freed after forward: set "
                "parallel.reshard_after_forward = false, or dp_shard = 1"
            )
        return self

    @property
    def resolved(self) -> Parallel:
        """The data-parallel part, for `octavo.parallelize`."""
        fields = {"dp_replicate", "dp_shard", "reshard_after_forward", "cpu_offload", "fp8_comm"}
        return Parallel(**self.model_dump(include=fields))

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Return (dp_replicate, dp_shard) for a world size; the ranks of `ep` count as shards."""
        shared = self.tp * self.cp * self.pp
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "pp": self.pp, "tp × cp × pp": shared}
        for name, size in sizes.items():
            if world_size % size:
                fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
                raise ValueError(f"parallel.{name} = {size} does not divide the {world_size} processes: take {fitting}")
        try:
            return self.resolved.sizes(world_size // shared)
        except ValueError as error:
            note = f" (the {world_size} processes divided by tp × cp × pp = {shared})" if shared > 1 else ""
            raise ValueError(f"{error}{note}") from None

    def alone(self) -> str:
        """Why the layout needs several processes; empty if one is enough."""
        ranks = self.dp_replicate * max(self.dp_shard, 1) * self.tp * self.cp * self.pp
        ranks = max(ranks, self.ep)
        if ranks > 1 or self.cpu_offload:
            problem = f"asks for {ranks} processes" if ranks > 1 else "asks for cpu_offload, which shards do"
            return (
                f"[parallel] {problem}, and this is one by itself: start it with "
                f"torchrun --nproc-per-node {ranks} -m octavo train CONFIG"
            )
        return ""
