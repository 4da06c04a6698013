"""Norms, gates, MLPs and attention from parts of cases, [B,T,W] to [B,T,W]: code that Octavo knows or nearly knows."""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Part = dict[str, Any]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU, "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU(approximate="tanh"), "relu": nn.ReLU,
    "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "softplus": nn.Softplus, "leaky": nn.LeakyReLU, "elu": nn.ELU,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1, torch.promote_types(x.dtype, torch.float32)).to(x.dtype) * x.shape[-1],
    "log_softmax": lambda x: F.log_softmax(x, -1), "sin": torch.sin, "exp": lambda x: torch.exp(x.clamp(max=4.0)),
    "square": lambda x: F.relu(x).square(), "sigmoid_product": lambda x: x * torch.sigmoid(x),
    "logsumexp": lambda x: x - torch.logsumexp(x, -1, keepdim=True), "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip
KNOWN_NORMS = ("layer", "layer_no_bias", "layer_no_affine", "rms", "rms_no_affine", "llama", "gemma", "t5")
KNOWN_GATES = ("llama", "phi3")  # Norms and gated MLPs whose forward may differ by one rounding
CORES = ("sdpa", "eager", "soft_cap", "log_softmax", "cosine", "logsumexp", "mha")
MASKS = (None, "causal", "padded", "additive")


def transformers(family: str, *names: str) -> list[Any]:
    return [getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name) for name in names]


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def _rstd(m: Any, x: Tensor) -> Tensor:
    return (x.pow(2).mean(-1, keepdim=True) + m.eps).rsqrt()


def _centered(m: Any, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, unbiased=False, keepdim=True) + m.eps).rsqrt()


def _by_moments(m: Any, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = x.pow(2).mean(-1, keepdim=True) - mean.pow(2)
    return m.weight * (x - mean) * (variance.clamp(min=0) + m.eps).rsqrt()


def _by_groups(m: Any, x: Tensor) -> Tensor:
    parts = x.unflatten(-1, (2 if x.shape[-1] % 2 == 0 else 1, -1))
    return m.weight * (parts * _rstd(m, parts)).flatten(-2)


def _rms(m: Any, x: Tensor) -> Tensor:
    return m.weight * (x * _rstd(m, x))


OWN_NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "own_rms": _rms, "own_layer": lambda m, x: _centered(m, x) * m.weight + m.bias, "own_moments": _by_moments,
    "own_detached": lambda m, x: m.weight * (x * _rstd(m, x).detach()), "own_groups": _by_groups,
    "own_mean_back": lambda m, x: m.weight * _centered(m, x) + x.mean(-1, keepdim=True),
    "own_l2": lambda m, x: F.normalize(x, dim=-1, eps=m.eps) * m.weight,
    "own_by_length": lambda m, x: m.weight * x if x.shape[1] > 8 else _rms(m, x),
    "own_by_dtype": lambda m, x: m.weight * F.normalize(x, p=1, dim=-1) if m.is_bf16(x) else _rms(m, x),
    "own_gain": lambda m, x: _rms(m, x) * m.gain,
}  # fmt: skip


class Own(nn.Module):
    """What may do something else in bf16, as which its reference in float64 counts where `as_dtype` is."""

    as_dtype: torch.dtype | None = None

    def is_bf16(self, x: Tensor) -> bool:
        return (self.as_dtype or x.dtype) == torch.bfloat16


class OwnNorm(Own):
    """A norm in plain PyTorch, some of them with a detail that a norm does not have."""

    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.form, self.eps = part.get("form", "own_rms"), part.get("eps", 1e-6)
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.bias = nn.Parameter(0.1 * torch.randn(width)) if self.form == "own_layer" else None
        self.gain = nn.Parameter(torch.tensor(1.5)) if self.form == "own_gain" else None

    def forward(self, x: Tensor) -> Tensor:
        return OWN_NORMS[self.form](self, x)


_NORMS = {"llama": "LlamaRMSNorm", "gemma": "GemmaRMSNorm", "t5": "T5LayerNorm"}


def norm(width: int, part: Part) -> nn.Module:
    form = part.get("form", "layer")
    if form.startswith("own_"):
        return OwnNorm(width, part)
    if form in _NORMS:
        module: nn.Module = transformers(form, _NORMS[form])[0](width, eps=part.get("eps", 1e-6))
    elif form.startswith("layer"):
        module = nn.LayerNorm(width, elementwise_affine=form != "layer_no_affine", bias=form != "layer_no_bias")
    else:
        module = nn.RMSNorm(width, elementwise_affine=form == "rms")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(width)
    return module


