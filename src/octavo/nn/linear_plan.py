"""A linear's launches and products, prepared: the results of `octavo.nn.linear` in less host time (docs/host_time.md).

The ordinary path of `octavo.nn.linear` calls seven ops, and each inspects its operands. What each finds depends only on
options and on the dtypes, shapes, strides and devices of X, W, the bias and G. So the first forward leaves a
`LinearPlan`, which holds the plan of each op (`octavo.kernels.direct`), and later ones run it: the same kernels on the
same operands, hence the same bits, with the same tensors saved for backward.

The ordinary path runs instead

- where something could see or change an op: `octavo.kernels.direct.signature` says where;
- if X is recomputed in backward or has an amax history, if FSDP gathers W in FP8, if `accumulating` shares its cast;
- if an equalized layer measures (`octavo.nn.equalized`);
- if a backend makes no plans, as on CPUs, or if the registry's choices changed since the plan was made;
- in backward, if saved tensors have no plan as they are now: hooks and `weight.data = …` change strides and dtypes.

Rejected: plans per op alone, with which a linear makes twice the Python calls.
"""

import math
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from octavo.activations.saved_tensors import recomputable_of, saves_as_usual, unhooked
from octavo.kernels.direct import ZEROS, Plans, signature
from octavo.kernels.gemm import ProductPlan
from octavo.kernels.quantize import plan_pair, plan_quantize
from octavo.kernels.registry import CHOICES
from octavo.nn.input_casts import INPUT_CASTS, cast_key
from octavo.nn.operands import JUST_IN_TIME, Quantizer, Saved, output_dtype
from octavo.nn.weights import shares_cast
from octavo.numerics.equalization import ChannelScales
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import QuantSpec
from octavo.runtime.execution_context import is_capturing, stream_of
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import (
    apply_of,
    autocast_dtype,
    dispatch_modes,
    explain_freed_nodes,
    function_modes,
    guard_of,
    required_gradients,
    short_backward,
)

Gradients = tuple[Tensor | None, ...]
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
    if not SWITCH.enabled or torch.compiler.is_compiling():
        return None
    channels = None
    if quantizer is not JUST_IN_TIME:
        backward = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        if (channels := quantizer.steady_channels(input, backward)) is None:
            return None
    plan, match = None, _MATCHES.get(id(weight))
    if match is not None:
        matches, candidate, unbiased, records = match
        if (
            unbiased is (bias is None) and (matches(input, weight) if unbiased else matches(input, weight, bias))
            and candidate.recipe is recipe and candidate.keep_weights is keep_weights
            and candidate.equalized is (channels is not None)
            and candidate.choices == CHOICES.changes and records is torch.is_grad_enabled()
            and not (dispatch_modes() or function_modes() or (candidate.is_cuda and is_capturing(candidate.device)))
        ):  # fmt: skip
            plan = candidate
    if plan is None:
        plan = _plan_of(input, weight, bias, recipe, keep_weights, ordinary, channels)
    if plan is None or (keep_weights and shares_cast(weight)):
        return None
    y: Tensor
    usual = saves_as_usual()
    if not usual and plan.saves_x and recomputable_of(input) is not None:
        return None
    arguments = input, weight, bias, plan, None if channels is None else quantizer, channels
    y = _APPLY(*arguments) if usual else unhooked(_APPLY, *arguments)
    return y


def _plan_of(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, keep_weights: bool, ordinary: Backward,
    channels: ChannelScales | None,
) -> "LinearPlan | None":  # fmt: skip
    """Return the plan for these arguments of `planned_linear`, found by their signature; None without one."""
    tensors = signature(input, weight, bias, records=True)
    if tensors is None:
        return None
    records, autocast = torch.is_grad_enabled(), autocast_dtype(input.device.type)
    dgrad, wgrad = records and input.requires_grad, records and weight.requires_grad
    key = (tensors, id(recipe), keep_weights, dgrad, wgrad, autocast, channels is not None)
    plan = _PLANS.get(key)
    if plan is None or plan.choices != CHOICES.changes:
        plan = _PLANS.add(key, LinearPlan(input, weight, bias, recipe, keep_weights, ordinary, channels, dgrad, wgrad))
    if not plan.complete:
        return None
    # Guards see whether autocast is on, but not its dtype.
    matches = None if autocast is not None else guard_of(input, weight, *() if bias is None else (bias,))
    if matches is not None:
        _MATCHES.add(id(weight), (matches, plan, bias is None, records))
    return plan


