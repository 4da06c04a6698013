"""Level 4: looking at a model in training: what its memory goes to."""

from octavo.inspect.memory import memory

__all__ = ["memory"]
