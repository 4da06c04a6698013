"""Linear and cross-entropy in one, a chunk of tokens at a time, so that the whole logits never exist.

    z = softcap(scale · (H Wᵀ + b))     L = Σ lse(z) − z[target]     legend: T tokens, D features, V vocabulary
    ∂H = G W      ∂W = Gᵀ H             G = (softmax(z) − onehot) · ∂z/∂logits

Logits [T,V] are the largest tensor of a language model: for 8192 tokens and 128 000 words 2 GB in bf16, and a plain
loss keeps them in float32 besides and makes as much again in backward. But G is known, up to the one number that
arrives from above, as soon as a token's logits are. So forward takes C tokens at a time and goes on to their gradients
at once; kept for backward are ∂H (as large as H) and ∂W (which would be made anyway), and backward multiplies both by
that number. The arithmetic is that of the plain loss: three products, none of them twice.

C is chosen so that a chunk's logits take about the memory of H. ∂W is added up over the chunks in its own dtype where
that is float32, and in bf16 by products that accumulate in float32 within a chunk: at most `MOST_CHUNKS` roundings.
In fp16 the sum over tokens, which the mean divides only in backward, would overflow: it is float32, within a chunk too.
Rejected: a float32 sum for bf16 weights, which costs as much as it saves for small batches; and for fp16 a G divided
by the number of tokens beforehand, which a loss scale, known in backward only, could no longer save from underflow.

Where liger-kernel is installed and the tensors are on a GPU its fused kernel does the same work (`backend="auto"`).
"""

from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.numerics.names import nearest
from octavo.runtime.torch_compat import autocast_dtype, without_autocast

MOST_CHUNKS = 32
"""Largest number of chunks; more would make products too small, and round the gradient of a bf16 weight too often."""
SMALLEST_CHUNK = 256
"""Tokens below which a chunk's products would not fill a device."""

