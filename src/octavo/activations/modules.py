"""Modules that store their activations in FP8 (norms, gated MLPs, activation functions, others) or run fused kernels.

Those that store do not change forward, bit for bit; fused ones round it less often, and compiled graphs leave them to
the compiler. `octavo.nn.select.STORED_HOW` says what each kind saves. If the code of a module has changed, an
activation has hooks, or the ops do not take the operands, the module's own operations run: weights, epsilon, children,
flags and the code itself are read in each call.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.activations.compiled import combined, stored, stored_for_norm
from octavo.activations.detect import (
    GLU_ACTIVATIONS,
    ORIGINAL,
    Glu,
    ModuleSpec,
    Norm,
    activation_of,
    original_class,
    spec_of,
)
from octavo.activations.exactness import is_scaled_sum
from octavo.activations.functional import (
    FUNCTIONS,
    activation_saving_fp8,
    fused_glu,
    fused_norm,
    glu_saving_fp8,
    norm_saving_fp8,
)
from octavo.activations.saved_tensors import compressed, fusing, recording
from octavo.kernels.registry import triton_unsupported
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.runtime.swap import set_class
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import constant_in_graphs, global_module_hooks, is_traceable_wrapper_subclass

STORAGE_ATTRIBUTE = "octavo_storage"  # Attribute of a converted module: its `Norm`, `Glu`, `Activation` or one below


@dataclass(frozen=True, kw_only=True)
class HookedForward:
    kind = "saved_tensors"
    unrounded: tuple[str, ...] = ()  # Names of its parts whose products save their inputs unrounded


@dataclass(frozen=True, kw_only=True)
class Fused:
    kind: str  # "fused_norm" or "fused_glu"


Storage = ModuleSpec | HookedForward | Fused


class FusedModule(nn.Module):
    """Base class of modules that run fused kernels, and only of those."""


class Fp8Saving(nn.Module):
    """Base class of modules that store their activations in FP8, and only of those."""

    @constant_in_graphs
    def octavo_in_graph(self) -> str:
        # A method, because Dynamo guards on the identity of a module that it passes to such a function, which makes a
        # graph for each of equal modules. What the answer depends on, Dynamo guards where it traces the module's code.
        return _in_graph(self)


class Fp8SavingNorm(Fp8Saving):
    def forward(self, *args: object, **kwargs: object) -> Any:
        x, original = _only(args, kwargs), super().forward
        if torch.compiler.is_compiling():
            kind = self.octavo_in_graph() if recording() and _is_matrix(x) else ""
            if x is None or not kind:
                return original(*args, **kwargs)
            with torch.no_grad():
                y = original(x)
            return combined(y, original(stored_for_norm(x, kind == "center")))
        operands = _norm_operands(self, x) if x is not None and recording() else None
        parameters = [] if operands is None else [p for p in operands[:2] if p is not None]
        if x is None or operands is None or not any(t.requires_grad for t in (x, *parameters)) or is_scaled_sum(x):
            return original(*args, **kwargs)
        with torch.no_grad():
            y = original(*args, **kwargs)
        fit = y.dtype in SUPPORTED_DTYPES and y.shape == x.shape and (x.dtype == y.dtype or y.dtype != torch.float16)
        if not fit or (parameters and parameters[0].dtype not in (y.dtype, torch.float32)):
            return original(*args, **kwargs)
        return norm_saving_fp8(x, y, *operands)


class FusedNorm(FusedModule):
    def forward(self, *args: object, **kwargs: object) -> Any:
        x = _only(args, kwargs)
        operands = _norm_operands(self, x) if x is not None and fusing() else None
        parameters = [] if operands is None else [p for p in operands[:2] if p is not None]
        if (
            x is None
            or operands is None
            or not _has_kernels(x.device)
            or x.stride(-1) != 1  # results of kernels have dense rows
            or any(p.dtype != x.dtype for p in parameters)  # of equal ones the original's result has that, too
            or not _is_saved(x, *parameters)
        ):
            return super().forward(*args, **kwargs)
        return fused_norm(x, *operands)


class FusedGlu(FusedModule):
    def forward(self, *args: object, **kwargs: object) -> Any:
        x, (glu, function, act) = _only(args, kwargs), gate_of(self) if fusing() else (None, None, None)
        if x is None or glu is None or act is None:
            return super().forward(*args, **kwargs)
        return _gated(self, glu, function, act, x, fused=True)


def _norm_operands(module: nn.Module, x: Tensor) -> tuple[Tensor | None, Tensor | None, float | None, Norm] | None:
    """Return weight, bias and epsilon of a norm, and what it computes; None if that is unknown or they do not fit x."""
    norm = spec_of(module) if _is_matrix(x) else None
    if not isinstance(norm, Norm):
        return None
    if not all(_has_parameter(module, name) for name in (norm.weight, norm.bias) if name is not None):
        return None  # parametrized, or not a tensor
    weight, bias = (None if name is None else own_parameter(module, name) for name in (norm.weight, norm.bias))
    parameters = [p for p in (weight, bias) if p is not None]
    eps: Any = norm.eps
    if isinstance(eps, str):  # no property
        eps = vars(module)[eps] if eps in vars(module) else getattr(type(module), eps, "")
    fit = all(_is_matrix(p) and p.shape == x.shape[-1:] and p.dtype == parameters[0].dtype for p in parameters)
    shape = getattr(module, "normalized_shape", None)  # of PyTorch's own norms
    fit &= (eps is None or isinstance(eps, float)) and (shape is None or tuple(shape) == tuple(x.shape[-1:]))
    return (weight, bias, eps, norm) if fit else None


class Fp8SavingGlu(Fp8Saving):
    def forward(self, *args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            x, kind = _only(args, kwargs), self.octavo_in_graph() if recording() else ""
            return _gated_in_graph(self, kind, x) if kind and x is not None else super().forward(*args, **kwargs)
        x, (glu, function, act) = _only(args, kwargs), gate_of(self) if recording() else (None, None, None)
        if x is None or glu is None or act is None:
            return compressed(self, (), super().forward, *args, **kwargs)
        return compressed(self, (), _gated, self, glu, function, act, x)


class Fp8SavingActivation(Fp8Saving):
    def forward(self, *args: object, **kwargs: object) -> Any:
        x, original = _only(args, kwargs), super().forward
        if torch.compiler.is_compiling():
            kind = self.octavo_in_graph() if recording() and _is_matrix(x) else ""
            return of_stored(original, x) if x is not None and kind else original(*args, **kwargs)
        activation = activation_of(self) if recording() and _is_matrix(x) else None
        if x is None or activation is None or not x.requires_grad:
            return original(*args, **kwargs)
        with torch.no_grad():
            y = original(*args, **kwargs)
        return activation_saving_fp8(x, y, activation)


class Fp8SavingHooked(Fp8Saving):
    octavo_storage: HookedForward

    def forward(self, *args: object, **kwargs: object) -> Any:
        return compressed(self, self.octavo_storage.unrounded, super().forward, *args, **kwargs)


def gate_of(module: nn.Module) -> tuple[Glu | None, Any, str | None]:
    """Return what a gated MLP computes, its activation function and that one's name; None where it is not known."""
    glu = spec_of(module)
    if not isinstance(glu, Glu):
        return None, None, None
    own = vars(module) | module._modules
    function: Any = FUNCTIONS[glu.function] if glu.function is not None else own.get(glu.activation or "")
    if not all(name in module._modules for name in (glu.gate, glu.up or glu.gate, glu.down)):
        function = None  # computed where they are read
    act = None if function is None or _is_altered(function) else activation_of(function)
    return glu, function, act if act in GLU_ACTIVATIONS else None


