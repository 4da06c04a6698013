"""The processes of a run: one, or those that torchrun started. Rank 0 owns the output folder, metrics and reports.

An action that may fail on one rank alone runs inside `raise_together` or `run_on_rank0`: all ranks then stop with the
same message. If a rank dies, all others raise `LostRankError`; torchrun's `--max-restarts` resumes the run.

The error of a collective does not show its cause: Gloo raises a plain RuntimeError for a dead peer, a timeout and a
wrong argument. So its traceback shows whether it comes from a collective, and `Heartbeat` whether a rank is gone.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from octavo.kernels.gemm.torch_bf16 import SWITCH as CPU_PRODUCTS
from octavo.numerics.suggestions import grouped
from octavo.runtime.torch_compat import PrefixStore, Store, get_default_store
from octavo.train.config.run_config import ConfigError, TrainConfig, naming
from octavo.train.config.sections import Run
from octavo.train.diagnose import NonFiniteError

T = TypeVar("T")

MACHINE_PATHS = {"run.out", "data.source", "data.cache", "eval.source"}  # They may differ; data has a fingerprint
STARTED_KEY = "octavo/begun"  # Key in torchrun's store of a run that has started


class SharedError(ConfigError):
    """An error that all ranks raise, so that only one of them prints it."""


class LostRankError(RuntimeError):
    """Another rank has ended, or does not answer."""


@dataclass(frozen=True)
class Ranks:
    device: torch.device  # Device of this process
    rank: int = 0  # Rank of this process
    world_size: int = 1  # Number of processes
    local: int = 0  # Rank of this process on its machine
    # torchrun's store, which survives a restart of the processes; None without torchrun.
    store: Store | None = None

    @property
    def restarted(self) -> bool:
        """Whether torchrun has restarted these processes after the run had started."""
        return self.store is not None and self.store.check([STARTED_KEY])

    def begin(self) -> None:
        if self.store is not None:
            self.store.set(STARTED_KEY, "")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def raise_together(self, action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
        """Run `action`, which must not wait for others, on every rank; if it fails on one, all raise ConfigError."""
        # A rank with an error other than ValueError and OSError raises that.
        if self.world_size == 1:
            return action()
        result: Any = None
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        if self.any(error is not None, group=group):
            is_mistake = isinstance(error, ValueError | OSError)  # of a user or of the machine: its message is enough
            text = str(error) if is_mistake else f"{type(error).__name__}: {error}"
            errors = self.all_gather(None if error is None else text)
            if error is not None and not is_mistake:
                error.add_note(_ALL_ANSWER)
                raise error
            rank, message = next((rank, other) for rank, other in enumerate(errors) if other is not None)
            raise SharedError(f"rank {rank}: {message}" if rank else message)
        return cast(T, result)

    @contextmanager
    def closing(self, manager: AbstractContextManager[T]) -> Iterator[T]:
        """Enter and leave a context manager of this rank; an error of leaving it is raised on all ranks."""
        with ExitStack() as stack:
            value = stack.enter_context(manager)
            yield value
            leave = stack.pop_all()
        self.raise_together(leave.close)

    def run_on_rank0(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on all ranks. Raises its errors as `raise_together` does."""
        if self.world_size == 1:
            return action()
        results = [self.raise_together(lambda: action() if self.is_main else None)]
        dist.broadcast_object_list(results, 0)
        return cast(T, results[0])

    def check_same(self, settings: Mapping[str, Any]) -> None:
        by_rank = self.all_gather(dict(settings))
        for key in dict.fromkeys(key for own in by_rank for key in own):
            owners = grouped((repr(own[key]) if key in own else "unset", rank) for rank, own in enumerate(by_rank))
            if len(owners) > 1:
                shown = "; ".join(f"{value} on {_rank_names(ranks)}" for value, ranks in owners.items())
                raise SharedError(f"the ranks do not train the same: {key} = {shown}. Give every machine the same one")

    def any(self, flag: bool, *, group: dist.ProcessGroup | None = None) -> bool:
        return bool(self.max(int(flag), group=group))

    def max(self, value: int, *, group: dist.ProcessGroup | None = None) -> int:
        if self.world_size == 1:
            return value
        values = torch.tensor(value, dtype=torch.int32, device="cpu")
        dist.all_reduce(values, dist.ReduceOp.MAX, group)
        return int(values)

    def first_reported(self, text: str | None, order: int = 0) -> str | None:
        """The text of the lowest order, then lowest rank, with that rank's number; None if no rank has one."""
        if self.world_size == 1:
            return text
        by_rank = enumerate(self.all_gather((order, text)))
        reports = [(order, rank, text) for rank, (order, text) in by_rank if text is not None]
        return "{2} (rank {1})".format(*min(reports)) if reports else None

    def all_reduce(self, *values: Tensor) -> list[Tensor]:
        stacked = torch.stack([value.double().to(self.device) for value in values])
        if self.world_size > 1:
            dist.all_reduce(stacked)
        return list(stacked)

    def host_group(self, timeout: timedelta) -> dist.ProcessGroup | None:
        return None if self.world_size == 1 else dist.new_group(backend="gloo", timeout=timeout)

    def all_gather(self, value: object) -> list[Any]:
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def join_ranks(config: TrainConfig) -> Iterator[Ranks]:
    """Join the ranks of a run: an existing process group, the processes of torchrun, or this process alone."""
    if dist.is_initialized():
        local, rank, world = dist.get_node_local_rank(0), dist.get_rank(), dist.get_world_size()
        with _detect_lost_ranks(rank, world):
            yield _check_same_config(config, Ranks(_device(config.run, local), rank, world, local))
        return
    if not under_torchrun():
        if problem := config.parallel.alone():
            raise ConfigError(problem)
        yield Ranks(choose_device(config.run.device))
        return
    rank, world, local = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = _device(config.run, local)
    store = _connect(device, rank, config.parallel.timeout)
    try:
        with _detect_lost_ranks(rank, world):
            yield _check_same_config(config, Ranks(device, rank, world, local, store))
    except (ConfigError, NonFiniteError):
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _check_same_config(config: TrainConfig, ranks: Ranks) -> Ranks:
    """Return `ranks` if all have the same configuration and it fits their number. Raises ConfigError on all ranks."""
    ranks.check_same({key: value for key, value in config.flat.items() if key not in MACHINE_PATHS})
    ranks.check_same({CPU_PRODUCTS: os.environ.get(CPU_PRODUCTS, "fast")})
    try:
        config.parallel.sizes(ranks.world_size)
    except ValueError as error:
        raise SharedError(str(error)) from None
    return ranks


