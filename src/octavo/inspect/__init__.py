"""Level 6: inspect a model before or during training: memory, time, and the effect of FP8 on its numerics."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.inspect.autopilot import Autopilot, RecipeChange
    from octavo.inspect.compare import compare_losses
    from octavo.inspect.findings import Finding, History, Thresholds
    from octavo.inspect.stats import OperandStats
    from octavo.inspect.watch import Watch
    from octavo.planner.model_memory import memory
    from octavo.planner.model_plan import plan

__all__ = [
    "Autopilot",
    "Finding",
    "History",
    "OperandStats",
    "RecipeChange",
    "Thresholds",
    "Watch",
    "compare_losses",
    "memory",
    "plan",
]

_MODULES = {
    "Autopilot": "inspect.autopilot",
    "Finding": "inspect.findings",
    "History": "inspect.findings",
    "RecipeChange": "inspect.autopilot",
    "OperandStats": "inspect.stats",
    "Thresholds": "inspect.findings",
    "Watch": "inspect.watch",
    "compare_losses": "inspect.compare",
    "memory": "planner.model_memory",
    "plan": "planner.model_plan",
}
"""Where each public name lives."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import octavo` stays fast."""
    if name in _MODULES:
        return getattr(import_module(f"octavo.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'octavo.inspect' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
