"""Level 3: optimizers with FP8 states."""

from octavo.optim.adamw import AdamW

__all__ = ["AdamW"]
