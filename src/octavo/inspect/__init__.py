"""Level 4: looking at a model in training, or before it: what its memory and its time go to."""

from typing import TYPE_CHECKING, Any

from octavo.inspect.memory import memory

if TYPE_CHECKING:
    from octavo.inspect.speed import plan

__all__ = ["memory", "plan"]


def __getattr__(name: str) -> Any:
    """`plan`, on first use: `import octavo` stays as quick as without it."""
    if name == "plan":
        from octavo.inspect.speed import plan

        return plan
    raise AttributeError(f"module 'octavo.inspect' has no attribute {name!r}")
