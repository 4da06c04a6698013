"""Statistics of operands: how well a matrix fits the FP8 format that a product reads it in (docs/inspect.md)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
