"""Products of a frozen weight that is stored in FP8 and multiplied in the dtype of X: weight-only quantization.

    forward  Y  = X Wᵀ     W = diag(b) Wq, dequantized before the product and dropped after it
    dgrad    ∂X = G W      the same, from the same bytes

X and G are not quantized, so outputs and gradients are those of a base whose weights have the FP8 values, bit for bit
(where X is stored by columns, PyTorch adds up ∂X in another order). It costs the time of products in the wider dtype
and of reading W again, and a temporary copy of one weight.

By default the projections of attention are weight-only: docs/howto.md has their part in the error. Choosing v and o
alone was rejected: it leaves Qwen3 below 28 dB, and inference engines join q, k and v.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.nn.operands import apply_unhooked, output_dtype
from octavo.nn.resident import ResidentWeight, dequantized_values
from octavo.numerics.spec import ADAPTIVE_BY_TEXT
from octavo.runtime.torch_compat import required_gradients


def weight_only_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `torch.nn.functional.linear` of the dequantized weight, differentiable in input and bias."""
    if (dtype := output_dtype(input, weight)) is None or not isinstance(weight, ResidentWeight):
        return F.linear(input, weight, bias)
    y: Tensor = apply_unhooked(_WeightOnly, input, weight, bias, dtype)
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
