"""Experts of a mixture in FP8: modules that hold the weights of all experts of a layer as 3-D parameters.

    Y = Σ over the k experts e of a token:  weight · down[e](gate(gate_up[e](x)))

Transformers keeps experts in one module per layer: `gate_up_proj` [E,2I,H] (or `up_proj` [E,I,H]) and `down_proj`
[E,H,I], transposed or with biases in some models. Its decorator `use_experts_implementation` gives such a class a
forward that calls one of several functions, which read flags of the module; `Experts` is one more of them. A class is
replaced only if the code of its forward is the decorator's and every flag is known here.
"""

import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from octavo.activations.detect import original_class, uses_default_call
from octavo.activations.modules import Storage, of_stored
from octavo.activations.saved_tensors import compressed, recording, unhooked
from octavo.kernels import grouped_mm, needs_both_orders, quantize
from octavo.kernels.grouped import is_grouped, quantize_grouped, sum_by_group
from octavo.nn.gathered import Fp8AllGatherOutput, rows_of
from octavo.nn.linear import dgrad_weight, forward_weight, linear
from octavo.nn.operands import Saved, output_dtype
from octavo.nn.resident import ResidentWeight, StatesOfResident, is_computed_from_resident, quantized_as
from octavo.nn.weights import is_fsdp_sharded
from octavo.numerics.recipe import DEFAULT, Recipe, weight_only
from octavo.runtime.derivatives import first_derivative_only
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import FakeTensor, is_traceable_wrapper_subclass, required_gradients
from octavo.tensor import Order, ScaledTensor

# grouped_linear:
#
#     forward  Y[g] = X[g] W[e]ᵀ     legend: M rows sorted by expert, E experts, K in and N out features of each expert,
#     dgrad    ∂X[g] = G[g] W[e]             g the rows of expert e
#     wgrad    ∂W[e] = G[g]ᵀ X[g]
#
# With recipes that scale by row and fold (`rowwise`), X is quantized once for all experts and each of the three
# products is one grouped product (`octavo.kernels.grouped`): the results of `octavo.nn.linear` on the rows of each
# expert alone, bit for bit on the reference backend. The scales of other recipes must not cross experts: they run
# `octavo.nn.linear` per expert, and wait for the GPU once to learn how many rows each has. Weights that are stored as
# [E,K,N] are copied to [E,N,K] before each quantization.