def _device(run: Run, local: int) -> torch.device:
    device = choose_device(run.device)
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            problem = f"there is no GPU for local rank {local}, this machine has {torch.cuda.device_count()}"
            raise ConfigError(f"{problem}: start as many processes as GPUs (torchrun --nproc-per-node)")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return device


@contextmanager
def _detect_lost_ranks(rank: int, world: int) -> Iterator[None]:
    """Turn the error of a collective into a LostRankError if another rank has ended."""
    if world == 1:
        yield
        return
    names = [uuid4().hex]
    dist.broadcast_object_list(names, 0)
    heartbeat = Heartbeat(get_default_store(), names[0], rank, world)
    try:
        yield
    except RuntimeError as error:
        if not from_collective(error) or _ALL_ANSWER in getattr(error, "__notes__", ()):
            raise
        if not heartbeat.gone():
            error.add_note(f"rank {rank}: a collective failed, and every other rank is alive")
            raise
        problem = f"another rank has ended or does not answer ({' '.join(str(error).split())[:200]})"
        remedy = "the same command with --resume goes on from the newest checkpoint, as torchrun --max-restarts does"
        raise LostRankError(f"rank {rank}: {problem}. Nothing that was saved is lost: {remedy}") from error
    finally:
        heartbeat.close()


def _connect(device: torch.device, rank: int, timeout: float) -> Store:
    """Make the process group and return torchrun's store. Objects and flags use gloo on every device."""
    # A restart by torchrun finds the addresses of ended processes in the store (pytorch issue 135712): see the prefix.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    try:
        store: Store
        store, rank, world = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        prefixed = PrefixStore(_attempt_prefix(store, rank, world, timeout), store)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=limit)
    except (dist.DistError, RuntimeError, ValueError) as error:
        address = ":".join(os.environ.get(name, "(unset)") for name in ("MASTER_ADDR", "MASTER_PORT"))
        problem = f"rank {rank} cannot reach the other ranks at MASTER_ADDR:MASTER_PORT = {address}"
        problem += f" within {timeout:g} s ({' '.join(str(error).split())[:200]})"
        remedy = "give every machine the same --rdzv-endpoint HOST:PORT, and see that HOST answers on PORT"
        raise ConfigError(f"{problem}: {remedy}") from None
    return store


