"""ulysses_attention: attention over sequences that are sharded over ranks (DeepSpeed-Ulysses, arXiv 2309.14509).

Each of p ranks has S/p tokens of every head. One all-to-all of q, k and v together gives it all S tokens of H/p heads,
on which any attention runs; another brings the results back:

    [B,H,S/p,D]  ──▶  [B,H/p,S,D]  ──▶  attention  ──▶  [B,H/p,S,Dv]  ──▶  [B,H,S/p,Dv]

Backward sends gradients by the same ways. In FP8 the messages are vectors in groups of 128 (`fp8/1x128`): a group is
part of one token and head if D is a multiple of 128, else it may hold the ends of two; q, k and v begin with groups of
their own. Attention and its backward compute with the same decoded q, k and v. The error of q and k is
less than that of the FP8 product that made them, 29 dB, and like that error it counts more the larger the scores are:
∂Q of normal q, k and v agrees to 36.5 dB if the largest score is 4, and to 21.9 dB if it is 57.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.comm import ADAPTIVE_SPEC
from octavo.comm.checks import Group, compare_calls, world_size
from octavo.comm.collectives import exchange_rows
from octavo.comm.encoding import parse_spec
from octavo.runtime.switch import SWITCH

_GROUP = parse_spec(ADAPTIVE_SPEC).granularity.columns  # Elements of a message that share a scale


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = None, *,
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention, fp8_comm: bool = True, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Compute attention over a sequence of which each rank has an equal, consecutive part.

    Args:
        q: [B,H,S/p,D], float32, bfloat16 or float16; the part of rank r are tokens r·S/p to (r + 1)·S/p.
        k: [B,Hkv,S/p,D], of the same dtype. Rotary embeddings are applied before, with the positions of this part.
        v: [B,Hkv,S/p,Dv], of the same dtype.
        group: The p ranks; None for the default group.
        attention: Called with q [B,H/p,S,D], k [B,Hkv/p,S,D], v [B,Hkv/p,S,Dv], the keyword arguments, and the heads
            r·H/p to (r + 1)·H/p; returns [B,H/p,S,Dv].
        fp8_comm: Send FP8, forward and backward, except inside `octavo.disabled()`; False for exact messages.
        **kwargs: For `attention`, such as `is_causal=True` or `enable_gqa=True`. Masks are those of whole sequences.

    Returns:
        [B,H,S/p,Dv] in the dtype of `attention`'s result.

    Raises:
        ValueError: If p does not divide the numbers of heads, a tensor is not 4-D, or dtypes differ.

    All ranks need parts of the same shape: pad the sequence to a multiple of p. Nothing compares them, except with
    `TORCH_DISTRIBUTED_DEBUG=DETAIL`: over Gloo unequal ones end a rank's process.

    Examples:
        >>> q = torch.randn(1, 8, 16, 128)                      # on two ranks, under torchrun: 32 tokens
        >>> octavo.parallel.ulysses_attention(q, q, q, is_causal=True).shape
        torch.Size([1, 8, 16, 128])
    """
    ranks = world_size(group)
    _check(q, k, v, ranks)
    compare_calls("ulysses_attention", group, ([list(t.shape) for t in (q, k, v)], q.dtype))
    parts = [t.unflatten(1, (ranks, -1)).movedim(1, 0) for t in (q, k, v)]  # [p,B,H/p,S/p,D]
    group_size = _GROUP if fp8_comm and not SWITCH.off else 1  # no group of v shares its scale with a larger k
    rows = [F.pad(part.reshape(ranks, -1), (0, -part[0].numel() % group_size)) for part in parts]
    received = _exchange(torch.cat(rows, dim=1), group, fp8_comm).split([row.shape[1] for row in rows], dim=1)
    whole = [
        row[:, : part[0].numel()].reshape(part.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
        for row, part in zip(received, parts, strict=True)
    ]
    y = attention(*whole, **kwargs)
    back = y.unflatten(2, (ranks, -1)).movedim(2, 0)  # [p,B,H/p,S/p,Dv]
    mine: Tensor = _exchange(back.reshape(ranks, -1), group, fp8_comm).view(back.shape)
    return mine.movedim(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, group: Group, fp8: bool) -> Any:
    """Send row r of [p,n] to rank r, and return the rows that arrive."""
    sizes = [parts.shape[1]] * parts.shape[0]
    return exchange_rows(parts.flatten(), sizes, sizes, group, fp8=fp8).view(parts.shape)


def _check(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> None:
    shapes = [list(t.shape) for t in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"ulysses_attention takes q, k and v [batch, heads, tokens, size]; got shapes {shapes}")
    heads = q.shape[1], k.shape[1], v.shape[1]
    if any(count % ranks for count in heads):
        fitting = [n for n in range(1, min(heads) + 1) if not any(count % n for count in heads)]
        raise ValueError(
            f"{ranks} ranks cannot share {heads[0]} heads of q, {heads[1]} of k and {heads[2]} of v equally: take a "
            f"group of one of {fitting} ranks, or repeat the heads of k and v"
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise ValueError(f"ulysses_attention takes q, k and v of one dtype; got {q.dtype}, {k.dtype} and {v.dtype}")
