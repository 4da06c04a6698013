"""Recipe: the precision of each operand of the three products of a linear layer, and the named recipes.

    forward  Y  = X Wᵀ     X [M,K], W [N,K]    contracts over K
    dgrad    ∂X = G W      G [M,N]             contracts over N
    wgrad    ∂W = Gᵀ X                         contracts over M

A matrix product can only take scales out of its sum if they do not vary along the contraction. Row scales of W vary
along N, and row scales of X along M, so in the backward products they sit in the wrong place. Other libraries then
quantize X and W a second time. Octavo *folds* them into G before G is quantized: with X ≈ diag(a) Xq and W ≈ diag(b)
Wq,

    ∂X = G W   ≈ (G diag(b)) Wq         quantize G diag(b) by row    ≈ diag(c) G1q     ∂X = diag(c) (G1q Wq)
    ∂W = Gᵀ X  ≈ (diag(a) G)ᵀ Xq        quantize diag(a) G by column ≈ G2q diag(d)     ∂W = diag(d) (G2qᵀ Xq)

so one FP8 copy of X and one of W serve all three products. Whether an operand folds is not written in the recipe: it
follows from its granularity (`folds_w`, `folds_x`).

Scales are those of the operand's own maxima, just in time. With a `history`, those of X and G come from the maxima of
earlier steps instead, as Transformer Engine's delayed scaling has them: `octavo.nn.delayed`.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from octavo.numerics.formats import E5M2
from octavo.numerics.names import nearest
from octavo.numerics.spec import COLUMN, ROW, TENSOR, Granularity, QuantSpec


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One spec per operand of the three products. Where a backward operand is None, that product runs in high
    precision.

    Attributes:
        name: What users type.
        x: X [M,K] in the forward product.
        w: W [N,K] in the forward product.
        dgrad_g: G [M,N] in ∂X = G W.
        dgrad_w: W [N,K] in ∂X = G W. Equal to `w` means that the forward copy is used again.
        wgrad_g: G [M,N] in ∂W = Gᵀ X, or None for a high-precision product.
        wgrad_x: X [M,K] in ∂W = Gᵀ X, or None. This is the form kept for backward. Equal to `x`: the forward copy.
        note: One line for tables.
        history: Forward-backward passes whose maxima of X and of G give their scales; 0 takes the present ones.
        margin: Powers of two that such scales are larger by, against maxima that grow.
    """

    name: str
    x: QuantSpec
    w: QuantSpec
    dgrad_g: QuantSpec
    dgrad_w: QuantSpec
    wgrad_g: QuantSpec | None
    wgrad_x: QuantSpec | None
    note: str
    history: int = 0
    margin: int = 0

    def __post_init__(self) -> None:
        if (self.wgrad_g is None) != (self.wgrad_x is None):
            raise ValueError(
                f"recipe {self.name!r}: wgrad runs in FP8 or in high precision as a whole; "
                "give both wgrad_g and wgrad_x, or neither"
            )
        if self.history < 0 or self.margin < 0 or (self.margin and not self.history):
            raise ValueError(
                f"recipe {self.name!r}: history is a number of passes, 0 or more, and margin powers of two of a "
                f"recipe with a history; got history={self.history}, margin={self.margin}"
            )
        one_form = self.wgrad_x in (None, self.x) and self.wgrad_g in (None, self.dgrad_g)
        if self.history and not (one_form and self.x.granularity == self.dgrad_g.granularity == TENSOR):
            raise ValueError(
                f"recipe {self.name!r}: with a history X and G have one form each, by tensor; got X {self.x} and "
                f"{self.wgrad_x}, G {self.dgrad_g} and {self.wgrad_g}"
            )
        if self.history and self.folds_w:
            raise ValueError(
                f"recipe {self.name!r}: with a history G is quantized as it is, so no scales of W can be folded into "
                f"it; got W {self.dgrad_w}: give it one scale, or blocks of rows and columns"
            )

    @property
    def folds_w(self) -> bool:
        """Whether W's scales are folded into G for dgrad (they vary along N, which dgrad contracts)."""
        return self.dgrad_w.folds_along(0)

    @property
    def folds_x(self) -> bool:
        """Whether X's scales are folded into G for wgrad (they vary along M, which wgrad contracts)."""
        return self.wgrad_x is not None and self.wgrad_x.folds_along(0)

    @property
    def gathers_w(self) -> bool:
        """Whether rows of W can be quantized where they are, and gathered so: one form for both products, by row or
        tensor.
        """
        return self.w == self.dgrad_w and self.w.granularity in (ROW, TENSOR)

    @property
    def shares_g(self) -> bool:
        """Whether one quantized G serves both backward products."""
        return self.dgrad_g == self.wgrad_g and not self.folds_w and not self.folds_x

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary, specs in their text form; `from_json` reads it back."""
        specs = ("x", "w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
        found = asdict(self) | {key: None if (spec := getattr(self, key)) is None else str(spec) for key in specs}
        return {key: value for key, value in found.items() if value or key not in _DELAY}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Recipe":
        """Read what `to_json` wrote."""
        plain = {key: fields[key] for key in ("name", "note", *_DELAY) if key in fields}
        specs = {key: None if v is None else QuantSpec.parse(v) for key, v in fields.items() if key not in plain}
        return Recipe(**plain, **specs)  # type: ignore[arg-type]


_DELAY = ("history", "margin")
"""Fields that are written where they are not zero."""


def _two_directions(name: str, *, x: Granularity, w: Granularity, w_t: Granularity, rule: str, note: str) -> Recipe:
    """A recipe whose scales vary along the contraction inside a row: each operand is quantized per direction."""

    def spec(granularity: Granularity) -> QuantSpec:
        return QuantSpec(granularity=granularity, scale_rule=rule)  # type: ignore[arg-type]

    x_t = Granularity(x.columns, x.rows)
    return Recipe(
        name=name,
        x=spec(x),
        w=spec(w),
        dgrad_g=spec(x),
        dgrad_w=spec(w_t),
        wgrad_g=spec(x_t),
        wgrad_x=spec(x_t),
        note=note,
    )


_E4M3_TENSOR = QuantSpec(granularity=TENSOR)
_E4M3_ROW = QuantSpec(granularity=ROW)
_E4M3_COLUMN = QuantSpec(granularity=COLUMN)
_E5M2_TENSOR = QuantSpec(format=E5M2, granularity=TENSOR)
_B1x128, _B128x128 = Granularity(1, 128), Granularity(128, 128)
_B1x32, _B32x1 = Granularity(1, 32), Granularity(32, 1)

TENSORWISE = Recipe(
    name="tensorwise",
    x=_E4M3_TENSOR,
    w=_E4M3_TENSOR,
    dgrad_g=_E5M2_TENSOR,
    dgrad_w=_E4M3_TENSOR,
    wgrad_g=_E5M2_TENSOR,
    wgrad_x=_E4M3_TENSOR,
    note="one scale per tensor, e5m2 gradients: the default of ColossalAI and torchao",
)
ROWWISE = Recipe(
    name="rowwise",
    x=_E4M3_ROW,
    w=_E4M3_ROW,
    dgrad_g=_E4M3_ROW,
    dgrad_w=_E4M3_ROW,
    wgrad_g=_E4M3_COLUMN,
    wgrad_x=_E4M3_ROW,
    note="one scale per row, folded into G for the backward products: one FP8 copy per tensor (default)",
)
ROWWISE_HP_WGRAD = Recipe(
    name="rowwise_hp_wgrad",
    x=_E4M3_ROW,
    w=_E4M3_ROW,
    dgrad_g=_E4M3_ROW,
    dgrad_w=_E4M3_ROW,
    wgrad_g=None,
    wgrad_x=None,
    note="as rowwise, weight gradients in high precision; keeps X in high precision, so frees no memory",
)
BLOCKWISE = _two_directions(
    "blockwise", x=_B1x128, w=_B128x128, w_t=_B128x128, rule="amax",
    note="1×128 activations and gradients, 128×128 weights, as DeepSeek-V3 (arXiv 2412.19437)",
)  # fmt: skip
MXFP8 = _two_directions(
    "mxfp8", x=_B1x32, w=_B1x32, w_t=_B32x1, rule="e8m0",
    note="groups of 32 with one-byte power-of-two scales (OCP MX), native on Blackwell",
)  # fmt: skip
DELAYED = replace(
    TENSORWISE,
    name="delayed",
    note="as tensorwise, X and G by the maxima of earlier steps: Transformer Engine's default, for comparison",
    history=16,
)

RECIPES = {recipe.name: recipe for recipe in (ROWWISE, TENSORWISE, ROWWISE_HP_WGRAD, BLOCKWISE, MXFP8, DELAYED)}
DEFAULT = ROWWISE


def get_recipe(recipe: str | Recipe) -> Recipe:
    """Look a recipe up by name (a Recipe passes through); raises ValueError naming the nearest known one."""
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"recipe is a name or an octavo.Recipe; got {type(recipe).__name__}. Known: {', '.join(RECIPES)}"
        )
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}{nearest(recipe, RECIPES)}. Known: {', '.join(RECIPES)}")
    return RECIPES[recipe]
