"""A linear layer in FP8 by the definitions in `octavo.numerics`, in float64 and without Octavo's kernels: scales
max(amax / max, 2⁻¹²⁶) in float32, codes round(x · (1/s)) with the product in float32, exact sums of products.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.numerics import Recipe
from octavo.numerics.spec import QuantSpec


@dataclass(frozen=True)
class Quantized:
    """FP8 values [R,C] and the scales of each element, both float64."""

    q: Tensor
    scale: Tensor

    @property
    def value(self) -> Tensor:
        return self.q * self.scale


def quantized(x: Tensor, spec: QuantSpec, fold: Tensor | None = None) -> Quantized:
    """Quantize a matrix; `fold` is multiplied in first, in float32."""
    x = x.float() if fold is None else x.float() * fold.float()
    rows, columns = x.shape
    if not x.numel():
        return Quantized(x.double(), torch.ones_like(x, dtype=torch.float64))
    height, length = spec.granularity.block((rows, columns))
    padded = F.pad(x, (0, -columns % length, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, length)).unflatten(0, (-1, height))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scale = (amax.double() / spec.format.max).float().clamp_min(2.0**-126)
    if spec.scale_rule != "amax":
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
    inverse = (1.0 / scale.double()).float()
    codes = (blocks * inverse).clamp(-spec.format.max, spec.format.max).to(spec.format.dtype).double()
    finite = amax.isfinite()
    codes = torch.where(finite, codes, torch.nan)
    scale = torch.where(finite, scale.double(), 1.0).expand_as(codes)
    q, s = (t.flatten(2, 3).flatten(0, 1)[:rows, :columns] for t in (codes, scale))
    return Quantized(q, s)


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.recipe, ctx.bias = recipe, bias is not None
        y = quantized(x_MK, recipe.x).value @ quantized(w_NK, recipe.w).value.t()
        return (y if bias is None else y + bias.double()).to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, g_MN: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx, dw = gradients(x, w, g_MN, ctx.recipe)
        return dx.to(x.dtype), dw.to(w.dtype), g_MN.double().sum(0).to(w.dtype) if ctx.bias else None, None


def gradients(x_MK: Tensor, w_NK: Tensor, g_MN: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    w = quantized(w_NK, recipe.dgrad_w)
    if recipe.folds_w:
        dx = quantized(g_MN, recipe.dgrad_g, w.scale[:, :1].t()).value @ w.q
    else:
        dx = quantized(g_MN, recipe.dgrad_g).value @ w.value
    if recipe.wgrad_x is None or recipe.wgrad_g is None:
        return dx, g_MN.double().t() @ x_MK.double()
    x = quantized(x_MK, recipe.wgrad_x)
    if recipe.folds_x:
        dw = quantized(g_MN, recipe.wgrad_g, x.scale[:, :1]).value.t() @ x.q
    else:
        dw = quantized(g_MN, recipe.wgrad_g).value.t() @ x.value
    return dx, dw


def emulate(model: nn.Module, names: set[str], recipe: Recipe) -> None:
    for name, fc in model.named_modules():
        if name in names:
            fc.forward = partial(_forward, fc, recipe)  # type: ignore[method-assign]


def _forward(fc: Any, recipe: Recipe, x: Tensor) -> Tensor:
    y: Tensor = _Emulated.apply(x.flatten(0, -2), fc.weight, fc.bias, recipe)
    return y.unflatten(0, x.shape[:-1])
