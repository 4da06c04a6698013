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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from octavo.train.config import ConfigError, TrainConfig, flat
from octavo.train.device import choose_device
from octavo.train.diagnose import NonFiniteError
from octavo.train.heartbeat import Heartbeat, from_collective

T = TypeVar("T")

MACHINE_PATHS = {"run.out", "data.source", "data.cache"}
"""Settings that name a place on a machine, and may differ between ranks; the data is compared by its fingerprint."""
STARTED_KEY = "octavo/begun"
"""Key of torchrun's store that says that a run was begun."""


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
        store: What processes that torchrun starts again find of those before them; None without torchrun.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    local: int = 0
    store: dist.Store | None = None  # type: ignore[name-defined]

    @property
    def restarted(self) -> bool:
        """Whether torchrun has started these processes again, after others had begun the run."""
        return self.store is not None and self.store.check([STARTED_KEY])

    def begin(self) -> None:
        """Tell those that may come after these that the run was begun."""
        if self.store is not None:
            self.store.set(STARTED_KEY, "")

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that reads and writes what there is one of."""
        return self.rank == 0

    def raise_together(self, action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
        """What `action` returns here, once no rank has failed in it; it must not wait for other ranks.

        Ranks wait for each other in `group`, or the default one. Raises ConfigError on all of them where `action`
        raised ValueError or OSError on one.
        """
        if self.world == 1:
            return action()
        result, error = _try(action)
        if self.any(error is not None, group=group):
            errors = self.all_gather(error)
            rank, message = next((rank, other) for rank, other in enumerate(errors) if other is not None)
            raise SharedError(message if None not in errors else f"rank {rank}: {message}")
        return result  # type: ignore[return-value]

    def run_on_rank0(self, action: Callable[[], T]) -> T:
        """What `action` returns on the first rank, which alone does it. Raises its ConfigError on all ranks."""
        if self.world == 1:
            return action()
        payload: list[Any] = [_try(action)] if self.is_main else [None]
        dist.broadcast_object_list(payload, 0)
        result, error = payload[0]
        if error is not None:
            raise SharedError(error)
        value: T = result
        return value

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError on all ranks where a setting differs between them; it names the first and who has which."""
        if self.world == 1:
            return
        by_rank = self.all_gather(dict(settings))
        for key in dict.fromkeys(key for settings_of_rank in by_rank for key in settings_of_rank):
            owners: dict[str, list[int]] = {}
            for rank, settings_of_rank in enumerate(by_rank):
                owners.setdefault(repr(settings_of_rank[key]) if key in settings_of_rank else "unset", []).append(rank)
            if len(owners) > 1:
                shown = "; ".join(f"{value} on {_rank_names(ranks)}" for value, ranks in owners.items())
                raise SharedError(f"the ranks do not train the same: {key} = {shown}. Give every machine the same one")

    def any(self, flag: bool, *, group: dist.ProcessGroup | None = None) -> bool:
        """Whether a flag is set on any rank."""
        if self.world == 1:
            return flag
        flags = torch.tensor(int(flag), dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group)
        return bool(flags)

    def first_reported(self, text: str | None, order: int = 0) -> str | None:
        """What was found at the lowest order by the lowest rank, with that rank named."""
        if self.world == 1:
            return text
        by_rank = enumerate(self.all_gather((order, text)))
        reports = [(order, rank, text) for rank, (order, text) in by_rank if text is not None]
        return "{2} (rank {1})".format(*min(reports)) if reports else None

    def all_reduce(self, *values: Tensor) -> list[Tensor]:
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
        self.raise_together(lambda: None)

    def host_group(self, timeout: timedelta) -> dist.ProcessGroup | None:
        """Another group of all ranks' CPUs, with a patience of its own; None for one process."""
        if self.world == 1:
            return None
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        return group

    def all_gather(self, value: Any) -> list[Any]:
        """A value of each rank, by rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


def under_torchrun() -> bool:
    """Whether torchrun, or whatever sets its variables, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def join_ranks(config: TrainConfig) -> Iterator[Ranks]:
    """The ranks of a run: those of a process group that is there, those torchrun started, or this process alone.

    Raises:
        ConfigError: Where they cannot be reached or are not configured alike, or `[parallel]` asks for ranks and this
            process is alone.
        LostRankError: Where one of them is lost while the run lasts.
    """
    environment = os.environ
    if dist.is_initialized():
        local = dist.get_node_local_rank(0)
        with _detect_lost_ranks(dist.get_rank(), dist.get_world_size()):
            yield _check_same_config(
                config, Ranks(_device(config, local), dist.get_rank(), dist.get_world_size(), local)
            )
        return
    if not under_torchrun():
        if problem := config.parallel.alone():
            raise ConfigError(problem)
        yield Ranks(choose_device(config.run.device))
        return
    rank, world, local = (int(environment.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = _device(config, local)
    store = _connect(device, rank, config.parallel.timeout)
    try:
        with _detect_lost_ranks(rank, world):
            yield _check_same_config(config, Ranks(device, rank, world, local, store))
    except (ConfigError, NonFiniteError):
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _check_same_config(config: TrainConfig, ranks: Ranks) -> Ranks:
    """The ranks, where all have the same configuration and it is one for so many. Raises ConfigError on all of them."""
    settings = dict(flat("", config.model_dump(mode="json", exclude_none=True)))
    ranks.check_same({key: value for key, value in settings.items() if key not in MACHINE_PATHS})
    try:
        config.parallel.resolved.sizes(ranks.world)
    except ValueError as error:
        raise SharedError(str(error)) from None
    return ranks


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
def _detect_lost_ranks(rank: int, world: int) -> Iterator[None]:
    """What a collective raises when another rank is gone, as a LostRankError."""
    if world == 1:
        yield
        return
    names = [uuid4().hex]
    dist.broadcast_object_list(names, 0)
    heartbeat = Heartbeat(_get_default_store(), names[0], rank, world)
    try:
        yield
    except RuntimeError as error:
        if not from_collective(error):
            raise
        if not heartbeat.gone():
            error.add_note(f"rank {rank}: a collective failed, and every other rank is alive")
            raise
        reason = " ".join(str(error).split())
        raise LostRankError(
            f"rank {rank}: another rank has ended or does not answer ({reason[:200]}). Nothing that was saved is lost: "
            "the same command with --resume goes on from the newest checkpoint, as torchrun --max-restarts does"
        ) from error
    finally:
        heartbeat.close()


def _connect(device: torch.device, rank: int, timeout: float) -> dist.Store:  # type: ignore[name-defined]
    """Make the process group, and return torchrun's store. Objects and flags travel between CPUs, whatever tensors do.

    The store outlives the processes that torchrun starts again, with the addresses of the dead in it (pytorch issue
    135712): so each attempt has keys of its own.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    try:
        store, rank, world = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        prefixed = dist.PrefixStore(_attempt_prefix(store, rank, world, timeout), store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=limit)
    except (dist.DistError, RuntimeError, ValueError) as error:
        address = ":".join(os.environ.get(name, "(unset)") for name in ("MASTER_ADDR", "MASTER_PORT"))
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"rank {rank} cannot reach the other ranks at MASTER_ADDR:MASTER_PORT = {address} within {timeout:g} s "
            f"({reason}): give every machine the same --rdzv-endpoint HOST:PORT, and see that HOST answers on PORT"
        ) from None
    return store


def _attempt_prefix(store: dist.Store, rank: int, world: int, timeout: float) -> str:  # type: ignore[name-defined]
    """A name that the processes of one attempt know, and those of an earlier one did not.

    torchrun's restart count is none: a machine whose processes were only stopped because another's had failed does not
    count it. So rank 0 makes one up, and tells it to whoever asks until every rank has thanked; the dead do not.
    """
    token = uuid4().hex
    if rank:
        store.set(f"octavo/asks/{rank}", token)
        name = str(store.get(f"octavo/answer/{token}").decode())
        store.set(f"octavo/thanks/{name}/{rank}", "")
        return f"octavo/{name}"
    end, missing = time.monotonic() + timeout, set(range(1, world))
    while missing:
        for other in sorted(missing):
            if store.check([f"octavo/thanks/{token}/{other}"]):
                missing.remove(other)
            elif store.check([f"octavo/asks/{other}"]):
                store.set(f"octavo/answer/{store.get(f'octavo/asks/{other}').decode()}", token)
        if missing and time.monotonic() > end:
            raise RuntimeError(f"{_rank_names(sorted(missing))} did not come")
        time.sleep(0.01)
    return f"octavo/{token}"


def _rank_names(ranks: list[int]) -> str:
    """[1, 2] → "ranks 1, 2"."""
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _try(action: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return action(), None
    except (ValueError, OSError) as error:
        return None, str(error)
