"""The processes of a run: one, or those that torchrun started.

    torchrun --nproc-per-node 8 -m octavo train CONFIG

Every rank trains on its share of each batch; what there is one of (the output folder, metrics, reports) is the first
one's. What may go wrong on one rank alone is done inside `agreed` or `shared`: then all of them stop with the same
message, instead of waiting for one that has stopped already.

A rank that dies takes the run with it: the others find out from the collective they are in, at once where a connection
breaks and after `parallel.timeout` where it does not, and end with `LostRankError`. torchrun's `--max-restarts` starts
all of them again, and the run goes on from its newest checkpoint.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from octavo.train.config import ConfigError, TrainConfig
from octavo.train.model import choose_device

T = TypeVar("T")

BROKEN = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "socket", "gloo", "nccl")
"""What a collective says whose other end is gone, one way or another."""


class SharedError(ConfigError):
    """A mistake that all ranks know of, so that one of them need tell."""


class LostRankError(RuntimeError):
    """Another rank has ended, or does not answer."""


@dataclass(frozen=True)
class Ranks:
    """Who else trains.

    Attributes:
        device: Where this process trains.
        rank: Number of this process.
        world: How many there are.
        local: Number of this process on its machine.
        restarted: Whether torchrun has started these processes again, after one of them was lost.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    local: int = 0
    restarted: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the rank that reads and writes what there is one of."""
        return self.rank == 0

    def agreed(self, action: Callable[[], T]) -> T:
        """What `action` returns here, once no rank has failed in it; it must not wait for other ranks.

        Raises ConfigError on all ranks where it raised ValueError or OSError on one.
        """
        if self.world == 1:
            return action()
        result, problem = _tried(action)
        problems = self._gathered(problem)
        for rank, other in enumerate(problems):
            if other is not None:
                raise SharedError(other if all(problems) else f"rank {rank}: {other}")
        return result  # type: ignore[return-value]

    def shared(self, action: Callable[[], T]) -> T:
        """What `action` returns on the first rank, which alone does it. Raises its ConfigError on all ranks."""
        if self.world == 1:
            return action()
        told: list[Any] = [_tried(action)] if self.first else [None]
        dist.broadcast_object_list(told, 0)
        result, problem = told[0]
        if problem is not None:
            raise SharedError(problem)
        found: T = result
        return found

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        if self.world == 1:
            return flag
        flags = torch.tensor(int(flag), dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def first_found(self, found: str | None) -> str | None:
        """What the lowest rank that found something found, with that rank named."""
        if self.world == 1:
            return found
        by_rank = enumerate(self._gathered(found))
        return next((f"{text} (rank {rank})" for rank, text in by_rank if text is not None), None)

    def totals(self, *values: Tensor) -> list[Tensor]:
        """Sums of float64 scalars over the ranks."""
        stacked = torch.stack([value.double().to(self.device) for value in values])
        if self.world > 1:
            dist.all_reduce(stacked)
        return list(stacked)

    def share(self, batch: Tensor) -> Tensor:
        """This rank's rows of a batch [B, …] that the ranks divide."""
        return batch.chunk(self.world)[self.rank]

    def wait(self) -> None:
        """Until all ranks are here."""
        self.agreed(lambda: None)

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


@contextmanager
def joined(config: TrainConfig) -> Iterator[Ranks]:
    """The ranks of a run: those of a process group that is there, those torchrun started, or this process alone.

    Raises:
        ConfigError: Where they cannot be reached, or `[parallel]` asks for ranks and this process is alone.
        LostRankError: Where one of them is lost while the run lasts.
    """
    environment = os.environ
    if dist.is_initialized():
        world = dist.get_world_size()
        _check_sizes(config, world)
        with _watched(dist.get_rank(), world):
            yield Ranks(_device(config, local := dist.get_node_local_rank(0)), dist.get_rank(), world, local)
        return
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        if problem := config.parallel.alone():
            raise ConfigError(problem)
        yield Ranks(choose_device(config.run.device))
        return
    rank, world, local = (int(environment.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = _device(config, local)
    _check_sizes(config, world)
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    _connect(device, rank, config.parallel.timeout, attempt)
    try:
        with _watched(rank, world):
            yield Ranks(device, rank, world, local, restarted=attempt != "0")
    except ConfigError:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _check_sizes(config: TrainConfig, world: int) -> None:
    try:
        config.parallel.asked.sizes(world)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _device(config: TrainConfig, local: int) -> torch.device:
    """The device of a process, one for each on its machine."""
    device = choose_device(config.run.device)
    if device.type != "cuda":
        return device
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no GPU for local rank {local}, this machine has {torch.cuda.device_count()}: start as many "
            "processes as GPUs (torchrun --nproc-per-node)"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


@contextmanager
def _watched(rank: int, world: int) -> Iterator[None]:
    """What a collective says when another rank is gone, as a LostRankError."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if world == 1 or not any(word in reason.lower() for word in BROKEN):
            raise
        raise LostRankError(
            f"rank {rank}: another rank has ended or does not answer ({reason[:200]}). Nothing that was saved is lost: "
            "the same command with --resume goes on from the newest checkpoint, as torchrun --max-restarts does"
        ) from error


def _connect(device: torch.device, rank: int, timeout: float, attempt: str) -> None:
    """Make the process group. Objects and flags travel between CPUs, whatever the tensors do.

    torchrun's store outlives the processes it restarts, with the addresses of the dead in it (pytorch issue 135712): so
    each attempt has keys of its own.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = timedelta(seconds=timeout)
    try:
        store, rank, world = next(rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
        own = dist.PrefixStore(f"octavo/{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=patience)
    except (dist.DistError, RuntimeError, ValueError) as error:
        place = ":".join(os.environ.get(name, "(unset)") for name in ("MASTER_ADDR", "MASTER_PORT"))
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"rank {rank} cannot reach the other ranks at MASTER_ADDR:MASTER_PORT = {place} within {timeout:g} s "
            f"({reason}): give every machine the same --rdzv-endpoint HOST:PORT, and see that HOST answers on PORT"
        ) from None


def _tried(action: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return action(), None
    except (ValueError, OSError) as error:
        return None, str(error)
