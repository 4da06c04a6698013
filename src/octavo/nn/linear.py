"""Linear: an `nn.Linear` in everything but its product, and the one autograd function behind it.

    forward  Y  = X Wᵀ     nt: contracts over K      legend: M tokens (all leading dims flattened),
    dgrad    ∂X = G W      nn: contracts over N              K in_features, N out_features,
    wgrad    ∂W = Gᵀ X     tn: contracts over M              G = ∂loss/∂Y [M,N]

The recipe gives one spec per operand (see `octavo.numerics.recipe`, also for how row scales fold into G). There is
one path for all recipes: quantize, multiply, done.

Kept for backward: the FP8 form of X that wgrad reads, one byte per element, and W by reference. W is quantized again
in backward rather than kept: the parameter exists anyway, autograd's version counter refuses a W modified in between,
and a pass over W is small beside the product. A frozen W needs no wgrad, so X is not kept at all; a frozen X needs no
dgrad.

Layers that read the same tensor (q, k and v; gate and up) share one quantized copy: see `_LastInput`.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.kernels import quantize, scaled_mm
from octavo.numerics.recipe import DEFAULT, Recipe
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Linear(nn.Linear):
    """A linear layer that computes in FP8. Made from an `nn.Linear` by `octavo.convert`, turned back by
    `octavo.revert`.

    Parameters, `state_dict`, hooks and flags are those of `nn.Linear`; `recipe` says how it computes. One can also be
    made directly, with the arguments of `nn.Linear`.
    """

    recipe: Recipe = DEFAULT

    def forward(self, input: Tensor) -> Tensor:
        """Y = X Wᵀ + b in FP8 for input [..., in_features]; see `linear`."""
        return linear(input, self.weight, self.bias, self.recipe)

    def extra_repr(self) -> str:
        """As `nn.Linear`, with the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """`torch.nn.functional.linear` in FP8, differentiable.

    Args:
        input: [..., K], float32, bfloat16 or float16; any leading sizes, zero included.
        weight: [N, K], of the input's dtype unless autocast is on. Any strides.
        bias: [N] or None; added in float32.
        recipe: Precision of the operands of the three products.

    Returns:
        [..., N] in the input's dtype, or autocast's where that is on.

    Raises:
        ValueError: Where the last dimension is not K, or dtypes differ without autocast.
        TypeError: For a dtype that has no FP8 form.
    """
    device_type = input.device.type
    if not _SWITCH.enabled:
        return F.linear(input, weight, bias)
    if input.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"linear takes float32, bfloat16 or float16 input; got {input.dtype}")
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: the input's last dimension is in_features = {weight.shape[1]}; got shape {tuple(input.shape)}"
        )
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        out_dtype = torch.get_autocast_dtype(device_type)
    elif input.dtype != weight.dtype:
        raise ValueError(
            f"linear: input is {input.dtype} but weight is {weight.dtype}; cast one of them, or run under "
            f"torch.autocast({device_type!r}, dtype=torch.bfloat16)"
        )
    else:
        out_dtype = input.dtype
    x_MK = input.reshape(math.prod(input.shape[:-1]), weight.shape[1])
    wants_other_form = torch.is_grad_enabled() and weight.requires_grad and recipe.wgrad_x not in (None, recipe.x)
    with torch.no_grad():
        x = _LAST_INPUT.quantized(input, x_MK, recipe.x)
        kept_data = kept_scale = None
        if wants_other_form and recipe.wgrad_x is not None:
            kept = _LAST_INPUT.quantized(input, x_MK, recipe.wgrad_x)
            kept_data, kept_scale = kept.data, kept.scale
    y_MN = _LinearFunction.apply(x_MK, weight, bias, x.data, x.scale, kept_data, kept_scale, recipe, out_dtype)
    return y_MN.reshape(*input.shape[:-1], weight.shape[0])


