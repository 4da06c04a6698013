"""Modules that store their activations in FP8: norms, gated MLPs, plain activations, and scopes of attention and of
single linears.

    norm         keeps x in FP8 and rstd (and mean)     y is made again for who reads it
    glu          keeps gate and up in FP8               h = act(gate)·up is made again for the down projection
    activation   keeps x in FP8                         act(x) is made again for the next linear
    scope        keeps q, k, v, out … in FP8            through saved-tensor hooks: `octavo.nn.saved`

Linears beside an activation that do not compute in FP8 have a scope each, of their input alone. A scope of the module
around them would round whatever else that computes, a loss perhaps.

A converted module is of a class made of one of those below and the original one, as `octavo.convert` never replaces
module objects; what was found out about it (`octavo.nn.structure`) is in its attribute `octavo_storage`. Under
torch.compile, inside `octavo.disabled()` and for operands that the ops do not take it runs its original forward, and
keeps what that keeps.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from octavo.nn.saved import compressing
from octavo.nn.storing import FLOATING, Norm, stored_activation, stored_glu, stored_joint_glu, stored_norm
from octavo.nn.switch import stores

STORAGE_ATTRIBUTE = "octavo_storage"
"""Where a converted module has its `Norm`, `Glu`, `Activation` or `Scope`."""


@dataclass(frozen=True, kw_only=True)
class Glu:
    """Which children of a gated MLP do what.

    Attributes:
        gate: Name of the gate projection, or of the one that computes gate and up in one product.
        up: Name of the up projection; None where gate computes both.
        down: Name of the down projection.
        activation: `"silu"`, `"gelu"` or `"gelu_tanh"`.
        gate_first: Whether gate is the first half of a joint product.
    """

    kind = "glu"
    gate: str
    up: str | None
    down: str
    activation: str
    gate_first: bool = True


@dataclass(frozen=True, kw_only=True)
class Activation:
    """Which function an activation module computes: `"silu"`, `"gelu"` or `"gelu_tanh"`."""

    kind = "activation"
    activation: str


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What keeps in FP8 what its operations save: `"attention"`, or `"mlp"`, a linear beside an activation."""

    kind: str


Storage = Norm | Glu | Activation | Scope


class StoringNorm(nn.Module):
    """A norm over the last dimension that keeps its input in FP8."""

    octavo_storage: Norm

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the original, in float32 with one rounding."""
        x = _only(args, kwargs)
        weight, bias, norm = self.weight, getattr(self, "bias", None), self.octavo_storage
        assert isinstance(weight, Tensor)
        dtype = None if x is None or not stores() else _norm_dtype(x, weight, bias, norm)
        if x is None or dtype is None:
            original: Tensor = super().forward(*args, **kwargs)
            return original
        return stored_norm(x.to(dtype), weight, bias, norm)


class StoringGlu(nn.Module):
    """A gated MLP that keeps gate and up in FP8 and makes their product again."""

    octavo_storage: Glu

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """down(act(gate(x)) · up(x)), as the original."""
        x, names = _only(args, kwargs), self.octavo_storage
        if x is None or not stores():
            return super().forward(*args, **kwargs)
        with compressing(self):
            gate = getattr(self, names.gate)(x)
            if names.up is not None:
                h = stored_glu(gate, getattr(self, names.up)(x), names.activation)
            else:
                h = stored_joint_glu(gate, names.activation, names.gate_first)
            return getattr(self, names.down)(h)


class StoringActivation(nn.Module):
    """An activation that keeps its input in FP8."""

    octavo_storage: Activation

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the original."""
        x = _only(args, kwargs)
        if x is None or not (stores() and x.dtype in FLOATING and x.ndim):
            original: Tensor = super().forward(*args, **kwargs)
            return original
        return stored_activation(x, self.octavo_storage.activation)


class StoringScope(nn.Module):
    """Attention, or a linear, whose operations keep what they save in FP8."""

    octavo_storage: Scope

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original, under hooks."""
        with compressing(self):
            return super().forward(*args, **kwargs)


_MIXINS: dict[str, Any] = {"norm": StoringNorm, "glu": StoringGlu, "activation": StoringActivation}


def is_storing(module: nn.Module) -> bool:
    """Whether this module, itself, stores its activations in FP8."""
    return isinstance(module, StoringNorm | StoringGlu | StoringActivation | StoringScope)


def make_storing(module: nn.Module, storage: Storage) -> None:
    """Make a module store its activations, in place."""
    setattr(module, STORAGE_ATTRIBUTE, storage)
    original: Any = type(module)
    module.__class__ = _storing_class(_MIXINS.get(storage.kind, StoringScope), original)


def make_plain(module: nn.Module) -> None:
    """Undo `make_storing`."""
    module.__class__ = type(module).__bases__[1]
    delattr(module, STORAGE_ATTRIBUTE)


@cache
def _storing_class(*both: Any) -> Any:
    """The class of a converted module. Copies and pickles name the two it is made of."""
    mixin, original = both

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        return _blank, (mixin, original), self.__getstate__()

    members = {"__reduce_ex__": reduce, "__module__": __name__, "__doc__": original.__doc__}
    return type(f"Storing{original.__name__}", (mixin, original), members)


def _blank(mixin: Any, original: Any) -> nn.Module:
    cls = _storing_class(mixin, original)
    module: nn.Module = cls.__new__(cls)
    return module


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that a module was called with, if that was all."""
    given = (*args, *kwargs.values())
    return given[0] if len(given) == 1 and isinstance(given[0], Tensor) else None


def _norm_dtype(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> torch.dtype | None:
    """The dtype in which a norm works and which it gives; None where that is better left to the original."""
    dtype: torch.dtype | None = torch.promote_types(x.dtype, weight.dtype) if norm.promotes else x.dtype
    if norm.native and _autocast(x):
        dtype = _given_under_autocast(norm.center, x.device.type, x.dtype, weight.dtype, _autocast_dtype(x))
    elif norm.native and x.dtype != weight.dtype:
        return None
    if dtype not in FLOATING or weight.dtype not in (dtype, torch.float32) or x.shape[-1:] != weight.shape:
        return None
    return dtype if bias is None or bias.dtype == weight.dtype else None


def _autocast(x: Tensor) -> bool:
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type)


@cache
def _given_under_autocast(
    center: bool, device_type: str, dtype: torch.dtype, weight_dtype: torch.dtype, autocast_dtype: torch.dtype
) -> torch.dtype | None:
    """What PyTorch's own norm gives under autocast, which is float32 on some devices and the input's dtype on others:
    found by calling it on two numbers. None where it cannot be called so, or gives anything else.
    """
    autocast = torch.autocast(device_type, autocast_dtype)
    with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings(), autocast:
        warnings.simplefilter("ignore")
        try:
            x = torch.zeros(1, 2, dtype=dtype, device=device_type)
            weight = torch.zeros(2, dtype=weight_dtype, device=device_type)
            y = F.layer_norm(x, (2,), weight) if center else F.rms_norm(x, (2,), weight)
        except RuntimeError:  # dtypes that do not go together, or a device that is not there
            return None
    return y.dtype if y.dtype in (dtype, torch.float32) else None
