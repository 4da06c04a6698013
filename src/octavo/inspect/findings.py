"""Findings: statistics that crossed a limit, each with its layer and operand."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

# Statistics of operands: how well a matrix fits the FP8 format that a product reads it in (docs/inspect.md).


OPERANDS = ("x", "w", "dgrad_g", "wgrad_g")  # X and W of the forward product, and G as each backward product reads it
QUANTILES = 17  # Number of quantiles of the channel scales, the smallest and the largest included


@dataclass(frozen=True, kw_only=True)
class OperandStats:
    """Statistics of an operand of a linear layer in a step, over all calls, micro-batches and ranks; equal on these."""

    step: int
    """Step number as the trainer counts: 1, 2, …"""
    layer: str
    """Name of the layer in the model."""
    operand: str
    """"x", "w", "dgrad_g" or "wgrad_g"; G as quantized for each product, with scales folded in as the recipe defines.
    """
    recipe: str
    """Name of the recipe; "bf16" for a layer in high precision, measured with the default recipe."""
    elements: int
    """Number of elements: of W its own, of the others those of all tokens of the step."""
    nonfinite: int
    """Elements that are NaN or infinite."""
    amax: float
    """Largest finite magnitude in high precision; 0 if there is none."""
    smallest: float
    """Smallest finite magnitude above zero; 0 if there is none."""
    scale_spread: float
    """Ratio of the largest to the smallest scale; 1 for a single scale."""
    underflow: float
    """Share of non-zero values that quantize to zero."""
    saturation: float
    """Share of finite values clamped to the largest FP8 value; only with scales that are not those of the values."""
    sqnr: float
    """Signal to quantization noise ratio in dB; inf for no error, nan without finite values to compare."""
    what_if: Mapping[str, float] = field(default_factory=dict)
    """SQNR in dB of the same tensor under other recipes, by recipe name."""
    channel_scales: Sequence[float] = ()
    """Of X in an equalized layer: log2 s of its channels, at `QUANTILES` even quantiles, rising; else empty."""

    @property
    def dynamic_range(self) -> float:
        """Powers of two between the smallest and the largest magnitude; 0 without a value above zero."""
        return math.log2(self.amax) - math.log2(self.smallest) if self.smallest else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary for strict JSON: NaN is null and infinity "inf"."""
        fields = asdict(self) | {"what_if": {name: _json_value(value) for name, value in self.what_if.items()}}
        if not self.channel_scales:
            del fields["channel_scales"]
        return fields | {"sqnr": _json_value(self.sqnr)}


def _json_value(value: float) -> float | str | None:
    return None if math.isnan(value) else value if math.isfinite(value) else "inf"


HISTORY_LENGTH = 16  # Maximum number of earlier samples in the median
MIN_HISTORY = 2  # Minimum number of earlier samples for a jump to be reported


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits of the statistics.

    Raises:
        ValueError: For a limit out of its range, with the range.
    """

    sqnr: float = 18.0
    """Minimum in dB; -inf for no limit."""
    underflow: float = 0.2
    """Maximum share for X and W, 0 to 1; G may have twice that, because tiny gradients of a token matter little:
    healthy runs reach 0.004 for X and 0.29 for G (`docs/inspect.md`).
    """
    saturation: float = 0.01
    """Maximum share, 0 to 1."""
    amax_jump: float = 100.0
    """Maximum factor, above 1, between an amax and the median of its earlier samples, up or down; inf for no limit."""
    nonfinite: int = 0
    """Maximum number of NaN or infinite elements."""
    product_error: float = 0.25
    """Maximum error of the products of a layer, 0 to 1; above it the autopilot changes the layer's recipe. Healthy
    layers have 0.03 to 0.10 (`octavo.inspect.sample`).
    """

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("sqnr", self.sqnr < math.inf, "a number of dB, below infinity"),
            ("underflow", 0 <= self.underflow <= 1, "a share, 0 to 1"),
            ("saturation", 0 <= self.saturation <= 1, "a share, 0 to 1"),
            ("amax_jump", self.amax_jump > 1, "a factor above 1"),
            ("nonfinite", self.nonfinite >= 0, "a number of elements, 0 or more"),
            ("product_error", 0 <= self.product_error <= 1, "an error, 0 to 1"),
        ):
            if not valid:
                raise ValueError(f"Thresholds: {name} = {getattr(self, name)} is not {expected}")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One statistic of one operand that crossed its limit."""

    step: int
    """Step number as the trainer counts: 1, 2, …"""
    layer: str
    """Name of the linear layer."""
    operand: str
    """"x", "w", "dgrad_g" or "wgrad_g"."""
    what: str
    """The limit, a field of `Thresholds`: "sqnr", "underflow", "saturation", "amax_jump" or "nonfinite"."""
    value: float
    """The measured value, in the limit's unit; an amax that fell has a jump below 1."""
    limit: float
    """The limit it crossed."""

    def __str__(self) -> str:
        """Format as "step 50: model.layers.3.mlp.down_proj x: SQNR 11.2 dB (limit 18)"."""
        return f"step {self.step}: {self.layer} {self.operand}: {self.measured}"

    @property
    def measured(self) -> str:
        """The measured value and the limit, as text."""
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
    """Recent amax values of each operand, to detect jumps."""

    def __init__(self) -> None:
        self._amax: dict[tuple[str, str], deque[float]] = {}

    def add(self, rows: Iterable[OperandStats]) -> None:
        """Add samples, in the order of steps."""
        for row in rows:
            if row.elements > row.nonfinite:
                self._amax.setdefault((row.layer, row.operand), deque(maxlen=HISTORY_LENGTH)).append(row.amax)

    def median(self, row: OperandStats) -> float | None:
        """Return the median amax of earlier samples of this operand; None if there are too few or it is zero."""
        earlier = self._amax.get((row.layer, row.operand), ())
        return (median(earlier) or None) if len(earlier) >= MIN_HISTORY else None


def findings(rows: Sequence[OperandStats], thresholds: Thresholds, history: History | None = None) -> list[Finding]:
    """Return the statistics of one step that crossed a limit, in the order of the rows."""

    def finding(row: OperandStats, what: str, value: float, limit: float) -> Finding:
        return Finding(step=row.step, layer=row.layer, operand=row.operand, what=what, value=value, limit=limit)

    bad = [row for row in rows if row.nonfinite > thresholds.nonfinite]
    origins = [row for row in bad if row.operand == "w" or row is bad[0]]
    crossings = [finding(row, "nonfinite", row.nonfinite, thresholds.nonfinite) for row in origins]
    for row in rows:
        underflow_limit = thresholds.underflow if row.operand in ("x", "w") else min(2 * thresholds.underflow, 1.0)
        checks = [
            ("sqnr", row.sqnr, thresholds.sqnr, row.sqnr < thresholds.sqnr),
            ("underflow", row.underflow, underflow_limit, row.underflow > underflow_limit),
            ("saturation", row.saturation, thresholds.saturation, row.saturation > thresholds.saturation),
        ]
        typical = history.median(row) if history is not None else None
        if typical is not None and row.elements > row.nonfinite:
            jump = row.amax / typical
            crossed = jump > thresholds.amax_jump or jump * thresholds.amax_jump < 1
            checks.append(("amax_jump", jump, thresholds.amax_jump, crossed))
        crossings += [finding(row, what, value, limit) for what, value, limit, crossed in checks if crossed]
    return crossings
