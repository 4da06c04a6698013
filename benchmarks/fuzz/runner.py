"""Run one case, with a time limit, and turn whatever happens into an `Outcome`."""

import importlib
import json
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz import ranks
from benchmarks.fuzz.build import Case
from benchmarks.fuzz.outcome import Invalid, Outcome, of_error
from benchmarks.fuzz.shrink import shrink

SECONDS, PATIENCE = 20.0, 12.0
"""Seconds of computing after which a case is cut, and the factor for waiting: other programs may share the machine."""
CORPUS = Path(__file__).parent / "corpus.json"


class _TimeLimit(BaseException):
    """A case took too long."""


def check(case: Case, seconds: float = SECONDS) -> Outcome:
    """Run a case of any kind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of more threads have another order
    _import_all()
    if ranks.needed(case):
        ranks.POOL.start()
    try:
        with _limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"benchmarks.fuzz.{case['kind']}").check(case)
    except Invalid as error:
        return Outcome("invalid", "", str(error))
    except _TimeLimit:
        return Outcome("cut", "", f"more than {seconds:g} s")
    except Exception as error:
        return of_error(error)
    finally:
        torch.set_num_threads(threads)


@cache
def _import_all() -> None:
    """Import what cases import, before the time of one begins: an import that is cut short may abort the process."""
    importlib.import_module("torch._dynamo")
    if find_spec("transformers") is not None:
        for name in ("llama", "gemma", "t5", "phi3", "mixtral", "gpt_oss"):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def smallest(case: Case, label: str, seconds: float = 30.0) -> Case:
    """Shrink a case that fails with a label."""

    def fails(smaller: Case) -> bool:
        outcome = check(smaller)
        return outcome.failed and outcome.label == label

    return shrink(case, fails, seconds)


def corpus(only: str | None = None) -> list[dict[str, Any]]:
    """Cases once found: `{"note": what it shows, "case": …}`."""
    entries: list[dict[str, Any]] = json.loads(CORPUS.read_text())
    return [entry for entry in entries if only in (None, entry["case"]["kind"])]


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise _TimeLimit in the main thread after a time, and each second after that in case somebody swallows it.

    The time is that of this process's CPU; a case that waits, for ranks or for ever, has `PATIENCE` times as long.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _TimeLimit

    timers = (
        (signal.ITIMER_PROF, signal.signal(signal.SIGPROF, stop), signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.signal(signal.SIGALRM, stop), signal.SIGALRM, seconds * PATIENCE),
    )
    for timer, _, _, limit in timers:
        signal.setitimer(timer, limit, 1.0)
    try:
        yield
    finally:
        for timer, before, number, _ in timers:
            signal.setitimer(timer, 0.0)
            signal.signal(number, before)
