"""A linear's launches and products, prepared: the results of `octavo.nn.linear` in less host time (docs/host_time.md).

The ordinary path of `octavo.nn.linear` calls seven ops, and each inspects its operands. What each finds depends only on
options and on the dtypes, shapes, strides and devices of X, W, the bias and G. So the first forward leaves a
`LinearPlan`, which holds the plan of each op (`octavo.kernels.direct`), and later ones run it: the same kernels on the
same operands, hence the same bits, with the same tensors saved for backward.

The ordinary path runs instead

- where something could see or change an op: `octavo.kernels.direct.signature` says where;
- if X is recomputed in backward or has an amax history, if FSDP gathers W in FP8, if `accumulating` shares its cast;
- if a backend makes no plans, as on CPUs, or if the registry's choices changed since the plan was made;
- in backward, if saved tensors have no plan as they are now: hooks and `weight.data = …` change strides and dtypes.

Rejected: plans per op alone, with which a linear makes twice the Python calls.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from octavo.activations.saved_tensors import recomputable_of, unhooked
from octavo.kernels.direct import ZEROS, Plans, signature
from octavo.kernels.gemm import ProductPlan
from octavo.kernels.quantize import plan_pair, plan_quantize
from octavo.kernels.registry import CHOICES
from octavo.nn.input_casts import INPUT_CASTS, cast_key
from octavo.nn.operands import JUST_IN_TIME, Quantizer, output_dtype
from octavo.nn.weights import shares_cast
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import QuantSpec
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import apply_of, autocast_dtype, explain_freed_nodes, required_gradients

Gradients = tuple[Tensor | None, ...]
Saved = tuple[Tensor | None, ...]
Backward = Callable[[Any, Tensor], Gradients]


def planned_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, keep_weights: bool, quantizer: Quantizer,
    ordinary: Backward,
) -> Tensor | None:  # fmt: skip
    """Return `octavo.nn.linear` of these arguments from a plan; None if the ordinary path must run.

    Args:
        input: As the following four, an argument of `octavo.nn.linear`.
        weight: See there.
        bias: See there.
        recipe: See there.
        keep_weights: See there.
        quantizer: See there.
        ordinary: The backward of the ordinary path, for a context and G [M,N].
    """
    if quantizer is not JUST_IN_TIME or torch.compiler.is_compiling() or not SWITCH.enabled:
        return None
    tensors = signature(input, weight, bias, records=True)
    if tensors is None or (keep_weights and shares_cast(weight)):
        return None
    dgrad = wgrad = False
    if torch.is_grad_enabled():
        dgrad, wgrad = input.requires_grad, weight.requires_grad
        if wgrad and recomputable_of(input) is not None:
            return None
    key = (tensors, id(recipe), keep_weights, dgrad, wgrad, autocast_dtype(input.device.type))
    plan = _PLANS.get(key)
    if plan is None or plan.choices != CHOICES.changes:
        plan = _PLANS.add(key, LinearPlan(input, weight, bias, recipe, keep_weights, dgrad, wgrad))
    if not plan.complete:
        return None
    y: Tensor = unhooked(_APPLY, input, weight, bias, plan, ordinary)
    return y


class LinearPlan:
    """The operands and products of one linear, for X, W and bias of one signature; `complete` if all ops have plans.

    Holds no tensor but unit scales. `choices` counts the changes to the registry's choices when it was made.
    """

    def __init__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, keep_weights: bool, dgrad: bool,
        wgrad: bool,
    ) -> None:  # fmt: skip
        self.recipe, self.choices, self.complete = recipe, CHOICES.changes, False
        if input.ndim == 0 or weight.ndim != 2:
            return
        out_dtype = output_dtype(input, weight)
        assert out_dtype is not None
        n, k = weight.shape
        self.m, self.n, self.k = math.prod(input.shape[:-1]), n, k
        if not self.m * n * k or weight.device != input.device or (bias is not None and bias.shape != (n,)):
            return
        self.out_dtype, self.out_shape = out_dtype, [*input.shape[:-1], n]
        self.dtypes = input.dtype, weight.dtype, None if bias is None else bias.dtype
        self.is_matrix, self.in_shape = input.ndim == 2, input.shape
        wgrad_x = recipe.wgrad_x if wgrad else None
        wgrad_w = recipe.dgrad_w if dgrad and keep_weights else None
        with torch.no_grad():
            self.x = _plan_cast(input.reshape(self.m, k), recipe.x, wgrad_x)
            self.w = _plan_cast(weight, recipe.w, wgrad_w)
        self.cast_key, self.one_cast_key = cast_key(recipe, True, None), cast_key(recipe, False, None)
        self.saves_x, self.saves_w = wgrad, dgrad
        self.saves_x_cast, self.saves_w_cast = wgrad_x is not None, wgrad_w is not None
        self.one_w_scale = recipe.dgrad_w == recipe.w
        self.y = ProductPlan(recipe.x, recipe.w, "nt", out_dtype, fast_accum=True)
        self.backwards: Plans[BackwardPlan] = Plans()
        self.complete = self.x is not None and self.w is not None

    def forward(self, ctx: Any, input: Tensor, w_NK: Tensor, bias: Tensor | None) -> Tensor:
        """Return Y [..., N], and save for backward what the ordinary path saves."""
        casts = INPUT_CASTS.casts_of(input)
        cast = None if casts is None else casts.get(self.cast_key) or (
            None if self.saves_x_cast else casts.get(self.one_cast_key)
        )  # fmt: skip
        x_MK = input if self.is_matrix else input.reshape(self.m, self.k)
        if cast is None:
            cast = self.x.run(x_MK, None, None, None, ZEROS)
            if casts is not None:
                casts[self.cast_key if self.saves_x_cast else self.one_cast_key] = cast
        x, x_t, x_scale, x_t_scale = cast
        w, w_t, w_scale, w_t_scale = self.w.run(w_NK, None, None, None, ZEROS)
        y_MN = self.y(x, w, x_scale, w_scale, bias)
        saved: list[Tensor | None] = [None] * 5
        if self.saves_w_cast:
            saved[:3] = w_NK, w_t, w_t_scale
        elif self.saves_w:
            saved[0], saved[2] = w_NK, w_scale if self.one_w_scale else None
        if self.saves_x_cast:
            saved[3:] = x_t, x_t_scale
        elif self.saves_x:
            saved[3] = (x_MK if self.is_matrix else x_MK.detach()).to(self.out_dtype)
        ctx.save_for_backward(*saved)
        return y_MN if self.is_matrix else torch.ops.aten._unsafe_view(y_MN, self.out_shape)

    def backward(self, ctx: Any, g: Tensor) -> Gradients:
        """Return ∂X, ∂W and ∂b for G = ∂loss/∂Y [..., N]; None for those that nothing needs."""
        g_MN = g if self.is_matrix else g.reshape(self.m, self.n)
        saved, needs = ctx.saved_tensors, required_gradients(ctx, 3)
        tensors = signature(g_MN, *saved)
        if tensors is None or self.choices != CHOICES.changes:
            return self._ordinary(ctx, g_MN, saved, needs)
        key = needs, tensors
        plan = self.backwards.get(key)
        if plan is None:
            plan = self.backwards.add(key, BackwardPlan(self, g_MN, saved, *needs))
        if not plan.complete:
            return self._ordinary(ctx, g_MN, saved, needs)
        gradients = plan.run(g_MN, saved)
        return gradients if self.is_matrix else self._shaped(gradients)

    def _ordinary(self, ctx: Any, g_MN: Tensor, saved: Saved, needs: tuple[bool, ...]) -> Gradients:
        # A context of its own: hooks, such as those of checkpointing, may return a saved tensor only once.
        context = SimpleNamespace(
            saved_tensors=saved, needs_input_grad=needs, next_functions=(), recipe=self.recipe, quantizer=JUST_IN_TIME,
            rematerializer=None, columns=self.k, dtypes=self.dtypes,
        )  # fmt: skip
        gradients = (*ctx.ordinary(context, g_MN)[:3], None, None)
        return gradients if self.is_matrix else self._shaped(gradients)

    def _shaped(self, gradients: Gradients) -> Gradients:
        dx_MK = gradients[0]
        return None if dx_MK is None else dx_MK.view(self.in_shape), *gradients[1:]


class BackwardPlan:
    """The operands and products of a backward, for G and saved tensors of one signature; `complete` as above.

    Args:
        plan: The plan of the forward.
        g_MN: G.
        saved: What forward saved: W, its cast for dgrad, the scales of that cast; X for wgrad, its scales.
        dgrad: Whether ∂X is needed.
        wgrad: Whether ∂W is needed.
        dbias: Whether ∂b is needed.
    """

    def __init__(
        self, plan: LinearPlan, g_MN: Tensor, saved: Saved, dgrad: bool, wgrad: bool, dbias: bool
    ) -> None:  # fmt: skip
        recipe, (w_NK, w, w_scale, *_) = plan.recipe, saved
        x_dtype, self.w_dtype, self.bias_dtype = plan.dtypes
        self.dgrad, self.wgrad, self.dbias = dgrad, wgrad, dbias
        self.fp8_wgrad = wgrad and plan.saves_x_cast
        self.folds_w, self.folds_x = dgrad and recipe.folds_w, self.fp8_wgrad and recipe.folds_x
        self.w = self.g = None
        self.complete = True
        if dgrad and w is None:
            assert w_NK is not None
            self.w = plan_quantize(w_NK, recipe.dgrad_w, order="columns", scale=w_scale)
            self.complete = self.w is not None
        if dgrad or self.fp8_wgrad:
            fold_w = g_MN.new_empty((1, plan.n), dtype=torch.float32) if self.folds_w else None
            fold_x = g_MN.new_empty((plan.m, 1), dtype=torch.float32) if self.folds_x else None
            self.g = self._plan_gradient(g_MN, fold_w, fold_x, recipe)
            self.complete &= self.g is not None
        self.dx = ProductPlan(recipe.dgrad_g, recipe.dgrad_w, "nn", x_dtype)
        if recipe.wgrad_g is not None and recipe.wgrad_x is not None:
            self.dw = ProductPlan(recipe.wgrad_g, recipe.wgrad_x, "tn", self.w_dtype)

    def _plan_gradient(self, g_MN: Tensor, fold_w: Tensor | None, fold_x: Tensor | None, recipe: Recipe) -> Any:
        if not self.fp8_wgrad or recipe.wgrad_g is None:
            return plan_quantize(g_MN, recipe.dgrad_g, fold_w)
        if not self.dgrad:
            return plan_quantize(g_MN, recipe.wgrad_g, fold_x, order="columns")
        if recipe.shared_grad_cast:
            return plan_quantize(g_MN, recipe.dgrad_g, order="both")
        return plan_pair(g_MN, recipe.dgrad_g, fold_w, recipe.wgrad_g, fold_x)

    def run(self, g_MN: Tensor, saved: Saved) -> Gradients:
        """Return ∂X, ∂W and ∂b, None for those that are not needed, and None for two inputs that are no tensors."""
        w_NK, w, w_scale, x, x_scale = saved
        dx_MK = dw_NK = dbias_N = fold_w = fold_x = None
        if self.w is not None:
            _, w, w_scale, _ = self.w.run(w_NK, None, None, w_scale, ZEROS)
        if self.folds_w and w_scale is not None:
            fold_w, w_scale = _as_factor(w_scale), None
        if self.folds_x and x_scale is not None:
            fold_x, x_scale = _as_factor(x_scale), None
        if self.g is not None:
            folds = (fold_w, fold_x) if self.dgrad else (fold_x, None)
            g, g_t, g_scale, g_t_scale = self.g.run(g_MN, *folds, None, ZEROS)
            if self.dgrad:
                assert w is not None
                dx_MK = self.dx(g, w, g_scale, w_scale)
            if self.fp8_wgrad:
                assert x is not None
                dw_NK = self.dw(g_t, x, g_t_scale, x_scale)
        if self.wgrad and not self.fp8_wgrad:
            assert x is not None
            dw_NK = (g_MN.t() @ x).to(self.w_dtype)
        if self.dbias:
            dbias_N = g_MN.sum(0, dtype=torch.float32).to(self.bias_dtype)
        return dx_MK, dw_NK, dbias_N, None, None


@explain_freed_nodes
class _PlannedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, ordinary: Backward
    ) -> Tensor:  # fmt: skip
        ctx.plan, ctx.ordinary = plan, ordinary
        return plan.forward(ctx, input, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        plan: LinearPlan = ctx.plan
        return plan.backward(ctx, g)


_APPLY = apply_of(_PlannedLinear)
_PLANS: Plans[LinearPlan] = Plans()


def _plan_cast(x: Tensor, spec: QuantSpec, spec_t: QuantSpec | None) -> Any:
    """Return the plan of x quantized into rows for `spec` and columns for `spec_t`, if given."""
    if spec_t is None:
        return plan_quantize(x, spec)
    return plan_quantize(x, spec, order="both") if spec == spec_t else plan_pair(x, spec, None, spec_t, None)


def _as_factor(scale: Tensor) -> Tensor:
    return scale if scale.dtype == torch.float32 else scale.float()