class LinearPlan:
    """The operands and products of one linear, for X, W and bias of one signature; `complete` if all ops have plans.

    Holds no tensor but unit scales. `choices` counts the changes to the registry's choices when it was made.
    """

    __slots__ = (
        "_match", "backwards", "cast_key", "choices", "complete", "device", "dtypes", "equalized", "in_shape",
        "is_cuda", "is_matrix", "k", "keep_weights", "m", "n", "one_cast_key", "one_w_scale", "ordinary", "out_dtype",
        "out_shape", "recipe", "saves_w", "saves_w_cast", "saves_x", "saves_x_cast", "w", "w_KN", "x", "y",
    )  # fmt: skip

    def __init__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, keep_weights: bool,
        ordinary: Backward, channels: ChannelScales | None, dgrad: bool, wgrad: bool,
    ) -> None:  # fmt: skip
        self.recipe, self.choices, self.complete = recipe, CHOICES.changes, False
        self.keep_weights, self.ordinary, self.equalized = keep_weights, ordinary, channels is not None
        self.device, self.is_cuda = weight.device, weight.is_cuda
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
            inverse, factor = (None, None) if channels is None else (channels.inverse, channels.factor)
            self.x = _plan_cast(input.reshape(self.m, k), recipe.x, wgrad_x, inverse)
            self.w = _plan_cast(weight, recipe.w, wgrad_w, factor)
        self.cast_key, self.one_cast_key = (cast_key(recipe, both, None)[:2] for both in (True, False))
        self.saves_x, self.saves_w = wgrad, dgrad
        self.saves_x_cast, self.saves_w_cast = wgrad_x is not None, wgrad_w is not None
        self.w_KN: Any = None
        self.one_w_scale = recipe.dgrad_w == recipe.w
        self.y: Any = ProductPlan(recipe.x, recipe.w, "nt", out_dtype, fast_accum=True)
        self.backwards: Plans[BackwardPlan] = Plans()
        self._match: tuple[Any, ...] | None = None
        self.complete = self.x is not None and self.w is not None

    def forward(
        self, ctx: Any, input: Tensor, w_NK: Tensor, bias: Tensor | None, channels: ChannelScales | None = None
    ) -> Any:
        """Return Y [..., N], and save for backward what the ordinary path saves."""
        factor, inverse = (None, None) if channels is None else (channels.factor, channels.inverse)
        casts = INPUT_CASTS.casts_of(input, _PLAIN if not self.is_cuda else (None, stream_of(self.device), False))
        cast = key = None
        if casts is not None:
            key = (*self.cast_key, channels)
            cast = casts.get(key)
            if cast is None and not self.saves_x_cast:
                key = (*self.one_cast_key, channels)
                cast = casts.get(key)
        x_MK = input if self.is_matrix else input.reshape(self.m, self.k)
        if cast is None:
            cast = self.x.run(x_MK, inverse, None, None, ZEROS)
            if casts is not None:
                casts[key] = cast
        x, x_t, x_scale, x_t_scale = cast
        if self.w_KN is None:
            w, w_t, w_scale, w_t_scale = self.w.run(w_NK, factor, None, None, ZEROS)
            y_MN = self.y(x, w, x_scale, w_scale, bias)
            if self.y.call is not None:
                self.w_KN = self.w.transposing(rows=True, columns=False)
        else:
            w, w_t, w_scale, w_t_scale = self.w_KN.run(w_NK, factor, None, None, ZEROS)
            y_MN = self.y.call.run(x, w, x_scale, w_scale, bias, bias is None)
            if y_MN is None:
                y_MN = self.y(x, w.t(), x_scale, w_scale, bias)
        if not self.saves_x_cast:
            x_t = (x_MK if self.is_matrix else x_MK.detach()).to(self.out_dtype) if self.saves_x else None
            x_t_scale = None
        if self.saves_w_cast:
            ctx.save_for_backward(w_NK, w_t, w_t_scale, x_t, x_t_scale)
        elif self.saves_w:
            ctx.save_for_backward(w_NK, None, w_scale if self.one_w_scale else None, x_t, x_t_scale)
        else:
            ctx.save_for_backward(None, None, None, x_t, x_t_scale)
        return y_MN if self.is_matrix else torch.ops.aten._unsafe_view(y_MN, self.out_shape)

    def backward(self, ctx: Any, g: Tensor, channels: ChannelScales | None) -> Gradients:
        """Return ∂X, ∂W and ∂b for G = ∂loss/∂Y [..., N]; None for those that nothing needs."""
        g_MN = g if self.is_matrix else g.reshape(self.m, self.n)
        saved, needs = ctx.saved_tensors, required_gradients(ctx, 3)
        plan, match = None, self._match
        if match is not None and self.choices == CHOICES.changes and not torch.is_grad_enabled():
            known_needs, present, matches, candidate = match
            if (
                known_needs == needs and matches(g_MN, *present(saved))
                and not (torch.compiler.is_compiling() or dispatch_modes() or function_modes())
                and not (self.is_cuda and is_capturing(self.device))
            ):  # fmt: skip
                plan = candidate
        if plan is None:
            plan = self._backward_of(g_MN, saved, needs, channels)
        if plan is None:
            return self._ordinary(g_MN, saved, needs, channels)
        gradients = plan.run(g_MN, saved, channels)
        return gradients if self.is_matrix else self._shaped(gradients)

    def _backward_of(
        self, g_MN: Tensor, saved: Saved, needs: tuple[bool, ...], channels: ChannelScales | None
    ) -> "BackwardPlan | None":  # fmt: skip
        """Return the plan of a backward, found by the signature of its tensors; None without one."""
        tensors = signature(g_MN, *saved)
        if tensors is None or self.choices != CHOICES.changes:
            return None
        plan = self.backwards.get((needs, tensors))
        if plan is None:
            plan = self.backwards.add((needs, tensors), BackwardPlan(self, g_MN, saved, channels, *needs))
        if not plan.complete:
            return None
        indices = [i for i, tensor in enumerate(saved) if tensor is not None]
        matches = guard_of(g_MN, *(tensor for tensor in saved if tensor is not None)) if len(indices) > 1 else None
        if matches is not None:
            self._match = needs, itemgetter(*indices), matches, plan
        return plan

    def _ordinary(
        self, g_MN: Tensor, saved: Saved, needs: tuple[bool, ...], channels: ChannelScales | None
    ) -> Gradients:  # fmt: skip
        # A context of its own: hooks, such as those of checkpointing, may return a saved tensor only once.
        scales = (None, None) if channels is None else (channels.factor, channels.inverse)
        context = SimpleNamespace(
            saved_tensors=saved, needs_input_grad=needs, next_functions=(), recipe=self.recipe, channels=scales,
            quantizer=JUST_IN_TIME, rematerializer=None, columns=self.k, dtypes=self.dtypes,
        )  # fmt: skip
        gradients = (*self.ordinary(context, g_MN)[:3], None, None, None)
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
        channels: The channel scales of the forward, if any.
        dgrad: Whether ∂X is needed.
        wgrad: Whether ∂W is needed.
        dbias: Whether ∂b is needed.
    """

    __slots__ = (
        "bias_dtype", "complete", "dbias", "dgrad", "dw", "dx", "folds_w", "folds_x", "fp8_wgrad", "g", "g_NM", "w",
        "w_dtype", "wgrad",
    )  # fmt: skip

    def __init__(
        self, plan: LinearPlan, g_MN: Tensor, saved: Saved, channels: ChannelScales | None, dgrad: bool, wgrad: bool,
        dbias: bool,
    ) -> None:  # fmt: skip
        recipe, (w_NK, w, w_scale, _, _) = plan.recipe, saved
        factor = None if channels is None else channels.factor
        x_dtype, self.w_dtype, self.bias_dtype = plan.dtypes
        self.dgrad, self.wgrad, self.dbias = dgrad, wgrad, dbias
        self.fp8_wgrad = wgrad and plan.saves_x_cast
        self.folds_w, self.folds_x = dgrad and recipe.folds_w, self.fp8_wgrad and recipe.folds_x
        self.w = self.g = None
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

    def run(self, g_MN: Tensor, saved: Saved, channels: ChannelScales | None) -> Gradients:
        """Return ∂X, ∂W and ∂b, None for those that are not needed, and for the three inputs that are no tensors."""
        w_NK, w, w_scale, x, x_scale = saved
        factor, inverse = (None, None) if channels is None else (channels.factor, channels.inverse)
        dx_MK: Any = None
        dw_NK: Any = None
        dbias_N = fold_w = fold_x = None
        if self.w is not None:
            _, w, w_scale, _ = self.w.run(w_NK, factor, None, w_scale, ZEROS)
        if self.folds_w and w_scale is not None:
            fold_w, w_scale = w_scale if w_scale.dtype == torch.float32 else w_scale.float(), inverse
        if self.folds_x and x_scale is not None:
            fold_x, x_scale = x_scale if x_scale.dtype == torch.float32 else x_scale.float(), factor
        if self.g is not None:
            as_t = self.g_NM is not None
            g, g_t, g_scale, g_t_scale = (self.g_NM if as_t else self.g).run(
                g_MN, fold_w if self.dgrad else fold_x, fold_x if self.dgrad else None, None, ZEROS
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
        return dx_MK, dw_NK, dbias_N, None, None, None


@short_backward
@explain_freed_nodes
class _PlannedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, quantizer: Quantizer | None,
        channels: ChannelScales | None,
    ) -> Tensor:  # fmt: skip
        ctx.call = plan, quantizer, channels
        y: Tensor = plan.forward(ctx, input, weight, bias, channels)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        plan, quantizer, channels = ctx.call
        if quantizer is not None:
            quantizer.note_backward()
        gradients: Gradients = plan.backward(ctx, g, channels)
        return gradients


_PLAIN = (None,)
"""The execution context of a CPU tensor, outside of dispatch modes."""
_APPLY = apply_of(_PlannedLinear)
_PLANS: Plans[LinearPlan] = Plans()
_MATCHES: Plans[tuple[Callable[..., bool], LinearPlan, bool, bool]] = Plans()
"""By id of a weight: a check for tensors like those of its last call, its plan, whether bias was None, grad mode."""


def _plan_cast(x: Tensor, spec: QuantSpec, spec_t: QuantSpec | None, fold: Tensor | None) -> Any:
    """Return the plan of x · fold quantized into rows for `spec` and columns for `spec_t`, if given."""
    if spec_t is None:
        return plan_quantize(x, spec, fold)
    return plan_quantize(x, spec, fold, order="both") if spec == spec_t else plan_pair(x, spec, fold, spec_t, fold)
