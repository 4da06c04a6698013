"""Experts of a mixture in FP8: modules that hold the weights of all experts of a layer as 3-D parameters.

    Y = Σ over the k experts e of a token:  weight · down[e](gate(gate_up[e](x)))

Transformers keeps experts in one module per layer: `gate_up_proj` [E,2I,H] (or `up_proj` [E,I,H]) and `down_proj`
[E,H,I], transposed in some models, with biases in some. Its decorator `use_experts_implementation` replaces the forward
of such a class by one that calls any of several interchangeable functions (a loop, batched or grouped products), which
read what the class computes from flags of the module. `Experts` is one more such function, with the two products in
FP8: sort the rows by expert, multiply (`octavo.nn.grouped_linear`), let the module itself apply its gate, activation
and norm, multiply by the routing weights, and add the k results of each token. Routers are modules of their own, and
stay in high precision.

A class is replaced only if the code of its forward is the decorator's and every flag of the decorator is known here.
Names of classes do not matter. Anything else keeps its forward, and the report says why.

Slots whose expert id is negative, or E or more, are dropped: their rows sort last, no product reads them, and no
gradient comes from them.

Under expert parallelism (`octavo.parallel.expert_parallel`) each rank holds some of the experts, and an `Exchange`
carries the sorted rows to the ranks of their experts and the results back.
"""

import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from octavo.activations.detect import original_class, uses_default_call
from octavo.activations.modules import STORAGE_ATTRIBUTE, mixed_class, of_stored
from octavo.activations.saved_tensors import compressed, recording
from octavo.kernels.grouped import is_grouped
from octavo.nn.grouped_linear import grouped_linear
from octavo.nn.resident import ResidentWeight
from octavo.nn.resident_state import is_computed_from_resident, join_in_state, split_in_state
from octavo.nn.weights import is_fsdp_sharded
from octavo.numerics.recipe import DEFAULT, Recipe, weight_only
from octavo.runtime.swap import become, has_own_forward, is_fully_sharded
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import is_traceable_wrapper_subclass

