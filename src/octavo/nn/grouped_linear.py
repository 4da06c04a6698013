"""grouped_linear: a linear layer with one weight per expert, over rows sorted by expert, in FP8.

    forward  Y[g] = X[g] W[e]ᵀ     legend: M rows sorted by expert, E experts, K in and N out features of each expert,
    dgrad    ∂X[g] = G[g] W[e]             g the rows of expert e
    wgrad    ∂W[e] = G[g]ᵀ X[g]

With recipes that scale by row and fold (`rowwise`), X is quantized once for all experts and each of the three products
is one grouped product (`octavo.kernels.grouped`): the results of `octavo.nn.linear` on the rows of each expert alone,
bit for bit on the reference backend. The other recipes share scales between rows or contract over blocks of rows, which
must not cross experts: they run `octavo.nn.linear` per expert, and wait for the GPU once to learn how many rows each
has.

Saved for backward, as for `octavo.nn.linear`: X in FP8, one byte per element, and W by reference with its scales.
Weights that FSDP2 gathers in FP8, and those that are resident in FP8, are read as they are.
Weights that are stored as [E,K,N] are copied to [E,N,K] before each quantization, or, if they are resident in FP8,
before each product, a byte per parameter.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels import grouped_mm, needs_both_orders, quantize
from octavo.kernels.grouped import groups_of_rows, is_grouped, quantize_grouped_gradient, sum_by_group
from octavo.nn.fp8_weight import quantized_as
from octavo.nn.gathered import Fp8AllGatherOutput, rows_of
from octavo.nn.linear import linear
from octavo.nn.operands import Saved, apply_unhooked, dgrad_weight, forward_operands, output_dtype
from octavo.nn.resident import ResidentWeight
from octavo.numerics.recipe import Recipe
from octavo.runtime.derivatives import first_derivative_only
from octavo.runtime.torch_compat import FakeTensor, required_gradients
from octavo.tensor import Order, ScaledTensor


def grouped_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, recipe: Recipe, transposed: bool = False,
    keep_weights: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply the rows of each expert by its weight, in FP8, differentiable.

    Args:
        input: [M,K], rows sorted by expert; float32, bfloat16 or float16.
        weight: [E,N,K], or [E,K,N] if `transposed`, of the input's dtype unless autocast is on.
        bias: [E,N] or None.
        offsets: int32 [E], where the rows of each expert end, on the input's device.
        recipe: Precision of the products; not one with a `history` or `equalization`.
        transposed: Whether each expert's weight is stored as [in, out].
        keep_weights: As of `octavo.nn.linear`.

    Returns:
        [M,N] in the input's dtype, or in autocast's if autocast is on. Rows from `offsets[-1]` on are zero, and so is
        their gradient.

    Raises:
        ValueError: If sizes or dtypes do not fit.

    Examples:
        >>> x, weight = torch.randn(8, 64), torch.randn(2, 32, 64)
        >>> octavo.nn.grouped_linear(x, weight, None, torch.tensor([3, 8]).int(), octavo.RECIPES["rowwise"]).shape
        torch.Size([8, 32])
    """
    if weight.ndim != 3 or input.ndim != 2 or offsets.shape != weight.shape[:1]:
        raise ValueError(
            "grouped_linear takes input [M,K], weight [E,N,K] and offsets [E]; got "
            f"{list(input.shape)}, {list(weight.shape)} and {list(offsets.shape)}"
        )
    if recipe.layer_state:
        raise ValueError(f"recipe {recipe.name!r} needs {recipe.layer_state}, which experts do not keep: use 'rowwise'")
    out_dtype = output_dtype(input, weight, 1 if transposed else 2)
    if out_dtype is None or not is_grouped(recipe):
        by_row = weight.transpose(1, 2) if transposed else weight
        if out_dtype is None:  # inside `octavo.disabled()`
            return _per_expert(torch.nn.functional.linear, input, by_row, bias, offsets)
        return _per_expert(lambda x, w, b: linear(x, w, b, recipe, keep_weights), input, by_row, bias, offsets)
    return apply_unhooked(_GroupedLinear, input, weight, bias, offsets, recipe, out_dtype, transposed, keep_weights)


