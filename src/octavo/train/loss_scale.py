"""Loss scaling: lifts small fp16 gradients out of the underflow, and backs off when large ones overflow.

Powers of two change no mantissa. docs/autopilot.md has the rules, also of a scale that a temporary fault has lowered
far: it is restored on trial, after twice as many good steps (up to 16), at half the scale, each time that fails.
"""

GROWTH_INTERVAL = 2000
INITIAL_SCALE = 2.0**16
MAX_SCALE = 2.0**24  # Upper limit of a dynamic scale: 65504, the largest fp16 value, is then a gradient of 0.004
MAX_SKIPS = 40  # Skipped steps in a row before the run stops: the scale has then fallen by 2⁴⁰, so range is not it
RESTORE_FACTOR = 2.0**8  # Factor by which a scale falls before it is restored on trial
QUIET_STEPS = 16  # Good steps in a row after which an overflow starts a new fall; also the longest wait for a trial


class LossScale:
    def __init__(self, mode: str | float) -> None:
        self.active = mode != "none"  # Whether the run uses loss scaling
        self._dynamic = mode == "dynamic"
        self._good_steps = 0
        self._skips = 0
        self.value: float = INITIAL_SCALE if self._dynamic else 1.0 if isinstance(mode, str) else mode  # The scale
        # The scale before the last step restored it; None if the step restored nothing.
        self.restored_from: float | None = None
        self._before = self.value  # the scale before its fall
        self._trial_from, self._wait = 0.0, 1  # the scale below one on trial; good steps until the next trial

    @property
    def exhausted(self) -> bool:
        return self._skips > MAX_SKIPS

    @property
    def last_chance(self) -> bool:
        return self._skips == MAX_SKIPS

    def update(self, *, overflow: bool, loss_is_finite: bool = True) -> None:
        """Count a step. A dynamic scale grows after enough good ones, and backs off after an overflow."""
        self.restored_from = None
        collapsed = self.value * RESTORE_FACTOR < self._before
        if overflow:
            if self._good_steps >= QUIET_STEPS and not collapsed:
                self._before, self._wait = max(self._before, self.value), 1
            self._skips, self._good_steps = self._skips + 1, 0
            if self._dynamic and loss_is_finite and self._trial_from:  # the trial has failed
                self.value, self._trial_from = self._trial_from, 0.0
                self._before, self._wait = self._before / 2, min(2 * self._wait, QUIET_STEPS)
            elif self._dynamic and loss_is_finite:
                self.value /= 2
            return
        self._skips, self._good_steps = 0, self._good_steps + 1
        if self._trial_from:
            self._trial_from, self._wait = 0.0, 1
        if collapsed and self._good_steps >= self._wait:
            self._restore()
        elif self._dynamic and self._good_steps >= GROWTH_INTERVAL:
            self._before = max(self._before, self.value)
            self.value = max(self.value, min(2 * self.value, MAX_SCALE))
            self._good_steps = 0

    def skip_zero_gradient(self) -> bool:
        """Skip a step whose gradient is exactly zero and restore the scale; False if underflow cannot be the cause."""
        before = max(self._before, INITIAL_SCALE)
        if not self._dynamic or self.value >= before or self.exhausted:
            return False
        self._before = before
        self._skips += 1
        self._restore()
        return True

    def undo_fall(self) -> None:
        """Restore the scale from before its fall, for a run that stops and resumes after the cause is fixed."""
        self._skips = 0
        if self.value < self._before:
            self.value, self._good_steps, self._trial_from, self._wait = self._before, 0, 0.0, 1

    def _restore(self) -> None:
        self.restored_from = self._trial_from = self.value
        self.value, self._good_steps = self._before, 0

    def state_dict(self) -> dict[str, float]:
        return {
            "value": self.value, "good_steps": self._good_steps, "overflows": self._skips, "before": self._before,
            "trial_from": self._trial_from, "wait": self._wait,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self._before, self._trial_from = state["value"], state["before"], state["trial_from"]
        self._good_steps, self._skips, self._wait = (int(state[key]) for key in ("good_steps", "overflows", "wait"))