_FLAGS = {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated"}
"""Flags of Transformers' decorator that `Experts` reads or that the module's own gate reads."""
STACKED = ("gate_up_proj", "up_proj", "down_proj")
"""Weights of experts, 3-D; their biases are 2-D."""
_DECORATOR = "transformers.integrations.moe"
_ATTRIBUTES = ("recipe", "keep_weights", STORAGE_ATTRIBUTE)


class Exchange(Protocol):
    """Carries rows between ranks that each hold some of the experts."""

    def __call__(
        self, on_rows: Callable[[Tensor, Tensor], Tensor], rows: Tensor, offsets: Tensor, recipe: Recipe
    ) -> Tensor:
        """Return `on_rows` of rows [M,H] that are sorted by expert, computed where their experts are; `offsets` [E]."""

    def local(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that belongs to this rank's experts, differentiable."""


class Experts(nn.Module):
    """Experts that compute in FP8. `octavo.convert` makes them from Transformers' experts; `octavo.revert` undoes that.

    Attributes:
        recipe: Precision of the products.
        keep_weights: Whether they were converted with `keep_weights=True`: see `octavo.nn.weights`.
        octavo_exchange: Carries rows to experts on other ranks; None if all experts are here.
        octavo_storage: How they store activations in FP8; None if they do not. Of the class, because a graph of
            torch.compile has no guard on what `vars()` lacks.
    """

    octavo_original: ClassVar[Any]
    recipe: Recipe = DEFAULT
    keep_weights: bool = False
    octavo_exchange: Exchange | None = None
    octavo_storage: Any = None
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of each token.

        Args:
            hidden_states: [T,H].
            top_k_index: int64 [T,k], the experts of each token; negative, or E or more, for none.
            top_k_weights: [T,k], their routing weights.

        Returns:
            [T,H] in the dtype of `hidden_states`.
        """
        if SWITCH.off and self.octavo_exchange is None:
            original: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return original
        if self.octavo_storage is not None:
            result: Tensor = compressed(self, (), self._mixture, hidden_states, top_k_index, top_k_weights)
            return result
        return self._mixture(hidden_states, top_k_index, top_k_weights)

    def _mixture(self, hidden_TH: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        k, count = index_Tk.shape[-1], self.down_proj.shape[0]
        ids = index_Tk.reshape(-1)
        ids, order = torch.sort(ids.masked_fill(ids < 0, count), stable=True)
        experts = torch.arange(count, device=ids.device, dtype=ids.dtype)
        offsets = torch.searchsorted(ids, experts, right=True).int()
        inverse = inverse_order(order)
        rows = gather_rows(hidden_TH, order, inverse, k)
        exchange = self.octavo_exchange
        compute = self.octavo_on_rows
        y = compute(rows, offsets) if exchange is None else exchange(compute, rows, offsets, self.recipe)
        weights = gather_rows(weights_Tk.reshape(-1, 1), order, inverse)
        y = self._of_stored(lambda rows: rows * weights, y)
        y = gather_rows(y, inverse, order).view(*hidden_TH.shape[:-1], k, y.shape[-1])
        result: Tensor = y.sum(-2).to(hidden_TH.dtype)  # not a view, of which FSDP2 warns
        return result

    def octavo_on_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Compute each expert of this rank on its rows: [M,H] sorted by expert → [M,H]; `offsets` as in
        `grouped_linear`.
        """
        both = self._octavo_linear("gate_up_proj" if self.has_gate else "up_proj", rows, offsets)
        gate: Any = self._apply_gate if self.has_gate else self.act_fn
        inner = gate(both) if self.has_bias else self._of_stored(gate, both)
        y = self._octavo_linear("down_proj", inner, offsets)
        return self.post_expert_norm(y) if getattr(self, "has_post_expert_norm", False) else y  # type: ignore[operator]

    def _of_stored(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return function(x); in a graph that stores activations, its backward reads the FP8 copy of x."""
        in_graph = torch.compiler.is_compiling() and self.octavo_storage is not None and recording()
        result: Tensor = of_stored(function, x) if in_graph else function(x)
        return result

    def _octavo_linear(self, name: str, rows: Tensor, offsets: Tensor) -> Tensor:
        exchange = self.octavo_exchange
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias") if self.has_bias else None
        if exchange is not None:
            weight, bias = exchange.local(weight), None if bias is None else exchange.local(bias)
        keeps = self.keep_weights and not torch.compiler.is_compiling() and not is_fsdp_sharded(self)
        recipe = weight_only(self.recipe) if is_computed_from_resident(self, name) else self.recipe
        return grouped_linear(rows, weight, bias, offsets, recipe, bool(self.is_transposed), keeps)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        split_in_state(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        join_in_state(self, state_dict, prefix, arguments[-1])
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """Return the description of the original, with the recipe."""
        return ", ".join(part for part in (super().extra_repr(), f"recipe={self.recipe.name}") if part)


def inverse_order(order: Tensor) -> Tensor:
    """Return the inverse of a permutation, int64 [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def gather_rows(x: Tensor, order: Tensor, inverse: Tensor, k: int = 1) -> Tensor:
    """Return the rows of x [T,·], each repeated k times, in the order `order` [T·k], whose inverse is `inverse`."""
    rows: Tensor = _GatherRows.apply(x, order, inverse, k)
    return rows


class _GatherRows(torch.autograd.Function):
    """See `gather_rows`. Backward reorders and adds, without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.reshape(-1, x.shape[-1])[order if k == 1 else order // k]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        g = g[inverse]
        return (g if ctx.k == 1 else g.view(-1, ctx.k, g.shape[-1]).sum(1)), None, None, None


def looks_like_experts(module: nn.Module) -> bool:
    """Return whether a module is experts: converted, or with 3-D `gate_up_proj` or `up_proj`, and `down_proj`."""
    if isinstance(module, Experts):
        return True
    own = module._parameters
    if not isinstance(own, dict):  # a ScriptModule
        return False
    up, down = own.get("gate_up_proj", own.get("up_proj")), own.get("down_proj")
    return up is not None and down is not None and up.ndim == down.ndim == 3


def is_converted_experts(module: nn.Module) -> TypeGuard[Experts]:
    """Return whether a module is experts that compute in FP8."""
    return isinstance(module, Experts)


def experts_obstacle(module: nn.Module) -> str | None:
    """Return why experts cannot compute in FP8, or None; `looks_like_experts` holds."""
    owner = original_class(module)
    kind = f"{owner.__module__}.{owner.__qualname__}"
    unknown = f"{kind} holds experts, but"
    forward = inspect.getattr_static(owner, "forward", None)
    if getattr(forward, "__code__", None) is not _decorated_code() or not uses_default_call(owner):
        return f"{unknown} its forward is not that of Transformers' use_experts_implementation, so it is not known"
    if other := _decorator_flags() - _FLAGS:
        return f"{unknown} this release of Transformers has flags that Octavo does not know: {', '.join(sorted(other))}"
    if missing := [name for name in ("has_gate", "has_bias", "is_transposed") if not hasattr(module, name)]:
        return f"{unknown} it has no flag {missing[0]}: it was not made by its own constructor"
    if (implementation := _foreign_implementation(module, forward)) is not None:
        return f"{unknown} its config chooses the experts implementation {implementation!r}, which is not Transformers'"
    if is_fully_sharded(module) or any(map(_is_foreign, module.parameters(recurse=False))):
        return "sharded already: convert before sharding"
    if has_own_forward(module):
        return "its forward was replaced on the instance, so it would not be used: convert before that is done"
    if (problem := _misfit(module)) is not None:
        return f"{unknown} {problem}"
    if taken := [name for name in _ATTRIBUTES if name in vars(module) and not isinstance(module, Experts)]:
        return f"it has an attribute {taken[0]!r} of its own, which converted experts use: rename it"
    try:
        mixed_class(Experts, owner)
    except Exception as error:
        return f"making a subclass of {kind} raises {type(error).__name__}: {error}"
    return None


def _is_foreign(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a tensor of another library's, or a DTensor."""
    return is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, ResidentWeight)


def _decorator() -> Any:
    return getattr(sys.modules.get(_DECORATOR), "use_experts_implementation", None)


def _decorated_code() -> CodeType | None:
    """Return the code of the forward that Transformers' decorator gives to classes, None before it is imported."""
    code = getattr(_decorator(), "__code__", None)
    for name in ("wrapper", "forward"):
        inner = code.co_consts if code is not None else ()
        code = next((c for c in inner if isinstance(c, CodeType) and c.co_name == name), None)
    return code


def _decorator_flags() -> set[str]:
    parameters = inspect.signature(_decorator()).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"experts_interface"}


def _foreign_implementation(module: nn.Module, forward: Any) -> str | None:
    """Return the implementation that a module would call, by name, if it is neither Transformers' nor its class's."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    interface = inspect.getclosurevars(forward).nonlocals.get("experts_interface")
    if chosen in (None, "eager") or interface is None:
        return None
    function = interface[chosen] if chosen in interface else None
    return None if str(getattr(function, "__module__", "")).startswith("transformers.") else chosen


def experts_shape(module: nn.Module) -> tuple[int, int, int, int]:
    """Return E, in features H, out features of the first product, and inner features I."""
    parameters: Any = module._parameters
    up = parameters["gate_up_proj"] if parameters.get("gate_up_proj") is not None else parameters["up_proj"]
    down = parameters["down_proj"]
    transposed = getattr(module, "is_transposed", False)
    hidden, both = up.shape[1:] if transposed else (up.shape[2], up.shape[1])
    return up.shape[0], hidden, both, down.shape[1] if transposed else down.shape[2]


def _misfit(module: nn.Module) -> str | None:
    """Return why the parameters of experts do not fit together or their flags, or None."""
    own: Any = module._parameters
    name = "gate_up_proj" if module.has_gate else "up_proj"
    if own.get(name) is None:
        return f"it has no parameter {name}"
    experts, hidden, both, inner = experts_shape(module)
    down = own["down_proj"]
    expected = (experts, inner, hidden) if module.is_transposed else (experts, hidden, inner)
    if tuple(down.shape) != expected or both != inner * (2 if module.has_gate else 1):
        return f"{name} {list(own[name].shape)} and down_proj {list(down.shape)} do not fit its flags"
    if module.has_bias and any(own.get(f"{part}_bias") is None for part in (name, "down_proj")):
        return "it has no bias parameters"
    return None


def describe_experts(module: nn.Module, recipe: Recipe) -> str:
    """Return the reason that a report shows for converted experts."""
    experts, hidden, both, inner = experts_shape(module)
    each = "" if is_grouped(recipe) else ", one product per expert"
    return f"experts: {experts} x ({hidden} → {both}, {inner} → {hidden}) in FP8 ({recipe.name}{each})"


def convert_experts(module: nn.Module, recipe: Recipe, storage: Any, keep_weights: bool) -> None:
    """Make experts compute in FP8, in place; with a `storage`, they also store their activations in FP8."""
    attributes = {} if storage is None else {STORAGE_ATTRIBUTE: storage}
    owner = mixed_class(Experts, original_class(module))
    become(module, owner, recipe=recipe, keep_weights=keep_weights, **attributes)


def revert_experts(module: nn.Module) -> None:
    """Undo `convert_experts`."""
    become(module, original_class(module))
    for name in _ATTRIBUTES:
        vars(module).pop(name, None)
