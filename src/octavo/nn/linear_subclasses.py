"""Subclasses of `nn.Linear` that compute what it does, recognized by the code of their `forward`.

Some write the product in another way (Falcon's `input @ weight.T + bias`), some add methods and leave `forward` alone.
The formula of the class (`octavo.activations.formulas`) is compared with those of the methods below; no name of a class counts.
"""

import inspect
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import nn

from octavo.activations.formulas import Formula, formula_of, formula_of_method
from octavo.activations.detect import is_called_plainly, original_class


class _Linears:
    """Ways to write what `nn.Linear` computes."""

    weight: Any
    bias: Any

    def functional(self, x):  # type: ignore[no-untyped-def]
        return F.linear(x, self.weight, self.bias)

    def early(self, x):  # type: ignore[no-untyped-def]
        y = x @ self.weight.T
        if self.bias is None:
            return y
        return y + self.bias

    def late(self, x):  # type: ignore[no-untyped-def]
        y = x @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        return y


def computes_linear(module: nn.Module) -> bool:
    """Whether a module of a subclass of `nn.Linear` computes what that does: by the code of its class as it is now."""
    owner = original_class(module)
    formula = _linear_formula(owner)
    return formula is not None and formula.holds(owner, module) and is_called_plainly(owner)


@cache
def _linear_formula(owner: Any) -> Formula | None:
    """The formula of a class, if it is that of `nn.Linear` and its parameters are plain attributes."""
    formula = formula_of(owner)
    hidden = any(inspect.getattr_static(owner, name, None) is not None for name in ("weight", "bias"))
    return None if formula is None or formula.expression not in _ways() or hidden else formula


@cache
def _ways() -> list[Any]:
    formulas = [formula_of_method(_Linears, way) for way in ("functional", "early", "late")]
    return [formula.expression for formula in formulas if formula is not None]
