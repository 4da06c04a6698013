"""A linear's launches and products, prepared: the results of `octavo.nn.linear` in less host time (docs/host_time.md).

The first forward leaves a `PreparedLinear` with the plan of each op (`octavo.kernels.direct`), and later ones run it:
the same kernels on the same operands. The ordinary path runs instead where something could see or change an op
(`octavo.kernels.direct.signature`), X is recomputed in backward, FSDP gathers W in FP8, `accumulating` shares its cast,
an equalized layer measures, a backend makes no plans, the registry's choices changed, or hooks changed saved tensors.
"""

import math
import weakref
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from octavo.activations.recompute import RECOMPUTABLE
from octavo.activations.saved_tensors import INNERMOST, recomputable_of, unhooked
from octavo.kernels.direct import ZEROS, Plans, signature
from octavo.kernels.gemm import ProductPlan
from octavo.kernels.quantize import plan_pair, plan_quantize
from octavo.kernels.registry import CHOICES
from octavo.nn.operands import (
    INPUT_CASTS,
    JUST_IN_TIME,
    MAX_UNUSED,
    RETRY_EVERY,
    Quantizer,
    ReuseCounter,
    Saved,
    cast_key,
    note_reader,
    output_dtype,
)
from octavo.nn.resident import ResidentWeight, dequantized_values
from octavo.nn.weights import shares_cast
from octavo.numerics.equalization import ChannelScales
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import ADAPTIVE_BY_TEXT, QuantSpec
from octavo.runtime.derivatives import transform_error
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
    will_execute,
)

Gradients = tuple[Tensor | None, ...]
Backward = Callable[[Any, Tensor], Gradients]


def planned_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, keep_weights: bool, quantizer: Quantizer,
    ordinary: Backward,
) -> Tensor | None:  # fmt: skip
    """Return `octavo.nn.linear` of these arguments from a plan, or weight-only; None if the ordinary path must run."""
    if recipe.weight_only:
        return _weight_only_linear(input, weight, bias)
    if is_dynamo_compiling() or SWITCH.off:
        return None
    channels = None
    if quantizer is not JUST_IN_TIME:  # an equalized layer: None in a pass that measures
        backward = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        if (channels := quantizer.cached_channel_scales(input, backward)) is None:
            return None
    # Nearly every call takes the plan of the last one with this weight: one guard compares all tensors, and what it
    # cannot see is compared here. Otherwise `_plan_of` looks the plan up by signature, or makes one.
    key = id(weight) if torch.is_grad_enabled() else -id(weight)
    plan, readers, match = None, None, _MATCHES.get(key)
    if match is not None:
        matches, candidate, unbiased, readers, _ = match
        if (
            unbiased is (bias is None) and (matches(input, weight) if unbiased else matches(input, weight, bias))
            and candidate.recipe is recipe and candidate.keep_weights is keep_weights
            and candidate.equalized is (channels is not None)
            and candidate.choices == CHOICES.changes
            and not (dispatch_modes() or function_modes() or (candidate.is_cuda and is_capturing(candidate.device)))
        ):  # fmt: skip
            plan = candidate
    if plan is None:
        plan, readers = _plan_of(input, weight, bias, recipe, keep_weights, ordinary, channels, key), None
        if plan is None:
            return None
    if keep_weights and shares_cast(weight):
        return None
    # What the layer would save of X may be recomputed instead, which the ordinary path does.
    usual = INNERMOST.hooks is None and not RECOMPUTABLE.entries  # no hooks in force, and nothing to recompute X from
    if not usual and plan.saves_x and recomputable_of(input) is not None:
        return None
    # q, k and v read one X: the first to come leaves its casts. A layer whose casts nobody reads stops leaving them.
    unread = 0
    if readers is not None and ((entry := INPUT_CASTS.entry) is None or entry[0]() is not input):
        readers.unread = unread = readers.unread + 1
    casts = None
    if unread <= MAX_UNUSED or not unread % RETRY_EVERY:
        context = (None, stream_of(plan.device), False) if plan.is_cuda else _PLAIN
        casts = INPUT_CASTS.casts_of(input, context)
        if casts is not None and readers is not None:
            casts.setdefault(ReuseCounter, readers)  # of the layer that keeps the first
    call = plan, casts, None if channels is None else quantizer, channels
    return _APPLY(input, weight, bias, call) if usual else unhooked(_APPLY, input, weight, bias, call)  # type: ignore[no-any-return]


