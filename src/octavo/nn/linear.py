"""Linear: an `nn.Linear` in everything but its product, and the one autograd function behind it.

    forward  Y  = X Wᵀ     nt: contracts over K      legend: M tokens (all leading dims flattened),
    dgrad    ∂X = G W      nn: contracts over N              K in_features, N out_features,
    wgrad    ∂W = Gᵀ X     tn: contracts over M              G = ∂loss/∂Y [M,N]

The recipe gives one spec per operand (see `octavo.numerics.recipe`, also for how row scales fold into G). There is
one path for all recipes: quantize, multiply, done.

FP8 matrix units want both operands contiguous along the contraction, and X, W and G are each contracted over both of
their dimensions. So on a GPU (`wants_copies`) each is quantized into both memory orders from one read: X row-major for
forward and column-major for wgrad, G row-major for dgrad and column-major for wgrad, W row-major in forward and
column-major in backward.

Kept for backward: the form of X that wgrad reads, one byte per element, and W by reference with its scales. W is cast
again in backward rather than saved (`octavo.nn.weights` saves it, by choice): the parameter exists anyway, autograd's
version counter refuses a W modified in between, and with its scales known a cast reads W once. A frozen W needs no
wgrad, so X is not kept at all; a frozen X needs no dgrad. A backward that asks for some gradients only, as zero-bubble
pipelines do, computes no others (`octavo.nn.engine`).

A weight that FSDP gathered in FP8 (`octavo.nn.gathered`) is used as it came, and saved as it came.

A recipe with a history has X and G cut to the maxima of earlier passes: `octavo.nn.delayed`.

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
from octavo.activations.saved_tensors import source_of, unhooked
from octavo.kernels import quantize, quantize_pair, scaled_mm, wants_copies
from octavo.nn.delayed import Past, X, past_of
from octavo.nn.engine import wanted_gradients
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
    """A linear layer that computes in FP8. Made from an `nn.Linear` by `octavo.convert`, turned back by
    `octavo.revert`.

    Parameters, `state_dict`, hooks and flags are those of `nn.Linear`; `recipe` says how it computes. One can also be
    made directly, with the arguments of `nn.Linear`.
    """

    recipe: Recipe = DEFAULT
    keeps_weight: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """Y = X Wᵀ + b in FP8 for input [..., in_features]; see `linear`."""
        return linear(input, self.weight, self.bias, self.recipe, keeps_weight(self), past_of(self, self.recipe))

    def extra_repr(self) -> str:
        """As `nn.Linear`, with the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, keeps_weight: bool = False,
    past: Past | None = None,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.linear` in FP8, differentiable.

    Args:
        input: [..., K], float32, bfloat16 or float16; any leading sizes, zero included.
        weight: [N, K], of the input's dtype unless autocast is on. Any strides.
        bias: [N] or None; added in float32.
        recipe: Precision of the operands of the three products.
        keeps_weight: Save the FP8 copy of the weight for backward, and share it inside `octavo.nn.accumulating`; see
            `octavo.nn.weights`.
        past: What the scales of X and G come from; None for their own maxima, whatever the recipe.

    Returns:
        [..., N] in the input's dtype, or autocast's where that is on.

    Raises:
        ValueError: Where the last dimension is not K, or dtypes differ without autocast.
        TypeError: For a dtype that has no FP8 form.
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
    wants_kept = torch.is_grad_enabled() and weight.requires_grad and recipe.wgrad_x is not None
    source = source_of(input) if wants_kept else None
    with torch.no_grad():
        x, kept = _LAST_INPUT.quantized(input, x_MK, recipe, wants_kept and source is None, past)
    # What both forms share is handed over once: torch.compile takes no tensor twice.
    kept_data = None if kept is None or kept.data is x.data else kept.data
    kept_scale = None if kept is None or kept.scale is x.scale else kept.scale
    y_MN = unhooked(
        _LinearFunction.apply, x_MK, weight, bias, x.data, x.scale, kept_data, kept_scale, source, recipe, out_dtype,
        keeps_weight, past,
    )  # fmt: skip
    if input.ndim == 2:
        return y_MN
    # Not a view, as the output of `nn.Linear` is none: FSDP2, for one, warns of blocks that return one.
    y: Tensor = torch.ops.aten._unsafe_view(y_MN, [*input.shape[:-1], weight.shape[0]])
    return y


@explain_freed_nodes
class _LinearFunction(torch.autograd.Function):
    """The three products. X arrives quantized: `x_*` for forward; `kept_*` for wgrad, where that differs."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, x_data: Tensor, x_scale: Tensor,
        kept_data: Tensor | None, kept_scale: Tensor | None, source: Recomputable | None, recipe: Recipe,
        out_dtype: torch.dtype, keeps_weight: bool, past: Past | None,
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
        kept: tuple[Tensor | None, ...]
        if not needs_wgrad:
            kept, source = (None, None), None
        elif source is not None:
            kept = source.tensors
        elif recipe.wgrad_x is None:
            kept = x_MK.to(out_dtype), None
        else:
            kept = x_data if kept_data is None else kept_data, x_scale if kept_scale is None else kept_scale
        w_saved: tuple[Tensor | None, ...] = None, None, None
        if needs_dgrad and w_t is not None:  # with W itself, unless it was gathered: autograd refuses one that changed
            w_saved = None if gathered else w_NK, w_t.data if w_t.copy is None else w_t.copy, w_t.scale
        elif needs_dgrad:
            w_saved = w_NK, None, w.scale if recipe.dgrad_w == recipe.w else None
        ctx.save_for_backward(*w_saved, *kept)
        ctx.recipe, ctx.past, ctx.gathered = recipe, past, gathered
        ctx.rematerializer = None if source is None else source.rematerializer
        ctx.columns = x_MK.shape[1]
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias is None else bias.dtype
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        w_NK, w_data, w_scale, *kept = ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias = wanted_gradients(ctx, 3)
        dx_MK = dw_NK = dbias_N = w = x = None
        if needs_dgrad and w_data is not None:
            w = ScaledTensor(w_data, w_scale, recipe.dgrad_w)
            w = for_dgrad(w) if ctx.gathered else w
        elif needs_dgrad:
            w = _cast_again(w_NK, w_scale, recipe.dgrad_w)
        if needs_wgrad and recipe.wgrad_x is not None:
            order = "columns" if wants_copies(g_MN.device) else "rows"
            if ctx.rematerializer is None:
                x = ScaledTensor(kept[0], kept[1], recipe.wgrad_x)
            else:
                x = ctx.rematerializer.quantized(kept, recipe.wgrad_x, order, ctx.columns)
        g_dgrad, g_wgrad = _quantized_gradient(g_MN, w, x, recipe, ctx.past)
        if w is not None and g_dgrad is not None:
            dx_MK = scaled_mm(g_dgrad, w.unscaled if recipe.folds_w else w, "nn", out_dtype=x_dtype)
        if x is not None and g_wgrad is not None:
            dw_NK = scaled_mm(g_wgrad, x.unscaled if recipe.folds_x else x, "tn", out_dtype=w_dtype)
        elif needs_wgrad:
            dw_NK = (g_MN.t() @ kept[0]).to(w_dtype)
        if needs_bias:
            dbias_N = g_MN.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx_MK, dw_NK, dbias_N, *[None] * 9


def _cast_again(w_NK: Tensor, scale: Tensor | None, spec: QuantSpec) -> ScaledTensor:
    """W for dgrad, with the scales of the forward copy where the recipe uses that again."""
    return quantize(w_NK, spec, order="columns" if wants_copies(w_NK.device) else "rows", scale=scale)


def _quantized_input(
    x_MK: Tensor, recipe: Recipe, wants_kept: bool, amax: Tensor | None
) -> tuple[ScaledTensor, ScaledTensor | None]:
    """X for forward, and for wgrad if that is wanted; by a maximum of a recipe with one form, if that is given."""
    spec, spec_t, copies = recipe.x, recipe.wgrad_x, wants_copies(x_MK.device)
    if not wants_kept or spec_t is None:
        return quantize(x_MK, spec, amax=amax), None
    if spec == spec_t:
        x = quantize(x_MK, spec, order="both" if copies else "rows", amax=amax)
        return x, x if x.copy is None else ScaledTensor(x.copy, x.scale, spec)
    if copies:
        return quantize_pair(x_MK, spec, None, spec_t, None)
    return quantize(x_MK, spec), quantize(x_MK, spec_t)


def _quantized_gradient(
    g_MN: Tensor, w: ScaledTensor | None, x: ScaledTensor | None, recipe: Recipe, past: Past | None
) -> tuple[ScaledTensor | None, ScaledTensor | None]:
    """G for dgrad (where there is a w) and for wgrad (where there is an x), other operands' scales folded in."""
    amax = None if past is None else past.closing(g_MN)
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
    """Row scales [R,1] of an operand (or [1,R] of a transposed one), as a factor of G."""
    return None if operand.scale is None else operand.scale.float()


_Forms = tuple[ScaledTensor, ScaledTensor | None]


@dataclass
class _Read:
    """The quantized forms of a tensor in this state. Does not refer to the tensor, whose end calls `forget`.

    `storage` is weak, and there so that no other storage gets the address that `state` holds.
    """

    state: tuple[Any, ...]
    storage: StorageWeakRef
    forms: dict[Any, _Forms] = field(default_factory=dict)

    def forget(self) -> None:
        """Free the forms, and the graph that `state` holds; called from any thread."""
        self.state, self.forms = (), {}


class InputCastCache(threading.local):
    """The quantized forms of the tensor that a linear read last, so that its siblings need not quantize it again.

    q, k and v are called one after the other with the same tensor object; so are gate and up. The copy is found by
    identity, which needs no knowledge of any model, and dropped when the tensor dies or another input comes. Each
    thread has its own. Layers with a history have the copy that the first of them made: having read the same tensors,
    all have the same history.

    Only tensors that autograd made (those with a `grad_fn`) are remembered. Others may be buffers that somebody writes
    into without autograd noticing (a receive buffer, a CUDA graph's input, an array shared with NumPy). A copy is not
    used once the tensor has another version, `grad_fn` or memory, nor on another stream, inside another dispatch mode
    or CUDA graph capture: see `execution_context`.

    The limit is that of autograd itself, which saves tensors by reference: a write into an activation that PyTorch does
    not report (through `.data`, NumPy or a custom kernel), between two layers that read it, is not seen. PyTorch's own
    gradients of the first layer are wrong then.

    Under torch.compile the graph of a training step merges equal `quantize` calls instead.
    """

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], _Read] | None = None

    def quantized(self, owner: Tensor, x_MK: Tensor, recipe: Recipe, wants_kept: bool, past: Past | None) -> "_Forms":
        """`_quantized_input(x_MK, …)`, where x_MK is the matrix view of `owner`."""
        amax = None if past is None else past.amax(X, x_MK)
        if torch.compiler.is_compiling() or owner.grad_fn is None or torch.is_inference_mode_enabled():
            return _quantized_input(x_MK, recipe, wants_kept, amax)
        state = (
            owner._version, owner.grad_fn, owner.untyped_storage()._cdata, owner.storage_offset(), owner.shape,
            owner.stride(), owner.dtype, *execution_context(owner),
        )  # fmt: skip
        entry = self._entry
        if entry is None or entry[0]() is not owner or entry[1].state != state:
            read = _Read(state, StorageWeakRef(owner.untyped_storage()))
            entry = self._entry = weakref.ref(owner, lambda _: read.forget()), read
        forms = entry[1].forms
        delay = None if past is None else (past.history.passes, past.history.margin)
        both, only = (recipe.x, recipe.wgrad_x, delay), (recipe.x, None, delay)
        wanted = both if wants_kept else only if only in forms else both
        if wanted not in forms:
            wanted = both if wants_kept else only
            forms[wanted] = _quantized_input(x_MK, recipe, wants_kept, amax)
        return forms[wanted]


_LAST_INPUT = InputCastCache()
