"""Linears that quantize in another way than Octavo's, beside which Octavo's is measured. Everything else is the same.

given   the maxima are known: delayed scaling, and the least any recipe can cost (its bound)

forward  Y  = X Wᵀ        X and W quantized in both memory orders, each from one read
dgrad    ∂X = G W         legend as in `octavo.nn.linear`
wgrad    ∂W = Gᵀ X
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.kernels import quantize, scaled_mm
from octavo.numerics import RECIPES, QuantSpec, Recipe
from octavo.numerics.spec import FULL
from octavo.tensor import ScaledTensor

Quantizer = Callable[..., ScaledTensor]
"""quantizer(name, x, spec, fold, order) → the FP8 form of the operand called `name`."""


class FirstMaxima:
    """Quantizes with the maxima that each operand had when it was first seen."""

    def __init__(self) -> None:
        self._amax: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor, spec: QuantSpec, fold: Tensor | None, order: Any) -> ScaledTensor:
        """`octavo.kernels.quantize` with these maxima."""
        if name not in self._amax:
            self._amax[name] = _amax(x.float() if fold is None else x.float() * fold, spec)
        return quantize(x, spec, fold, order=order, amax=self._amax[name])


def _amax(values: Tensor, spec: QuantSpec) -> Tensor:
    dims = [dim for dim, extent in enumerate(spec.granularity) if extent == FULL]
    return values.abs().amax(dims, keepdim=True)


class VariantLinear(nn.Module):
    """A linear without bias whose three products are those of a recipe and whose quantizer is another.

    Args:
        layer: Its weight is taken over.
        recipe: `tensorwise` or `rowwise`.
        quantizer: A `FirstMaxima()`.
    """

    def __init__(self, layer: nn.Linear, recipe: str, quantizer: Quantizer) -> None:
        super().__init__()
        self.weight = layer.weight
        self.recipe = RECIPES[recipe]
        self.quantizer = quantizer

    def forward(self, x: Tensor) -> Tensor:
        """Y = X Wᵀ for x [..., K]."""
        y: Tensor = _Products.apply(x.reshape(-1, x.shape[-1]), self.weight, self.recipe, self.quantizer)
        return y.reshape(*x.shape[:-1], self.weight.shape[0])


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, recipe: Recipe, quantizer: Quantizer) -> Tensor:
        x, w = quantizer("x", x_MK, recipe.x, None, "both"), quantizer("w", w_NK, recipe.w, None, "both")
        ctx.recipe, ctx.quantizer, ctx.dtypes = recipe, quantizer, (x_MK.dtype, w_NK.dtype)
        ctx.save_for_backward(x.other_order, x.scale, w.other_order, w.scale)
        return scaled_mm(x, w, "nt", out_dtype=x_MK.dtype, fast_accum=True)

    @staticmethod
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        recipe, quantizer = ctx.recipe, ctx.quantizer
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        x, w = ScaledTensor(x_data, x_scale, recipe.wgrad_x), ScaledTensor(w_data, w_scale, recipe.dgrad_w)
        if recipe.shared_grad_cast:
            g = g_t = quantizer("g", g_MN, recipe.dgrad_g, None, "both")
        else:
            g = quantizer("g", g_MN, recipe.dgrad_g, w_scale.t() if recipe.folds_w else None, "rows")
            g_t = quantizer("g_t", g_MN, recipe.wgrad_g, x_scale if recipe.folds_x else None, "columns")
        dx_MK = scaled_mm(g, w.unscaled if recipe.folds_w else w, "nn", out_dtype=ctx.dtypes[0])
        dw_NK = scaled_mm(g_t, x.unscaled if recipe.folds_x else x, "tn", out_dtype=ctx.dtypes[1])
        return dx_MK, dw_NK, None, None


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """The module with each `nn.Linear` in it replaced, the module itself included."""
    if isinstance(module, nn.Linear):
        return make(module)
    for name, child in list(module.named_children()):
        setattr(module, name, replace_linears(child, make))
    return module
