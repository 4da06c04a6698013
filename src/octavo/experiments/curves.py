"""The per-step series of a run as arrays: what the report draws and compares.

A value that was not finite leaves a gap, never a zero.
"""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.train.record.metrics import LOSS, StepMetrics

Floats = NDArray[np.floating[Any]]
Steps = NDArray[np.int64]
UNITS = {"mfu": 100, "peak_memory": 2**-30}  # Factors from the units of steps to those of `Curves`


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One run's series, all of one length; NaN where a step has no value."""

    step: Steps  # Optimizer steps finished, ascending from 1
    loss: Floats  # Mean cross-entropy of the step's batch, in nats per token
    lr: Floats  # Learning rate of the step
    grad_norm: Floats  # Global L2 norm of the gradient before clipping
    tokens_per_s: Floats  # Target tokens per second of the step
    held_out: Floats  # Loss on held-out data after the step; NaN in most
    mfu: Floats  # Model FLOPs utilization in percent of the bf16 peak
    peak_memory: Floats  # Largest number of bytes of tensors on the first GPU so far, in GiB

    @classmethod
    def of(cls, rows: Iterable[StepMetrics]) -> "Curves":
        steps, columns = array("q"), {field.name: array("d") for field in fields(cls) if field.name != "step"}
        for row in rows:
            steps.append(row.step)
            for name, column in columns.items():
                value = (row.held_out or {}).get(LOSS) if name == "held_out" else getattr(row, name)
                column.append(math.nan if value is None else value)
        series = {name: np.array(column) * UNITS.get(name, 1) for name, column in columns.items()}
        return cls(step=np.array(steps), **series)


def smoothing_window(steps: int) -> int:
    """Steps in the running mean for a run of `steps` steps: 5 % of them, odd, at least 1."""
    return max(1, steps // 20 | 1)


def smooth(values: Floats) -> Floats:
    """Centred running mean of [n] values, over fewer at both ends, ignoring what is not finite."""
    # Centred: unlike an exponential average it does not lag.
    finite, count = np.isfinite(values), len(values)
    half, places = smoothing_window(count) // 2, np.arange(count)
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, count)
    sums, counts = (np.pad(np.cumsum(each), (1, 0)) for each in (np.where(finite, values, 0.0), finite))
    with np.errstate(invalid="ignore"):  # 0/0 where nothing is finite
        return np.asarray((sums[last] - sums[first]) / (counts[last] - counts[first]))


def gap_percent(baseline: Curves, candidate: Curves) -> tuple[Steps, Floats]:
    """The steps both runs have and, for each, the candidate's loss above the baseline's, in percent."""
    steps, mine, theirs = np.intersect1d(baseline.step, candidate.step, return_indices=True)
    reference = baseline.loss[mine]
    return steps, 100 * (candidate.loss[theirs] - reference) / reference
