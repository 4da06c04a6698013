"""Level 6: inspect a model before or during training: memory, time, and the effect of FP8 on its numerics."""

from typing import TYPE_CHECKING

from octavo.runtime.extras import lazy_names

if TYPE_CHECKING:
    from octavo.inspect.autopilot import Autopilot, RecipeChange
    from octavo.inspect.compare import compare_losses
    from octavo.inspect.findings import Finding, History, OperandStats, Thresholds
    from octavo.inspect.watch import Watch
    from octavo.planner.model_plan import memory, plan

__all__ = [
    "Autopilot", "Finding", "History", "OperandStats", "RecipeChange", "Thresholds", "Watch", "compare_losses",
    "memory", "plan",
]  # fmt: skip

if not TYPE_CHECKING:  # so that `import octavo` stays fast
    __getattr__ = lazy_names(
        __name__,
        {
            "inspect.autopilot": ("Autopilot", "RecipeChange"), "inspect.compare": ("compare_losses",),
            "inspect.findings": ("Finding", "History", "OperandStats", "Thresholds"),
            "inspect.watch": ("Watch",), "planner.model_plan": ("memory", "plan"),
        },
    )  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
