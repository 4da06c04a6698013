"""Heartbeats: each rank increments a key in the store of the process group twice a second.

The error of a collective does not show its cause. Gloo raises a plain RuntimeError for a dead peer, a timeout and a
wrong argument, NCCL a DistBackendError for a dead peer and a full GPU. So the type and traceback of an error show
whether it comes from a collective, and the store shows whether another rank is gone.
"""

import threading
import time
from typing import Any

import torch.distributed as dist

BEAT_SECONDS = 0.5
"""Seconds between two counts."""
GRACE_SECONDS = 3.0
"""Seconds without a count after which a rank counts as gone: killed, stopped, or its machine down."""
LEFT = "left"


class Heartbeat:
    """Counts for this rank in a thread, until closed."""

    def __init__(self, store: Any, name: str, rank: int, world: int) -> None:
        self._store = dist.PrefixStore(f"octavo/alive/{name}", store.clone())  # type: ignore[attr-defined]
        self._rank, self._world = rank, world
        self._store.set(str(rank), "0")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._count, name="octavo-heartbeat", daemon=True)
        self._thread.start()

    def gone(self) -> list[int]:
        """Other ranks that had left when this was called, or do not count; all of them where the store is gone."""
        # Takes up to `GRACE_SECONDS` seconds. A rank that leaves meanwhile was there when the error was raised.
        others = set(range(self._world)) - {self._rank}
        try:
            before = {rank: self._read(rank) for rank in others}
            silent, end = others, time.monotonic() + GRACE_SECONDS
            while silent and time.monotonic() < end and LEFT not in before.values():
                time.sleep(BEAT_SECONDS / 4)
                silent = {rank for rank in silent if self._read(rank) == before[rank]}
        except RuntimeError:  # as all of torch's errors of a store are
            return sorted(others)
        return sorted(rank for rank in silent if LEFT not in before.values() or before[rank] == LEFT)

    def close(self) -> None:
        """Leave."""
        self._closing.set()
        self._thread.join()

    def _read(self, rank: int) -> str:
        key = str(rank)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _count(self) -> None:
        number = 0
        try:
            while not self._closing.wait(BEAT_SECONDS):
                number += 1
                self._store.set(str(self._rank), str(number))
            self._store.set(str(self._rank), LEFT)
        except RuntimeError:  # the store's host is gone, which others notice as this one does
            return


def from_collective(error: BaseException) -> bool:
    """Whether an error was raised by a collective: by its type, or where it is as plain as Gloo's, by its traceback."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return False
    if isinstance(error, dist.DistError):
        return True
    modules, trace = [], error.__traceback__
    while trace is not None:
        modules.append(str(trace.tb_frame.f_globals.get("__name__")))
        trace = trace.tb_next
    called = any(module.startswith(("torch.distributed", "octavo.comm")) for module in modules)
    of_ddp = modules and modules[-1] in ("torch.nn.parallel.distributed", "torch.autograd.graph")  # forward, backward
    return type(error) is RuntimeError and bool(called or of_ddp)
