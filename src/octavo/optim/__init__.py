"""Level 3: optimizers with FP8 states."""

from octavo.optim.adamw import AdamW
from octavo.optim.interface import Optimizer
from octavo.optim.muon import Muon

__all__ = ["AdamW", "Muon", "Optimizer"]
