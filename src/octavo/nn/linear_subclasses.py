"""Recognize subclasses of `nn.Linear` that compute the same, by the code of their `forward`, and make FP8 classes.

Some write the product differently (Falcon's `input @ weight.T + bias`), some add methods and inherit `forward`. The
formula of the class (`octavo.activations.formulas`) is compared with those of the methods below, not the class's name.
"""

import inspect
from functools import cache
from pkgutil import resolve_name
from typing import Any, TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.activations.detect import ORIGINAL, original_class, uses_default_call
from octavo.activations.formulas import Formula, formula_of
from octavo.activations.modules import STORAGE_ATTRIBUTE, forward_like, mixed_class
from octavo.nn import equalized
from octavo.nn.experts import Experts, looks_like_experts
from octavo.nn.linear import Linear
from octavo.nn.linear_like import LinearLike
from octavo.runtime.linear_kinds import LINEAR, kind_of, kind_of_class
from octavo.runtime.swap import has_own_forward, set_class

# Attributes of a converted layer besides its parameters
ATTRIBUTES = ("recipe", "keep_weights", equalized.ATTRIBUTE, STORAGE_ATTRIBUTE)
_COPYING = ("__copy__", "__deepcopy__", "__getstate__", "__setstate__")


class CastingLinear(Linear):
    """A `Linear` from a subclass of `nn.Linear` that casts weight and bias to the dtype of the input."""

    octavo_casts = True


class _Linears:
    weight: Tensor
    bias: Tensor | None

    def functional(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def early(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        if self.bias is None:
            return y
        return y + self.bias

    def late(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        return y


class _Casting(_Linears):
    """Ways to write one whose weight is cast to the dtype of the input, as nanochat and Whisper do."""

    def without_bias(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))

    def with_bias(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def with_bias_first(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype) if self.bias is not None else None)


def computes_linear(module: nn.Module) -> bool:
    """Return whether a module of a subclass of `nn.Linear` computes the same, by the current code of its class."""
    owner = original_class(module)
    formula = _linear_formula(owner)
    if formula is None or (formula.expression == _ways(_Casting)[0] and module.bias is not None):
        return False
    return formula.holds(owner, module) and uses_default_call(owner)


@cache
def _linear_formula(owner: type) -> Formula | None:
    """Return the formula of a class, if it is that of `nn.Linear` and its parameters are plain attributes."""
    formula = formula_of(owner)
    hidden = any(inspect.getattr_static(owner, name, None) is not None for name in ("weight", "bias"))
    known = formula is not None and formula.expression in (*_ways(_Linears), *_ways(_Casting))
    return formula if known and not hidden else None


@cache
def _ways(owner: type) -> list[Any]:
    """Return the expressions of the methods of one of the classes above, in order."""
    methods = [name for name, member in vars(owner).items() if inspect.isfunction(member)]
    return [formula.expression for name in methods if (formula := formula_of(owner, name)) is not None]


def is_converted(module: nn.Module) -> TypeGuard[LinearLike]:
    return isinstance(module, LinearLike)


def computes_fp8(module: nn.Module) -> TypeGuard[LinearLike | Experts]:
    """Return whether a module is a converted linear or converted experts."""
    return isinstance(module, LinearLike | Experts)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear, converted or not, stores W as [in, out], as Transformers' `Conv1D` does."""
    if isinstance(module, LinearLike):
        return module.weight_is_transposed
    kind = kind_of(module)
    return kind is not None and bool(resolve_name(kind.fp8).weight_is_transposed)


def fp8_class(original: Any) -> type[LinearLike]:
    listed = kind_of_class(original)
    kind = LINEAR if listed is None and issubclass(original, nn.Linear) else listed
    formula = _linear_formula(original) if listed is None and kind is LINEAR else None
    casts = formula is not None and formula.expression in _ways(_Casting)
    if kind is None:
        raise ValueError(f"Octavo has no FP8 class for a {original.__name__}")
    linear: Any = CastingLinear if casts else resolve_name(kind.fp8)
    fp8: type[LinearLike] = mixed_class(linear, original)
    if vars(fp8)["forward"] is not forward_like(linear, original):
        raise TypeError(f"{original.__name__} replaces the forward of its subclasses, so it may change")
    return fp8


def class_in_fp8(module: nn.Module) -> Any:
    """Return the class that a linear or experts have once they are converted."""
    original = original_class(module)
    return mixed_class(Experts, original) if looks_like_experts(module) else fp8_class(original)


def class_obstacle(module: nn.Module) -> str | None:
    """Return why a linear that computes the same as `nn.Linear`, or experts, cannot change their class, or None."""
    if isinstance(module, Experts):
        return None
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    own = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    own |= {name for owner in type(module).__mro__ for name in vars(owner)}
    if taken := [name for name in ATTRIBUTES if name in own]:
        return f"it has an attribute {taken[0]!r} of its own, which a converted layer uses: rename it"
    if any(getattr(type(module), name, None) is not getattr(nn.Linear, name, None) for name in _COPYING):
        return f"{kind} copies itself in its own way, and the copy might not have its recipe"
    try:
        class_in_fp8(module)
    except Exception as error:
        return f"making a subclass of {kind} raises {type(error).__name__}: {error}"
    return None


def change_since(module: nn.Module) -> str | None:
    """Return the change of a module since its conversion that prevents `revert`, or None."""
    if ORIGINAL not in vars(type(module)):  # inherited: the class is not Octavo's
        return (
            f"became a {type(module).__name__} after it was converted (by a parametrization, or fully_shard): undo "
            "that first"
        )
    if has_own_forward(module):
        return (
            "has a forward that was put on the instance after it was converted, and that may call the one it had: undo "
            "that first (accelerate.hooks.remove_hook_from_submodules(model), if accelerate did it)"
        )
    if vars(module).get("octavo_exchange") is not None:
        return "holds some of the experts (octavo.parallel.expert_parallel): convert and choose its recipe before that"
    return None


def restore_original_class(module: nn.Module) -> None:
    set_class(module, original_class(module))
    for name in ATTRIBUTES:
        vars(module).pop(name, None)  # a directly constructed Linear has class attributes only
