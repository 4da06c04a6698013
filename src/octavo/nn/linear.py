"""`Linear`, an `nn.Linear` that multiplies in FP8, and its autograd function.

    forward  Y  = X Wᵀ     nt: contracts over K      legend: M tokens (all leading dims flattened),
    dgrad    ∂X = G W      nn: contracts over N              K in_features, N out_features,
    wgrad    ∂W = Gᵀ X     tn: contracts over M              G = ∂loss/∂Y [M,N]

Where an operand's scales vary along a sum, they fold into G (`octavo.numerics.recipe`): with X ≈ diag(a) Xq and
W ≈ diag(b) Wq, a `Quantizer` casts G diag(b) for dgrad and diag(a) G for wgrad. Saved for backward: X quantized for
wgrad, or what it is recomputed from, and W by reference with its scales. Backward quantizes W again: its storage exists
anyway, and autograd's version counter raises if W is modified in between.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.activations.saved_tensors import unhooked
from octavo.kernels import needs_both_orders, quantize, scaled_mm
from octavo.nn import operands
from octavo.nn.linear_like import LinearLike
from octavo.nn.operands import JUST_IN_TIME, Quantizer, Saved
from octavo.nn.prepared_linear import planned_linear
from octavo.nn.resident import Fp8Weight, for_dgrad, quantized_as
from octavo.nn.weights import cast_weight
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import COLUMN, ROW, QuantSpec
from octavo.runtime.torch_compat import explain_freed_nodes, is_nested_or_sparse, required_gradients
from octavo.tensor import Order, ScaledTensor


class Linear(LinearLike, nn.Linear):
    """A linear layer that computes in FP8. `octavo.convert` makes it from an `nn.Linear`; `octavo.revert` undoes that.

    Parameters, `state_dict`, hooks, flags and constructor are those of `nn.Linear`; `recipe` sets the precision.

    Examples:
        >>> octavo.nn.Linear(64, 128)(torch.randn(2, 64)).shape
        torch.Size([2, 128])
    """

    octavo_original = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Y = X Wᵀ + b in FP8 for input [..., in_features]; see `linear`."""
        keep_weights, recipe = self.keep_weights and self.octavo_keep_weights(), self.recipe
        own, found = self.__dict__, self.__dict__["_parameters"]
        plain = self.octavo_default_lookup and "weight" in found and "bias" in found
        if plain and not ("weight" in own or "bias" in own):
            weight, bias = found["weight"], found["bias"]  # the fast path of `nn.Module.__getattr__`
        else:
            (weight, bias), recipe = self.octavo_operands(input), self.octavo_parametrized_recipe()
        return linear(input, weight, bias, recipe, keep_weights, self.octavo_quantizer())

    def extra_repr(self) -> str:
        """Return the description of `nn.Linear`, with the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, keep_weights: bool = False,
    quantizer: Quantizer = JUST_IN_TIME,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.linear` in FP8, differentiable.

    Args:
        input: [..., K], float32, bfloat16 or float16; any leading sizes, zero included; or nested.
        weight: [N, K], of the input's dtype unless autocast is on; of any strides, or a DTensor.
        bias: [N] or None; added in float32.
        recipe: Precision of the operands of the three products.
        keep_weights: Save the FP8 copy of the weight for backward; see `octavo.nn.weights`.
        quantizer: Quantizes X and G; by default by their current amax, whatever the recipe.

    Returns:
        [..., N] in the input's dtype, or in autocast's if autocast is on.

    Raises:
        ValueError: If the last dimension is not K, or dtypes differ without autocast.
        TypeError: If the dtype cannot be quantized, or the input is sparse.

    Examples:
        >>> x, weight = torch.randn(8, 64), torch.randn(32, 64, requires_grad=True)
        >>> octavo.nn.linear(x, weight, None, octavo.RECIPES["rowwise"]).sum().backward()
        >>> weight.grad.shape
        torch.Size([32, 64])
    """
    planned = planned_linear(input, weight, bias, recipe, keep_weights, quantizer, _LinearFunction.backward)
    if planned is not None:
        return planned
    if is_nested_or_sparse(input):
        return operands.on_values(linear, input, weight, bias, recipe, keep_weights, quantizer)
    if (out_dtype := operands.output_dtype(input, weight)) is None:
        return F.linear(input, weight, bias)
    if hasattr(weight, "placements"):
        return operands.dtensor_linear(linear, input, weight, bias, recipe, keep_weights, quantizer)
    x_MK = input if input.ndim == 2 else input.reshape(math.prod(input.shape[:-1]), weight.shape[1])
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad and recipe.wgrad_x is not None
    channels = quantizer.channels(input, weight)
    scales = (None, None) if channels is None else (channels.factor, channels.inverse)
    x = quantizer.input(input, x_MK, recipe, needs_wgrad, channels)
    options = recipe, out_dtype, keep_weights, quantizer
    y_MN: Tensor = unhooked(_LinearFunction.apply, x_MK, weight, bias, *x, *scales, *options)
    if input.ndim == 2:
        return y_MN
    # Not a view, as for `nn.Linear`: FSDP2 warns about blocks that return a view.
    return torch.ops.aten._unsafe_view(y_MN, [*input.shape[:-1], weight.shape[0]])  # type: ignore[no-any-return]


