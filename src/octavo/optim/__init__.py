"""Level 3: optimizers with FP8 states."""

from octavo.optim.adamw import ADAMW, AdamW
from octavo.optim.muon import MUON, Muon
from octavo.optim.states import Optimizer

__all__ = ["AdamW", "Muon", "Optimizer"]

OPTIMIZERS = {spec.name: spec for spec in (ADAMW, MUON)}  # Optimizers by their name in `optim.name`
