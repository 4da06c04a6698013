"""The classes of linear layers that `convert` knows, and their FP8 classes: the one table that selection, conversion
and FP8 activations read. Classes are named, not imported: one whose module nothing has imported has no instances.
"""

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class LinearKind:
    """A class of linear layers.

    Attributes:
        plain: The class, as "module.Class".
        fp8: The class that it becomes, a subclass of it and of `octavo.nn.LinearLike`.
        delayed: The same for recipes with a `history`, a subclass of `octavo.nn.delayed.Delayed`; or None.
        sizes: Attributes of a layer of the plain class that hold in_features and out_features.
    """

    plain: str
    fp8: str
    delayed: str | None = None
    sizes: tuple[str, str] = ("in_features", "out_features")

    def plain_class(self) -> Any:
        """Return the plain class, or None while nothing has imported it."""
        module, _, name = self.plain.rpartition(".")
        return getattr(sys.modules.get(module), name, None)

    def fp8_class(self, delayed: bool = False) -> Any:
        """Return the FP8 class, for a recipe with a history if `delayed`; None if there is none. Imports it."""
        path = self.delayed if delayed else self.fp8
        module, _, name = (path or "").rpartition(".")
        return getattr(import_module(module), name) if path else None


LINEAR = LinearKind(plain="torch.nn.Linear", fp8="octavo.nn.linear.Linear", delayed="octavo.nn.delayed.DelayedLinear")
KINDS = [
    LINEAR,
    LinearKind(
        plain="transformers.pytorch_utils.Conv1D",
        fp8="octavo.nn.conv1d.Conv1D",
        delayed="octavo.nn.conv1d.DelayedConv1D",
        sizes=("nx", "nf"),
    ),
]


def kind_of(module: nn.Module) -> LinearKind | None:
    """Return the kind of a linear of a class of the table or of a subclass, converted or not; None for others."""
    return next((kind for kind in KINDS if (plain := kind.plain_class()) and isinstance(module, plain)), None)


def kind_of_class(plain: Any) -> LinearKind | None:
    """Return the kind of a class of the table; None for other classes, also for subclasses."""
    return next((kind for kind in KINDS if kind.plain_class() is plain), None)
