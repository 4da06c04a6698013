"""The classes of linear layers that `convert` knows, by name: one that nothing imported has no instances."""

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class LinearKind:
    plain: str  # The class, as "module.Class"
    fp8: str  # The class that it becomes, a subclass of it and of `octavo.nn.LinearLike`: not imported before that
    # Attributes of a layer of the class that hold in_features and out_features.
    sizes: tuple[str, str] = ("in_features", "out_features")

    def plain_class(self) -> Any:
        """Return the class, or None while nothing has imported it."""
        module, _, name = self.plain.rpartition(".")
        return getattr(sys.modules.get(module), name, None)


LINEAR = LinearKind(plain="torch.nn.Linear", fp8="octavo.nn.linear.Linear")
KINDS = [
    LINEAR,
    LinearKind(plain="transformers.pytorch_utils.Conv1D", fp8="octavo.nn.conv1d.Conv1D", sizes=("nx", "nf")),
]


def kind_of(module: nn.Module) -> LinearKind | None:
    """Return the kind of a linear of a class of the table or of a subclass, converted or not; None for others."""
    return next((kind for kind in KINDS if (plain := kind.plain_class()) and isinstance(module, plain)), None)


def kind_of_class(plain: object) -> LinearKind | None:
    """Return the kind of a class of the table; None for other classes, also for subclasses."""
    return next((kind for kind in KINDS if kind.plain_class() is plain), None)
