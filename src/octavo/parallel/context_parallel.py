"""context_parallel: attention of a Transformers model over sequences that are sharded over ranks (Ulysses).

Each of p ranks has S/p tokens of every head. One all-to-all of q, k and v together gives it all S tokens of H/p heads,
on which any attention runs; another brings the results back (arXiv 2309.14509, DeepSpeed-Ulysses):

    [B,H,S/p,D]  ──▶  [B,H/p,S,D]  ──▶  attention  ──▶  [B,H/p,S,Dv]  ──▶  [B,H,S/p,Dv]
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octavo.comm import ADAPTIVE_SPEC
from octavo.comm.checks import Group, compare_calls, world_size
from octavo.comm.collectives import exchange_rows
from octavo.comm.encoding import parse_spec
from octavo.parallel.agreement import EqualShapes, check_mesh, check_on_all_ranks
from octavo.runtime.switch import SWITCH

_NAME = "octavo_ulysses"
_SETTINGS: WeakKeyDictionary[nn.Module, tuple[DeviceMesh, EqualShapes, bool, str]] = WeakKeyDictionary()
"""Mesh, its comparison of shapes, FP8 messages or not, and the name of the attention inside, by attention module."""


def context_parallel(model: nn.Module, mesh: DeviceMesh, *, fp8_comm: bool = True) -> nn.Module:
    """Have a causal language model of Transformers take a part of each sequence on each rank, in place.

    Rank r gets tokens r·S/p to (r + 1)·S/p of every sequence, their labels, and their `position_ids` in it, [1,S/p].

    Args:
        model: Its config names a registered attention function, such as `"sdpa"`.
        mesh: One dimension, such as `mesh["cp"]`, whose size divides the heads of queries and of keys.
        fp8_comm: Send queries, keys, values, results and their gradients in FP8.

    Returns:
        The model itself.

    Raises:
        TypeError: If `model` is not a module or `mesh` not a `DeviceMesh`.
        ValueError: If the model does not use Transformers' attention functions, has other layers than full attention or
            heads that the ranks do not divide, or ranks differ. On every rank; the model is left as it was. In a
            forward: for an attention mask, a short window, or in the first one parts of different shapes.

    Examples:
        >>> mesh = init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "cp"))  # doctest: +SKIP
        >>> octavo.parallel.context_parallel(model, mesh["cp"])  # doctest: +SKIP
        >>> model = octavo.parallelize(model)  # doctest: +SKIP
    """
    attention = check_on_all_ranks(
        "context_parallel", model, mesh, lambda: (_check(model, mesh), [bool(fp8_comm), tuple(mesh.shape)])
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = model.config
    equal_shapes = EqualShapes(mesh, "context parallelism")
    for module in attention:
        _SETTINGS[module] = mesh, equal_shapes, bool(fp8_comm), config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    config._attn_implementation = _NAME
    return model


def inner_attention(model: nn.Module) -> str | None:
    """Return the name of the attention that runs inside `context_parallel`; None without it."""
    return next((_SETTINGS[module][-1] for module in model.modules() if module in _SETTINGS), None)


def _check(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Return the attention modules. Raises ValueError as `context_parallel`."""
    check_mesh("context_parallel", mesh, "dp", "cp")
    kind = type(model).__name__
    config: Any = getattr(model, "config", None)
    attention = [m for m in model.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
    if not (getattr(model, "_supports_attention_backend", False) and attention):
        raise ValueError(
            f"{kind} does not compute attention by Transformers' attention functions: call "
            "octavo.parallel.ulysses_attention in its attention"
        )
    if config._attn_implementation == _NAME:
        raise ValueError(f"{kind} is under context parallelism already: call context_parallel once")
    text = config.get_text_config()
    if others := sorted({name for name in getattr(text, "layer_types", None) or [] if name != "full_attention"}):
        raise ValueError(f"{kind} has layers of kinds {others}, and context_parallel supports full attention only")
    if config._attn_implementation == "eager":
        raise ValueError(
            f"{kind} computes attention in its own code ('eager'), which needs a mask of whole sequences: load it with "
            "attn_implementation='sdpa'"
        )
    heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if any(count % mesh.size() for count in heads):
        fitting = [n for n in range(1, min(heads) + 1) if not any(count % n for count in heads)]
        raise ValueError(
            f"{mesh.size()} ranks do not divide the {heads[0]} heads of queries and {heads[1]} of keys of {kind}: take "
            f"one of {fitting} ranks"
        )
    return attention


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Transformers' interface of attention: [B,H,S/p,D] to [B,S/p,H,Dv]."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    mesh, equal_shapes, fp8, name = _SETTINGS[module]
    equal_shapes(query)
    whole = query.shape[2] * mesh.size()
    window = kwargs.get("sliding_window")
    if attention_mask is not None or (window is not None and window < whole):
        what = "an attention mask" if attention_mask is not None else f"a window of {window} in {whole} tokens"
        raise ValueError(f"context parallelism does not support {what}: use sequences without it, or cp = 1")
    if torch.is_autocast_enabled(query.device.type):  # as it does with the inputs of attention
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    inner: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
    kwargs.pop("position_ids", None)  # of this part; flash attention looks for packed documents in them

    def whole_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = inner(module, q, k, v, None, **kwargs)[0]
        return y.transpose(1, 2)

    y = ulysses_attention(query, key, value, mesh.get_group(), attention=whole_sequence, fp8_comm=fp8)
    return y.transpose(1, 2).contiguous(), None


_GROUP = parse_spec(ADAPTIVE_SPEC).granularity.columns  # Elements of a message that share a scale


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group = None, *,
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention, fp8_comm: bool = True, **kwargs: object,
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
    _check_operands(q, k, v, ranks)
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
    return _exchange(back.reshape(ranks, -1), group, fp8_comm).view(back.shape).movedim(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, group: Group, fp8: bool) -> Tensor:
    """Send row r of [p,n] to rank r, and return the rows that arrive."""
    sizes = [parts.shape[1]] * parts.shape[0]
    received: Tensor = exchange_rows(parts.flatten(), sizes, sizes, group, fp8=fp8)
    return received.view(parts.shape)


def _check_operands(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> None:
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
