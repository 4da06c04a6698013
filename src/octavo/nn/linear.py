"""`Linear`, an `nn.Linear` that multiplies in FP8, and its autograd function.

    forward  Y  = X Wᵀ     nt: contracts over K      legend: M tokens (all leading dims flattened),
    dgrad    ∂X = G W      nn: contracts over N              K in_features, N out_features,
    wgrad    ∂W = Gᵀ X     tn: contracts over M              G = ∂loss/∂Y [M,N]

The recipe gives one spec per operand (see `octavo.numerics.recipe`, also for how row scales fold into G). All recipes
share one code path: quantize, then multiply.

FP8 matrix units need both operands contiguous along the contraction, and X, W and G are each contracted over both of
their dimensions. So on a GPU (`wants_copies`) each is quantized into both memory orders from one read: X row-major for
forward and column-major for wgrad, G row-major for dgrad and column-major for wgrad, W row-major in forward and
column-major in backward.

Saved for backward: X quantized for wgrad, one byte per element, and W by reference with its scales. Backward
quantizes W again instead of saving it (`keep_weights` saves it, see `octavo.nn.weights`): the parameter exists anyway,
autograd's version counter raises if W is modified in between, and with given scales the cast reads W once. A frozen W
needs no wgrad, so X is not saved; a frozen X needs no dgrad. A backward that needs only some gradients, as in
zero-bubble pipelines, computes only those (`octavo.nn.engine`).

A weight that FSDP gathered in FP8 (`octavo.nn.gathered`) is used and saved as it is.

A recipe with an amax history scales X and G by the amax of earlier passes: see `octavo.nn.delayed`.

Layers that read the same tensor (q, k and v; gate and up) share one quantized copy: see `InputCastCache`. If X can be
recomputed from what its producer saved (`octavo.activations.recompute`), X is not saved but recomputed in backward.
"""

