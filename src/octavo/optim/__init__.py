"""Level 3: optimizers with FP8 states."""

from octavo.optim.adamw import AdamW
from octavo.optim.interface import Optimizer

__all__ = ["AdamW", "Optimizer"]