_BACKENDS = ("auto", "torch", "liger")
_REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    backend: Literal["auto", "torch", "liger"] = "auto",
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` without the whole logits.

    Args:
        hidden: [..., D], float64, float32, bfloat16 or float16; any number of tokens from 0 up.
        weight: [V, D]: the vocabulary head's, which may be tied to an embedding. Gets a gradient if it requires one.
        target: [...] int64 class of each token, already shifted.
        bias: [V] or None.
        ignore_index: Target of tokens that do not count.
        reduction: `"mean"` over the tokens that count, or `"sum"`.
        scale: Factor of the logits (Cohere, Granite).
        softcap: Logits become softcap · tanh(logits / softcap) (Gemma).
        chunk: Tokens at a time; chosen from the sizes where None.
        backend: `"torch"` runs everywhere. `"liger"` is liger-kernel's fused kernel; `"auto"` takes it where it is
            installed, the tensors are on a GPU, and it has what is asked for.

    Returns:
        The loss, a float32 scalar (float64 for float64 input). Mean over no token is NaN, with zero gradients, as in
        PyTorch. Autocast is respected: products in its dtype, gradients in the dtypes of the arguments.

    Raises:
        ValueError: For shapes, dtypes or options that do not fit; named, with what is wanted.
        RuntimeError: In a second backward of the same forward (`retain_graph`): the first takes the gradients made in
            forward. Under activation checkpointing, which makes them again, it is allowed.
    """
    _check(hidden, weight, target, bias, reduction, softcap, chunk, backend)
    dtype = _product_dtype(hidden, weight)
    h_TD, t_T = hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1)
    if backend == "liger" or (backend == "auto" and _takes_liger(hidden, dtype, scale)):
        return _liger(h_TD.to(dtype), weight.to(dtype), t_T, bias, ignore_index, reduction, softcap)
    wanted = torch.is_grad_enabled()
    rows = chunk or chunk_tokens(h_TD.shape[0], h_TD.shape[1], weight.shape[0])
    total = _Chunked.apply(h_TD, weight, bias, t_T, ignore_index, scale, softcap, rows, dtype, wanted)
    if reduction == "sum":
        return total
    count = (t_T != ignore_index).sum()
    # 0/0 for the value; a gradient of 0, not NaN, where no token counts.
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def chunk_tokens(tokens: int, features: int, vocabulary: int) -> int:
    """Tokens of one chunk: its logits are about as large as the hidden states of all tokens."""
    fair = -(-tokens * features // max(vocabulary, 1))
    return max(fair, -(-tokens // MOST_CHUNKS), min(SMALLEST_CHUNK, tokens), 1)


class _Chunked(torch.autograd.Function):
    """Summed loss; its gradients are made in forward."""

    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, w_VD: Tensor, bias: Tensor | None, t_T: Tensor, ignore_index: int, scale: float,
        softcap: float | None, rows: int, dtype: torch.dtype, wanted: bool,
    ) -> Tensor:  # fmt: skip
        needs_h, needs_w, needs_b = (needed and wanted for needed in ctx.needs_input_grad[:3])
        total = h_TD.new_zeros((), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        dh_TD = torch.empty_like(h_TD, dtype=dtype) if needs_h else None
        dw_VD = torch.zeros_like(w_VD, dtype=_sum_dtype(w_VD.dtype)) if needs_w else None
        db_V = torch.zeros_like(total).expand(w_VD.shape[0]).clone() if needs_b else None
        with without_autocast(h_TD.device.type):
            w = w_VD.to(dtype)
            for start in range(0, h_TD.shape[0], rows):
                h = h_TD[start : start + rows].to(dtype)
                z = h @ w.t() if bias is None else torch.addmm(bias.to(dtype), h, w.t())
                loss, g = _loss_and_gradient(
                    z, t_T[start : start + rows], ignore_index, scale, softcap, needs_h or needs_w or needs_b
                )
                total += loss
                if g is None:
                    continue
                if db_V is not None:
                    db_V += g.sum(0)
                g = g.to(dtype)
                if dh_TD is not None:
                    torch.mm(g, w, out=dh_TD[start : start + rows])
                if dw_VD is not None:
                    _add_product(dw_VD, g, h)
        ctx.save_for_backward(dh_TD, dw_VD, db_V)
        ctx.dtypes = h_TD.dtype, w_VD.dtype, None if bias is None else bias.dtype
        ctx.spent = set()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            _spend(ctx.spent, saved)
        # In place, past autograd's version counter, which sees nothing where hooks hold what is saved: see _spend.
        grads = (None if made is None else made.data.mul_(g) for made in saved)
        return *(None if d is None else d.to(dtype) for d, dtype in zip(grads, ctx.dtypes, strict=True)), *[None] * 7


def _spend(spent: set[StorageWeakRef], saved: tuple[Tensor | None, ...]) -> None:
    """Refuses gradients that an earlier backward has multiplied already; those made anew by checkpointing are others.

    A weak reference keeps the address of a storage from being used again, so it is told by that.
    """
    storages = {StorageWeakRef(made.untyped_storage()) for made in saved if made is not None}
    if storages & spent:
        raise RuntimeError(
            "linear_cross_entropy: backward runs once; its gradients are made in forward and used up by the first. "
            "Call it again for a second backward, or add up the losses and run one"
        )
    spent |= storages


def _loss_and_gradient(
    logits: Tensor, t_C: Tensor, ignore_index: int, scale: float, softcap: float | None, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of a chunk, and its gradient by the logits [C,V], in float32 (float64)."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    if scale != 1.0:
        z = z * scale
    slope = None
    if softcap is not None:
        slope = torch.tanh(z / softcap)
        z = slope * softcap
    counts = (t_C != ignore_index).unsqueeze(1)
    index = t_C.unsqueeze(1).masked_fill(~counts, 0)
    lse = z.logsumexp(1, keepdim=True)
    loss = (lse - z.gather(1, index)).masked_fill(~counts, 0).sum()
    if not wanted:
        return loss, None
    g = z.sub_(lse).exp_() if z is not logits else (z - lse).exp_()
    g.scatter_(1, index, g.gather(1, index) - 1)
    g.masked_fill_(~counts, 0)
    if slope is not None:
        g.mul_(slope.square_().neg_().add_(1))
    return loss, g.mul_(scale) if scale != 1.0 else g


def _add_product(dw_VD: Tensor, g_CV: Tensor, h_CD: Tensor) -> None:
    """∂W += Gᵀ H."""
    if dw_VD.dtype == g_CV.dtype:
        dw_VD.addmm_(g_CV.t(), h_CD)
    elif g_CV.dtype != torch.float16:
        dw_VD += g_CV.t() @ h_CD
    elif g_CV.is_cuda:
        dw_VD += torch.mm(g_CV.t(), h_CD, out_dtype=torch.float32)
    else:
        dw_VD.addmm_(g_CV.float().t(), h_CD.float())


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the gradient of a weight is added up over tokens."""
    return torch.float32 if dtype == torch.float16 else dtype


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device_type = hidden.device.type
    autocast = autocast_dtype(device_type)
    if autocast is not None:
        return autocast
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"linear_cross_entropy: hidden is {hidden.dtype} but weight is {weight.dtype}; cast one of them, or run "
            f"under torch.autocast({device_type!r}, dtype=torch.bfloat16)"
        )
    return hidden.dtype


def _takes_liger(hidden: Tensor, dtype: torch.dtype, scale: float) -> bool:
    return (
        hidden.is_cuda
        and hidden.numel() > 0
        and scale == 1.0
        and dtype in (torch.float32, torch.bfloat16)
        and type(hidden) is Tensor  # not one of FakeTensorMode, whose memory is to be that of `torch`
        and not torch.compiler.is_compiling()
        and find_spec("liger_kernel") is not None
    )


def _liger(
    h_TD: Tensor, w_VD: Tensor, t_T: Tensor, bias: Tensor | None, ignore_index: int, reduction: str,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(
        h_TD, w_VD, t_T, bias=bias, ignore_index=ignore_index, reduction=reduction, softcap=softcap
    )
    return loss


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, softcap: float | None,
    chunk: int | None, backend: str,
) -> None:  # fmt: skip
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy takes hidden [..., D] and weight [V, D]; got {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    if target.shape != hidden.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(
            f"linear_cross_entropy: target is int64 {list(hidden.shape[:-1])}, a class for each token; got "
            f"{target.dtype} {list(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_cross_entropy: bias is [{weight.shape[0]}]; got {list(bias.shape)}")
    for name, given, known in (("reduction", reduction, _REDUCTIONS), ("backend", backend, _BACKENDS)):
        if given not in known:
            raise ValueError(f"{name} is one of {', '.join(map(repr, known))}; got {given!r}{nearest(given, known)}")
    for name, number in (("softcap", softcap), ("chunk", chunk)):
        if number is not None and not number > 0:
            raise ValueError(f"linear_cross_entropy: {name} is a number above 0, or None; got {number!r}")