import math
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.activations.recompute import Recomputable
from octavo.activations.saved_tensors import recomputable_of, unhooked
from octavo.kernels import quantize, quantize_pair, scaled_mm, wants_copies
from octavo.nn.delayed import DelayedScaling, X, delayed_scaling_of
from octavo.nn.engine import required_gradients
from octavo.nn.gathered import Fp8AllGatherOutput, for_dgrad, quantized_as
from octavo.nn.weights import cast_weight, keeps_weight
from octavo.numerics.recipe import DEFAULT, Recipe
from octavo.numerics.spec import QuantSpec
from octavo.runtime.execution_context import execution_context
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import autocast_dtype, explain_freed_nodes
from octavo.tensor import ScaledTensor

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Linear(nn.Linear):
    """A linear layer that computes in FP8. `octavo.convert` makes it from an `nn.Linear`; `octavo.revert` undoes that.

    Parameters, `state_dict`, hooks and flags are those of `nn.Linear`; `recipe` sets the precision. The constructor
    takes the arguments of `nn.Linear`.

    Examples:
        >>> octavo.nn.Linear(64, 128)(torch.randn(2, 64)).shape
        torch.Size([2, 128])
    """

    recipe: Recipe = DEFAULT
    keeps_weight: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """Y = X Wᵀ + b in FP8 for input [..., in_features]; see `linear`."""
        scaling = delayed_scaling_of(self, self.recipe)
        return linear(input, self.weight, self.bias, self.recipe, keeps_weight(self), scaling)

    def extra_repr(self) -> str:
        """Return the description of `nn.Linear`, with the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, keeps_weight: bool = False,
    past: DelayedScaling | None = None,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.linear` in FP8, differentiable.

    Args:
        input: [..., K], float32, bfloat16 or float16; any leading sizes, zero included.
        weight: [N, K], of the input's dtype unless autocast is on. Any strides.
        bias: [N] or None; added in float32.
        recipe: Precision of the operands of the three products.
        keeps_weight: Save the FP8 copy of the weight for backward, and share it inside `octavo.nn.accumulating`; see
            `octavo.nn.weights`.
        past: Source of the scales of X and G. None: their current amax, whatever the recipe.

    Returns:
        [..., N] in the input's dtype, or in autocast's if autocast is on.

    Raises:
        ValueError: If the last dimension is not K, or dtypes differ without autocast.
        TypeError: If the dtype cannot be quantized.

    Examples:
        >>> x, weight = torch.randn(8, 64), torch.randn(32, 64, requires_grad=True)
        >>> octavo.nn.linear(x, weight, None, octavo.RECIPES["rowwise"]).sum().backward()
        >>> weight.grad.shape
        torch.Size([32, 64])
    """
    device_type = input.device.type
    if not SWITCH.enabled:
        return F.linear(input, weight, bias)
    if input.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"linear takes float32, bfloat16 or float16 input; got {input.dtype}")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: the input's last dimension is in_features = {weight.shape[1]}; got shape {tuple(input.shape)}"
        )
    autocast = autocast_dtype(device_type)
    if autocast is None and input.dtype != weight.dtype:
        raise ValueError(
            f"linear: input is {input.dtype} but weight is {weight.dtype}; cast one of them, or run under "
            f"torch.autocast({device_type!r}, dtype=torch.bfloat16)"
        )
    out_dtype = input.dtype if autocast is None else autocast
    x_MK = input.reshape(math.prod(input.shape[:-1]), weight.shape[1])
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad and recipe.wgrad_x is not None
    recomputable = recomputable_of(input) if needs_wgrad else None
    with torch.no_grad():
        x, x_t = _INPUT_CASTS.quantized(input, x_MK, recipe, needs_wgrad and recomputable is None, past)
    # Tensors that both casts share are passed once: torch.compile takes no tensor twice.
    x_t_data = None if x_t is None or x_t.data is x.data else x_t.data
    x_t_scale = None if x_t is None or x_t.scale is x.scale else x_t.scale
    y_MN = unhooked(
        _LinearFunction.apply, x_MK, weight, bias, x.data, x.scale, x_t_data, x_t_scale, recomputable, recipe,
        out_dtype, keeps_weight, past,
    )  # fmt: skip
    if input.ndim == 2:
        return y_MN
    # Not a view, as for `nn.Linear`: FSDP2 warns about blocks that return a view.
    y: Tensor = torch.ops.aten._unsafe_view(y_MN, [*input.shape[:-1], weight.shape[0]])
    return y


