"""Spike guard: rolls a run back to the checkpoint before its loss spiked, and skips the batches (`[guard] spike`).

docs/autopilot.md defines a spike. Every checkpoint holds the number of skipped batches and the state of the guard, and
`events.jsonl` those of a rollback until the next checkpoint, so a killed and resumed run equals an uninterrupted one.
"""

import math
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from octavo.train.checkpoint.retention import checkpoints, remove_checkpoint, step_of
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import GuardConfig
from octavo.train.record.metrics import StepMetrics

MIN_STEPS = 16  # Fewest steps in the window before a spike can be detected
MAD_TO_STD = 1.4826  # Standard deviation of a normal distribution, in median absolute deviations
MIN_DEVIATION = 0.01  # Smallest deviation, as a fraction of the median
STEPS_PER_ALARM = 100_000  # Expected number of steps per false alarm, at least
LOSS_DAMAGE, LOSS_AND_NORM_DAMAGE = 2.0, 1.25  # Factors of the median loss: alone, and with an unusual gradient norm
NORM_FACTOR = 3.0  # Factor above or below the median gradient norm that is unusual


class SpikeError(RuntimeError):
    def __init__(self, message: str, *, step: int, first: int) -> None:
        super().__init__(message)
        self.step = step  # The step that detected it, 1, 2, …
        self.first = first  # The first step of the rise


class SpikeGuard:
    def __init__(self, config: GuardConfig) -> None:
        self.rollbacks = 0  # Number of rollbacks of the run
        self._config = config
        self._usual: deque[list[float]] = deque(maxlen=config.window)  # [loss, gradient norm] of the last steps
        self._rise: list[list[float]] = []
        self._first = 0
        self._last: list[int] = []  # step of the last spike, and of the checkpoint after it

    @property
    def active(self) -> bool:
        return self._config.spike > 0 and self.rollbacks < self._config.rollbacks

    @property
    def rising(self) -> bool:
        return bool(self._rise)

    def check(self, row: StepMetrics) -> None:
        """Count a step; a step skipped under loss scaling does not count."""
        if not self.active or row.skipped or row.loss is None or row.grad_norm is None:
            return
        rises = self._rises(row.loss)
        if rises:
            self._first = self._first if self._rise else row.step
        else:
            self._accept_rise()
        (self._rise if rises else self._usual).append([row.loss, row.grad_norm])
        if rises and len(self._rise) >= steps_in_a_row(len(self._usual)):
            if damage := self._damage():
                raise self.spike_error(damage, row.step)
            self._accept_rise()

    def spike_error(self, reason: str, step: int) -> SpikeError:
        """The error for a spike detected in a step; it includes the rise before the step, if any."""
        return SpikeError(reason, step=step, first=self._first if self._rise else step)

    def checkpoint_before(self, out: Path, spike: SpikeError) -> Path:
        """The checkpoint to roll back to. Removes newer ones, because the run differs from there."""
        all_paths = checkpoints(out)
        before = [path for path in all_paths if step_of(path) < spike.first] or all_paths[:1]
        if self._last and spike.step - self._last[0] <= self._config.window:
            before = [path for path in before if step_of(path) < self._last[1]] or before[:1]
        for newer in all_paths[len(before) :]:
            remove_checkpoint(newer)
            if newer.exists():
                raise ConfigError(f"{newer} is from after a spike and cannot be removed: remove it, and --resume")
        return before[-1]

    def record_rollback(self, spike: int, to: int, rollbacks: int) -> None:
        self.rollbacks, self._last = rollbacks, [spike, to]

    def state_dict(self) -> dict[str, Any]:
        own = {"usual": list(self._usual), "rise": self._rise, "first": self._first}
        return {"rollbacks": self.rollbacks, "last": self._last, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollbacks, self._last = state.get("rollbacks", 0), list(state.get("last", []))
        self._usual = deque(state.get("usual", []), self._config.window)
        self._rise, self._first = list(state.get("rise", [])), state.get("first", 0)

    def _rises(self, loss: float) -> bool:
        losses = [usual for usual, _ in self._usual]
        if len(losses) < min(MIN_STEPS, self._config.window) or loss <= max(losses):
            return False
        halves = losses[: len(losses) // 2], losses[len(losses) // 2 :]
        middles = [median(half) for half in halves]
        distances = (abs(usual - middle) for half, middle in zip(halves, middles, strict=True) for usual in half)
        spread = max(MAD_TO_STD * median(distances), MIN_DEVIATION * abs(middles[1]))
        return loss - middles[1] > self._config.spike * spread

    def _damage(self) -> str:
        newer = list(self._usual)[len(self._usual) // 2 :]
        (usual_loss, usual_norm), (loss, norm) = (map(median, zip(*rows, strict=True)) for rows in (newer, self._rise))
        unusual = not usual_norm / NORM_FACTOR < norm < usual_norm * NORM_FACTOR
        if loss < LOSS_DAMAGE * usual_loss and not (unusual and loss >= LOSS_AND_NORM_DAMAGE * usual_loss):
            return ""
        steps = f"steps {self._first} to {self._first + len(self._rise) - 1}"
        usual = f"the medians of {len(newer)} steps before were {usual_loss:.4g} and {usual_norm:.3g}"
        rise = f"the loss is {loss:.4g} and the gradient norm {norm:.3g}"
        return f"{steps}: {rise}; {usual} (guard.spike = {self._config.spike:g})"

    def _accept_rise(self) -> None:
        """Add a rise to the usual steps: it did not last, or is a new level."""
        self._usual.extend(self._rise)
        self._rise = []


def steps_in_a_row(before: int) -> int:
    """Smallest number of rising steps after `before` others that chance explains once in `STEPS_PER_ALARM` steps."""
    return next(number for number in range(1, STEPS_PER_ALARM) if math.comb(before + number, number) >= STEPS_PER_ALARM)