def _plan_of(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, keep_weights: bool, ordinary: Backward,
    channels: ChannelScales | None, match_key: int,
) -> "PreparedLinear | None":  # fmt: skip
    """Return the plan for these arguments, found by their signature; the next call finds it by `match_key`."""
    tensors = signature(input, weight, bias, records=True)
    if tensors is None:
        return None
    records, autocast = torch.is_grad_enabled(), autocast_dtype(input.device.type)
    dgrad, wgrad, dbias = (records and x is not None and x.requires_grad for x in (input, weight, bias))
    key = (tensors, id(recipe), keep_weights, dgrad, wgrad, dbias, autocast, channels is not None)
    plan = _PLANS.get(key)
    if plan is None or plan.choices != CHOICES.changes:
        plan = _PLANS.add(
            key, PreparedLinear(input, weight, bias, recipe, keep_weights, ordinary, channels, dgrad, wgrad)
        )
    if not plan.complete:
        return None
    # Guards see whether autocast is on, but not its dtype.
    if autocast is None:
        matches = guard_of(input, weight, *() if bias is None else (bias,))
        reference = weakref.ref(weight, partial(_forget, match_key))
        _MATCHES.add(match_key, (matches, plan, bias is None, ReuseCounter(), reference))
    return plan


def _forget(key: int, reference: weakref.ref[Tensor]) -> None:
    """Drop the match of a weight that is deleted: the next one with its id has other readers."""
    match = _MATCHES.get(key)
    if match is not None and match[-1] is reference:
        del _MATCHES[key]