def _in_graph(module: nn.Module) -> str:
    """Return "center" for a layer norm, "plain" for another norm or activation, names for `_gated_in_graph`, or ""."""
    spec = spec_of(module)
    if isinstance(spec, Norm):
        known = all(_has_parameter(module, name) for name in (spec.weight, spec.bias) if name is not None)
        known &= len(getattr(module, "normalized_shape", "1")) == 1
        return ("center" if spec.center else "plain") if known else ""
    if isinstance(spec, Glu):
        glu, _, act = gate_of(module)
        names = glu and (glu.gate, glu.up or "", glu.down, glu.activation or "", act or "", f"{glu.up_first:d}")
        return " ".join(names) if names and act else ""
    return "" if activation_of(module) is None else "plain"


def of_stored(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x), whose backward reads the FP8 copy of x; see `octavo.activations.compiled`."""
    with torch.no_grad():
        y = function(x)
    return combined(y, function(stored(x)))


def _gated_in_graph(module: nn.Module, names: str, x: Tensor) -> Any:
    """`_gated` under torch.compile, which recompiles if a child, the activation included, is replaced."""
    gate_name, up_name, down, activation, act, up_first = names.split(" ")
    function = getattr(module, activation) if activation else FUNCTIONS[act]
    gate, up, _ = gate_and_up(module, gate_name, up_name, up_first == "1", x)
    if not _same_kind(gate, up):
        return getattr(module, down)(function(gate) * up)
    bias = getattr(getattr(module, gate_name), "bias", None)
    if bias is not None and not up_name:
        bias = bias.chunk(2)[0 if up_first == "0" else 1]
    with torch.no_grad():
        h = function(gate) * up
    return getattr(module, down)(combined(h, FUNCTIONS[act](stored(gate, bias)) * stored(up)))


def gate_and_up(module: nn.Module, gate: str, up: str | None, up_first: bool, x: Tensor) -> tuple[Any, Any, Any]:
    """Call the projections in the original order; return gate, up, and the product that has both as halves, or None."""
    if not up:
        both = getattr(module, gate)(x)
        first, second = both.chunk(2, dim=-1)
        return (second, first, both) if up_first else (first, second, both)
    before = getattr(module, up)(x) if up_first else None
    gated = getattr(module, gate)(x)
    return gated, getattr(module, up)(x) if before is None else before, None


def _same_kind(gate: Tensor, up: Tensor) -> bool:
    return gate.shape == up.shape and gate.dtype == up.dtype and _is_matrix(gate) and _is_matrix(up)


def _gated(module: nn.Module, glu: Glu, function: Any, act: str, x: Tensor, fused: bool = False) -> Any:
    """Compute a gated MLP; call its children in the original order."""
    down = getattr(module, glu.down)
    gate, up, both = gate_and_up(module, glu.gate, glu.up, glu.up_first, x)
    accurate = gate.dtype != torch.float32  # of which the kernel's exponential is less accurate than PyTorch's
    if fused and _same_kind(gate, up) and accurate and _has_kernels(gate.device) and _is_saved(gate, up):
        return down(fused_glu(gate, up, act, both, not glu.up_first))
    if fused or not _same_kind(gate, up) or not (gate.requires_grad or up.requires_grad):
        return down(function(gate) * up)
    with torch.no_grad():
        h = function(gate) * up
    bias = _bias(module, glu, gate if both is None else both)
    return down(glu_saving_fp8(gate, up, h, act, bias, both, not glu.up_first))


def _bias(module: nn.Module, glu: Glu, gate: Tensor) -> Tensor | None:
    """Return the bias of the gate projection, if it fits and FSDP has not sharded or freed it."""
    bias = own_parameter(getattr(module, glu.gate), "bias")
    if not isinstance(bias, Tensor) or bias.shape != gate.shape[-1:] or not _is_matrix(bias):
        return None
    return bias if bias.untyped_storage().nbytes() >= bias.nbytes else None


_MIXINS: dict[str, Any] = {
    "norm": Fp8SavingNorm, "glu": Fp8SavingGlu, "activation": Fp8SavingActivation, "saved_tensors": Fp8SavingHooked,
    "fused_norm": FusedNorm, "fused_glu": FusedGlu,
}  # fmt: skip


def handles_activations(module: nn.Module) -> bool:
    return isinstance(module, Fp8Saving | FusedModule)


def activation_class(module: nn.Module, storage: Storage) -> type[nn.Module]:
    """Return the class of a module that stores its activations or fuses. Raises any error of making a subclass."""
    original: Any = type(module)
    return mixed_class(_MIXINS[storage.kind], original)  # type: ignore[no-any-return]


def convert_activations(module: nn.Module, storage: Storage) -> None:
    SWITCH.stored |= not isinstance(storage, Fused)
    set_class(module, activation_class(module, storage), **{STORAGE_ATTRIBUTE: storage})


def revert_activations(module: nn.Module) -> None:
    set_class(module, original_class(module))
    del vars(module)[STORAGE_ATTRIBUTE]


@cache
def mixed_class(*both: Any) -> Any:
    """Return the class of a converted module, with bases (mixin, original class). Copies and pickles refer to both."""
    # Its name, module, docstring, annotations and signature of `forward` are the original's, by which frameworks choose
    # columns, wrap blocks and place layers.
    # Raises any error of making a subclass of the original, and TypeError if its objects cannot change to that class.
    mixin, original = both

    def reduce(self: nn.Module, protocol: object) -> tuple[Any, ...]:
        return _blank, both, self.__getstate__()

    own = forward_like(mixin, original)
    described = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    described["__annotations__"] = dict(inspect.get_annotations(original))
    members = {ORIGINAL: original, "__reduce_ex__": reduce, "forward": own, **described}
    mixed: Any = type(original.__name__, both, members)
    # A metaclass or `__init_subclass__` may wrap forward, as Transformers' checkpointing layers do, but not replace it.
    innermost = inspect.unwrap(mixed.forward, stop=lambda function: function is own)
    if mixed.__bases__ != both or innermost is not own:
        raise TypeError(f"the metaclass or __init_subclass__ of {original.__name__} changes its subclasses")
    set_class(object.__new__(original), mixed)
    return mixed


@cache
def forward_like(mixin: Any, original: Any) -> Any:
    """Return the forward of a mixin with the name, signature, annotations and docstring of the original class's."""
    own = mixin.forward
    parameters = inspect.signature(own).parameters
    if "args" in parameters or list(parameters) == list(inspect.signature(original.forward).parameters):
        copied: Any = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
        copied.__kwdefaults__ = own.__kwdefaults__
    else:  # callers may pass its argument by another name
        names = tuple(inspect.signature(original.forward).parameters)

        def renamed(self: nn.Module, *args: object, **kwargs: object) -> Any:
            for name in kwargs:
                if name not in names:
                    raise TypeError(f"{original.__name__}.forward() has no argument {name!r}; it has {[*names[1:]]}")
            return own(self, *args, *kwargs.values())

        copied = renamed
    return update_wrapper(copied, original.forward, updated=())


