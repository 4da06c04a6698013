"""Spike guard: a loss that leaves its way, and the way back (`[guard] spike`).

A loss is a spike where it lies above the median of the last `window` losses by more than `spike` robust standard
deviations (1.4826 times the median distance from the median, at least 1 % of the median: a loss that hardly varies is
no reason to stop at its first bump). Losses fall while a model learns, so the median lies above the next one, and only
a rise of its own stands out.

Then the run goes back to its newest checkpoint and on from there with the batches after the spike: those in between
are not seen again (as PaLM was trained, arXiv 2204.02311, section 5.1). A spike that comes back within a window goes
back one checkpoint further, as the newest may have had it in its weights already. What a batch is stays a function of
(seed, step, batches skipped), and the last is in every checkpoint.
"""

import math
import shutil
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from octavo.train.checkpoint import checkpoints
from octavo.train.metrics import StepMetrics
from octavo.train.sections import GuardConfig

FEWEST = 16
"""Losses below which none is called a spike."""
NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median distance from its median."""
LEAST = 0.01
"""Smallest deviation, as a share of the median."""


class SpikeError(RuntimeError):
    """A step whose loss is a spike; the run has to go back.

    Attributes:
        step: The step, 1, 2, …
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class SpikeGuard:
    """Tells spikes from losses.

    Args:
        config: What a spike is, and how many are answered.

    Attributes:
        rollbacks: How often the run went back.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.rollbacks = 0
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self._last: tuple[int, int] | None = None

    @property
    def active(self) -> bool:
        """Whether a spike would be answered."""
        return self._config.spike > 0 and self.rollbacks < self._config.rollbacks

    def restart(self, losses: Iterable[float | None]) -> None:
        """Take these for the losses of the steps before the next one."""
        self._losses.clear()
        self._losses.extend(loss for loss in losses if loss is not None)

    def check(self, row: StepMetrics) -> None:
        """Take note of a step.

        Raises:
            SpikeError: Where its loss is a spike.
        """
        if self.active and len(self._losses) >= min(FEWEST, self._config.window) and row.loss is not None:
            middle = median(self._losses)
            spread = max(NORMAL * median(abs(loss - middle) for loss in self._losses), LEAST * abs(middle))
            height = (row.loss - middle) / spread if spread else math.inf
            if row.loss > middle and height > self._config.spike:
                raise SpikeError(
                    f"step {row.step}: the loss is {row.loss:.4g}, {height:.3g} deviations above {middle:.4g}, the "
                    f"median of {len(self._losses)} steps (guard.spike = {self._config.spike:g})",
                    step=row.step,
                )
        if row.loss is not None:
            self._losses.append(row.loss)

    def way_back(self, out: Path, spike: int) -> Path:
        """The checkpoint to go back to after a spike in step `spike`. Newer ones are removed: the run will differ."""
        found = checkpoints(out)
        if self._last is not None and spike - self._last[0] <= self._config.window:
            older = [path for path in found if _step(path) < self._last[1]]
            found = older or found[:1]
        for newer in checkpoints(out)[len(found) :]:
            shutil.rmtree(newer)
        return found[-1]

    def went_back(self, spike: int, to: int) -> None:
        """Take note of a return to step `to`."""
        self.rollbacks += 1
        self._last = (spike, to)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
