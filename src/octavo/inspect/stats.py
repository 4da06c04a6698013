"""Statistics of operands: how well a matrix fits the FP8 form that a product reads it in.

    x  the operand, in high precision (for G with the other operand's scales folded in: what is quantized)
    q  its FP8 form, s its scales, x' = q · s

    underflow   = #(x ≠ 0, x' = 0) / #(x ≠ 0)
    saturation  = #(|x| > s · fp8_max) / #x              of finite x; scales of x's own maxima saturate nothing
    SQNR        = 10 log10( Σ x² / Σ (x − x')² )         where x and x' are finite

They are counted by `octavo.inspect.tally`, in the steps that `octavo.inspect.watch` samples.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OPERANDS = ("x", "w", "dgrad_g", "wgrad_g")
"""X and W of the forward product, and G in the form of each backward product."""


@dataclass(frozen=True, kw_only=True)
class OperandStats:
    """One operand of one linear in one step: of all calls and micro-batches, over all ranks, and the same on each."""

    step: int
    """As the trainer counts: 1, 2, …"""
    layer: str
    """Name of the linear in the model."""
    operand: str
    """"x", "w", "dgrad_g" or "wgrad_g"; G as it is quantized for each product, with scales folded in as the recipe
    says."""
    recipe: str
    """Name of the recipe; "bf16" for a linear in high precision, measured as the default recipe would have it."""
    elements: int
    """Elements measured: of W its own, of the others those of all tokens of the step."""
    nonfinite: int
    """Elements that are NaN or infinite."""
    amax: float
    """Largest finite magnitude in high precision; 0 where there is none."""
    smallest: float
    """Smallest finite magnitude above zero; 0 where there is none."""
    scale_spread: float
    """Largest over smallest scale; 1 for one scale."""
    underflow: float
    """Share of non-zero values that quantize to zero."""
    saturation: float
    """Share of finite values that were cut to the largest FP8 value: happens only with scales of earlier maxima."""
    sqnr: float
    """Signal to quantization noise in dB; inf where nothing is lost, nan where nothing finite could be compared."""
    what_if: Mapping[str, float] = field(default_factory=dict)
    """Recipe name → SQNR in dB of the same tensor under that recipe."""

    @property
    def dynamic_range(self) -> float:
        """Powers of two between the smallest and the largest magnitude; 0 where there is none above zero."""
        return math.log2(self.amax) - math.log2(self.smallest) if self.smallest else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary that strict JSON can hold: NaN is null and infinity "inf"; `from_json` reads it back."""
        fields = asdict(self) | {"what_if": {name: _plain(value) for name, value in self.what_if.items()}}
        return fields | {"sqnr": _plain(self.sqnr)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "OperandStats":
        """Read what `to_json` wrote. Raises TypeError or KeyError for anything else."""
        what_if = {name: _number(value) for name, value in fields["what_if"].items()}
        return OperandStats(**fields | {"sqnr": _number(fields["sqnr"]), "what_if": what_if})


def _plain(value: float) -> float | str | None:
    return None if math.isnan(value) else value if math.isfinite(value) else "inf"


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)
