"""Two processes that are ranks of one Gloo group, kept between cases; ended and started afresh where one fails."""

import atexit
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fuzz.build import Case
from benchmarks.fuzz.outcome import Invalid, Outcome, fail, of_error

WORLD = 2
_SECONDS, _AFTER_THE_FIRST = 180.0, 3.0
_JOBS = 100
"""Cases after which new processes take over: each case leaves process groups, and every Gloo group keeps threads."""
WRAPPERS = ("fully_shard", "parallelize")
"""Those that run on ranks."""
Job = Callable[[Case], Outcome]
Defect = Callable[[], AbstractContextManager[Any]]

DEFECTS: list[Defect] = []
"""Contexts that ranks enter around a job, functions of a module: for tests."""


def needed(case: Case) -> bool:
    return case["kind"] in ("comm", "experts") or case.get("wrapper") in WRAPPERS


class Pool:
    """The processes; started by the first run."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._started = self._jobs = 0

    def run(self, job: Job, case: Case) -> Outcome:
        self.start()
        try:
            for _, connection in self._workers:
                connection.send((job, case, list(DEFECTS)))
            outcomes = self._collect()
        except BaseException:
            self.kill()
            raise
        self._jobs += 1
        if len(outcomes) < WORLD or any(o.label.startswith("error") for o in outcomes) or self._jobs % _JOBS == 0:
            self.kill()
        for status in ("fail", "invalid", "pass"):
            for outcome in outcomes:
                if outcome.status == status:
                    return outcome
        return fail("error", f"the ranks did not answer within {_SECONDS:g} s")

    def kill(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def start(self) -> None:
        """Start the processes, unless they are there, and wait until they are a group: before a case's time begins."""
        if self._workers:
            return
        context = multiprocessing.get_context("spawn")
        self._started += 1
        store = f"{self._folder.name}/store-{self._started}"
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, store), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, connection in self._workers:
            connection.recv()

    def _collect(self) -> list[Outcome]:
        left, end = {connection for _, connection in self._workers}, time.monotonic() + _SECONDS
        outcomes: list[Outcome] = []
        while left and (seconds := end - time.monotonic()) > 0:
            for connection in wait(list(left), seconds):
                assert isinstance(connection, Connection)
                left.remove(connection)
                try:
                    outcomes.append(connection.recv())
                except (EOFError, ConnectionError):
                    outcomes.append(fail("error", "the process of a rank died"))
                if outcomes[-1].label.startswith("error"):
                    end = min(end, time.monotonic() + _AFTER_THE_FIRST)
        return outcomes


POOL = Pool()
atexit.register(POOL.kill)


def _serve(connection: Connection, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timeout)
    connection.send("ready")
    while True:
        try:
            job, case, defects = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(job, case, defects))


def _outcome(job: Job, case: Case, defects: list[Defect]) -> Outcome:
    try:
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for defect in defects:
                stack.enter_context(defect())
            return job(case)
    except Invalid as error:
        return Outcome("invalid", "", str(error))
    except Exception as error:
        return of_error(error)
