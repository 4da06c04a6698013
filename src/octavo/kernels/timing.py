"""Timing for `octavo calibrate`: medians of what a call takes the GPU, and the host until it returns.

A caller waits for the larger of the two (`CallTime.wait`); the candidate with the shortest wait is saved.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from octavo.kernels.calibration import Entry
from octavo.runtime.torch_compat import cuda_sleep

CALLS = 24  # Timed calls of each candidate


class CallTime(NamedTuple):
    """Microseconds of a call."""

    kernel: float  # On the GPU
    host: float  # On the host, until the call returns

    @property
    def wait(self) -> float:
        """What a caller waits for, call after call."""
        return max(self)


TimedCall = Callable[[], object]
Timer = Callable[[list[TimedCall]], CallTime]  # Runs calls in order and returns the medians of their times


@dataclass(frozen=True, kw_only=True)
class TimingTask(ABC):
    """A product or a quantization to time."""

    op: str  # Name in the calibration table
    name: str  # Recipe and product or operand, such as `"rowwise dgrad"`
    case: tuple[str, ...]  # Key in the calibration table, next to the op
    shape: tuple[int, ...]  # Rows and columns of a matrix, or m, n, k of a product

    @abstractmethod
    def rate(self, microseconds: float) -> str: ...

    @abstractmethod
    def candidates(self, device: torch.device) -> "Iterable[Candidate]": ...

    def timed(self, device: torch.device, time: Timer) -> "TimingResult":
        """Time every candidate, and choose the one with the shortest wait."""
        return time_candidates(self, self.candidates(device), time)


@dataclass(frozen=True, kw_only=True)
class TimingResult:
    task: TimingTask  # The task
    times: dict[str, CallTime]  # Times by candidate, the shortest wait first
    entry: Entry | None  # The fastest candidate, for the calibration table; None if only `reference` is available
    skipped: dict[str, str] = field(default_factory=dict)  # Reasons why candidates were not timed


Candidate = tuple[str, tuple[str, int | None], Callable[[], str | list[TimedCall]]]
"""Label, backend and configuration, and what returns its calls, or the reason why it is left out."""


def time_candidates(task: TimingTask, candidates: Iterable[Candidate], time: Timer) -> TimingResult:
    """Time candidates, leave out those that raise, and choose the one with the shortest wait."""
    measured: dict[str, CallTime] = {}
    choices: dict[str, tuple[str, int | None]] = {}
    skipped: dict[str, str] = {}
    for label, choice, prepare in candidates:
        try:
            calls = prepare()
            if isinstance(calls, str):
                skipped[label] = calls
            else:
                measured[label], choices[label] = time(calls), choice
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            skipped[label] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    # Configurations of a backend take the host the same time. The shortest is the least disturbed one, and what differs
    # between them is noise, which must not choose.
    hosts: dict[str, float] = {}
    for label, (backend, _) in choices.items():
        hosts[backend] = min(hosts.get(backend, math.inf), measured[label].host)
    times = {label: CallTime(measured[label].kernel, hosts[backend]) for label, (backend, _) in choices.items()}
    times = dict(sorted(times.items(), key=lambda item: (item[1].wait, item[1].kernel)))
    entry = None
    if times:
        fastest, *rest = times
        backend, config = choices[fastest]
        entry = Entry(
            op=task.op, case=task.case, shape=task.shape, backend=backend, config=config,
            microseconds=times[fastest].kernel, host_microseconds=times[fastest].host,
            others={label: times[label].wait for label in rest},
        )  # fmt: skip
    return TimingResult(task=task, times=times, entry=entry, skipped=skipped)


def cycled(run: Callable[..., object], operands: Sequence[Sequence[Any]]) -> list[TimedCall]:
    """Return calls that take copies of operands in turn."""
    return [partial(run, *operands[i % len(operands)]) for i in range(CALLS)]


def cache_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache in bytes; 0 on other devices."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def time_on_gpu(calls: list[TimedCall]) -> CallTime:
    """Return the median times of calls on the current GPU."""
    for call in calls[:3]:  # compiles kernels and prepares their launches
        call()
    torch.cuda.synchronize()
    host = []
    for call in calls:
        begin = time.perf_counter()
        call()
        host.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
    cuda_sleep(200_000 * len(calls))  # clocks: about 0.1 ms a call
    for call, (start, end) in zip(calls, events, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return CallTime(median(start.elapsed_time(end) * 1000 for start, end in events), median(host))