class BackwardPlan:
    """Operands and products of a backward for G and saved tensors of a signature; `complete` as in `PreparedLinear`."""

    __slots__ = (
        "bias_dtype", "complete", "dbias", "dgrad", "dw", "dx", "folds_w", "folds_x", "fp8_wgrad", "g", "g_NM", "w",
        "w_dtype", "wgrad",
    )  # fmt: skip

    def __init__(
        self, plan: "PreparedLinear", g_MN: Tensor, saved: Saved, channels: ChannelScales | None, dgrad: bool,
        wgrad: bool, dbias: bool,
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
            if not self.fp8_wgrad or recipe.wgrad_g is None:
                self.g = plan_quantize(g_MN, recipe.dgrad_g, fold_w)
            elif not dgrad:
                self.g = plan_quantize(g_MN, recipe.wgrad_g, fold_x, order="columns")
            else:
                self.g = _plan_both(g_MN, recipe.dgrad_g, fold_w, recipe.wgrad_g, fold_x)
            self.complete &= self.g is not None
        self.dx: Any = ProductPlan(recipe.dgrad_g, recipe.dgrad_w_epilogue or recipe.dgrad_w, "nn", x_dtype)
        self.dw: Any = None
        self.g_NM: Any = None
        if self.fp8_wgrad and recipe.wgrad_g is not None and recipe.wgrad_x is not None:
            self.dw = ProductPlan(recipe.wgrad_g, recipe.wgrad_x_epilogue or recipe.wgrad_x, "tn", self.w_dtype)

    def run(self, g_MN: Tensor, saved: Saved, channels: ChannelScales | None) -> Gradients:
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
        return dx_MK, dw_NK, dbias_N, None


class PreparedLinear:
    """The operands and products of one linear, for X, W and bias of one signature; `complete` if all ops have plans."""

    # Holds no tensor but unit scales. `choices` counts the changes to the registry's choices when it was made. `match`
    # is for the next backward: what selects the saved tensors that there are, a check for G and these, and their plan.
    __slots__ = (
        "backwards", "cast_key", "choices", "complete", "device", "dtypes", "equalized", "in_shape", "is_cuda",
        "is_matrix", "k", "keep_weights", "m", "match", "n", "one_cast_key", "one_w_scale", "ordinary", "out_dtype",
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
            x_MK = input if self.is_matrix else input.reshape(self.m, k)  # which would change strides of one row
            self.x = _plan_both(x_MK, recipe.x, inverse, wgrad_x, inverse)
            self.w = _plan_both(weight, recipe.w, factor, wgrad_w, factor)
        self.cast_key, self.one_cast_key = (cast_key(recipe, both, None)[:2] for both in (True, False))
        self.saves_x, self.saves_w = wgrad, dgrad
        self.saves_x_cast, self.saves_w_cast = wgrad_x is not None, wgrad_w is not None
        self.w_KN: Any = None
        self.one_w_scale = recipe.dgrad_w == recipe.w
        self.y: Any = ProductPlan(recipe.x, recipe.w, "nt", out_dtype, fast_accum=True)
        self.backwards: Plans[BackwardPlan] = Plans()
        self.match: tuple[Callable[..., Any], Callable[..., bool], BackwardPlan] | None = None
        self.complete = self.x is not None and self.w is not None

    def forward(
        self, ctx: Any, input: Tensor, w_NK: Tensor, bias: Tensor | None, casts: dict[Any, Any] | None,
        channels: ChannelScales | None,
    ) -> Any:  # fmt: skip
        """Return Y [..., N], and save for backward what the ordinary path saves."""
        factor, inverse = (None, None) if channels is None else (channels.factor, channels.inverse)
        cast = None
        if casts is not None:  # of both orders, or of rows if these suffice
            cast = casts.get((*self.cast_key, channels))
            if cast is None and not self.saves_x_cast:
                cast = casts.get((*self.one_cast_key, channels))
            if cast is not None:
                note_reader(casts)
        x_MK = input if self.is_matrix else input.reshape(self.m, self.k)
        if cast is None:
            cast = self.x.run(x_MK, inverse, None, None, ZEROS.cut)
            if casts is not None:
                casts[(*(self.cast_key if self.saves_x_cast else self.one_cast_key), channels)] = cast
        x, x_t, x_scale, x_t_scale = cast
        if self.w_KN is None:
            w, w_t, w_scale, w_t_scale = self.w.run(w_NK, factor, None, None, ZEROS.cut)
            y_MN = self.y(x, w, x_scale, w_scale, bias)
            if self.y.call is not None:
                self.w_KN = self.w.transposing(rows=True, columns=False)
        else:
            w, w_t, w_scale, w_t_scale = self.w_KN.run(w_NK, factor, None, None, ZEROS.cut)
            y_MN = self.y.call.run(x, w, x_scale, w_scale, bias, bias is None)
            if y_MN is None:
                y_MN = self.y(x, w.t(), x_scale, w_scale, bias)
        if not self.saves_x_cast:
            x_t = (x_MK if self.is_matrix else x_MK.detach()).to(self.out_dtype) if self.saves_x else None
            x_t_scale = None
        if self.saves_w_cast:
            ctx.save_for_backward(w_NK.detach(), w_t, w_t_scale, x_t, x_t_scale)
        elif self.saves_w:
            ctx.save_for_backward(w_NK.detach(), None, w_scale if self.one_w_scale else None, x_t, x_t_scale)
        else:
            ctx.save_for_backward(None, None, None, x_t, x_t_scale)
        return y_MN if self.is_matrix else torch.ops.aten._unsafe_view(y_MN, self.out_shape)

    def backward(self, ctx: Any, g_MN: Tensor, saved: Saved, channels: ChannelScales | None) -> Gradients:
        """Return ∂X, ∂W and ∂b for G = ∂loss/∂Y [M,N]; None for those that nothing needs."""
        needs, tensors = required_gradients(ctx, 3), signature(g_MN, *saved)
        if tensors is None or self.choices != CHOICES.changes:
            return self._ordinary(ctx, g_MN, saved, needs, channels)
        plan = self.backwards.get((needs, tensors))
        if plan is None:
            plan = self.backwards.add((needs, tensors), BackwardPlan(self, g_MN, saved, channels, *needs))
        if not plan.complete:
            return self._ordinary(ctx, g_MN, saved, needs, channels)
        indices = [i for i, tensor in enumerate(saved) if tensor is not None]
        if needs == ctx.needs_input_grad[:3] and len(indices) > 1:
            matches = guard_of(g_MN, *(tensor for tensor in saved if tensor is not None))
            self.match = itemgetter(*indices), matches, plan
        return plan.run(g_MN, saved, channels)

    def _ordinary(
        self, ctx: Any, g_MN: Tensor, saved: Saved, needs: tuple[bool, ...], channels: ChannelScales | None
    ) -> Gradients:
        # A context of its own: hooks, such as those of checkpointing, may return a saved tensor only once.
        scales = (None, None) if channels is None else (channels.factor, channels.inverse)
        context = SimpleNamespace(
            saved_tensors=saved, needs_input_grad=needs, next_functions=ctx.next_functions, recipe=self.recipe,
            channels=scales, quantizer=JUST_IN_TIME, rematerializer=None, columns=self.k, dtypes=self.dtypes,
        )  # fmt: skip
        return (*self.ordinary(context, g_MN)[:3], None)

    def shaped(self, gradients: Gradients) -> Gradients:
        dx_MK = gradients[0]
        return None if dx_MK is None else dx_MK.view(self.in_shape), *gradients[1:]


@short_backward
@explain_freed_nodes
class _PlannedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None,
        call: tuple[PreparedLinear, dict[Any, Any] | None, Quantizer | None, ChannelScales | None],
    ) -> Tensor:  # fmt: skip
        plan, casts, quantizer, channels = call
        ctx.call = plan, quantizer, channels
        return plan.forward(ctx, input, weight, bias, casts, channels)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        plan, quantizer, channels = ctx.call
        if quantizer is not None:
            quantizer.note_backward()
        g_MN = g if plan.is_matrix else g.reshape(plan.m, plan.n)
        saved, match = ctx.saved_tensors, plan.match
        gradients: Gradients
        if match is not None and plan.choices == CHOICES.changes and not is_dynamo_compiling():
            present, matches, backward_plan = match
            if (
                matches(g_MN, *present(saved)) and _uses_all_gradients(ctx)
                and not (torch.is_grad_enabled() or dispatch_modes() or function_modes())
                and not (plan.is_cuda and is_capturing(plan.device))
            ):  # fmt: skip
                gradients = backward_plan.run(g_MN, saved, channels)
                return gradients if plan.is_matrix else plan.shaped(gradients)
        gradients = plan.backward(ctx, g_MN, saved, channels)
        return gradients if plan.is_matrix else plan.shaped(gradients)

    @staticmethod
    def jvp(ctx: object, *tangents: object) -> Any:
        raise transform_error("a converted linear layer")


_PLAIN = (None,)  # The execution context of a CPU tensor, outside of dispatch modes
_APPLY = apply_of(_PlannedLinear)
_PLANS: Plans[PreparedLinear] = Plans()
_MATCHES: Plans[tuple[Callable[..., bool], PreparedLinear, bool, ReuseCounter, weakref.ref[Tensor]]] = Plans()
"""By id of a weight, negative without autograd: a check for tensors like those of its last call, its plan, whether bias
was None, who reads the casts of its input, and the weight."""


def _uses_all_gradients(ctx: Any) -> bool:
    """Whether `required_gradients` would return what `ctx.needs_input_grad` says, outside of torch.compile."""
    for node, _ in ctx.next_functions:
        try:
            if node is not None and not will_execute(node):
                return False
        except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` returns
            pass
    return True


def _plan_both(x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec | None, fold_t: Tensor | None) -> Any:
    """Return the plan of `octavo.nn.weights.quantize_both`; without `spec_t`, of the first cast."""
    if spec_t is None:
        return plan_quantize(x, spec, fold)
    if spec == spec_t and fold is fold_t:
        return plan_quantize(x, spec, fold, order="both")
    return plan_pair(x, spec, fold, spec_t, fold_t)


# Products of a frozen weight that is stored in FP8 and multiplied in the dtype of X: weight-only quantization.
#
#     forward  Y  = X Wᵀ     W = diag(b) Wq, dequantized before the product and dropped after it
#     dgrad    ∂X = G W      the same, from the same bytes
#
# X and G are not quantized, so outputs and gradients are those of a base whose weights have the FP8 values, bit for bit
# (where X is stored by columns, PyTorch adds up ∂X in another order).


def _weight_only_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `torch.nn.functional.linear` of the dequantized weight, differentiable in input and bias."""
    if (dtype := output_dtype(input, weight)) is None or not isinstance(weight, ResidentWeight):
        return F.linear(input, weight, bias)
    y: Tensor = unhooked(_WeightOnly.apply, input, weight, bias, dtype)
    return y


class _WeightOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ResidentWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(weight.data_, weight.scale)
        # torch.compile reads no spec of a transposed weight, such as Conv1D's.
        ctx.spec, ctx.dtype = ADAPTIVE_BY_TEXT.get(weight.text) or weight.spec, dtype
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        w_NK = dequantized_values(weight.data_, weight.scale, ctx.spec, weight.dtype).to(dtype)
        return F.linear(x.to(dtype), w_NK, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        needs_dgrad, _, needs_bias = required_gradients(ctx, 3)
        dx = dbias = None
        if needs_dgrad:
            data, scale = ctx.saved_tensors
            w_NK = dequantized_values(data, scale, ctx.spec, w_dtype).to(ctx.dtype)
            dx = (g @ w_NK).to(x_dtype)
        if needs_bias:
            dbias = g.reshape(-1, g.shape[-1]).sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, None, dbias, None
