"""Timing of kernels for `octavo calibrate`: operands from device memory, Python's own time hidden, medians.

As many copies of the operands are used in turn as exceed L2 twice. The calls are queued behind a pause, so that the GPU
never waits for Python; CUDA events around each give its time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from octavo.kernels.calibration import Entry

CALLS = 24
"""Timed calls of each candidate."""

Call = Callable[[], object]
Timer = Callable[[list[Call]], list[float]]
"""Runs calls one after the other and returns the microseconds of each."""


class Measured(Protocol):
    """What can be measured.

    Attributes:
        name: Recipe and what it is, such as `"rowwise dgrad"`.
        case: Key of the calibration table, beside the op.
        shape: Sizes, as the table has them.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def case(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    def rate(self, microseconds: float) -> str:
        """What a time means, for tables."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What measuring gave.

    Attributes:
        task: What was measured.
        times: Median microseconds by candidate, fastest first.
        entry: The winner, for the calibration table; None where nothing serves but `reference`.
        left_out: Why candidates were not measured.
    """

    task: Measured
    times: dict[str, float]
    entry: Entry | None
    left_out: dict[str, str] = field(default_factory=dict)


def cache_bytes(device: torch.device) -> int:
    """Bytes of a GPU's L2 cache; 0 elsewhere."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def time_on_gpu(calls: list[Call]) -> list[float]:
    """Microseconds of each call on the GPU, Python's own time hidden behind a pause."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
    torch.cuda._sleep(200_000 * len(calls))  # clocks: about 0.1 ms a call
    for call, (start, end) in zip(calls, marks, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in marks]