@explain_freed_nodes
class _LinearFunction(torch.autograd.Function):
    """The three products. X arrives quantized: `x_*` for forward; `x_t_*` for wgrad, if that differs."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, x_data: Tensor, x_scale: Tensor,
        x_t_data: Tensor | None, x_t_scale: Tensor | None, recomputable: Recomputable | None, recipe: Recipe,
        out_dtype: torch.dtype, keeps_weight: bool, scaling: DelayedScaling | None,
    ) -> Tensor:  # fmt: skip
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        gathered, w_t = isinstance(w_NK, Fp8AllGatherOutput), None
        if isinstance(w_NK, Fp8AllGatherOutput):
            w = w_t = quantized_as(w_NK, recipe.w)
        elif keeps_weight:
            w, w_t = cast_weight(w_NK, recipe, needs_dgrad)
        else:
            w = quantize(w_NK, recipe.w)
        x = ScaledTensor(x_data, x_scale, recipe.x)
        y_MN = scaled_mm(x, w, "nt", out_dtype=out_dtype, bias=bias, fast_accum=True)
        x_saved: tuple[Tensor | None, ...]
        if not needs_wgrad:
            x_saved, recomputable = (None, None), None
        elif recomputable is not None:
            x_saved = recomputable.tensors
        elif recipe.wgrad_x is None:
            x_saved = x_MK.to(out_dtype), None
        else:
            x_saved = x_data if x_t_data is None else x_t_data, x_scale if x_t_scale is None else x_t_scale
        w_saved: tuple[Tensor | None, ...] = None, None, None
        if needs_dgrad and w_t is not None:  # W itself too, unless gathered, so that autograd raises if it changed
            w_saved = None if gathered else w_NK, w_t.data if w_t.copy is None else w_t.copy, w_t.scale
        elif needs_dgrad:
            w_saved = w_NK, None, w.scale if recipe.dgrad_w == recipe.w else None
        ctx.save_for_backward(*w_saved, *x_saved)
        ctx.recipe, ctx.scaling, ctx.gathered = recipe, scaling, gathered
        ctx.rematerializer = None if recomputable is None else recomputable.rematerializer
        ctx.columns = x_MK.shape[1]
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias is None else bias.dtype
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        w_NK, w_data, w_scale, *x_saved = ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias = required_gradients(ctx, 3)
        dx_MK = dw_NK = dbias_N = w = x = None
        if needs_dgrad and w_data is not None:
            w = ScaledTensor(w_data, w_scale, recipe.dgrad_w)
            w = for_dgrad(w) if ctx.gathered else w
        elif needs_dgrad:
            w = _recast_weight(w_NK, w_scale, recipe.dgrad_w)
        if needs_wgrad and recipe.wgrad_x is not None:
            order = "columns" if wants_copies(g_MN.device) else "rows"
            if ctx.rematerializer is None:
                x = ScaledTensor(x_saved[0], x_saved[1], recipe.wgrad_x)
            else:
                x = ctx.rematerializer.quantized(x_saved, recipe.wgrad_x, order, ctx.columns)
        g_dgrad, g_wgrad = _quantized_gradient(g_MN, w, x, recipe, ctx.scaling)
        if w is not None and g_dgrad is not None:
            dx_MK = scaled_mm(g_dgrad, w.unscaled if recipe.folds_w else w, "nn", out_dtype=x_dtype)
        if x is not None and g_wgrad is not None:
            dw_NK = scaled_mm(g_wgrad, x.unscaled if recipe.folds_x else x, "tn", out_dtype=w_dtype)
        elif needs_wgrad:
            dw_NK = (g_MN.t() @ x_saved[0]).to(w_dtype)
        if needs_bias:
            dbias_N = g_MN.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx_MK, dw_NK, dbias_N, *[None] * 9


def _recast_weight(w_NK: Tensor, scale: Tensor | None, spec: QuantSpec) -> ScaledTensor:
    """Quantize W for dgrad, with the scales of the forward cast if the recipe uses the same spec."""
    return quantize(w_NK, spec, order="columns" if wants_copies(w_NK.device) else "rows", scale=scale)


def _quantized_input(
    x_MK: Tensor, recipe: Recipe, needs_wgrad: bool, amax: Tensor | None
) -> tuple[ScaledTensor, ScaledTensor | None]:
    """Quantize X for forward, and for wgrad if needed. `amax`, for delayed scaling, needs equal specs for both."""
    spec, spec_t, copies = recipe.x, recipe.wgrad_x, wants_copies(x_MK.device)
    if not needs_wgrad or spec_t is None:
        return quantize(x_MK, spec, amax=amax), None
    if spec == spec_t:
        x = quantize(x_MK, spec, order="both" if copies else "rows", amax=amax)
        return x, x if x.copy is None else ScaledTensor(x.copy, x.scale, spec)
    if copies:
        return quantize_pair(x_MK, spec, None, spec_t, None)
    return quantize(x_MK, spec), quantize(x_MK, spec_t)


def _quantized_gradient(
    g_MN: Tensor, w: ScaledTensor | None, x: ScaledTensor | None, recipe: Recipe, scaling: DelayedScaling | None
) -> tuple[ScaledTensor | None, ScaledTensor | None]:
    """Quantize G for dgrad (if w is given) and for wgrad (if x is given), with the other operand's scales folded in."""
    amax = None if scaling is None else scaling.gradient_amax(g_MN)
    fold_w = _fold(w.t()) if w is not None and recipe.folds_w else None
    fold_x = _fold(x) if x is not None and recipe.folds_x else None
    spec, spec_t, copies = recipe.dgrad_g, recipe.wgrad_g, wants_copies(g_MN.device)
    if w is not None and x is not None and spec_t is not None:
        if recipe.shares_g:
            g = quantize(g_MN, spec, order="both" if copies else "rows", amax=amax)
            return g, g
        if copies:
            return quantize_pair(g_MN, spec, fold_w, spec_t, fold_x)
    g_dgrad = None if w is None else quantize(g_MN, spec, fold_w, amax=amax)
    if x is None or spec_t is None:
        return g_dgrad, None
    return g_dgrad, quantize(g_MN, spec_t, fold_x, order="columns" if copies else "rows", amax=amax)


