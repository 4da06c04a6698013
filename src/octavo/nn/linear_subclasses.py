"""Recognize subclasses of `nn.Linear` that compute the same, by the code of their `forward`, and make the classes of
converted linears.

Some write the product differently (Falcon's `input @ weight.T + bias`), some add methods and inherit `forward`. The
formula of the class (`octavo.activations.formulas`) is compared with those of the methods below; class names do not
matter.
"""

import inspect
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import nn

from octavo.activations.detect import ORIGINAL, is_called_plainly, original_class
from octavo.activations.formulas import Formula, formula_of, formula_of_method
from octavo.activations.modules import mixed_class
from octavo.nn.delayed import ATTRIBUTE
from octavo.nn.linear import Linear
from octavo.runtime.swap import become, has_own_forward

ATTRIBUTES = ("recipe", "keeps_weight", ATTRIBUTE)
"""Attributes of a converted linear besides its parameters."""
_COPYING = ("__copy__", "__deepcopy__", "__getstate__", "__setstate__")


class _Linears:
    """Equivalent ways to write `nn.Linear`."""

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
    """Return whether a module of a subclass of `nn.Linear` computes the same, by the current code of its class."""
    owner = original_class(module)
    formula = _linear_formula(owner)
    return formula is not None and formula.holds(owner, module) and is_called_plainly(owner)


@cache
def _linear_formula(owner: Any) -> Formula | None:
    """Return the formula of a class, if it is that of `nn.Linear` and its parameters are plain attributes."""
    formula = formula_of(owner)
    hidden = any(inspect.getattr_static(owner, name, None) is not None for name in ("weight", "bias"))
    return None if formula is None or formula.expression not in _ways() or hidden else formula


@cache
def _ways() -> list[Any]:
    formulas = [formula_of_method(_Linears, way) for way in ("functional", "early", "late")]
    return [formula.expression for formula in formulas if formula is not None]


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Transformers' `Conv1D` (a linear with a [in, out] weight). Does not import it."""
    return type(module).__module__ == "transformers.pytorch_utils" and type(module).__name__ == "Conv1D"


def fp8_class(module: nn.Module) -> type[nn.Module]:
    """Return the FP8 class for a linear. Raises any error of making a subclass of its class."""
    if is_conv1d(module):
        from octavo.nn.conv1d import Conv1D

        return Conv1D
    original: Any = type(module)
    fp8: type[nn.Module] = Linear if original is nn.Linear else mixed_class(Linear, original)
    return fp8


def lossy_subclass(module: nn.Module) -> str | None:
    """Return why a linear that computes the same as `nn.Linear` cannot change its class, or None."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    own = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    own |= {name for owner in type(module).__mro__ for name in vars(owner)}
    if taken := [name for name in ATTRIBUTES if name in own]:
        return f"it has an attribute {taken[0]!r} of its own, which a converted linear uses: rename it"
    if any(getattr(type(module), name, None) is not getattr(nn.Linear, name, None) for name in _COPYING):
        return f"{kind} copies itself in its own way, and the copy might not have its recipe"
    try:
        fp8_class(module)
    except Exception as error:
        return f"making a subclass of {kind} raises {type(error).__name__}: {error}"
    return None


def change_since(module: nn.Module) -> str | None:
    """Return the change of a module since its conversion that prevents `revert`, or None."""
    if type(module).__module__ not in ("octavo.nn.linear", "octavo.nn.conv1d", "octavo.activations.modules"):
        return (
            f"became a {type(module).__name__} after it was converted (by a parametrization, or fully_shard): undo "
            "that first"
        )
    if has_own_forward(module):
        return (
            "has a forward that was put on the instance after it was converted, and that may call the one it had: undo "
            "that first (accelerate.hooks.remove_hook_from_submodules(model), if accelerate did it)"
        )
    return None


def make_exact(module: nn.Module) -> None:
    """Restore the original class of a converted linear."""
    become(module, getattr(type(module), ORIGINAL, type(module).__bases__[0]))
    for name in ATTRIBUTES:
        vars(module).pop(name, None)  # a directly constructed Linear has class attributes only
