"""Findings: statistics that crossed a limit, each with its layer and operand.

What is not finite is reported where it began. Rows come in the order in which operands were computed (forward, then
backward), so the first one with a NaN or an infinity is the origin, and what follows from it is left out; weights that
are not finite are origins of their own.

An amax is compared with the median of its last samples, both ways: a thousandfold rise is an outlier or a divergence, a
thousandfold fall a gradient on its way to vanish. A median, so that one odd step does not move it.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from octavo.inspect.stats import OperandStats

REMEMBERED = 16
"""Earlier samples of an operand that the median is taken of, at most."""
FEWEST = 2
"""Earlier samples below which no jump is reported."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits that statistics must not cross.

    Raises:
        ValueError: For a limit out of its range, with the range.
    """

    sqnr: float = 18.0
    """Fewest dB; -inf for no limit."""
    underflow: float = 0.2
    """Largest share of X and W, 0 to 1; of G twice that, as a token with a gradient that small says little: healthy
    runs reach 0.004 for X and 0.29 for G (`docs/inspect.md`)."""
    saturation: float = 0.01
    """Largest share, 0 to 1."""
    amax_jump: float = 100.0
    """Largest factor, above 1, by which an amax may exceed the median of its earlier samples, or fall below it; inf for
    no limit."""
    nonfinite: int = 0
    """Most elements that may be NaN or infinite."""
    product_error: float = 0.25
    """Largest error of the products of a layer, 0 to 1; beyond it the autopilot moves the layer. Healthy ones have 0.03
    to 0.10 (`octavo.inspect.product_error`)."""

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("sqnr", self.sqnr < math.inf, "a number of dB, below infinity"),
            ("underflow", 0 <= self.underflow <= 1, "a share, 0 to 1"),
            ("saturation", 0 <= self.saturation <= 1, "a share, 0 to 1"),
            ("amax_jump", self.amax_jump > 1, "a factor above 1"),
            ("nonfinite", self.nonfinite >= 0, "a number of elements, 0 or more"),
            ("product_error", 0 <= self.product_error <= 1, "an error, 0 to 1"),
        ):
            if not good:
                raise ValueError(f"Thresholds: {name} = {getattr(self, name)} is not {wanted}")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One figure of one operand that crossed its limit."""

    step: int
    """As the trainer counts: 1, 2, …"""
    layer: str
    """Name of the linear."""
    operand: str
    """"x", "w", "dgrad_g" or "wgrad_g"."""
    what: str
    """Which limit, a field of `Thresholds`: "sqnr", "underflow", "saturation", "amax_jump" or "nonfinite"."""
    value: float
    """What was measured, in the limit's unit; an amax that fell has a jump below 1."""
    limit: float
    """The limit it crossed."""

    def __str__(self) -> str:
        """As "step 50: model.layers.3.mlp.down_proj x: SQNR 11.2 dB (limit 18)"."""
        return f"step {self.step}: {self.layer} {self.operand}: {self.measured}"

    @property
    def measured(self) -> str:
        """What was measured, and the limit."""
        if self.what == "nonfinite":
            return f"{self.value:.0f} values are NaN or infinite" + (f" (limit {self.limit:g})" if self.limit else "")
        if self.what == "sqnr":
            return f"SQNR {self.value:.1f} dB (limit {self.limit:g})"
        if self.what == "amax_jump":
            rose = self.value > 1
            factor = self.value if rose else 1 / self.value if self.value else math.inf
            return f"amax {'rose' if rose else 'fell'} {factor:.3g}-fold from its median (limit {self.limit:g})"
        return f"{self.what} {100 * self.value:.3g} % (limit {100 * self.limit:g})"


class History:
    """The last amax of each operand, for jumps."""

    def __init__(self) -> None:
        self._amax: dict[tuple[str, str], deque[float]] = {}

    def add(self, rows: Iterable[OperandStats]) -> None:
        """Remember samples, in the order of steps."""
        for row in rows:
            if row.elements > row.nonfinite:
                self._amax.setdefault((row.layer, row.operand), deque(maxlen=REMEMBERED)).append(row.amax)

    def median(self, row: OperandStats) -> float | None:
        """The median amax of earlier samples of this operand; None where there are too few, or it is zero."""
        earlier = self._amax.get((row.layer, row.operand), ())
        return (median(earlier) or None) if len(earlier) >= FEWEST else None


def findings(rows: Sequence[OperandStats], thresholds: Thresholds, history: History | None = None) -> list[Finding]:
    """What crossed a limit in the rows of one step, in their order.

    Args:
        rows: `Watch.rows`.
        thresholds: The limits.
        history: Earlier samples, for jumps of an amax; not changed. None: jumps are not looked for.
    """
    found = _nonfinite(rows, thresholds.nonfinite)
    for row in rows:
        starved = thresholds.underflow if row.operand in ("x", "w") else min(2 * thresholds.underflow, 1.0)
        checks = [
            ("sqnr", row.sqnr, thresholds.sqnr, row.sqnr < thresholds.sqnr),
            ("underflow", row.underflow, starved, row.underflow > starved),
            ("saturation", row.saturation, thresholds.saturation, row.saturation > thresholds.saturation),
        ]
        usual = history.median(row) if history is not None else None
        if usual is not None and row.elements > row.nonfinite:
            jump = row.amax / usual
            crossed = jump > thresholds.amax_jump or jump * thresholds.amax_jump < 1
            checks.append(("amax_jump", jump, thresholds.amax_jump, crossed))
        found += [_finding(row, what, value, limit) for what, value, limit, crossed in checks if crossed]
    return found


def _nonfinite(rows: Sequence[OperandStats], limit: int) -> list[Finding]:
    """Where values that are not finite came from."""
    bad = [row for row in rows if row.nonfinite > limit]
    origins = [row for row in bad if row.operand == "w" or row is bad[0]]
    return [_finding(row, "nonfinite", row.nonfinite, limit) for row in origins]


def _finding(row: OperandStats, what: str, value: float, limit: float) -> Finding:
    return Finding(step=row.step, layer=row.layer, operand=row.operand, what=what, value=value, limit=limit)
