"""Detect norms, gated MLPs and activation functions: code with the formula of a method below, up to attributes' names.

spec_of(a LlamaRMSNorm)    Norm(weight="weight", eps="variance_epsilon")
spec_of(a LlamaMLP)        Glu(gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn")
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.activations.formulas import Expression, Formula, formula_of, matches

GLU_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")  # Gate activations that have a kernel
ACTIVATIONS = (*GLU_ACTIVATIONS, "quick_gelu")
ORIGINAL = "octavo_original"  # Attribute of the class of a converted module: its original class


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm over the last dimension. Names are those of attributes of the module.

    Attributes:
        weight: Name of the weight [K]; None for none.
        bias: Name of the bias [K] of a layer norm; None for none.
        eps: Name of the epsilon added to the mean square or the variance, or its value.
        add_unit_offset: Multiplies by 1 + weight.
        center: Subtracts the mean first (layer norm).
    """

    kind = "norm"
    weight: str | None = "weight"
    bias: str | None = None
    eps: str | float = "eps"
    add_unit_offset: bool = False
    center: bool = False


@dataclass(frozen=True, kw_only=True)
class Glu:
    """A gated MLP, down(act(gate(x)) · up(x)). Names are those of children of the module.

    Attributes:
        gate: The gate projection, or the one that computes gate and up in one product.
        up: The up projection; None if `gate` computes both, [gate, up] side by side.
        down: The down projection.
        activation: The attribute that holds the activation function, a module or a function; or None.
        function: Otherwise the name of the function: `"silu"`, `"gelu"` or `"gelu_tanh"`.
        up_first: Whether up is called before gate, or is the first half of a joint product.
    """

    kind = "glu"
    gate: str
    up: str | None
    down: str
    activation: str | None = None
    function: str | None = None
    up_first: bool = False


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An activation function of one tensor.

    Attributes:
        function: `"silu"`, `"gelu"`, `"gelu_tanh"` or `"quick_gelu"`; None if `attribute` determines it.
        attribute: Attribute of the module: a function, or PyTorch's name of an approximation.
    """

    kind = "activation"
    function: str | None = None
    attribute: str | None = None


ModuleSpec = Norm | Glu | Activation


class _Norms:
    weight: Tensor
    bias: Tensor
    eps: float
    normalized_shape: list[int]

    def layer_norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def rms_norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def llama(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x.to(torch.float32)).to(x.dtype)

    def olmo(self, x: Tensor) -> Tensor:
        return (self.weight * self.normed(x.to(torch.float32))).to(x.dtype)

    def helium(self, x: Tensor) -> Tensor:
        y = self.normed(x.to(torch.float32))
        return (self.weight.to(torch.float32) * y).to(x.dtype)

    def moshi(self, x: Tensor) -> Tensor:
        return (self.normed(x.float()) * self.weight.float()).to(x.dtype)

    def gemma(self, x: Tensor) -> Tensor:
        return (self.normed(x.float()) * (1.0 + self.weight.float())).to(x.dtype)

    def llama4_l2(self, x: Tensor) -> Tensor:
        return self.normed(x.float()).to(x.dtype)

    def t5(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            y = y.to(self.weight.dtype)
        return self.weight * y

    def cohere(self, x: Tensor) -> Tensor:
        values = x.to(torch.float32)
        mean = values.mean(-1, keepdim=True)
        variance = (values - mean).pow(2).mean(-1, keepdim=True)
        y = (values - mean) * torch.rsqrt(variance + self.eps)
        return (self.weight.to(torch.float32) * y).to(x.dtype)


class _Glus:
    gate: Callable[[Tensor], Tensor]
    up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]
    activation: Callable[[Tensor], Tensor]

    def gate_times_up(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))

    def up_times_gate(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.activation(self.gate(x)))

    def silu_times_up(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def up_times_joint_gate(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).chunk(2, dim=-1)
        return self.down(up * self.activation(gate))

    def joint_gate_times_up(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class _Activations:
    attribute: Callable[[Tensor], Tensor]
    inplace: bool
    approximate: str

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def silu_torch(self, x: Tensor) -> Tensor:
        return F.silu(x, inplace=self.inplace)

    def gelu_torch(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)

    def held(self, x: Tensor) -> Tensor:
        return self.attribute(x)

    def gelu(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    def gelu_tanh_fast(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))

    def quick_gelu(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


_KNOWN: list[tuple[Any, type, dict[str, dict[str, Any]]]] = [
    (Norm, _Norms, {
        "layer_norm": {"center": True}, "rms_norm": {}, "llama": {}, "olmo": {}, "helium": {},
        "moshi": {}, "gemma": {"add_unit_offset": True}, "llama4_l2": {"weight": None}, "t5": {},
        "cohere": {"center": True},
    }),
    (Glu, _Glus, {
        "gate_times_up": {}, "up_times_gate": {"up_first": True}, "silu_times_up": {"function": "silu"},
        "up_times_joint_gate": {"up": None}, "joint_gate_times_up": {"up": None},
    }),
    (Activation, _Activations, {
        "silu": {"function": "silu"}, "silu_torch": {"function": "silu"}, "held": {},
        "gelu_torch": {"attribute": "approximate"},
        "gelu": {"function": "gelu"}, "gelu_tanh": {"function": "gelu_tanh"},
        "gelu_tanh_fast": {"function": "gelu_tanh"}, "quick_gelu": {"function": "quick_gelu"},
    }),
]  # fmt: skip
"""What the methods above compute: a kind of `ModuleSpec`, and its fields that attributes of their names do not give."""
# Functions that a module may store as its activation
_FUNCTION_NAMES: dict[object, str] = {F.silu: "silu", F.gelu: "gelu"}
_REGISTERED: "weakref.WeakKeyDictionary[type, tuple[ModuleSpec, Formula]]" = weakref.WeakKeyDictionary()


def register(owner: type[nn.Module], computes: ModuleSpec) -> None:
    """Declare what the modules of a class compute, so that they can store activations in FP8 and run fused kernels.

    For classes whose code is not recognized. `octavo.convert` compares outputs and every gradient of each module of the
    class with the declaration, and raises ValueError if they differ. If the class gets a new `forward`, that runs.

    Args:
        owner: A module class.
        computes: A `Norm`, `Glu` or `Activation`, with the names of the attributes that play each role.

    Examples:
        >>> import octavo, torch
        >>> class MyNorm(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.gain, self.tiny = torch.nn.Parameter(torch.ones(width)), 1e-6
        ...     def forward(self, x):
        ...         return x / (x.square().mean(-1, keepdim=True) + self.tiny).sqrt() * self.gain
        >>> octavo.nn.register(MyNorm, octavo.nn.Norm(weight="gain", eps="tiny"))
    """
    if not (isinstance(owner, type) and issubclass(owner, nn.Module)):
        raise TypeError(f"register takes a class of modules; got {owner!r}")
    if not isinstance(computes, Norm | Glu | Activation):
        raise TypeError(f"register takes an octavo.nn.Norm, Glu or Activation; got {computes!r}")
    function = getattr(computes, "function", None)
    if function is not None and function not in ACTIVATIONS:
        raise ValueError(f"register: {function!r} is not a known activation; known are {', '.join(ACTIVATIONS)}")
    forward = owner.forward
    if not isinstance(forward, FunctionType) or forward is nn.Module.__dict__.get("forward"):
        raise ValueError(f"register: {owner.__name__} has no forward that is written in Python")
    _REGISTERED[owner] = computes, Formula(None, (("forward", forward, forward.__code__),))


def registered(owner: type) -> bool:
    return owner in _REGISTERED


def original_class(module: nn.Module) -> Any:
    return getattr(type(module), ORIGINAL, type(module))


def spec_of(module: nn.Module) -> ModuleSpec | None:
    """Return what a module computes, by the current code of its class; None if unknown."""
    owner = original_class(module)
    spec, formula = _REGISTERED.get(owner) or _detected_spec(owner)
    return spec if formula is not None and formula.holds(owner, module) and uses_default_call(owner) else None


def calls_one_kernel(module: nn.Module) -> bool:
    """Return whether a module with recognized code calls a norm of PyTorch, which is one kernel on a GPU."""
    formula = _detected_spec(original_class(module))[1]
    call = None if formula is None or formula.expression is None else formula.expression[0]
    return call is not None and call[:2] in (("call", ("outside", F.layer_norm)), ("call", ("outside", F.rms_norm)))


def uses_default_call(owner: type) -> bool:
    """Return whether calling a module of a class calls its `forward`, and attribute access is that of `nn.Module`."""
    names = ("__call__", "_call_impl", "__getattr__", "__getattribute__")
    return all(getattr(owner, name) is getattr(nn.Module, name) for name in names)


def activation_of(module: object) -> str | None:
    """Return the name in `ACTIVATIONS` of a function, or of what a module computes; None for others."""
    if not isinstance(module, nn.Module):
        return _function_name(module)
    spec = spec_of(module)
    if not isinstance(spec, Activation) or getattr(module, "inplace", False):
        return None
    if spec.attribute is None:
        return spec.function
    value = vars(module).get(spec.attribute)
    if isinstance(value, str):  # nn.GELU's approximate
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(value)
    return _function_name(value)


def _function_name(function: object) -> str | None:
    if isinstance(function, partial):
        tanh = function.func is F.gelu and not function.args and function.keywords == {"approximate": "tanh"}
        return "gelu_tanh" if tanh else None
    return _FUNCTION_NAMES.get(function) if isinstance(function, FunctionType | BuiltinFunctionType) else None


@cache
def _detected_spec(owner: type) -> tuple[ModuleSpec | None, Formula | None]:
    formula = formula_of(owner)
    expression = None if formula is None else formula.expression
    for kind, fields, pattern in _patterns():
        names: dict[str, str] = {}
        if expression is not None and matches(pattern, expression, names):
            if all(names.get(role, role) == role for role in ("normalized_shape", "inplace", "approximate")):
                roles = {role: name for role, name in names.items() if role in kind.__dataclass_fields__}
                return kind(**(roles | fields)), formula
    return None, None


def _pattern(owner: type, method: str) -> Expression:
    formula = formula_of(owner, method)
    return None if formula is None else formula.expression


@cache
def _patterns() -> list[tuple[Any, dict[str, Any], Expression]]:
    known = ((kind, owner, *method) for kind, owner, methods in _KNOWN for method in methods.items())
    return [(kind, fields, _pattern(owner, method)) for kind, owner, method, fields in known]
