"""W and G of the three products, and what forward saves for backward; the legend is that of `octavo.nn.linear`.

FP8 matrix units need both operands contiguous along the contraction, and X, W and G are each contracted over both of
their dimensions. So on a GPU (`wants_copies`) each is quantized into both memory orders from one read: X row-major for
forward and column-major for wgrad, G row-major for dgrad and column-major for wgrad, W row-major in forward and
column-major in backward.

Saved for backward: X quantized for wgrad, one byte per element, and W by reference with its scales. Backward
quantizes W again instead of saving it (`keep_weights` saves it, see `octavo.nn.weights`): the parameter exists anyway,
autograd's version counter raises if W is modified in between, and with given scales the cast reads W once. A frozen W
needs no wgrad, so X is not saved; a frozen X needs no dgrad. A weight that FSDP gathered in FP8 (`octavo.nn.gathered`)
is saved as it is. If X can be recomputed from what its producer saved (`octavo.activations.recompute`), that is saved.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.activations.recompute import Recomputable, Rematerializer
from octavo.kernels import quantize, quantize_pair, wants_copies
from octavo.nn.delayed import DelayedScaling
from octavo.nn.gathered import Fp8AllGatherOutput, for_dgrad, quantized_as
from octavo.nn.weights import cast_weight
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

Saved = tuple[Tensor | None, ...]


def forward_weight(w_NK: Tensor, recipe: Recipe, keeps_weight: bool, needs_dgrad: bool) -> tuple[ScaledTensor, Saved]:
    """Return W quantized for forward, and the three tensors that `dgrad_weight` needs: W, its FP8 copy, its scales."""
    w_t = None
    if isinstance(w_NK, Fp8AllGatherOutput):
        w = w_t = quantized_as(w_NK, recipe.w)
    elif keeps_weight:
        w, w_t = cast_weight(w_NK, recipe, needs_dgrad)
    else:
        w = quantize(w_NK, recipe.w)
    if not needs_dgrad:
        return w, (None, None, None)
    if w_t is None:
        return w, (w_NK, None, w.scale if recipe.dgrad_w == recipe.w else None)
    # W itself too, unless gathered, so that autograd raises if it changed.
    owner = None if isinstance(w_NK, Fp8AllGatherOutput) else w_NK
    return w, (owner, w_t.data if w_t.copy is None else w_t.copy, w_t.scale)


def dgrad_weight(saved: Sequence[Tensor | None], recipe: Recipe) -> ScaledTensor:
    """Return W quantized for dgrad, with the scales of the forward cast if the recipe uses the same spec."""
    w_NK, data, scale = saved
    if data is not None:
        w = ScaledTensor(data, scale, recipe.dgrad_w)
        return for_dgrad(w) if w_NK is None else w
    assert w_NK is not None
    return quantize(w_NK, recipe.dgrad_w, order="columns" if wants_copies(w_NK.device) else "rows", scale=scale)


def saved_input(
    x_MK: Tensor, x_t: Saved, recomputable: Recomputable | None, recipe: Recipe, out_dtype: torch.dtype
) -> Saved:
    """Return the tensors that wgrad needs of X: those it is recomputed from, X in high precision, or `x_t` in FP8."""
    if recomputable is not None:
        return recomputable.tensors
    return (x_MK.to(out_dtype), None) if recipe.wgrad_x is None else x_t


def wgrad_input(
    saved: Sequence[Tensor | None], rematerializer: Rematerializer | None, spec: QuantSpec, device: torch.device,
    columns: int,
) -> ScaledTensor:  # fmt: skip
    """Return X [M, columns] quantized for wgrad, from what `saved_input` returned."""
    if rematerializer is not None:
        return rematerializer.quantized(saved, spec, "columns" if wants_copies(device) else "rows", columns)
    data, scale = saved
    assert data is not None
    return ScaledTensor(data, scale, spec)


def quantized_gradient(
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
