"""Kernel timing for `octavo calibrate`: operands from device memory, Python overhead hidden, medians.

Calls cycle through copies of the operands that exceed L2 twice. They are queued behind a sleep, so the GPU never waits
for Python; CUDA events around each call give its time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from octavo.kernels.calibration import Entry
from octavo.runtime.torch_compat import cuda_sleep

CALLS = 24
"""Timed calls of each candidate."""

TimedCall = Callable[[], object]
Timer = Callable[[list[TimedCall]], list[float]]
"""Runs calls in order and returns the microseconds of each."""


class TimingTask(Protocol):
    """A task that can be timed.

    Attributes:
        name: Recipe and product or operand, such as `"rowwise dgrad"`.
        case: Key in the calibration table, next to the op.
        shape: Shape in the calibration table.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def case(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    def rate(self, microseconds: float) -> str:
        """Format the achieved rate."""


@dataclass(frozen=True, kw_only=True)
class TimingResult:
    """Result of timing a task.

    Attributes:
        task: The task.
        times: Median microseconds by candidate, fastest first.
        entry: The fastest candidate, for the calibration table; None if only `reference` is available.
        skipped: Reasons why candidates were not timed.
    """

    task: TimingTask
    times: dict[str, float]
    entry: Entry | None
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_medians(
        cls, task: TimingTask, op: str, medians: dict[str, float], choices: dict[str, tuple[str, int | None]],
        skipped: dict[str, str],
    ) -> "TimingResult":  # fmt: skip
        """Make the result of timed candidates, with backend and configuration of each in `choices`."""
        times = dict(sorted(medians.items(), key=lambda item: item[1]))
        entry = None
        if times:
            fastest, *rest = times
            backend, config = choices[fastest]
            entry = Entry(
                op=op, case=task.case, shape=task.shape, backend=backend, config=config, microseconds=times[fastest],
                others={label: times[label] for label in rest},
            )  # fmt: skip
        return cls(task=task, times=times, entry=entry, skipped=skipped)


def cache_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache in bytes; 0 on other devices."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def time_on_gpu(calls: list[TimedCall]) -> list[float]:
    """Return the microseconds of each call on the GPU, without Python overhead."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
    cuda_sleep(200_000 * len(calls))  # clocks: about 0.1 ms a call
    for call, (start, end) in zip(calls, events, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in events]