@explain_freed_nodes
class _LinearFunction(torch.autograd.Function):
    """The three products. X arrives quantized: `x_*` for forward; `x_t_*` for wgrad, if that differs."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, x_data: Tensor, x_scale: Tensor | None,
        x_t_data: Tensor | None, x_t_scale: Tensor | None, recomputable: Any, factor: Tensor | None,
        inverse: Tensor | None, recipe: Recipe, out_dtype: torch.dtype, keep_weights: bool, quantizer: Quantizer,
    ) -> Tensor:  # fmt: skip
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        x = ScaledTensor(x_data, x_scale, recipe.x)
        w, w_saved = forward_weight(w_NK, factor, recipe, keep_weights, needs_dgrad, x_scale)
        y_MN = scaled_mm(x, w, "nt", out_dtype=out_dtype, bias=bias, fast_accum=True)
        x_saved: Saved = (None, None)
        if needs_wgrad and recomputable is not None:
            x_saved = recomputable.tensors
        elif needs_wgrad and recipe.wgrad_x is None:  # wgrad runs in high precision
            x_saved = x_MK.to(out_dtype), None
        elif needs_wgrad:
            x_saved = x_data if x_t_data is None else x_t_data, x_scale if x_t_scale is None else x_t_scale
        # A graph computes the channel scales, so it has to save them; in eager they are the layer's.
        ctx.channels = () if torch.compiler.is_compiling() else (factor, inverse)
        ctx.save_for_backward(*w_saved, *x_saved, *(() if ctx.channels else (factor, inverse)))
        ctx.recipe, ctx.quantizer, ctx.columns = recipe, quantizer, x_MK.shape[1]
        ctx.rematerializer = recomputable.rematerializer if needs_wgrad and recomputable is not None else None
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias is None else bias.dtype
        return y_MN

    @staticmethod
    @operands.first_derivative_only
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        tensors: tuple[Any, ...] = (*ctx.saved_tensors, *ctx.channels)
        *saved, factor, inverse = tensors
        needs_dgrad, needs_wgrad, needs_bias = required_gradients(ctx, 3)
        dx_MK = dw_NK = dbias_N = w = x = None
        if needs_wgrad and recipe.wgrad_x is not None and ctx.rematerializer is None:
            x = ScaledTensor(saved[3], saved[4], recipe.wgrad_x)
        elif needs_wgrad and recipe.wgrad_x is not None:
            order: Order = "columns" if needs_both_orders(g_MN.device) else "rows"
            x = ctx.rematerializer.quantized(saved[3:], recipe.wgrad_x, order, ctx.columns, inverse)
        if needs_dgrad:
            w = dgrad_weight(saved[:3], factor, recipe, None if x is None else x.scale)
        g_dgrad, g_wgrad = ctx.quantizer.gradient(g_MN, w, x, recipe)
        if w is not None and g_dgrad is not None:
            dx_MK = scaled_mm(g_dgrad, _in_epilogue(w, recipe.folds_w, inverse), "nn", out_dtype=x_dtype)
        if x is not None and g_wgrad is not None:
            dw_NK = scaled_mm(g_wgrad, _in_epilogue(x, recipe.folds_x, factor), "tn", out_dtype=w_dtype)
        elif needs_wgrad:
            dw_NK = (g_MN.t() @ saved[3]).to(w_dtype)
        if needs_bias:
            dbias_N = g_MN.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx_MK, dw_NK, dbias_N, *[None] * 11


def forward_weight(
    w_NK: Tensor, factor: Tensor | None, recipe: Recipe, keep_weights: bool, needs_dgrad: bool, x_scale: Tensor | None
) -> tuple[ScaledTensor, Saved]:
    """Return W diag(factor) for forward, and what `dgrad_weight` needs: W, its FP8 copy for dgrad, its scales."""
    w_t = None
    if isinstance(w_NK, Fp8Weight):
        w = w_t = quantized_as(w_NK, recipe.w)
    elif keep_weights:
        w, w_t = cast_weight(w_NK, recipe, needs_dgrad, factor)
    else:
        w = quantize(w_NK, recipe.w, factor, fuse_with=_fuse_with(x_scale, recipe.w))
    if not needs_dgrad:
        return w, (None, None, None)
    # Not the parameter itself: backward reads the values of forward after `weight.data = …`, as of nn.Linear.
    owner = None if isinstance(w_NK, Fp8Weight) else w_NK.detach()
    if w_t is None:
        return w, (owner, None, w.scale if recipe.dgrad_w == recipe.w else None)
    # W too, if there is one, so that autograd raises if it changed.
    return w, (owner, w_t.data if w_t.other_order is None else w_t.other_order, w_t.scale)


def dgrad_weight(
    saved: Sequence[Tensor | None], factor: Tensor | None, recipe: Recipe, x_scale: Tensor | None = None
) -> ScaledTensor:
    """Return W diag(factor) quantized for dgrad, with the scales of the forward cast if it has the same spec."""
    w_NK, data, scale = saved
    if data is not None:
        w = ScaledTensor(data, scale, recipe.dgrad_w)
        return for_dgrad(w) if w_NK is None else w
    assert w_NK is not None
    order: Order = "columns" if needs_both_orders(w_NK.device) else "rows"
    return quantize(
        w_NK, recipe.dgrad_w, factor, order=order, scale=scale, fuse_with=_fuse_with(x_scale, recipe.dgrad_w)
    )


def _fuse_with(x_scale: Tensor | None, spec: QuantSpec) -> Tensor | None:
    """Return what casts of weights that read the same X have in common, for `quantize`."""
    return x_scale if spec.granularity == ROW and torch.compiler.is_compiling() else None


def _in_epilogue(operand: ScaledTensor, folds: bool, channels: Tensor | None) -> ScaledTensor:
    """Return W or X for a backward product: with its scales, or with the channel scales if those are folded into G."""
    if not folds:
        return operand
    if channels is None:
        return operand.unscaled
    return ScaledTensor(operand.data, channels, _BY_COLUMN[operand.spec.format.name], operand.other_order)


_BY_COLUMN = {form.name: QuantSpec(format=form, granularity=COLUMN) for form in (E4M3, E5M2)}
