"""Processes that are kept between jobs, as ranks of a group: what one raises comes back, all end where one hangs."""

import atexit
import io
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

AFTER_THE_FIRST = 5.0  # Seconds that the other processes get to tell their part, once one has failed
DIED = "its process died"
Job = Callable[[], Any]  # What pickle finds by its name, such as a partial of a function of a module


class Processes:
    """Processes, each with a job at a time; `folder` is theirs, and another one once they were killed."""

    def __init__(self, method: str = "spawn", preload: Sequence[str] = ()) -> None:
        self._context: Any = multiprocessing.get_context(method)
        if preload:
            self._context.set_forkserver_preload(list(preload))
        self._workers: list[tuple[Any, Connection]] = []
        self._working = 0
        self._scratch = tempfile.TemporaryDirectory()
        atexit.register(self.kill)

    @property
    def folder(self) -> str:
        return self._scratch.name

    def start(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def send(self, jobs: Sequence[Job]) -> None:
        self.start(len(jobs))
        self._working = len(jobs)
        for (_, connection), job in zip(self._workers, jobs, strict=False):
            connection.send_bytes(_packed(job))

    def collect(
        self, timeout: float, failed: Callable[[Any], bool] = lambda result: False
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Return results and errors of the jobs, by number; end all processes where one died or is silent."""
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        end = time.monotonic() + timeout
        left = dict(enumerate(connection for _, connection in self._workers[: self._working]))
        while left and (seconds := end - time.monotonic()) > 0:
            ready = wait(list(left.values()), seconds)
            for number in [number for number, connection in left.items() if connection in ready]:
                try:
                    good, answer = torch.load(io.BytesIO(left.pop(number).recv_bytes()), weights_only=False)
                except (EOFError, ConnectionError):
                    good, answer = False, DIED
                (results if good else errors)[number] = answer
                if not good or failed(answer):
                    end = min(end, time.monotonic() + AFTER_THE_FIRST)
        errors |= dict.fromkeys(left, f"nothing within {timeout:g} s, or since another rank failed")
        if left or DIED in errors.values():
            self.kill()
        return results, errors

    def kill(self) -> None:
        for process, connection in self._workers:
            process.kill()
            connection.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        self._scratch.cleanup()
        self._scratch = tempfile.TemporaryDirectory()


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _serve(connection: Connection) -> None:
    """Do what comes, until the other end is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            job: Job = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
        except EOFError:
            return
        try:
            answer = True, job()
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send_bytes(_packed(answer))