class _LinearFunction(torch.autograd.Function):
    """The three products. X arrives quantized: `x_*` for forward; `kept_*` for wgrad where that reads another form."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, x_data: Tensor, x_scale: Tensor,
        kept_data: Tensor | None, kept_scale: Tensor | None, recipe: Recipe, out_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        w = quantize(w_NK, recipe.w)
        x = ScaledTensor(x_data, x_scale, recipe.x)
        y_MN = scaled_mm(x, w, "nt", out_dtype=out_dtype, bias=bias, fast_accum=True)
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        if not needs_wgrad:
            kept_data = kept_scale = None
        elif recipe.wgrad_x is None:
            kept_data = x_MK.to(out_dtype)
        elif recipe.wgrad_x == recipe.x:
            kept_data, kept_scale = x_data, x_scale
        ctx.save_for_backward(kept_data, kept_scale, w_NK if needs_dgrad else None)
        ctx.recipe = recipe
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias is None else bias.dtype
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        kept_data, kept_scale, w_NK = ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
        dx_MK = dw_NK = dbias_N = g = None
        if needs_dgrad:
            w = quantize(w_NK, recipe.dgrad_w, anew=True)
            g = quantize(g_MN, recipe.dgrad_g, fold=_fold(w.t()) if recipe.folds_w else None)
            dx_MK = scaled_mm(g, w.unscaled if recipe.folds_w else w, "nn", out_dtype=x_dtype)
        if needs_wgrad and recipe.wgrad_x is not None and recipe.wgrad_g is not None:
            x = ScaledTensor(kept_data, kept_scale, recipe.wgrad_x)
            if g is None or not recipe.shares_g:
                g = quantize(g_MN, recipe.wgrad_g, fold=_fold(x) if recipe.folds_x else None)
            dw_NK = scaled_mm(g, x.unscaled if recipe.folds_x else x, "tn", out_dtype=w_dtype)
        elif needs_wgrad:
            dw_NK = (g_MN.t() @ kept_data).to(w_dtype)
        if needs_bias:
            dbias_N = g_MN.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx_MK, dw_NK, dbias_N, None, None, None, None, None, None


def _fold(operand: ScaledTensor) -> Tensor | None:
    """Row scales [R,1] of an operand (or [1,R] of a transposed one), as a factor of G."""
    return None if operand.scale is None else operand.scale.float()


class _LastInput:
    """The quantized forms of the tensor that a linear read last, so that its siblings need not quantize it again.

    q, k and v are called one after the other with the same tensor object; so are gate and up. The copy is found by
    identity, which needs no knowledge of any model, and dropped when the tensor dies or another input comes.

    Only tensors that autograd made (those with a `grad_fn`) are remembered. Others may be buffers that somebody writes
    into without autograd noticing (a receive buffer, a CUDA graph's input, an array shared with NumPy). A copy made on
    another stream, inside another dispatch mode or CUDA graph capture is not used either: see `_surroundings`. What is
    not seen is a write into an activation behind autograd's back, through `.data`, between two layers that read it.

    Under torch.compile the graph of a training step merges equal `quantize` calls instead.
    """

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], tuple[Any, ...], dict[QuantSpec, ScaledTensor]] | None = None

    def quantized(self, owner: Tensor, x_MK: Tensor, spec: QuantSpec) -> ScaledTensor:
        """`quantize(x_MK, spec)`, where x_MK is the matrix view of `owner`."""
        if torch.compiler.is_compiling() or owner.grad_fn is None or torch.is_inference_mode_enabled():
            return quantize(x_MK, spec)
        state = (owner._version, *_surroundings(owner))
        entry = self._entry
        if entry is None or entry[0]() is not owner or entry[1] != state:
            entry = (weakref.ref(owner, self._forget), state, {})
            self._entry = entry
        forms = entry[2]
        if spec not in forms:
            forms[spec] = quantize(x_MK, spec)
        return forms[spec]

    def _forget(self, dead: weakref.ref[Tensor]) -> None:
        if self._entry is not None and self._entry[0] is dead:
            self._entry = None


def _surroundings(x: Tensor) -> tuple[Any, ...]:
    """What decides where the work on x goes: the dispatch mode that records it, the stream, the capture."""
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    if not x.is_cuda:
        return (mode,)
    return mode, torch.cuda.current_stream(x.device).cuda_stream, torch.cuda.is_current_stream_capturing()


class _Switch:
    """Whether converted layers compute in FP8."""

    enabled = True


_LAST_INPUT = _LastInput()
_SWITCH = _Switch()


@contextmanager
def disabled() -> Iterator[None]:
    """Inside the block, converted layers compute in the dtype of their weights: for high-precision evaluation.

    Holds for the whole process, all threads. Do the backward of what was computed inside before leaving it, where
    activation checkpointing would compute it again.
    """
    before = _SWITCH.enabled
    _SWITCH.enabled = False
    try:
        yield
    finally:
        _SWITCH.enabled = before
