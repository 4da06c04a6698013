"""Level 0: formats, specs, recipes, plans and error measures. Nothing here runs a kernel."""

from typing import TYPE_CHECKING

from octavo.runtime.extras import lazy_names

if TYPE_CHECKING:
    from octavo.numerics.equalization import channel_amax, column_amax, equalize
    from octavo.numerics.error import first_mismatch, sqnr
    from octavo.numerics.formats import E4M3, E5M2, E8M0, Format
    from octavo.numerics.plan import Decision, Plan
    from octavo.numerics.precision import LEVELS, Precision
    from octavo.numerics.recipe import RECIPES, Recipe, equalized, get_recipe, weight_only
    from octavo.numerics.spec import COLUMN, ROW, TENSOR, Granularity, QuantSpec

__all__ = [
    "COLUMN", "E4M3", "E5M2", "E8M0", "LEVELS", "RECIPES", "ROW", "TENSOR", "Decision", "Format", "Granularity", "Plan",
    "Precision", "QuantSpec", "Recipe", "channel_amax", "column_amax", "equalize", "equalized", "first_mismatch",
    "get_recipe", "sqnr", "weight_only",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "numerics.equalization": ("channel_amax", "column_amax", "equalize"),
            "numerics.error": ("first_mismatch", "sqnr"),
            "numerics.formats": ("E4M3", "E5M2", "E8M0", "Format"),
            "numerics.plan": ("Decision", "Plan"),
            "numerics.precision": ("LEVELS", "Precision"),
            "numerics.recipe": ("RECIPES", "Recipe", "equalized", "get_recipe", "weight_only"),
            "numerics.spec": ("COLUMN", "ROW", "TENSOR", "Granularity", "QuantSpec"),
        },
    )
