"""Loss scaling: lifts small fp16 gradients out of the underflow, and backs off when large ones overflow.

The loss is multiplied by `value` before backward and the gradients divided by it in fp32. A step whose gradient is
not finite is skipped; "dynamic" then halves the scale, and doubles it, up to 2²⁴, after 2000 steps in a row without
overflow. Powers of two change no mantissa, so a scale that neither overflows nor underflows leaves the gradients
bitwise as they were.

A loss that is not finite is no overflow, as the scale comes after it: the step is skipped and the scale stays. A run
that skips more than 40 steps in a row stops, and saves the scale from before them: the one after them, 2⁻⁴⁰ times as
large, would let all gradients underflow.
"""

GROWTH_INTERVAL = 2000
INITIAL = 2.0**16
LARGEST = 2.0**24
"""Where a dynamic scale stops growing: 65504, the largest fp16 gradient, is then one of 0.004."""
MOST_SKIPS = 40
"""Skipped steps in a row after which it is no question of range: a dynamic scale has fallen by 2⁴⁰ by then."""


class LossScale:
    """Scale of the loss: "none", "dynamic", or a fixed number."""

    def __init__(self, mode: str | float) -> None:
        self.active = mode != "none"
        self._dynamic = mode == "dynamic"
        self._good_steps = 0
        self._skips = 0
        self.value: float = INITIAL if self._dynamic else 1.0 if isinstance(mode, str) else mode
        self._before = self.value

    @property
    def exhausted(self) -> bool:
        """True after so many skipped steps in a row that another would only hide the cause."""
        return self._skips > MOST_SKIPS

    @property
    def last_chance(self) -> bool:
        """True where the next step, if it is skipped too, stops the run."""
        return self._skips == MOST_SKIPS

    def update(self, *, overflow: bool, loss_is_finite: bool = True) -> None:
        """Count a step. A dynamic scale grows after enough good ones, and backs off after an overflow.

        Args:
            overflow: Whether the loss or the gradient was not finite, so that the step is skipped.
            loss_is_finite: Whether it was only the gradient; else the scale stays.
        """
        if not overflow:
            self._skips, self._good_steps = 0, self._good_steps + 1
            if self._dynamic and self._good_steps >= GROWTH_INTERVAL:
                self.value = max(self.value, min(2 * self.value, LARGEST))
                self._good_steps = 0
            return
        if not self._skips:
            self._before = self.value
        self._skips, self._good_steps = self._skips + 1, 0
        if self._dynamic and loss_is_finite:
            self.value /= 2

    def rewind(self) -> None:
        """Go back to the scale before the steps that were skipped last."""
        if self._skips:
            self.value, self._skips = self._before, 0

    def state_dict(self) -> dict[str, float]:
        """The scale, good and skipped steps in a row, and the scale before the skipped ones."""
        return {
            "value": self.value, "good_steps": self._good_steps, "overflows": self._skips, "before": self._before,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes over what `state_dict` returned."""
        self.value = state["value"]
        self._good_steps = int(state["good_steps"])
        self._skips = int(state["overflows"])
        self._before = state.get("before", self.value)
