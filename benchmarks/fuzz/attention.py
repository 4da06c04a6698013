"""Attention of the fuzzer's grammar: how scores are made, what becomes of them, and what is masked."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fuzz.modules import OwnNorm, Part

CORES = ("sdpa", "eager", "soft_cap", "log_softmax", "cosine", "logsumexp", "mha")
MASKS = ("none", "causal", "padded", "additive")
ROTARY = ("none", "table", "learned")


class Attention(nn.Module):
    """Multi-head attention with projections of the usual names.

    Options: `core`, `mask`, `rotary`, `heads`, `grouped` (two query heads for each of k and v), `scale` (factor of the
    scores), `key_bias` (a constant added to k's bias), `qk_norm`, `shift` (half of the channels from the token before),
    `dropout` (of the probabilities).
    """

    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.part = part
        self.heads = part.get("heads", 2)
        self.kv_heads = max(self.heads // 2, 1) if part.get("grouped") else self.heads
        self.size = part.get("head_size", max(2 * (width // self.heads // 2), 2))
        self.q_proj = nn.Linear(width, self.heads * self.size, bias="bias" in part)
        self.k_proj = nn.Linear(width, self.kv_heads * self.size, bias=True)
        self.v_proj = nn.Linear(width, self.kv_heads * self.size, bias="bias" in part)
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=False)
        if part.get("key_bias"):
            nn.init.constant_(self.k_proj.bias, part["key_bias"])
        frequencies = 1.0 / 100 ** (torch.arange(self.size // 2) / max(self.size // 2, 1))
        if part.get("rotary") == "learned":
            self.frequencies = nn.Parameter(frequencies)
        else:
            self.register_buffer("frequencies", frequencies, persistent=False)
        self.q_norm = OwnNorm(self.size, {}) if part.get("qk_norm") else None

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,W] to [B,T,W]."""
        part, (batch, length, width) = self.part, x.shape
        if part.get("shift"):
            before = F.pad(x, (0, 0, 1, 0))[:, :length]
            x = torch.cat((before[..., : width // 2], x[..., width // 2 :]), -1)
        q, k, v = (
            p(x).view(batch, length, n, self.size).transpose(1, 2)
            for p, n in ((self.q_proj, self.heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads))
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.q_norm(k)
        if part.get("rotary", "none") != "none":
            q, k = self._rotated(q), self._rotated(k)
        if self.kv_heads != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = self._attended(q, k, v, self._mask(x))
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, self.heads * self.size))

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], dtype=self.frequencies.dtype)[:, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _mask(self, x: Tensor) -> Tensor | None:
        """Which keys a query sees, [T,T]; a key that nobody sees is none."""
        form, length = self.part.get("mask", "none"), x.shape[1]
        if form == "none":
            return None
        seen = torch.ones(length, length, dtype=torch.bool)
        if form in ("causal", "additive"):
            return seen.tril()
        seen[:, length - length // 3 :] = False
        return seen

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        part, core = self.part, self.part.get("core", "sdpa")
        scale = part.get("scale", 1.0) / math.sqrt(self.size)
        added = None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -math.inf)
        if core == "sdpa":
            causal = part.get("mask") == "causal"
            mask = None if causal else added if part.get("mask") == "additive" else seen
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        if core == "cosine":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = q @ k.transpose(-1, -2) * scale
        if core == "soft_cap":
            scores = 5.0 * torch.tanh(scores / 5.0)
        if added is not None:
            scores = scores + added
        if core == "log_softmax":
            weights = torch.exp(F.log_softmax(scores, -1))
        elif core == "logsumexp":
            weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
        else:
            weights = torch.softmax(scores, -1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        if part.get("dropout"):
            weights = F.dropout(weights, part["dropout"], self.training)
        return weights @ v


class Multihead(nn.Module):
    """`nn.MultiheadAttention` on itself."""

    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        heads = part.get("heads", 2)
        self.attention = nn.MultiheadAttention(width, heads if width % heads == 0 else 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,W] to [B,T,W]."""
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


def attention(width: int, part: Part) -> Any:
    """Build attention."""
    return (Multihead if part.get("core") == "mha" else Attention)(width, part)
