"""Octavo: FP8 training for PyTorch.

    import octavo
    print(octavo.plan(model, 4, 2048, device="h100"))      # which layers gain there, and what a step will take
    model = octavo.convert(model)      # the one line: linear layers compute in FP8, in place
    print(octavo.report(model))        # which, in what recipe, and why
    optimizer = octavo.AdamW(model.parameters(), lr=3e-4)      # moments in FP8, exact masters in 16 bits

Importing it touches no device and imports neither Triton nor Transformers.
"""

from typing import TYPE_CHECKING, Any

from octavo._version import __version__
from octavo.inspect.deciding import convert
from octavo.nn import disabled, report, revert
from octavo.numerics import RECIPES, Plan, Precision, Recipe
from octavo.optim import AdamW

if TYPE_CHECKING:
    from octavo.inspect import plan
    from octavo.parallel import parallelize

__all__ = [
    "RECIPES",
    "AdamW",
    "Plan",
    "Precision",
    "Recipe",
    "__version__",
    "convert",
    "disabled",
    "parallelize",
    "plan",
    "report",
    "revert",
]


def __getattr__(name: str) -> Any:
    """`parallelize` and `plan`, on first use: torch's own sharding takes most of a second to import."""
    if name == "parallelize":
        from octavo.parallel import parallelize

        return parallelize
    if name == "plan":
        from octavo.inspect import plan

        return plan
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
