"""Norms and gated MLPs whose last operation is a multiplication, and its two factors.

    LlamaRMSNorm    weight · (x / rms(x)).to(x.dtype)       weight [K], and the rest
    GemmaRMSNorm    (x / rms(x) · (1 + weight)).to(x.dtype)
    LlamaMLP        down(act(gate(x)) · up(x))              act(gate(x)), and up(x)

The factors are computed with the operations of the module's own code, in its order: its class has the expression of one
of the methods of `octavo.activations.detect`, and `_FACTORS` has the operands of that method's last multiplication.
So the factors are the module's own, bit for bit, and so is the gradient that autograd computes through them. Norms
that are one operation of PyTorch (`nn.RMSNorm`, `nn.LayerNorm`), or multiply no weight, have no factors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.activations.detect import known_expression, original_class, registered, uses_default_call
from octavo.activations.formulas import Formula, formula_of, matches

Factors = tuple[Tensor, Tensor, torch.dtype]
"""Left and right factor, and the dtype to which their product is converted."""


def _promoted(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if a is b else torch.promote_types(a, b)


def _normed(x: Tensor, eps: Any) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _llama(x: Tensor, weight: Tensor, eps: Any) -> Factors:
    y = _normed(x.to(torch.float32), eps).to(x.dtype)
    return weight, y, _promoted(weight.dtype, y.dtype)


def _olmo(x: Tensor, weight: Tensor, eps: Any) -> Factors:
    return weight, _normed(x.to(torch.float32), eps), x.dtype


def _helium(x: Tensor, weight: Tensor, eps: Any) -> Factors:
    y = _normed(x.to(torch.float32), eps)
    return weight.to(torch.float32), y, x.dtype


def _moshi(x: Tensor, weight: Tensor, eps: Any) -> Factors:
    return _normed(x.float(), eps), weight.float(), x.dtype


def _gemma(x: Tensor, weight: Tensor, eps: Any) -> Factors:
    return _normed(x.float(), eps), 1.0 + weight.float(), x.dtype


def _t5(x: Tensor, weight: Tensor, eps: Any) -> Factors:
    y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype in [torch.float16, torch.bfloat16]:
        y = y.to(weight.dtype)
    return weight, y, _promoted(weight.dtype, y.dtype)


def _cohere(x: Tensor, weight: Tensor, eps: Any) -> Factors:
    values = x.to(torch.float32)
    mean = values.mean(-1, keepdim=True)
    variance = (values - mean).pow(2).mean(-1, keepdim=True)
    y = (values - mean) * torch.rsqrt(variance + eps)
    return weight.to(torch.float32), y, x.dtype


def _gate_times_up(x: Tensor, gate: Any, up: Any, act: Any) -> Factors:
    left = act(gate(x))
    return _pair(left, up(x))


def _up_times_gate(x: Tensor, gate: Any, up: Any, act: Any) -> Factors:
    left = up(x)
    return _pair(left, act(gate(x)))


def _up_times_joint_gate(x: Tensor, gate: Any, up: Any, act: Any) -> Factors:
    first, second = gate(x).chunk(2, dim=-1)
    return _pair(second, act(first))


def _joint_gate_times_up(x: Tensor, gate: Any, up: Any, act: Any) -> Factors:
    first, second = gate(x).chunk(2, dim=-1)
    return _pair(act(first), second)


def _pair(left: Tensor, right: Tensor) -> Factors:
    return left, right, _promoted(left.dtype, right.dtype)


_NORMS: dict[str, Callable[..., Factors]] = {
    "llama": _llama, "olmo": _olmo, "helium": _helium, "moshi": _moshi, "gemma": _gemma, "t5": _t5, "cohere": _cohere,
}  # fmt: skip
_GLUS: dict[str, Callable[..., Factors]] = {
    "gate_times_up": _gate_times_up, "silu_times_up": _gate_times_up, "up_times_gate": _up_times_gate,
    "up_times_joint_gate": _up_times_joint_gate, "joint_gate_times_up": _joint_gate_times_up,
}  # fmt: skip
"""Factors by the name of a method of `octavo.activations.detect`."""


@dataclass(frozen=True, kw_only=True)
class Factored:
    """A class of modules whose last multiplication has known factors."""

    kind: str  # `"norm"` or `"glu"`
    factors: Callable[..., Factors]  # Their function: of x, weight and epsilon, or of x, gate, up and activation
    names: Mapping[str, str]  # Names of the attributes that play each role
    formula: Formula  # Of the class, to recognize later that it has changed


def factored(module: nn.Module) -> Factored | None:
    """Return the factors of a norm's or a gated MLP's last multiplication, by the current code of its class."""
    owner = original_class(module)
    known = _of_class(owner)
    return known if known is not None and known.formula.holds(owner, module) and uses_default_call(owner) else None


@cache
def _of_class(owner: Any) -> Factored | None:
    formula = None if registered(owner) else formula_of(owner)
    for kind, known in (("norm", _NORMS), ("glu", _GLUS)):
        for name, factors in known.items():
            names: dict[str, str] = {}
            if formula is not None and matches(known_expression(kind, name), formula.expression, names):
                return Factored(kind=kind, factors=factors, names=names, formula=formula)
    return None


def factors_of(module: nn.Module, known: Factored, x: Tensor) -> Factors | None:
    """Return the factors for an input; None if an attribute that plays a role is not what its code reads: parametrized,
    a property, of another type.
    """
    # Calls the parts of a gated MLP, in the order of its code.
    names, own = known.names, vars(module)
    if known.kind == "norm":
        weight, eps = module._parameters.get(names["weight"]), own.get(names["eps"])
        return known.factors(x, weight, eps) if weight is not None and type(eps) is float else None
    parts: dict[str, Any] = module._modules
    gate, up, down = (parts.get(names.get(role, "")) for role in ("gate", "up", "down"))
    act = parts.get(names["act"], own.get(names["act"])) if "act" in names else F.silu
    if gate is None or down is None or act is None or (up is None and "up" in names):
        return None
    return known.factors(x, gate, up, act)