def grouped_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, recipe: Recipe, transposed: bool = False,
    keep_weights: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply the rows of each expert by its weight, in FP8, differentiable.

    Args:
        input: [M,K], rows sorted by expert; float32, bfloat16 or float16.
        weight: [E,N,K], or [E,K,N] if `transposed`, of the input's dtype unless autocast is on.
        bias: [E,N] or None.
        offsets: int32 [E], where the rows of each expert end, on the input's device.
        recipe: Precision of the products; not one with `equalization`.
        transposed: Whether each expert's weight is stored as [in, out].
        keep_weights: As of `octavo.nn.linear`.

    Returns:
        [M,N] in the input's dtype, or autocast's. Rows from `offsets[-1]` on are zero, and so is their gradient.

    Examples:
        >>> x, weight = torch.randn(8, 64), torch.randn(2, 32, 64)
        >>> octavo.nn.grouped_linear(x, weight, None, torch.tensor([3, 8]).int(), octavo.RECIPES["rowwise"]).shape
        torch.Size([8, 32])
    """
    if weight.ndim != 3 or input.ndim != 2 or offsets.shape != weight.shape[:1]:
        raise ValueError(
            "grouped_linear takes input [M,K], weight [E,N,K] and offsets [E]; got "
            f"{list(input.shape)}, {list(weight.shape)} and {list(offsets.shape)}"
        )
    if recipe.equalization:
        raise ValueError(f"recipe {recipe.name!r} needs channel scales, which experts do not keep: use 'rowwise'")
    out_dtype = output_dtype(input, weight, 1 if transposed else 2)
    if out_dtype is None or not is_grouped(recipe):
        by_row = weight.transpose(1, 2) if transposed else weight
        if out_dtype is None:  # inside `octavo.disabled()`
            return _per_expert(torch.nn.functional.linear, input, by_row, bias, offsets)
        return _per_expert(lambda x, w, b: linear(x, w, b, recipe, keep_weights), input, by_row, bias, offsets)
    options = recipe, out_dtype, transposed, keep_weights
    y_MN: Tensor = unhooked(_GroupedLinear.apply, input, weight, bias, offsets, *options)
    return y_MN


def _per_expert(
    function: Callable[..., Tensor], x_MK: Tensor, w_ENK: Tensor, bias_EN: Tensor | None, offsets: Tensor
) -> Tensor:
    experts, rows = w_ENK.shape[0], x_MK.shape[0]
    if isinstance(offsets, FakeTensor):  # the sizes are unknown: equal ones, to count memory and time
        ends = [rows * (expert + 1) // experts for expert in range(experts)]
    else:
        ends = offsets.tolist()
    counts = [end - start for start, end in zip([0, *ends], [*ends, rows], strict=True)]
    *parts, tail = x_MK.split(counts)
    biases = [None] * experts if bias_EN is None else bias_EN.unbind()
    results = [function(x, w, b) for x, w, b in zip(parts, w_ENK.unbind(), biases, strict=True)]
    return torch.cat([*results, results[0].new_zeros((tail.shape[0], w_ENK.shape[1]))])


def _matrix(stack: Tensor, transposed: bool) -> Tensor:
    """Return the rows of matrices [E,R,C], or [E,C,R], as one matrix [E·R,C]."""
    if isinstance(stack, Fp8AllGatherOutput):
        return rows_of(stack)
    return (stack.transpose(1, 2) if transposed else stack).flatten(0, 1)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, recipe: Recipe,
        out_dtype: torch.dtype, transposed: bool, keep_weights: bool,
    ) -> Tensor:  # fmt: skip
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        x = quantize(x_MK, recipe.x, order="both" if needs_wgrad and needs_both_orders(x_MK.device) else "rows")
        if isinstance(weight, ResidentWeight):
            w = quantized_as(weight, recipe.w.transposed if transposed else recipe.w)
            w = ScaledTensor(_matrix(w.data, transposed), _matrix(weight.scale, transposed), recipe.w)
            w_saved: Saved = (None, weight.data_, w.scale) if needs_dgrad else (None, None, None)
        else:
            rows = _matrix(weight, transposed)
            w, w_saved = forward_weight(rows, None, recipe, keep_weights, needs_dgrad, x.scale)
            if w_saved[0] is not None:
                w_saved = weight.detach(), *w_saved[1:]  # `rows` may be a copy
        y_MN = grouped_mm(x, w, offsets, "nt", out_dtype=out_dtype, bias=bias, fast_accum=True)
        x_saved = (x.data if x.other_order is None else x.other_order, x.scale) if needs_wgrad else (None, None)
        ctx.save_for_backward(*w_saved, *x_saved, offsets)
        ctx.recipe, ctx.transposed = recipe, transposed
        ctx.dtypes = x_MK.dtype, weight.dtype, None if bias is None else bias.dtype
        return y_MN

    @staticmethod
    @first_derivative_only("a converted layer of experts")
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        weight, w_data, w_scale, x_data, x_scale, offsets = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        needs_dgrad, needs_wgrad, needs_bias = required_gradients(ctx, 3)
        order: Order = "columns" if needs_both_orders(g_MN.device) else "rows"
        w = dx_MK = dw = dbias_EN = None
        if needs_dgrad:
            rows = weight if w_data is not None else _matrix(weight, ctx.transposed)
            if w_data is not None and w_data.ndim == 3:  # of a resident weight, as it is stored
                w_data = _matrix(w_data, ctx.transposed)
            w = dgrad_weight((rows, w_data, w_scale), None, recipe)
            w_scale = w_scale.view(offsets.shape[0], g_MN.shape[1])
        specs = recipe.dgrad_g if needs_dgrad else None, recipe.wgrad_g if needs_wgrad else None
        g_dgrad = g_wgrad = None
        if needs_dgrad or needs_wgrad:
            g_dgrad, g_wgrad = quantize_grouped(g_MN, offsets, *specs, w_scale, x_scale, order)
        if w is not None and g_dgrad is not None:
            dx_MK = grouped_mm(g_dgrad, w.unscaled, offsets, "nn", out_dtype=x_dtype)
        if g_wgrad is not None:
            assert recipe.wgrad_x is not None
            dw = grouped_mm(g_wgrad, ScaledTensor(x_data, None, recipe.wgrad_x), offsets, "tn", out_dtype=w_dtype)
            dw = dw.transpose(1, 2) if ctx.transposed else dw
        if needs_bias:
            dbias_EN = sum_by_group(g_MN, offsets).to(bias_dtype)
        return dx_MK, dw, dbias_EN, *[None] * 5


_FLAGS = {  # Options of Transformers' decorator that `Experts` reads or that the module's own gate reads
    "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "experts_interface",
}  # fmt: skip
STACKED = ("gate_up_proj", "up_proj", "down_proj")  # Weights of experts, 3-D; their biases are 2-D


class Experts(StatesOfResident):
    """Experts that compute in FP8. `octavo.convert` makes them from Transformers' experts; `octavo.revert` undoes that.

    Attributes:
        recipe: Precision of the products.
        keep_weights: Whether they were converted with `keep_weights=True`: see `octavo.nn.weights`.
        octavo_exchange: Carries rows to experts on other ranks; None if all experts are here.
        octavo_storage: How they store activations in FP8; None if they do not.
    """

    octavo_original: ClassVar[Any]
    recipe: Recipe = DEFAULT
    keep_weights: bool = False
    octavo_exchange: Any = None  # an `octavo.parallel.expert_parallel.ExpertExchange`
    octavo_storage: Storage | None = None  # of the class: a compiled graph has no guard on what `vars()` lacks
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts `top_k_index` int64 [T,k] (negative, or E or more, for none) of each token [T,H]."""
        if SWITCH.off and self.octavo_exchange is None:
            original: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return original
        if self.octavo_storage is not None:
            return compressed(self, (), self._mixture, hidden_states, top_k_index, top_k_weights)
        return self._mixture(hidden_states, top_k_index, top_k_weights)

    def _mixture(self, hidden_TH: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        k, count = index_Tk.shape[-1], self.down_proj.shape[0]
        ids = index_Tk.reshape(-1)  # those that are negative, or E or more, sort last: no product reads their rows
        ids, order = torch.sort(ids.masked_fill(ids < 0, count), stable=True)
        experts = torch.arange(count, device=ids.device, dtype=ids.dtype)
        offsets = torch.searchsorted(ids, experts, right=True).int()
        inverse = inverse_order(order)
        rows = gather_rows(hidden_TH, order, inverse, k)
        exchange, compute = self.octavo_exchange, self.octavo_on_rows
        y = compute(rows, offsets) if exchange is None else exchange(compute, rows, offsets, self.recipe)
        weights = gather_rows(weights_Tk.reshape(-1, 1), order, inverse)
        y = self._of_stored(lambda rows: rows * weights, y)
        y = gather_rows(y, inverse, order).view(*hidden_TH.shape[:-1], k, y.shape[-1])
        result: Tensor = y.sum(-2).to(hidden_TH.dtype)  # not a view, of which FSDP2 warns
        return result

    def octavo_on_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Compute each expert of this rank on its rows: [M,H] sorted by expert → [M,H]."""
        both = self._octavo_linear("gate_up_proj" if self.has_gate else "up_proj", rows, offsets)
        gate: Any = self._apply_gate if self.has_gate else self.act_fn
        inner = gate(both) if self.has_bias else self._of_stored(gate, both)
        y = self._octavo_linear("down_proj", inner, offsets)
        norm: Any = self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None
        return y if norm is None else norm(y)

    def _of_stored(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return function(x); in a graph that stores activations, its backward reads the FP8 copy of x."""
        in_graph = torch.compiler.is_compiling() and self.octavo_storage is not None and recording()
        return of_stored(function, x) if in_graph else function(x)

    def _octavo_linear(self, name: str, rows: Tensor, offsets: Tensor) -> Tensor:
        exchange = self.octavo_exchange
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias") if self.has_bias else None
        if exchange is not None:
            weight, bias = exchange.local(weight), None if bias is None else exchange.local(bias)
        keeps = self.keep_weights and not torch.compiler.is_compiling() and not is_fsdp_sharded(self)
        recipe = weight_only(self.recipe) if is_computed_from_resident(self, name) else self.recipe
        return grouped_linear(rows, weight, bias, offsets, recipe, bool(self.is_transposed), keeps)

    def extra_repr(self) -> str:
        """Return the description of the original, with the recipe."""
        return ", ".join(part for part in (super().extra_repr(), f"recipe={self.recipe.name}") if part)


def inverse_order(order: Tensor) -> Tensor:
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
    return isinstance(module, Experts)


def experts_obstacle(module: nn.Module) -> str | None:
    """Return why the code or the parameters of experts do not allow FP8, or None; `looks_like_experts` holds."""
    owner = original_class(module)
    unknown = f"{owner.__module__}.{owner.__qualname__} holds experts, but"
    forward = inspect.getattr_static(owner, "forward", None)
    if getattr(forward, "__code__", None) is not _decorated_code() or not uses_default_call(owner):
        return f"{unknown} its forward is not that of Transformers' use_experts_implementation, so it is not known"
    flags = {p.name for p in inspect.signature(_decorator()).parameters.values() if p.kind is p.KEYWORD_ONLY}
    if other := flags - _FLAGS:
        return f"{unknown} this release of Transformers has flags that Octavo does not know: {', '.join(sorted(other))}"
    if missing := [name for name in ("has_gate", "has_bias", "is_transposed") if not hasattr(module, name)]:
        return f"{unknown} it has no flag {missing[0]}: it was not made by its own constructor"
    if (implementation := _foreign_implementation(module, forward)) is not None:
        return f"{unknown} its config chooses the experts implementation {implementation!r}, which is not Transformers'"
    wrapped = filter(is_traceable_wrapper_subclass, module.parameters(recurse=False))  # or another library's
    if not all(isinstance(parameter, ResidentWeight) for parameter in wrapped):
        return "sharded already: convert before sharding"
    problem = _misfit(module)
    return None if problem is None else f"{unknown} {problem}"


def _decorator() -> Any:
    return getattr(sys.modules.get("transformers.integrations.moe"), "use_experts_implementation", None)


def _decorated_code() -> CodeType | None:
    """Return the code of the forward that Transformers' decorator gives to classes, None before it is imported."""
    code = getattr(_decorator(), "__code__", None)
    for name in ("wrapper", "forward"):
        inner = code.co_consts if code is not None else ()
        code = next((c for c in inner if isinstance(c, CodeType) and c.co_name == name), None)
    return code


def _foreign_implementation(module: nn.Module, forward: Callable[..., Any]) -> str | None:
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
    experts, hidden, both, inner = experts_shape(module)
    each = "" if is_grouped(recipe) else ", one product per expert"
    return f"experts: {experts} x ({hidden} → {both}, {inner} → {hidden}) in FP8 ({recipe.name}{each})"
