"""The steps of a run for the live page: a million of them in 41 MB."""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.experiments.curves import Curves
from octavo.experiments.logged_run import SAMPLES_SHOWN, Samples
from octavo.train.record.metrics import LOSS, WARMUP_STEPS, Losses, StepMetrics

RECENT = 50  # Last steps that are there with all of their fields; their speed tells the time that is left
COLUMNS = {
    "step": np.int64, "loss": np.float64, "held_out": np.float32, "lr": np.float32, "grad_norm": np.float32,
    "tokens_per_s": np.float32, "mfu": np.float32, "peak_memory": np.float32,
}  # fmt: skip
"""Type of each column; charts draw six digits."""


class LiveSteps:
    """Columns of numbers, which grow by a step at a time; the last steps and samples as they are."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget all steps."""
        self._count, self._skipped, self._seconds = 0, 0, 0.0
        self._columns: dict[str, NDArray[Any]] = {name: np.empty(1024, kind) for name, kind in COLUMNS.items()}
        # One more than is shown, since the last step may be popped.
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT + 1)
        self._samples: deque[Samples] = deque(maxlen=SAMPLES_SHOWN + 1)
        self._held_out: deque[StepMetrics] = deque(maxlen=2)

    def append(self, row: StepMetrics) -> None:
        """Add a step."""
        if self._count == len(self._columns["step"]):
            for name, column in self._columns.items():
                self._columns[name] = np.empty(2 * self._count, column.dtype)  # takes memory where it is written to
                self._columns[name][: self._count] = column
        own = {
            "held_out": (row.held_out or {}).get(LOSS),
            "mfu": None if row.mfu is None else 100 * row.mfu,
            "peak_memory": None if row.peak_memory is None else row.peak_memory / 2**30,
        }
        for name, column in self._columns.items():
            column[self._count] = own[name] if name in own else getattr(row, name)  # None becomes NaN
        self._count, self._skipped, self._seconds = (
            self._count + 1, self._skipped + row.skipped, self._seconds + row.step_s
        )  # fmt: skip
        self._recent.append(row)
        if row.samples:
            self._samples.append(Samples(step=row.step, texts=row.samples))
        if row.held_out:
            self._held_out.append(row)

    def pop(self) -> None:
        """Remove the last step, but not that before it as well."""
        row = self._recent.pop()
        self._count, self._skipped, self._seconds = (
            self._count - 1, self._skipped - row.skipped, self._seconds - row.step_s
        )  # fmt: skip
        if row.samples:
            self._samples.pop()
        if row.held_out:
            self._held_out.pop()

    @property
    def last_step(self) -> int:
        """Number of the last step; 0 without one."""
        return self._recent[-1].step if self._recent else 0

    @property
    def recent(self) -> list[StepMetrics]:
        """The last `RECENT` steps."""
        return list(self._recent)[-RECENT:]

    @property
    def samples(self) -> list[Samples]:
        """The last `SAMPLES_SHOWN` samples, the newest first."""
        return list(self._samples)[::-1][:SAMPLES_SHOWN]

    @property
    def held_out(self) -> StepMetrics | None:
        """The last step with an evaluation."""
        return self._held_out[-1] if self._held_out else None

    @property
    def curves(self) -> Curves:
        """The series; they share memory with the columns, until the next step."""
        return Curves(**{name: column[: self._count] for name, column in self._columns.items()})

    def totals(self) -> dict[str, Any]:
        """What `StepTotals` computes of the same steps."""
        last, curves = self._recent[-1] if self._recent else None, self.curves
        first = WARMUP_STEPS if self._count > WARMUP_STEPS else 0
        losses, memory = (values[np.isfinite(values)] for values in (curves.loss, curves.peak_memory))
        tail = losses[-max(1, len(losses) // 10) :]
        return {
            "steps": self.last_step,
            "tokens": last.tokens if last else 0,
            "losses": Losses(first=float(losses[0]), final=float(losses[-1]), tail_mean=float(tail.mean()))
            if len(losses)
            else None,
            "tokens_per_s": _median(curves.tokens_per_s[first:]),
            "skipped_steps": self._skipped,
            "wall_s": self._seconds,
            "held_out": self.held_out.held_out if self.held_out else None,
            "mfu": None if (mfu := _median(curves.mfu[first:])) is None else mfu / 100,
            "peak_memory": round(2**30 * float(memory.max())) if len(memory) else None,
        }


def _median(values: NDArray[Any]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None