def _blank(*both: Any) -> Any:
    cls = mixed_class(*both)
    return cls.__new__(cls)


def _only(args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor | None:
    """Return the tensor that a module was called with, if it is the only argument."""
    values = (*args, *kwargs.values())
    return values[0] if len(values) == 1 and isinstance(values[0], Tensor) else None


def _is_matrix(x: Tensor | None) -> bool:
    """Return whether Octavo's ops take a tensor (not a DTensor, for example)."""
    return x is not None and x.dtype in SUPPORTED_DTYPES and x.ndim > 0 and not is_traceable_wrapper_subclass(x)


def _is_saved(input: Tensor, *others: Tensor) -> bool:
    """Return whether the original saves an input, or nothing: it need not for the gradients of the others alone."""
    # Without a gradient it may be an inference tensor, or one that the next batch overwrites.
    return input.requires_grad or not torch.is_grad_enabled() or not any(t.requires_grad for t in others)


@cache
def _has_kernels(device: torch.device) -> bool:
    """Return whether a device has fused kernels, or is a CPU, whose reference takes their place."""
    return device.type == "cpu" or triton_unsupported(device, ()) is None


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter of a module, or the plain tensor that FSDP1 puts in its place; not a parametrized one."""
    value = module._parameters.get(name, vars(module).get(name))
    return value if isinstance(value, Tensor) else None


def _has_parameter(module: nn.Module, name: str) -> bool:
    return module._parameters.get(name, "") is None or own_parameter(module, name) is not None


# Modules whose hooks only observe
_OBSERVERS = ("octavo.", "torch.utils.module_tracker", "torch.distributed._tools", "torch.profiler")


def _is_altered(module: object) -> bool:
    """Return whether a module's hooks, global hooks or a replaced `forward` may change its result or gradient."""
    if not isinstance(module, nn.Module):
        return False
    kinds = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    hooks = chain(*(kind.values() for kind in kinds), global_module_hooks())
    owners = (getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) for hook in hooks)
    return "forward" in vars(module) or not all(str(owner).startswith(_OBSERVERS) for owner in owners)