def _per_expert(function: Any, x_MK: Tensor, w_ENK: Tensor, bias_EN: Tensor | None, offsets: Tensor) -> Tensor:
    """Apply a linear function to the rows of each expert."""
    experts, rows = w_ENK.shape[0], x_MK.shape[0]
    if isinstance(offsets, FakeTensor):  # the sizes are unknown: equal ones, to count memory and time
        ends = [rows * (expert + 1) // experts for expert in range(experts)]
    else:
        ends = offsets.tolist()
    counts = [end - start for start, end in zip([0, *ends], [*ends, rows], strict=True)]
    *parts, tail = x_MK.split(counts)
    biases = [None] * experts if bias_EN is None else bias_EN.unbind()
    results = [function(x, w, b) for x, w, b in zip(parts, w_ENK.unbind(), biases, strict=True)]
    return torch.cat([*results, results[0].new_zeros((tail.shape[0], w_ENK.shape[1]))])


def _rows(weight: Tensor, transposed: bool) -> Tensor:
    """Return the rows of all experts' weights, [E·N,K]."""
    if isinstance(weight, Fp8AllGatherOutput):
        return rows_of(weight)
    return _matrix(weight, transposed)


def _matrix(stack: Any, transposed: bool) -> Tensor:
    """Return the rows of matrices [E,R,C], or [E,C,R], as one matrix [E·R,C]."""
    matrix: Tensor = (stack.transpose(1, 2) if transposed else stack).flatten(0, 1)
    return matrix


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, recipe: Recipe,
        out_dtype: torch.dtype, transposed: bool, keep_weights: bool,
    ) -> Tensor:  # fmt: skip
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        x = quantize(x_MK, recipe.x, order="both" if needs_wgrad and needs_both_orders(x_MK.device) else "rows")
        if isinstance(weight, ResidentWeight):
            w = quantized_as(weight, recipe.w.transposed if transposed else recipe.w)
            w = ScaledTensor(_matrix(w.data, transposed), _matrix(w.scale, transposed), recipe.w)
            w_saved: Saved = (None, weight.data_, w.scale) if needs_dgrad else (None, None, None)
        else:
            rows = _rows(weight, transposed)
            _, w, w_saved = forward_operands(x.data, x.scale, rows, None, recipe, keep_weights, needs_dgrad)
            if w_saved[0] is not None:
                w_saved = weight.detach(), *w_saved[1:]  # `rows` may be a copy
        y_MN = grouped_mm(x, w, offsets, "nt", out_dtype=out_dtype, bias=bias, fast_accum=True)
        x_saved = (x.data if x.other_order is None else x.other_order, x.scale) if needs_wgrad else (None, None)
        ctx.save_for_backward(*w_saved, *x_saved, offsets)
        ctx.recipe, ctx.transposed = recipe, transposed
        ctx.dtypes = x_MK.dtype, weight.dtype, None if bias is None else bias.dtype
        return y_MN

    @staticmethod
    @first_derivative_only("a converted layer of experts")
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Recipe = ctx.recipe
        weight, w_data, w_scale, x_data, x_scale, offsets = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        needs_dgrad, needs_wgrad, needs_bias = required_gradients(ctx, 3)
        order: Order = "columns" if needs_both_orders(g_MN.device) else "rows"
        experts, n = offsets.shape[0], g_MN.shape[1]
        group = groups_of_rows(offsets, g_MN.shape[0])
        dx_MK = dw = dbias_EN = None
        if needs_dgrad:
            rows = weight if w_data is not None else _rows(weight, ctx.transposed)
            if w_data is not None and w_data.ndim == 3:  # of a resident weight, as it is stored
                w_data = _matrix(w_data, ctx.transposed)
            w = dgrad_weight((rows, w_data, w_scale), None, recipe)
            g = quantize_grouped_gradient(g_MN, group, recipe.dgrad_g, w_scale=w_scale.view(experts, n))
            dx_MK = grouped_mm(g, w.unscaled, offsets, "nn", out_dtype=x_dtype)
        if needs_wgrad:
            assert recipe.wgrad_g is not None and recipe.wgrad_x is not None
            x = ScaledTensor(x_data, None, recipe.wgrad_x)
            g = quantize_grouped_gradient(
                g_MN, group, recipe.wgrad_g, x_scale=x_scale, experts=experts, order=order
            )  # fmt: skip
            dw = grouped_mm(g, x, offsets, "tn", out_dtype=w_dtype)
            dw = dw.transpose(1, 2) if ctx.transposed else dw
        if needs_bias:
            dbias_EN = sum_by_group(g_MN, offsets).to(bias_dtype)
        return dx_MK, dw, dbias_EN, *[None] * 5
