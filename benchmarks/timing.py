"""Clocks. *Kernel time* replays a CUDA graph, or is that of events behind a kernel that sleeps where nothing can be
captured; *wall time* is of calls back to back. A call comes as several `runs` over buffers of its own, together at
least `CACHES` times the L2. Inputs are random normal numbers: on zeros products run faster.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CACHES = 2.0  # Buffers rotate over this many times the L2
MOST_SETS = 24
CPU_ROUNDS = 5
ENOUGH_MS = 60.0  # Replays, and wall-clock rounds, go on for about this long

Run = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one call, None if not timed; `spread` of the middle half over the median; `method`."""

    kernel_ms: float | None
    wall_ms: float | None
    spread: float | None
    method: str


def sets(bytes_per_run: float, l2_bytes: float) -> int:
    """How many buffer sets it takes to leave the cache behind."""
    return int(min(max(-(-CACHES * l2_bytes // max(bytes_per_run, 1.0)), 2), MOST_SETS))


def elapsed_ms(run: Run, device: torch.device) -> float:
    """Milliseconds of a call by the clock, with what it started on a GPU."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


class Rehearsal:
    """No GPU: every run is called once, so that the code is exercised, and nothing is timed."""

    timed = False
    l2_bytes = 0.0

    def measure(self, runs: Sequence[Run], *, wall: bool = True) -> Timing:
        for run in runs:
            run()
        return Timing(None, None, None, "none")

    def peak_mib(self, run: Run) -> float | None:
        run()
        return None


class CpuClock(Rehearsal):
    """Wall time on a CPU, best of some rounds: other processes only ever add to it."""

    timed = True

    def measure(self, runs: Sequence[Run], *, wall: bool = True) -> Timing:
        times = [elapsed_ms(run, torch.device("cpu")) for _ in range(CPU_ROUNDS) for run in runs]
        return Timing(None, min(times), None, "wall")


class GpuClock:
    """CUDA graphs, events and the wall clock."""

    timed = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.l2_bytes = float(torch.cuda.get_device_properties(device).L2_cache_size)

    def measure(self, runs: Sequence[Run], *, wall: bool = True) -> Timing:
        """Kernel and wall time of one run, the mean over `runs` and the median over repetitions."""

        def call() -> None:
            for run in runs:
                run()

        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # compiles and probes backends, which must not fall into a capture
            call()
            call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        try:
            graph, method = torch.cuda.CUDAGraph(), "graph"
            with torch.cuda.graph(graph):
                call()
            torch.cuda.synchronize(self.device)
            samples = self._timed(graph.replay, len(runs))
            graph.reset()
        except Exception as error:  # what synchronizes cannot be captured; timing it is still worth while
            torch.cuda.synchronize(self.device)
            samples = self._timed(call, len(runs), asleep=True)
            method = f"events, after {type(error).__name__} in capture"
        kernel = statistics.median(samples)
        quarter = len(samples) // 4
        middle = sorted(samples)[quarter : len(samples) - quarter]
        return Timing(kernel, self._wall(runs, kernel) if wall else None, (middle[-1] - middle[0]) / kernel, method)

    def peak_mib(self, run: Run) -> float:
        """Most memory allocated during a run, beyond what was there before it, in MiB."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def _timed(self, call: Run, count: int, *, asleep: bool = False) -> list[float]:

        def once() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if asleep:
                torch.cuda._sleep(20_000_000)  # cycles: about 10 ms, for the launches to queue up behind
            start.record()
            call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))

        repeats = int(min(max(ENOUGH_MS / max(once(), 1e-3), 7), 100))
        return [once() / count for _ in range(repeats)]

    def _wall(self, runs: Sequence[Run], kernel_ms: float) -> float:
        rounds = int(min(max(ENOUGH_MS / 3 / max(kernel_ms * len(runs), 1e-3), 1), 20))

        def call() -> None:
            for run in (*runs,) * rounds:
                run()

        torch.cuda.synchronize(self.device)
        return statistics.median(elapsed_ms(call, self.device) for _ in range(3)) / (rounds * len(runs))


Clock = Rehearsal | CpuClock | GpuClock
