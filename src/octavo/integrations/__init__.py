"""Level 7: Octavo inside other training tools. Nothing below imports this. A file imports its tool, on first use."""

from importlib import import_module
from typing import Any

_TOOLS = ("accelerate", "lightning", "torchtitan", "transformers")


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(_TOOLS)}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return list(_TOOLS)
