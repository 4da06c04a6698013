"""Loss scaling: lifts small fp16 gradients out of the underflow, and backs off when large ones overflow.

The loss is multiplied by `value` before backward and the gradients divided by it in fp32. A step whose gradient is
not finite is skipped; "dynamic" then halves the scale, and doubles it after 2000 steps in a row without overflow.
Powers of two change no mantissa, so a scale that neither overflows nor underflows leaves the gradients bitwise as
they were.
"""

GROWTH_INTERVAL = 2000
INITIAL = 2.0**16
MOST_SKIPS = 40
"""Skipped steps in a row after which it is no question of range: a dynamic scale has fallen by 2⁴⁰ by then."""


class LossScale:
    """Scale of the loss: "none", "dynamic", or a fixed number."""

    def __init__(self, mode: str | float) -> None:
        self.active = mode != "none"
        self._dynamic = mode == "dynamic"
        self._good_steps = 0
        self._overflows = 0
        self.value: float = INITIAL if self._dynamic else 1.0 if isinstance(mode, str) else mode

    @property
    def exhausted(self) -> bool:
        """True after so many overflows in a row that another step skipped would only hide the cause."""
        return self._overflows > MOST_SKIPS

    def update(self, *, overflow: bool) -> None:
        """Takes note of a step: a dynamic scale grows after enough good ones and backs off after an overflow."""
        self._good_steps = 0 if overflow else self._good_steps + 1
        self._overflows = self._overflows + 1 if overflow else 0
        if self._dynamic and overflow:
            self.value /= 2
        elif self._dynamic and self._good_steps == GROWTH_INTERVAL:
            self.value *= 2
            self._good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """The scale, and the good and the overflowed steps in a row."""
        return {"value": self.value, "good_steps": self._good_steps, "overflows": self._overflows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes over what `state_dict` returned."""
        self.value = state["value"]
        self._good_steps = int(state["good_steps"])
        self._overflows = int(state["overflows"])
