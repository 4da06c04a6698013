"""Fused linear and cross-entropy, one chunk of tokens at a time, without the whole logits.

    z = softcap(scale · (H Wᵀ + b))     L = Σ lse(z) − z[target]     legend: T tokens, D features, V vocabulary
    ∂H = G W      ∂W = Gᵀ H             G = (softmax(z) − onehot) · ∂z/∂logits

A token's logits determine G up to one factor, the gradient of the loss. So forward takes C tokens at a time, whose
logits take about the memory of H, and saves ∂H and ∂W for backward, which multiplies both by that factor. ∂W is summed
over chunks in its own dtype, with at most `MOST_CHUNKS` roundings; in float32 for fp16, where the sum would overflow.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.kernels.cross_entropy import cross_entropy_, loss_and_gradient
from octavo.numerics.suggestions import check_choice
from octavo.runtime.derivatives import first_derivative_only, refuse_transforms
from octavo.runtime.torch_compat import autocast_dtype, has_bf16_instructions, without_autocast

# Maximum number of chunks. More would make products too small, and round the gradient of a bf16 weight too often
MOST_CHUNKS = 32

_NAME, _REMEDY = "linear_cross_entropy", "compute the whole logits and torch.nn.functional.cross_entropy instead"


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean", scale: float = 1.0, softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """`cross_entropy(linear(hidden, weight, bias), target)` without the whole logits.

    Args:
        hidden: [..., D], float64, float32, bfloat16 or float16; any number of tokens, zero included.
        weight: [V, D] of the vocabulary head; may be tied to an embedding.
        target: [...] int64 class of each token, already shifted.
        bias: [V] or None.
        ignore_index: Target of tokens to ignore.
        reduction: `"mean"` over the tokens not ignored, or `"sum"`.
        scale: Factor of the logits (Cohere, Granite).
        softcap: Logits become softcap · tanh(logits / softcap) (Gemma).
        chunk: Tokens per chunk; None chooses by the sizes.

    Returns:
        The loss, a float32 scalar (float64 for float64 input). The mean over no tokens is NaN, with zero gradients, as
        in PyTorch. Under autocast, products use its dtype, gradients the dtypes of the arguments.

    Raises:
        ValueError: If shapes, dtypes or options do not fit.
        RuntimeError: In a second backward of the same forward (`retain_graph`), because the first consumes the
            gradients. Allowed under activation checkpointing, which recomputes them.

    Examples:
        >>> hidden, head = torch.randn(8, 64, requires_grad=True), torch.randn(1000, 64)
        >>> octavo.nn.loss.linear_cross_entropy(hidden, head, torch.arange(8)).backward()
    """
    _check(hidden, weight, target, bias, reduction, softcap, chunk)
    refuse_transforms(_NAME, hidden, weight, bias, remedy=_REMEDY)
    dtype = autocast_dtype(hidden.device.type) or hidden.dtype
    h_TD, t_T = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1)
    rows = chunk or chunk_tokens(h_TD.shape[0], h_TD.shape[1], weight.shape[0])
    options = ignore_index, scale, softcap, rows, dtype, torch.is_grad_enabled()
    total: Tensor = _ChunkedFunction.apply(h_TD, weight, bias, t_T, *options)
    if reduction == "sum":
        return total
    count = (t_T != ignore_index).sum()
    # If all tokens are ignored, the value is NaN (0/0) but the gradient 0.
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def chunk_tokens(tokens: int, features: int, vocabulary: int) -> int:
    """Return the tokens of one chunk, whose logits are about as large as the hidden states of all tokens."""
    balanced = -(-tokens * features // max(vocabulary, 1))
    return max(balanced, -(-tokens // MOST_CHUNKS), min(256, tokens), 1)  # products of fewer would not fill a device


class _ChunkedFunction(torch.autograd.Function):
    """Summed loss, whose forward also computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, w_VD: Tensor, bias: Tensor | None, t_T: Tensor, ignore_index: int, scale: float,
        softcap: float | None, rows: int, dtype: torch.dtype, grad_enabled: bool,
    ) -> Tensor:  # fmt: skip
        needs_h, needs_w, needs_b = (needed and grad_enabled for needed in ctx.needs_input_grad[:3])
        total = h_TD.new_zeros((), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        dh_TD = torch.empty_like(h_TD, dtype=dtype) if needs_h else None
        sum_dtype = torch.float32 if w_VD.dtype == torch.float16 else w_VD.dtype
        dw_VD = torch.zeros_like(w_VD, dtype=sum_dtype) if needs_w else None
        db_V = torch.zeros_like(total).expand(w_VD.shape[0]).clone() if needs_b else None
        if h_TD.is_cuda and not torch.compiler.is_compiling():  # elsewhere `gather` raises
            known = (t_T == ignore_index) | ((t_T >= 0) & (t_T < w_VD.shape[0]))
            torch._assert_async(known.all(), "linear_cross_entropy: a target is neither a class nor ignore_index")
        with without_autocast(h_TD.device.type):
            w = _operand(w_VD.to(dtype))
            for start in range(0, h_TD.shape[0], rows):
                h = _operand(h_TD[start : start + rows].to(dtype))
                z = h @ w.t() if bias is None else torch.addmm(bias.to(dtype).to(w.dtype), h, w.t())
                z = z.to(dtype)
                t, g = t_T[start : start + rows], None
                if (needs_h or needs_w) and _fuses(z, needs_b):
                    loss, g = cross_entropy_(z, t, ignore_index, scale, softcap), z
                else:
                    loss, g = loss_and_gradient(z, t, ignore_index, scale, softcap, needs_h or needs_w or needs_b)
                total += loss.sum()
                if g is None:
                    continue
                if db_V is not None:
                    db_V += g.sum(0)
                g = _operand(g.to(dtype))
                if dh_TD is not None:
                    dh = dh_TD[start : start + rows]
                    if g.dtype == dh.dtype:
                        torch.mm(g, w, out=dh)
                    else:
                        dh.copy_(g @ w)
                if dw_VD is not None:
                    _add_product(dw_VD, g, h)
        ctx.save_for_backward(dh_TD, dw_VD, db_V)
        ctx.dtypes = h_TD.dtype, w_VD.dtype, None if bias is None else bias.dtype
        ctx.consumed = set()
        return total

    @staticmethod
    @first_derivative_only(_NAME, _REMEDY)
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            _consume(ctx.consumed, saved)
        # In place and invisible to autograd's version counter, which hooks bypass anyway; hence _consume.
        grads = (None if tensor is None else tensor.data.mul_(g) for tensor in saved)
        return *(None if d is None else d.to(dtype) for d, dtype in zip(grads, ctx.dtypes, strict=True)), *[None] * 7


def _consume(consumed: set[StorageWeakRef], saved: tuple[Tensor | None, ...]) -> None:
    """Raise if an earlier backward has scaled these gradients. Checkpointing recomputes them in new storages."""
    # Weak references identify storages: they prevent reuse of an address.
    storages = {StorageWeakRef(tensor.untyped_storage()) for tensor in saved if tensor is not None}
    if storages & consumed:
        raise RuntimeError(
            "linear_cross_entropy: backward runs once, because it consumes gradients that forward computed. Call "
            "linear_cross_entropy again for a second backward, or sum the losses and run one backward"
        )
    consumed |= storages


def _fuses(z: Tensor, has_bias: bool) -> bool:
    """Whether a kernel turns logits into their gradient. The sum that a bias needs is one of float32 numbers."""
    return not has_bias and z.is_cuda and z.dtype != torch.float64 and not torch.compiler.is_compiling()


def _operand(values: Tensor) -> Tensor:
    """Return the operand of a product: bf16 as float32 on a CPU without bf16 instructions."""
    # PyTorch multiplies bf16 there element by element, 20 times slower than float32. Results are rounded to bf16 alike.
    if values.dtype != torch.bfloat16 or values.device.type != "cpu" or torch.compiler.is_compiling():
        return values
    real = type(values) in (Tensor, torch.nn.Parameter)  # memory plans are those of a GPU
    return values.float() if real and not has_bf16_instructions() else values


def _add_product(dw_VD: Tensor, g_CV: Tensor, h_CD: Tensor) -> None:
    """∂W += Gᵀ H."""
    if dw_VD.dtype == g_CV.dtype:
        dw_VD.addmm_(g_CV.t(), h_CD)
    elif g_CV.dtype != torch.float16:
        product = g_CV.t() @ h_CD
        dw_VD.copy_(product.add_(dw_VD)) if g_CV.dtype == torch.float32 else dw_VD.add_(product)
    elif g_CV.is_cuda:
        dw_VD += torch.mm(g_CV.t(), h_CD, out_dtype=torch.float32)
    else:
        dw_VD.addmm_(g_CV.float().t(), h_CD.float())


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, softcap: float | None,
    chunk: int | None,
) -> None:  # fmt: skip
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"{list(hidden.shape)} and {list(weight.shape)}"
        raise ValueError(f"linear_cross_entropy takes hidden [..., D] and weight [V, D]; got {shapes}")
    if target.shape != hidden.shape[:-1] or target.dtype != torch.int64:
        expected = f"int64 {list(hidden.shape[:-1])}, a class for each token"
        raise ValueError(f"linear_cross_entropy: target is {expected}; got {target.dtype} {list(target.shape)}")
    if hidden.dtype != weight.dtype and autocast_dtype(hidden.device.type) is None:
        raise ValueError(
            f"linear_cross_entropy: hidden is {hidden.dtype} but weight is {weight.dtype}; cast one of them, or run "
            f"under torch.autocast({hidden.device.type!r}, dtype=torch.bfloat16)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias is [{weight.shape[0]}]; got {list(bias.shape)}")
    check_choice("reduction", reduction, ("mean", "sum"))
    for name, number in (("softcap", softcap), ("chunk", chunk)):
        if number is not None and not number > 0:
            raise ValueError(f"linear_cross_entropy: {name} is a number above 0, or None; got {number!r}")
