"""The backward of a planned linear: see `octavo.nn.linear_plan`."""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.direct import ZEROS
from octavo.kernels.gemm import ProductPlan
from octavo.kernels.quantize import plan_pair, plan_quantize
from octavo.nn import linear_source
from octavo.nn.operands import Saved
from octavo.numerics.equalization import ChannelScales
from octavo.numerics.recipe import Recipe

Gradients = tuple[Tensor | None, ...]
PREPARED = 2
"""Passes after which all casts and products of a plan are prepared."""


class BackwardPlan:
    """The operands and products of a backward, for G and saved tensors of one signature; `complete` as above."""

    __slots__ = (
        "bias_dtype", "complete", "contiguous", "dbias", "dgrad", "dw", "dx", "equalized", "folds_w", "folds_x",
        "fp8_wgrad", "g", "g_NM", "passes", "run", "w", "w_dtype", "wgrad",
    )  # fmt: skip

    def __init__(
        self, plan: Any, g_MN: Tensor, saved: Saved, channels: ChannelScales | None, dgrad: bool, wgrad: bool,
        dbias: bool,
    ) -> None:  # fmt: skip
        recipe, (w_NK, w, w_scale, _, _) = plan.recipe, saved
        factor = None if channels is None else channels.factor
        x_dtype, self.w_dtype, self.bias_dtype = plan.dtypes
        self.dgrad, self.wgrad, self.dbias = dgrad, wgrad, dbias
        self.contiguous = all(scale is None or scale.is_contiguous() for scale in saved[2::2])
        self.fp8_wgrad = wgrad and plan.saves_x_cast
        self.folds_w, self.folds_x = dgrad and recipe.folds_w, self.fp8_wgrad and recipe.folds_x
        self.w = self.g = None
        self.equalized, self.passes, self.run = channels is not None, 0, self._run
        self.complete = True
        if dgrad and w is None:
            assert w_NK is not None
            self.w = plan_quantize(w_NK, recipe.dgrad_w, factor, order="columns", scale=w_scale)
            self.complete = self.w is not None
        if dgrad or self.fp8_wgrad:
            fold_w = g_MN.new_empty((1, plan.n), dtype=torch.float32) if self.folds_w else None
            fold_x = g_MN.new_empty((plan.m, 1), dtype=torch.float32) if self.folds_x else None
            self.g = self._plan_gradient(g_MN, fold_w, fold_x, recipe)
            self.complete &= self.g is not None
        self.dx: Any = ProductPlan(recipe.dgrad_g, recipe.dgrad_w_epilogue or recipe.dgrad_w, "nn", x_dtype)
        self.dw: Any = None
        self.g_NM: Any = None
        if self.fp8_wgrad and recipe.wgrad_g is not None and recipe.wgrad_x is not None:
            self.dw = ProductPlan(recipe.wgrad_g, recipe.wgrad_x_epilogue or recipe.wgrad_x, "tn", self.w_dtype)

    def _plan_gradient(self, g_MN: Tensor, fold_w: Tensor | None, fold_x: Tensor | None, recipe: Recipe) -> Any:
        if not self.fp8_wgrad or recipe.wgrad_g is None:
            return plan_quantize(g_MN, recipe.dgrad_g, fold_w)
        if not self.dgrad:
            return plan_quantize(g_MN, recipe.wgrad_g, fold_x, order="columns")
        if recipe.shared_grad_cast:
            return plan_quantize(g_MN, recipe.dgrad_g, order="both")
        return plan_pair(g_MN, recipe.dgrad_g, fold_w, recipe.wgrad_g, fold_x)

    def _run(self, g_MN: Tensor, saved: Saved, channels: ChannelScales | None) -> Gradients:
        """Return ∂X, ∂W and ∂b, None for those that are not needed, and for the input that is no tensor."""
        w_NK, w, w_scale, x, x_scale = saved
        factor, inverse = (None, None) if channels is None else (channels.factor, channels.inverse)
        dx_MK: Any = None
        dw_NK: Any = None
        dbias_N = fold_w = fold_x = None
        if self.w is not None:
            _, w, w_scale, _ = self.w.run(w_NK, factor, None, w_scale, ZEROS.cut)
        if self.folds_w and w_scale is not None:
            fold_w, w_scale = w_scale if w_scale.dtype == torch.float32 else w_scale.float(), inverse
        if self.folds_x and x_scale is not None:
            fold_x, x_scale = x_scale if x_scale.dtype == torch.float32 else x_scale.float(), factor
        if self.g is not None:
            as_t = self.g_NM is not None
            g, g_t, g_scale, g_t_scale = (self.g_NM if as_t else self.g).run(
                g_MN, fold_w if self.dgrad else fold_x, fold_x if self.dgrad else None, None, ZEROS.cut
            )
            if self.dgrad:
                call = self.dx.call
                dx_MK = None if call is None else call.run(g, w, g_scale, w_scale, None, self.w is not None)
                if dx_MK is None:
                    dx_MK = self.dx(g, w, g_scale, w_scale)
            if self.dw is not None:
                dw_NK = self.dw.call.run(g_t, x, g_t_scale, x_scale, None) if as_t else None
                if dw_NK is None:
                    dw_NK = self.dw(g_t.t() if as_t else g_t, x, g_t_scale.t() if as_t else g_t_scale, x_scale)
                    if self.dw.call is not None:
                        self.g_NM = self.g.transposing(rows=False, columns=True)
        if self.wgrad and not self.fp8_wgrad:
            assert x is not None
            dw_NK = (g_MN.t() @ x).to(self.w_dtype)
        if self.dbias:
            dbias_N = g_MN.sum(0, dtype=torch.float32).to(self.bias_dtype)
        self.passes += 1
        if self.passes == PREPARED:
            self.run = linear_source.backward_function(self)
        return dx_MK, dw_NK, dbias_N, None
