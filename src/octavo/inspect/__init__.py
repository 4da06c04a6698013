"""Level 5: inspect a model before or during training: memory, time, and the effect of FP8 on its numerics."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.inspect.memory import memory

if TYPE_CHECKING:
    from octavo.inspect.autopilot import Autopilot, Move
    from octavo.inspect.compare import compare_losses
    from octavo.inspect.findings import Finding, History, Thresholds
    from octavo.inspect.planning import plan
    from octavo.inspect.stats import OperandStats
    from octavo.inspect.watch import Watch

__all__ = [
    "Autopilot",
    "Finding",
    "History",
    "Move",
    "OperandStats",
    "Thresholds",
    "Watch",
    "compare_losses",
    "memory",
    "plan",
]

_ON_FIRST_USE = {
    "Autopilot": "autopilot",
    "Finding": "findings",
    "History": "findings",
    "Move": "autopilot",
    "OperandStats": "stats",
    "Thresholds": "findings",
    "Watch": "watch",
    "compare_losses": "compare",
    "plan": "planning",
}


def __getattr__(name: str) -> Any:
    """Import the other names on first use, so that `import octavo` stays fast."""
    if name in _ON_FIRST_USE:
        return getattr(import_module(f"octavo.inspect.{_ON_FIRST_USE[name]}"), name)
    raise AttributeError(f"module 'octavo.inspect' has no attribute {name!r}")
