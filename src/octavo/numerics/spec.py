"""QuantSpec: format, granularity and scale rule of one quantized matrix x ≈ q · s, s the *dequantization* scale.

    s = max(amax / format.max, 2⁻¹²⁶)        the division in float64, then rounded to float32;
    q = round(clamp(x · (1/s), ±format.max))  the product in float32, round to nearest even.

A non-finite amax gives s = 1 and q = NaN for the whole group.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from octavo.numerics.formats import E4M3, E8M0, VALUE_FORMATS, Format
from octavo.numerics.suggestions import nearest

FULL = 0  # Block extent for the whole dimension

SMALLEST_SCALE = 2.0**-126

ScaleRule = Literal["amax", "pow2", "e8m0"]


class Granularity(NamedTuple):
    """The block of elements that shares one scale: rows × columns, `FULL` for a whole dimension."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return _GRANULARITY_NAMES.get(self, f"{self.rows}x{self.columns}")

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the extent of one block in a matrix of this shape, at least 1×1."""
        rows, columns = shape
        return max(self.rows or rows, 1), max(self.columns or columns, 1)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of a matrix's scales: one per block, including partial blocks; 1 along FULL dimensions."""
        rows, columns = shape
        return (
            1 if self.rows == FULL else -(-rows // self.rows),
            1 if self.columns == FULL else -(-columns // self.columns),
        )


TENSOR = Granularity(FULL, FULL)
ROW = Granularity(1, FULL)
COLUMN = Granularity(FULL, 1)
_GRANULARITY_NAMES = {TENSOR: "tensor", ROW: "row", COLUMN: "column"}
_GRANULARITIES_BY_NAME = {name: granularity for granularity, name in _GRANULARITY_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """How one matrix is quantized.

    Attributes:
        format: E4M3 or E5M2.
        granularity: Which elements share a scale.
        scale_rule: `"amax"`: float32 scales, exactly amax / max. `"pow2"`: the same rounded up to a power of two, in
            float32. `"e8m0"`: the power of two stored in one byte, as in the OCP MX formats.
        text: Text that `parse` reads, such as `e4m3/row` or `e4m3/1x32/e8m0`. Torch ops take specs as this string. It
            is computed once, so that `torch.compile` sees a constant.

    Examples:
        >>> octavo.numerics.QuantSpec.parse("e4m3/1x32/e8m0").granularity
        Granularity(rows=1, columns=32)
    """

    format: Format = E4M3
    granularity: Granularity = TENSOR
    scale_rule: ScaleRule = "amax"
    text: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        rule = "" if self.scale_rule == "amax" else f"/{self.scale_rule}"
        object.__setattr__(self, "text", f"{self.format}/{self.granularity}{rule}")

    def __str__(self) -> str:
        return self.text

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales: float32, or one byte for `"e8m0"`."""
        return E8M0.dtype if self.scale_rule == "e8m0" else torch.float32

    @property
    def transposed(self) -> "QuantSpec":
        """Spec of the transposed matrix with the same blocks."""
        return replace(self, granularity=Granularity(self.granularity.columns, self.granularity.rows))

    def folds_along(self, dim: Literal[0, 1]) -> bool:
        """Whether scales vary only along `dim`, so products contracting it can fold them into the other operand."""
        along, across = self.granularity if dim == 0 else reversed(self.granularity)
        return along == 1 and across == FULL

    @staticmethod
    def parse(text: str) -> "QuantSpec":
        """Parse a spec; raises ValueError for invalid text."""
        return _parse(text)


@dataclass(frozen=True, kw_only=True)
class AdaptiveSpec:
    """Adaptive FP8, the format of what is widened before it is multiplied: `fp8/1x128`.

    Messages that the receiver widens, and weights of weight-only products, have it. Each group of 128 elements of a row
    has one of three 8-bit floating point formats, e4m3, e3m4 or e2m5, and a float32 scale (`octavo.kernels.adaptive`).
    """

    granularity: Granularity = field(default=Granularity(1, 128))  # Which elements share a scale and a format
    scale_dtype: torch.dtype = torch.float32  # Dtype of the scales
    text: str = field(init=False, compare=False)  # As `QuantSpec.text`

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", f"fp8/{self.granularity}")

    def __str__(self) -> str:
        return self.text

    @property
    def transposed(self) -> "AdaptiveSpec":
        """Spec of the transposed matrix with the same groups."""
        return AdaptiveSpec(granularity=Granularity(self.granularity.columns, self.granularity.rows))


ADAPTIVE = AdaptiveSpec()
MessageSpec = QuantSpec | AdaptiveSpec  # FP8 format of a message, or of a stored weight
ADAPTIVE_BY_TEXT = {spec.text: spec for spec in (ADAPTIVE, ADAPTIVE.transposed)}
"""Adaptive FP8 with groups along rows or columns, by `text`."""


@lru_cache(maxsize=256)
def _parse(text: str) -> QuantSpec:
    fields = text.split("/")
    if len(fields) not in (2, 3):
        raise ValueError(f"a spec has the form 'format/granularity' or 'format/granularity/scale_rule'; got {text!r}")
    format_name, granularity_name, rule = (*fields, "amax")[:3]
    if format_name not in VALUE_FORMATS:
        raise ValueError(f"unknown format {format_name!r} in spec {text!r}{nearest(format_name, VALUE_FORMATS)}")
    rules: dict[str, ScaleRule] = {"amax": "amax", "pow2": "pow2", "e8m0": "e8m0"}
    if rule not in rules:
        raise ValueError(f"unknown scale rule {rule!r} in spec {text!r}{nearest(rule, rules)}")
    return QuantSpec(
        format=VALUE_FORMATS[format_name],
        granularity=_parse_granularity(granularity_name, text),
        scale_rule=rules[rule],
    )


def _parse_granularity(name: str, text: str) -> Granularity:
    if name in _GRANULARITIES_BY_NAME:
        return _GRANULARITIES_BY_NAME[name]
    rows, separator, columns = name.partition("x")
    if not (separator and rows.isdigit() and columns.isdigit()):
        names = ", ".join(_GRANULARITIES_BY_NAME)
        raise ValueError(f"unknown granularity {name!r} in spec {text!r}; it is {names} or ROWSxCOLUMNS such as 1x128")
    return Granularity(int(rows), int(columns))
