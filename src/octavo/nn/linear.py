"""`Linear`, an `nn.Linear` that multiplies in FP8, and its autograd function.

    forward  Y  = X Wᵀ     nt: contracts over K      legend: M tokens (all leading dims flattened),
    dgrad    ∂X = G W      nn: contracts over N              K in_features, N out_features,
    wgrad    ∂W = Gᵀ X     tn: contracts over M              G = ∂loss/∂Y [M,N]

The recipe gives one spec per operand (see `octavo.numerics.recipe`, also for how row scales fold into G). All recipes
share one code path: quantize, then multiply. `octavo.nn.input_casts` quantizes X, once for layers that read the same
tensor; `octavo.nn.operands` quantizes W and G, and decides what is saved for backward. A backward that needs only some
gradients, as in zero-bubble pipelines, computes only those (`octavo.nn.engine`).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.activations.recompute import Recomputable
from octavo.activations.saved_tensors import recomputable_of, unhooked
from octavo.kernels import scaled_mm
from octavo.nn.delayed import DelayedScaling, delayed_scaling_of
from octavo.nn.engine import required_gradients
from octavo.nn.input_casts import INPUT_CASTS
from octavo.nn.operands import dgrad_weight, forward_weight, quantized_gradient, saved_input, wgrad_input
from octavo.nn.weights import keeps_weight
from octavo.numerics.recipe import DEFAULT, Recipe
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
    scaling: DelayedScaling | None = None,
) -> Tensor:  # fmt: skip
    """`torch.nn.functional.linear` in FP8, differentiable.

    Args:
        input: [..., K], float32, bfloat16 or float16; any leading sizes, zero included.
        weight: [N, K], of the input's dtype unless autocast is on. Any strides.
        bias: [N] or None; added in float32.
        recipe: Precision of the operands of the three products.
        keeps_weight: Save the FP8 copy of the weight for backward, and share it inside `octavo.nn.accumulating`; see
            `octavo.nn.weights`.
        scaling: Source of the scales of X and G. None: their current amax, whatever the recipe.

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
        x, x_t = INPUT_CASTS.quantized(input, x_MK, recipe, needs_wgrad and recomputable is None, scaling)
    # Tensors that both casts share are passed once: torch.compile takes no tensor twice.
    x_t_data = None if x_t is None or x_t.data is x.data else x_t.data
    x_t_scale = None if x_t is None or x_t.scale is x.scale else x_t.scale
    y_MN = unhooked(
        _LinearFunction.apply, x_MK, weight, bias, x.data, x.scale, x_t_data, x_t_scale, recomputable, recipe,
        out_dtype, keeps_weight, scaling,
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
        w, w_saved = forward_weight(w_NK, recipe, keeps_weight, needs_dgrad)
        x = ScaledTensor(x_data, x_scale, recipe.x)
        y_MN = scaled_mm(x, w, "nt", out_dtype=out_dtype, bias=bias, fast_accum=True)
        x_saved: tuple[Tensor | None, ...] = None, None
        if needs_wgrad:
            x_t = x_data if x_t_data is None else x_t_data, x_scale if x_t_scale is None else x_t_scale
            x_saved = saved_input(x_MK, x_t, recomputable, recipe, out_dtype)
        ctx.save_for_backward(*w_saved, *x_saved)
        ctx.recipe, ctx.scaling = recipe, scaling
        ctx.rematerializer = recomputable.rematerializer if needs_wgrad and recomputable is not None else None
        ctx.columns = x_MK.shape[1]
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias is None else bias.dtype
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        saved = ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias = required_gradients(ctx, 3)
        dx_MK = dw_NK = dbias_N = w = x = None
        if needs_dgrad:
            w = dgrad_weight(saved[:3], recipe)
        if needs_wgrad and recipe.wgrad_x is not None:
            x = wgrad_input(saved[3:], ctx.rematerializer, recipe.wgrad_x, g_MN.device, ctx.columns)
        g_dgrad, g_wgrad = quantized_gradient(g_MN, w, x, recipe, ctx.scaling)
        if w is not None and g_dgrad is not None:
            dx_MK = scaled_mm(g_dgrad, w.unscaled if recipe.folds_w else w, "nn", out_dtype=x_dtype)
        if x is not None and g_wgrad is not None:
            dw_NK = scaled_mm(g_wgrad, x.unscaled if recipe.folds_x else x, "tn", out_dtype=w_dtype)
        elif needs_wgrad:
            dw_NK = (g_MN.t() @ saved[3]).to(w_dtype)
        if needs_bias:
            dbias_N = g_MN.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx_MK, dw_NK, dbias_N, *[None] * 9
