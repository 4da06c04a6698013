"""Attention inside each of several packed documents, by PyTorch's variable-length attention.

    document     0 0 0 1 1 | 2 3 3 3 3        rows of a batch [B,S], one after the other: B·S tokens
    offsets      0 3 5 6 10 10 10             where each document starts; the last ones repeat: documents without tokens

Transformers hands the result of its mask functions to every layer, through compiled blocks and recomputations too. The
one registered here returns the offsets: [N+1] for causal masks, and with a sliding window of W the same numbers as
[W,N+1], by a stride of 0, because some layers do not know their window (Qwen2-MoE). Outside of `documents` everything
is SDPA. On a CPU the op computes document by document, as written here.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from octavo.numerics.error import sqnr
from octavo.planner.fake import fake_copy, fake_tensors, unpacked_sequences
from octavo.planner.trace import VARLEN as OP

NAME = "octavo_varlen"  # The name under which Transformers finds it; `model.attention = "varlen"`
MAX_HEAD_SIZE = 256
OFFSETS_STEP = 32  # Batches with similar numbers of documents have the same number of offsets
MASKS = {"causal_mask_function", "and_masks.<locals>.and_mask"}
WINDOW = "sliding_window_overlay.<locals>.inner_mask"
"""Functions of Transformers that make causal masks and sliding windows; the last has the window in its closure."""
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""For keys with fewer heads than queries, which the kernel of torch 2.11 takes, too, but without a flag."""

_offsets: ContextVar[Tensor | None] = ContextVar("offsets", default=None)  # Of the forward under way on a thread


def register() -> None:
    """Register the attention, its masks, and the op's CPU kernels, once."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
        exact = torch.autocast("cpu", enabled=False)
        torch.library.register_kernel(OP, "cpu", exact(_cpu_forward))
        torch.library.register_kernel(f"{OP}_backward", "cpu", exact(_cpu_backward))


def is_varlen(model: object) -> bool:
    """Whether a model computes attention by `attention`."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME


@cache
@torch.inference_mode(False)
@torch.enable_grad()
def device_problem(device: torch.device | None = None) -> str:
    """Why the device here, the GPU by default, does not compute the op rightly; "" if it does, or if there is none."""
    device = device or torch.device("cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        return ""  # a plan is for another machine
    # Grouped heads, a document of one token, a repeated offset; with and without a window: beside SDPA with a mask.
    lengths, generator = (17, 1, 46), torch.Generator().manual_seed(0)
    offsets = F.pad(torch.tensor([0, 17, 18, 64], dtype=torch.int32, device="cpu"), (0, 1), value=64).to(device)
    allowed = torch.block_diag(*(torch.ones(n, n, device="cpu") for n in lengths)).tril()
    draw = (torch.randn(1, heads, 64, 64, generator=generator, device="cpu") for heads in (4, 2, 2, 4))
    q, k, v, g = (x.to(device, torch.bfloat16).requires_grad_() for x in draw)
    for window in (None, 9):
        seen = (allowed if window is None else allowed.triu(1 - window)).bool().to(device)
        scores = (q.float() @ k.float().repeat_interleave(2, 1).mT / 8).masked_fill(~seen, -torch.inf)
        exact = (scores.softmax(-1) @ v.float().repeat_interleave(2, 1)).transpose(1, 2)
        expected = [exact, *torch.autograd.grad(exact, (q, k, v), g.transpose(1, 2).float())]
        try:
            mask = offsets if window is None else offsets.expand(window, -1)
            out, _ = attention(nn.Identity(), q, k, v, mask)
            actual = [out, *torch.autograd.grad(out, (q, k, v), g.transpose(1, 2))]
        except Exception as error:  # of no common type
            return f"PyTorch does not compute it on {device}: {' '.join(str(error).split())[:200]}"
        worst = min(sqnr(a.float(), b.float()) for a, b in zip(expected, actual, strict=True))
        if not worst > 35:
            return f"PyTorch's result on {device} differs from that with a mask: SQNR {worst:.1f} dB"
    return ""


def document_offsets(positions: Tensor, most: int) -> Tensor:
    """int32 offsets of at most `most` documents, which start where positions [B,S] are 0; static in shape."""
    tokens, starts, rows = positions.numel(), (positions == 0).flatten(), (positions[:, 0] == 0).all()
    count = min(-(-most // OFFSETS_STEP) * OFFSETS_STEP, tokens)
    torch._assert_async((starts.sum() <= count) & rows, f"more than {count} documents, or a row begins inside one")
    index = torch.arange(tokens, dtype=torch.int32, device=positions.device)
    # Sorted instead of `nonzero`, for whose size the host would wait.
    return F.pad(torch.where(starts, index, tokens).sort().values[:count], (0, 1), value=tokens)


@contextmanager
def documents(offsets: Tensor) -> Iterator[None]:
    """Keep attention inside documents in forwards of models whose attention is `NAME`."""
    token = _offsets.set(offsets)
    try:
        with unpacked_sequences():
            yield
    finally:
        _offsets.reset(token)


def _mask(
    *args: object, mask_function: Callable[..., object], attention_mask: Tensor | None = None, **kwargs: object
) -> Tensor | None:
    """Transformers' interface of masks: the offsets of documents, or SDPA's mask."""
    if (offsets := _offsets.get()) is None:
        import transformers.masking_utils as masks

        make: Callable[..., Tensor | None] = masks.sdpa_mask
        return make(*args, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    parts = [*_parts(mask_function)]
    kinds = {name.partition(".")[0] for part in parts if (name := _name(part)) not in {*MASKS, WINDOW}}
    if attention_mask is not None or kinds:
        what = f"masks by {', '.join(sorted(kinds))}" if kinds else "a mask of padding"
        raise ValueError(f"variable-length attention has causal masks and sliding windows only, and the model {what}")
    windows = [inspect.getclosurevars(part).nonlocals["sliding_window"] for part in parts if _name(part) == WINDOW]
    return offsets.expand(min(windows), -1) if windows else offsets


def _parts(mask: Callable[..., object]) -> Iterator[Callable[..., object]]:
    """The functions of which a mask function of Transformers is made, itself among them."""
    yield mask
    for cell in getattr(mask, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part):
                yield from _parts(part)


def _name(part: object) -> str:
    return getattr(part, "__qualname__", type(part).__name__)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Transformers' interface of attention: q [B,H,S,D], k [B,Hkv,S,D], v [B,Hkv,S,Dv] to [B,S,H,Dv]."""
    if attention_mask is None or attention_mask.dtype != torch.int32:  # as only offsets are
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    _check(module, query, key, dropout, kwargs)
    if torch.is_autocast_enabled(query.device.type):  # as it does with the inputs of SDPA
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rows, heads, length, size = query.shape
    values, offsets, window = value.shape[-1], attention_mask, None
    if attention_mask.ndim == 2:
        offsets, window = attention_mask[0], attention_mask.shape[0]
    padded = -(-max(size, values) // 8) * 8  # of equal sizes, and multiples of 8
    q, k, v = (
        F.pad(t.transpose(1, 2), (0, padded - t.shape[-1])).flatten(0, 1) if t.shape[-1] != padded
        else t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)
    )  # fmt: skip
    op: Callable[..., Any] = varlen_attn  # whose arguments differ between versions
    out = op(
        q, k, v, offsets, offsets, length, length, scale=size**-0.5 if scaling is None else scaling,
        window_size=(-1 if window is None else window - 1, 0), **_GROUPED,
    )  # fmt: skip
    return out[..., :values].view(rows, length, heads, values), None


def _check(module: nn.Module, query: Tensor, key: Tensor, dropout: float, kwargs: Mapping[str, object]) -> None:
    """Raise ValueError for attention that the op does not compute."""
    causal = kwargs.get("is_causal")
    problems = {
        f"dropout of {dropout}": dropout > 0,
        f"a soft cap of {kwargs.get('softcap')}": kwargs.get("softcap") is not None,
        "sinks": kwargs.get("s_aux") is not None,
        "a position bias": kwargs.get("position_bias") is not None,
        "attention to later tokens": not (getattr(module, "is_causal", True) if causal is None else causal),
        "keys of other tokens than queries": query.shape[2] != key.shape[2],
        f"heads of {query.shape[-1]}, above {MAX_HEAD_SIZE}": query.shape[-1] > MAX_HEAD_SIZE,
        "fp32 on a GPU": query.is_cuda and query.dtype not in (torch.bfloat16, torch.float16)
        and not torch.is_autocast_enabled("cuda"),
    }  # fmt: skip
    if found := [what for what, is_so in problems.items() if is_so]:
        raise ValueError(f"{type(module).__name__} has {', '.join(found)}, which variable-length attention has not")


def problem(model: nn.Module) -> str:
    """Why a model set to `NAME` cannot train with it, from a forward of two documents without storage; "" if it can."""
    seen: list[Tensor] = []

    def observe(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        seen.extend(t for t in tensors if t.dtype == torch.int32 and t.shape[-1] == len(offsets))

    with torch.device("cpu") as device, fake_tensors() as mode, torch.no_grad():
        copy = fake_copy(model, mode, device, dtype=torch.bfloat16).train()  # as grouped products take it
        positions = torch.arange(8, device=device).remainder(4).unsqueeze(0)
        offsets = document_offsets(positions, 2)
        for module in copy.modules():
            module.register_forward_pre_hook(observe, with_kwargs=True)
        try:
            with documents(offsets):
                cache = {"use_cache": False} if "use_cache" in inspect.signature(copy.forward).parameters else {}
                copy(input_ids=torch.zeros_like(positions), position_ids=positions, **cache)
        except Exception as error:  # of no common type
            reason = " ".join(str(error).split()).rstrip(".")
            own = isinstance(error, ValueError) and "variable-length" in reason
            return reason if own else f"{type(model).__name__} does not run with it ({reason})"
    return "" if seen else f"{type(model).__name__} does not compute attention by Transformers' attention functions"


def _spans(offsets: Tensor, window_size: list[int], dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The tokens of each document, and its mask [n,n]: 0 where a query sees a key, -∞ elsewhere."""
    left = window_size[0]
    for start, stop in pairwise(offsets.tolist()):
        if stop > start:
            hidden = offsets.new_ones(stop - start, stop - start, dtype=torch.bool).triu(1)
            hidden |= ~hidden.new_ones(hidden.shape).triu(-left) if left >= 0 else hidden
            yield slice(start, stop), offsets.new_zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)


def _grouped(tensor: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[n,H,D] as [Hkv,H/Hkv,n,D], so that keys and values are broadcast."""
    n, heads, size = tensor.shape
    return tensor.to(dtype).view(n, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, offsets_k: Tensor, max_q: int, max_k: int,
    is_causal: bool, scale: float, window_size: list[int], *_: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output [T,H,D], logsumexp [H,T] and an unused random state, as the op on a GPU."""
    dtype, out = torch.promote_types(query.dtype, torch.float32), torch.zeros_like(query)
    lse = query.new_zeros(query.shape[1], query.shape[0], dtype=dtype)
    for span, mask in _spans(offsets, window_size, dtype):
        q, k, v = (_grouped(t[span], key.shape[1], dtype) for t in (query, key, value))
        scores = (q @ k.mT) * scale + mask
        lse[:, span] = scores.logsumexp(-1).flatten(0, 1)
        out[span] = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
    return out, lse, query.new_zeros(2, dtype=torch.uint64)


def _cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, offsets: Tensor,
    offsets_k: Tensor, max_q: int, max_k: int, is_causal: bool, random: Tensor, scale: float, window_size: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """∂V = Pᵀ G, ∂S = P · (G Vᵀ - Σ G·O), ∂Q = ∂S K, ∂K = ∂Sᵀ Q, with P = exp(S - logsumexp)."""
    dtype, heads = lse.dtype, key.shape[1]
    grads = [torch.zeros_like(t) for t in (query, key, value)]
    for span, mask in _spans(offsets, window_size, dtype):
        q, k, v, o, g = (_grouped(t[span], heads, dtype) for t in (query, key, value, out, grad_out))
        probabilities = ((q @ k.mT) * scale + mask - lse[:, span].unflatten(0, (heads, -1)).unsqueeze(-1)).exp()
        of_scores = probabilities * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        for grad, own in zip(grads, (of_scores @ k, of_scores.mT @ q, probabilities.mT @ g), strict=True):
            own = own if grad.shape[1] == query.shape[1] else own.sum(1, keepdim=True)  # over the queries of a key
            grad[span] = own.permute(2, 0, 1, 3).flatten(1, 2).to(grad.dtype)
    return grads[0], grads[1], grads[2]