OWN_GATES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "swiglu": lambda m, g, u: m.act_fn(g) * u, "geglu": lambda m, g, u: m.act_fn(g) * u,
    "joint": lambda m, g, u: m.act_fn(g) * u, "beta": lambda m, g, u: g * torch.sigmoid(m.scalar * g) * u,
    "detached": lambda m, g, u: m.act_fn(g).detach() * u, "reversal": lambda m, g, u: m.act_fn(Reversal.apply(g)) * u,
    "straight_through": lambda m, g, u: (m.act_fn(g) + (m.act_fn(g).round() - m.act_fn(g)).detach()) * u,
    "gain": lambda m, g, u: m.act_fn(g) * u * m.scalar, "sigmoid": lambda m, g, u: torch.sigmoid(g) * u,
    "clamp": lambda m, g, u: m.act_fn(g.clamp(max=1.0)) * u.clamp(-1.0, 1.0),
    "dropout": lambda m, g, u: m.dropout(m.act_fn(g) * u), "bypass": lambda m, g, u: m.act_fn(g) * u + 0.5 * u,
    "by_length": lambda m, g, u: m.act_fn(g) ** (2 if g.shape[1] > 8 else 1) * u,
    "by_dtype": lambda m, g, u: m.act_fn(g) ** (2 if m.is_bf16(g) else 1) * u,
    "aux": lambda m, g, u: m.act_fn(g) * u, "aux_list": lambda m, g, u: m.act_fn(g) * u,
}  # fmt: skip


class Gate(Own):
    """down(act(gate(x)) · up(x)), and code that differs from it in one detail."""

    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.form, hidden, bias = part.get("form", "swiglu"), part.get("hidden", 2 * width), part.get("bias", 0.0)
        if self.form == "joint":
            self.gate_up_proj = nn.Linear(width, 2 * hidden, bias=False)
        else:
            self.gate_proj = nn.Linear(width, hidden, bias=bias != 0)
            self.up_proj = nn.Linear(width, hidden, bias=False)
            if bias:
                nn.init.constant_(self.gate_proj.bias, bias)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.act_fn = ACTIVATIONS[part.get("act", "gelu" if self.form == "geglu" else "silu")]()
        self.dropout = nn.Dropout(0.3) if self.form == "dropout" else None
        scalar = {"beta": 1.3, "gain": 0.7}.get(self.form)
        self.scalar = None if scalar is None else nn.Parameter(torch.tensor(scalar))
        self.aux: Tensor | None = None
        self.collected: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        joint = self.form == "joint"
        gate, up = self.gate_up_proj(x).chunk(2, -1) if joint else (self.gate_proj(x), self.up_proj(x))
        h = OWN_GATES[self.form](self, gate, up)
        if self.form in ("aux", "aux_list"):
            self.calls += 1
            loss = h.float().pow(2).mean() if h.numel() else h.float().sum()
            self.aux = loss if self.form == "aux" else None
            self.collected += [loss] if self.form == "aux_list" else []
        return self.down_proj(h)


def gate(width: int, part: Part) -> nn.Module:
    form = part.get("form", "swiglu")
    if form not in KNOWN_GATES:
        return Gate(width, part)
    mlp, config = transformers(form, *{"llama": ("LlamaMLP", "LlamaConfig"), "phi3": ("Phi3MLP", "Phi3Config")}[form])
    act = part.get("act", "silu")
    made: nn.Module = mlp(config(
        hidden_size=width, num_attention_heads=1, intermediate_size=part.get("hidden", 2 * width), pad_token_id=0,
        hidden_act={"gelu_tanh": "gelu_pytorch_tanh"}.get(act, act),
    ))  # fmt: skip
    return made


def mlp(width: int, part: Part) -> nn.Module:
    hidden = part.get("hidden", 2 * width)
    modules = [nn.Linear(width, hidden), ACTIVATIONS[part.get("act", "gelu")]()]
    modules += [nn.Dropout(part["dropout"])] if part.get("dropout") else []
    return nn.Sequential(*modules, nn.Linear(hidden, width))


class Attention(nn.Module):
    """Attention with the usual names; `shift` takes half of the channels from the token before."""

    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.part, self.heads = part, part.get("heads", 2)
        self.kv_heads = max(self.heads // 2, 1) if part.get("grouped") else self.heads
        self.size = max(2 * (width // self.heads // 2), 2)
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
        part, (batch, length, width) = self.part, x.shape
        if part.get("shift"):
            before = F.pad(x, (0, 0, 1, 0))[:, :length]
            x = torch.cat((before[..., : width // 2], x[..., width // 2 :]), -1)
        q, k, v = (
            p(x).view(batch, length, -1, self.size).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.q_norm(k)
        if "rotary" in part:
            q, k = self._rotated(q), self._rotated(k)
        if self.kv_heads != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        seen = None  # which keys a query sees, [T,T]
        if "mask" in part:
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            if part["mask"] == "padded":
                seen = (torch.arange(length) < length - length // 3).expand(length, length)
        return self.o_proj(self._attended(q, k, v, seen).transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], dtype=self.frequencies.dtype)[:, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

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
    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        heads = part.get("heads", 2)
        self.attention = nn.MultiheadAttention(width, heads if width % heads == 0 else 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


def attention(width: int, part: Part) -> nn.Module:
    return (Multihead if part.get("core") == "mha" else Attention)(width, part)
