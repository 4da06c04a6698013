"""Two processes that are ranks of one Gloo group, kept between cases; ended and started afresh where one fails."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist

from benchmarks.fuzz.build import Case
from benchmarks.fuzz.outcome import Outcome, fail, outcome_of
from benchmarks.processes import Processes

WORLD = 2
_SECONDS = 180.0
_JOBS = 100
"""Cases after which new processes take over: each case leaves process groups, and every Gloo group keeps threads."""
WRAPPERS = ("fully_shard", "parallelize")  # Those that run on ranks
Job = Callable[[Case], Outcome]
Defect = Callable[[], AbstractContextManager[Any]]

DEFECTS: list[Defect] = []  # Contexts that ranks enter around a job, functions of a module: for tests
POOL = Processes()
_numbers = count(1)


def on_ranks(job: Job, case: Case) -> Outcome:
    def is_error(outcome: Outcome) -> bool:
        return outcome.label.startswith("error")

    try:
        POOL.send([partial(_outcome, rank, POOL.folder, job, case, list(DEFECTS)) for rank in range(WORLD)])
        results, errors = POOL.collect(_SECONDS, is_error)
    except BaseException:  # over time, or interrupted
        POOL.kill()
        raise
    outcomes = [*results.values(), *(fail("error", f"rank {rank}: {text}") for rank, text in errors.items())]
    if any(map(is_error, outcomes)) or next(_numbers) % _JOBS == 0:
        POOL.kill()
    return min(outcomes, key=lambda outcome: ("fail", "invalid", "pass").index(outcome.status))


def _outcome(rank: int, folder: str, job: Job, case: Case, defects: list[Defect]) -> Outcome:
    if not dist.is_initialized():
        options: Any = {"rank": rank, "world_size": WORLD, "timeout": timedelta(seconds=_SECONDS)}
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", **options)

    def run() -> Outcome:
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for defect in defects:
                stack.enter_context(defect())
            return job(case)

    return outcome_of(run)
