"""Recipe: the precision of each operand of the three products of a linear layer, and the named recipes.

    forward  Y  = X Wᵀ     X [M,K], W [N,K]    contracts over K
    dgrad    ∂X = G W      G [M,N]             contracts over N     ≈ diag(c) (G1q Wq), G1q of G diag(b), by row
    wgrad    ∂W = Gᵀ X                         contracts over M     ≈ diag(d) (G2qᵀ Xq), G2q of diag(a) G, by column

Row scales of X ≈ diag(a) Xq and W ≈ diag(b) Wq vary along what backward contracts. Octavo *folds* them into G before it
quantizes G, so one FP8 copy of X and one of W serve all three products (docs/numerics.md).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from octavo.numerics.spec import COLUMN, ROW, TENSOR, QuantSpec
from octavo.numerics.suggestions import nearest


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One spec per operand of the three products; a product with operands None runs in high precision.

    Attributes:
        name: Name for users.
        x: X [M,K] in the forward product.
        w: W [N,K] in the forward product.
        dgrad_g: G [M,N] in ∂X = G W.
        dgrad_w: W [N,K] in ∂X = G W. If equal to `w`, dgrad uses the same quantization.
        wgrad_g: G [M,N] in ∂W = Gᵀ X, or None for a high-precision product.
        wgrad_x: X [M,K] in ∂W = Gᵀ X, or None; saved for backward. If equal to `x`, wgrad uses the forward copy.
        note: One line for tables.
        equalization: Passes from one refresh of the channel scales of X and W to the next; 0 for no such scales. Only
            for recipes that fold the scales of X and W.
        weight_only: Whether W alone is in FP8, as stored, and products run in X's dtype; specs of X and G are unused.

    Examples:
        >>> octavo.RECIPES["blockwise"].w.text
        'e4m3/128x128'
    """

    name: str
    x: QuantSpec
    w: QuantSpec
    dgrad_g: QuantSpec
    dgrad_w: QuantSpec
    wgrad_g: QuantSpec | None
    wgrad_x: QuantSpec | None
    note: str
    equalization: int = 0
    weight_only: bool = False

    def __post_init__(self) -> None:
        if (self.wgrad_g is None) != (self.wgrad_x is None):
            raise ValueError(f"recipe {self.name!r}: set both wgrad_g and wgrad_x, or neither")
        folds_x = self.wgrad_x is None or (self.folds_x and self.wgrad_x == self.x)
        can_equalize = self.folds_w and self.dgrad_w == self.w and folds_x
        if self.equalization < 0 or (self.equalization and not can_equalize):
            raise ValueError(
                f"recipe {self.name!r}: equalization is 0, or a number of passes for a recipe that folds the scales of "
                f"X and W into G; got {self.equalization}, W {self.w} and {self.dgrad_w}, X {self.x} and {self.wgrad_x}"
            )
        if self.weight_only and (self.equalization or self.w != self.dgrad_w):
            raise ValueError(f"recipe {self.name!r}: weight_only needs one FP8 form of W, and no equalization")

    @property
    def folds_w(self) -> bool:
        """Whether W's scales fold into G for dgrad (they vary along N, which dgrad contracts)."""
        return self.dgrad_w.folds_along(0)

    @property
    def folds_x(self) -> bool:
        """Whether X's scales fold into G for wgrad (they vary along M, which wgrad contracts)."""
        return self.wgrad_x is not None and self.wgrad_x.folds_along(0)

    @property
    def dgrad_w_epilogue(self) -> QuantSpec | None:
        """Scales by which dgrad multiplies its sums because of W: W's, channel scales if W's fold into G, or None."""
        return _epilogue(self.dgrad_w, self.folds_w, self.equalization)

    @property
    def wgrad_x_epilogue(self) -> QuantSpec | None:
        """Scales by which wgrad multiplies its sums because of X, as `dgrad_w_epilogue`."""
        return None if self.wgrad_x is None else _epilogue(self.wgrad_x, self.folds_x, self.equalization)

    @property
    def supports_fp8_gather(self) -> bool:
        """Whether ranks can quantize their rows of W and gather FP8: one spec for both products, by row or tensor."""
        return self.w == self.dgrad_w and self.w.granularity in (ROW, TENSOR)

    @property
    def shared_grad_cast(self) -> bool:
        """Whether one quantized G serves both backward products."""
        return self.dgrad_g == self.wgrad_g and not self.folds_w and not self.folds_x

    @property
    def specs(self) -> dict[str, QuantSpec | None]:
        """Specs of the operands, by field."""
        return {name: getattr(self, name) for name in _OPERANDS}

    @property
    def pairs(self) -> list[tuple[QuantSpec, QuantSpec]]:
        """Specs that are quantized together: of X in both directions, and of G for dgrad and wgrad."""
        both = (self.x, self.wgrad_x), (self.dgrad_g, self.wgrad_g)
        return [(first, second) for first, second in both if second is not None and first != second]

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary with specs as text, for `from_json`."""
        fields = asdict(self) | {name: None if spec is None else str(spec) for name, spec in self.specs.items()}
        return {key: value for key, value in fields.items() if value or key not in _OPTIONAL}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Recipe":
        """Read the output of `to_json`."""
        read: dict[str, Any] = {key: fields[key] for key in ("name", "note", *_OPTIONAL) if key in fields}
        read |= {key: None if v is None else QuantSpec.parse(v) for key, v in fields.items() if key not in read}
        return Recipe(**read)


_OPERANDS = ("x", "w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
_OPTIONAL = ("equalization", "weight_only")  # Fields that `to_json` omits if zero or False

_WEIGHT_ONLY, _EQUALIZED = "_weight_only", "_equalized"


def _epilogue(spec: QuantSpec, folds: bool, equalization: int) -> QuantSpec | None:
    if not folds:
        return spec
    return QuantSpec(format=spec.format, granularity=COLUMN) if equalization else None


def equalized(recipe: "str | Recipe", every: int = 50) -> Recipe:
    """Return a recipe with channel equalization: see `octavo.numerics.equalization`.

    Args:
        recipe: A recipe that folds the scales of X and W, such as `rowwise`, or its name.
        every: Passes (forwards and their backward) from one refresh of the channel scales to the next.

    Raises:
        ValueError: For a recipe that does not fold the scales of X and W.

    Examples:
        >>> octavo.numerics.equalized("rowwise_hp_wgrad").name
        'rowwise_hp_wgrad_equalized'
    """
    recipe = get_recipe(recipe)
    name = recipe.name if recipe.equalization else f"{recipe.name}{_EQUALIZED}"
    return replace(recipe, name=name, equalization=every)


def unequalized(recipe: Recipe) -> Recipe:
    if not recipe.equalization:
        return recipe
    name = recipe.name.removesuffix(_EQUALIZED)
    return RECIPES[name] if name in RECIPES else replace(recipe, name=name, equalization=0)


def weight_only(recipe: "str | Recipe") -> Recipe:
    """Return a recipe for frozen weights that are stored as this one does, and multiplied in the dtype of X.

    Args:
        recipe: A recipe with one FP8 form of W, such as `rowwise`, or its name.

    Raises:
        ValueError: For a recipe with several forms of W, or equalization.

    Examples:
        >>> octavo.numerics.weight_only("rowwise").name
        'rowwise_weight_only'
    """
    recipe = get_recipe(recipe)
    if recipe.weight_only:
        return recipe
    return replace(recipe, name=f"{recipe.name}{_WEIGHT_ONLY}", weight_only=True)


def _named(name: str, note: str, specs: Sequence[str | None], equalization: int = 0) -> Recipe:
    fields = dict(zip(_OPERANDS, specs, strict=True))
    return Recipe.from_json(fields | {"name": name, "note": note, "equalization": equalization})


_ROWS = ("e4m3/row", "e4m3/row", "e4m3/row", "e4m3/row", "e4m3/column", "e4m3/row")
_NAMED = (
    _named(
        "rowwise",
        "one scale per row, folded into G for the backward products: one FP8 copy per tensor (default)", _ROWS,
    ),
    _named(
        "tensorwise", "one scale per tensor, e5m2 gradients: the default of ColossalAI and torchao",
        ("e4m3/tensor", "e4m3/tensor", "e5m2/tensor", "e4m3/tensor", "e5m2/tensor", "e4m3/tensor"),
    ),
    _named(
        "rowwise_equalized", "as rowwise, channels of X and W equalized: for outlier channels, at the same cost", _ROWS,
        equalization=50,
    ),
    _named(
        "rowwise_hp_wgrad",
        "as rowwise, weight gradients in high precision; keeps X in high precision, so frees no memory",
        (*_ROWS[:4], None, None),
    ),
    # Of these two scales vary along the contraction, so each operand is quantized per direction.
    _named(
        "blockwise", "1×128 activations and gradients, 128×128 weights, as DeepSeek-V3 (arXiv 2412.19437)",
        ("e4m3/1x128", "e4m3/128x128", "e4m3/1x128", "e4m3/128x128", "e4m3/128x1", "e4m3/128x1"),
    ),
    _named(
        "mxfp8", "groups of 32 with one-byte power-of-two scales (OCP MX), native on Blackwell",
        ("e4m3/1x32/e8m0", "e4m3/1x32/e8m0", "e4m3/1x32/e8m0", "e4m3/32x1/e8m0", "e4m3/32x1/e8m0", "e4m3/32x1/e8m0"),
    ),
)  # fmt: skip
RECIPES = {recipe.name: recipe for recipe in _NAMED}
DEFAULT = RECIPES["rowwise"]


def get_recipe(recipe: str | Recipe) -> Recipe:
    """Look up a recipe by name (a Recipe passes through); raises ValueError with the closest match.

    Examples:
        >>> octavo.numerics.get_recipe("tensorwise").dgrad_g.text
        'e5m2/tensor'
    """
    if isinstance(recipe, Recipe):
        return recipe
    known = ", ".join(RECIPES)
    if not isinstance(recipe, str):
        raise TypeError(f"recipe is a name or an octavo.Recipe; got {type(recipe).__name__}. Known: {known}")
    name = recipe.removesuffix(_WEIGHT_ONLY)
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}{nearest(recipe, RECIPES)}. Known: {known}")
    return RECIPES[name] if name == recipe else weight_only(name)