def _attempt_prefix(store: Store, rank: int, world: int, timeout: float) -> str:
    """Agree on a key prefix that is unique to this attempt of torchrun."""
    # torchrun's restart count does not serve: a machine does not count restarts that another machine caused. So rank 0
    # makes up a token and answers each request for it until every rank has confirmed; ended processes never confirm.
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
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


_ALL_ANSWER = "every rank was alive after this error"  # Note on an error that ranks have told each other about


BEAT_SECONDS = 0.5  # Seconds between two counts
GRACE_SECONDS = 3.0  # Seconds without a count after which a rank counts as gone: killed, stopped, or its machine down


class Heartbeat:
    """Counts for this rank in a thread, in the store of the process group, until closed."""

    def __init__(self, store: Any, name: str, rank: int, world: int) -> None:
        self._store = PrefixStore(f"octavo/alive/{name}", store.clone())
        self._rank, self._others = rank, [other for other in range(world) if other != rank]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._count, name="octavo-heartbeat", daemon=True)
        self._thread.start()

    def gone(self) -> list[int]:
        """Other ranks that do not count, for `GRACE_SECONDS` seconds; all of them where the store is gone."""
        try:
            before = self._counts()
            silent, end = self._others, time.monotonic() + GRACE_SECONDS
            while silent and time.monotonic() < end:
                time.sleep(BEAT_SECONDS / 4)
                counts = self._counts()
                silent = [rank for rank in silent if counts[rank] == before[rank]]
        except RuntimeError:  # as all of torch's errors of a store are
            return self._others
        return silent

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _counts(self) -> dict[int, int]:
        return {rank: self._store.add(str(rank), 0) for rank in self._others}

    def _count(self) -> None:
        with suppress(RuntimeError):  # the store's host is gone, which others notice as this one does
            while not self._closing.wait(BEAT_SECONDS):
                self._store.add(str(self._rank), 1)
            self._store.add(str(self._rank), 1)  # for those that are looking: it was there when their error was raised


def from_collective(error: BaseException) -> bool:
    """Whether an error was raised by a collective: by its type, or where it is as plain as Gloo's, by its traceback."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return False
    if isinstance(error, dist.DistError):
        return True
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    called = any(module.startswith(("torch.distributed", "octavo.comm")) for module in modules)
    of_ddp = modules and modules[-1] in ("torch.nn.parallel.distributed", "torch.autograd.graph")  # forward, backward
    return type(error) is RuntimeError and bool(called or of_ddp)


def choose_device(name: str) -> torch.device:
    usable = torch.cuda.is_available()
    if name == "cuda" and not usable:
        raise ConfigError('run.device = "cuda", but torch finds no usable CUDA device: take "auto" or "cpu"')
    return torch.device("cuda" if name == "cuda" or (name == "auto" and usable) else "cpu")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # Variable that cuBLAS reads when CUDA starts; deterministic products need it


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms in this context: on a GPU attention's backward adds atomically."""
    if not enabled:
        yield
        return
    settings: Any = torch.utils.deterministic
    with ExitStack() as stack:
        if WORKSPACE not in os.environ:
            os.environ[WORKSPACE] = ":4096:8"
            stack.callback(os.environ.pop, WORKSPACE)
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        stack.callback(setattr, settings, "fill_uninitialized_memory", settings.fill_uninitialized_memory)
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # Octavo writes what it allocates
        yield


def share_on_machine(make: Callable[[], T], ranks: Ranks) -> T:
    """Call `make` on one rank of each machine and return its result on every rank, with one copy of its tensors."""
    if ranks.world_size == 1:
        return make()
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:  # of mode 0700
        file = Path(folder) / "model.pt"
        ranks.raise_together(lambda: _write(make(), file) if ranks.local == 0 else None)
        path = ranks.all_gather(file)[ranks.rank - ranks.local]
        # Of the same user, made just now.
        value: T = ranks.raise_together(lambda: torch.load(path, mmap=True, weights_only=False))
        ranks.raise_together(lambda: None)  # wait until all have mapped it
    return value


def _write(value: object, file: Path) -> None:
    shared = f"the processes of this machine share the model by {file}: set TMPDIR to a folder with room for it"
    with naming(shared, OSError, RuntimeError):
        torch.save(value, file)