def _fold(operand: ScaledTensor) -> Tensor | None:
    """Return row scales [R,1] of an operand (or [1,R] of a transposed one) as a factor of G."""
    return None if operand.scale is None else operand.scale.float()


InputCasts = tuple[ScaledTensor, ScaledTensor | None]
"""X for forward, and X for wgrad."""


@dataclass
class _CacheEntry:
    """The casts of a tensor in this state. Holds no reference to the tensor, whose deletion calls `forget`.

    `storage` is a weak reference; it prevents reuse of the address in `state` by another storage.
    """

    state: tuple[Any, ...]
    storage: StorageWeakRef
    casts: dict[Any, InputCasts] = field(default_factory=dict)

    def forget(self) -> None:
        """Free the casts, and the graph that `state` holds; called from any thread."""
        self.state, self.casts = (), {}


class InputCastCache(threading.local):
    """Casts of the last input of any linear, per thread, for sibling layers that read the same tensor.

    q, k and v are called one after the other with the same tensor object; so are gate and up. The lookup is by
    identity, so it needs no knowledge of the model. An entry is dropped when its tensor is deleted or another input
    arrives. Layers with an amax history share the cast of the first layer: they read the same tensors, so their
    histories are equal.

    Only tensors with a `grad_fn` are cached. Others may be buffers that are written without autograd noticing (a
    receive buffer, a CUDA graph's input, an array shared with NumPy). A cast is not reused once the tensor's version,
    `grad_fn` or memory changes, nor on another stream, inside another dispatch mode or CUDA graph capture: see
    `execution_context`.

    Limit, as in autograd, which saves tensors by reference: the cache misses a write into an activation that PyTorch
    does not report (through `.data`, NumPy or a custom kernel) between two layers that read it. PyTorch's own gradients
    of the first layer are then wrong, too.

    Under torch.compile the graph of a training step merges equal `quantize` calls instead.
    """

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], _CacheEntry] | None = None

    def quantized(
        self, owner: Tensor, x_MK: Tensor, recipe: Recipe, needs_wgrad: bool, scaling: DelayedScaling | None
    ) -> InputCasts:
        """Return `_quantized_input(x_MK, …)`, cached; x_MK is the matrix view of `owner`."""
        amax = None if scaling is None else scaling.amax(X, x_MK)
        if torch.compiler.is_compiling() or owner.grad_fn is None or torch.is_inference_mode_enabled():
            return _quantized_input(x_MK, recipe, needs_wgrad, amax)
        state = (
            owner._version, owner.grad_fn, owner.untyped_storage()._cdata, owner.storage_offset(), owner.shape,
            owner.stride(), owner.dtype, *execution_context(owner),
        )  # fmt: skip
        entry = self._entry
        if entry is None or entry[0]() is not owner or entry[1].state != state:
            new_entry = _CacheEntry(state, StorageWeakRef(owner.untyped_storage()))
            entry = self._entry = weakref.ref(owner, lambda _: new_entry.forget()), new_entry
        casts = entry[1].casts
        delay = None if scaling is None else (scaling.history.passes, scaling.history.margin)
        with_wgrad, forward_only = (recipe.x, recipe.wgrad_x, delay), (recipe.x, None, delay)
        key = with_wgrad if needs_wgrad or forward_only not in casts else forward_only
        if key not in casts:
            key = with_wgrad if needs_wgrad else forward_only
            casts[key] = _quantized_input(x_MK, recipe, needs_wgrad, amax)
        return casts[key]


_INPUT_CASTS = InputCastCache()
