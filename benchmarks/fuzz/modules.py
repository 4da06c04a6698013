"""Norms, gates and MLPs of the fuzzer's grammar: code that Octavo knows, and code that only resembles it.

Every module maps [B,T,W] to [B,T,W] and is built from a part of a case: a dictionary with an `"op"`, a `"form"` and
options, each of which may be left out.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Part = dict[str, Any]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU, "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU(approximate="tanh"), "relu": nn.ReLU,
    "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "softplus": nn.Softplus, "leaky": nn.LeakyReLU, "elu": nn.ELU,
}  # fmt: skip
KNOWN_NORMS = ("layer", "layer_no_bias", "layer_no_affine", "rms", "rms_no_affine", "llama", "gemma", "t5")
"""Norms whose forward may differ by one rounding."""
OWN_NORMS = (
    "own_rms", "own_layer", "own_detached", "own_moments", "own_groups", "own_mean_back", "own_l2", "own_by_length",
    "own_by_dtype", "own_gain",
)  # fmt: skip
KNOWN_GATES = ("llama", "phi3")
"""Gated MLPs whose forward may differ by one rounding."""
OWN_GATES = (
    "swiglu", "geglu", "joint", "beta", "detached", "reversal", "straight_through", "gain", "sigmoid", "clamp",
    "dropout", "by_length", "by_dtype", "aux", "aux_list", "bypass",
)  # fmt: skip


class Reversal(torch.autograd.Function):
    """The identity, whose gradient changes its sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """X."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """-grad."""
        return -grad


class OwnNorm(nn.Module):
    """A norm in plain PyTorch, some of them with a detail that a norm does not have."""

    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.form, self.eps = part.get("form", "own_rms"), part.get("eps", 1e-6)
        self.groups = 2 if width % 2 == 0 else 1
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        if self.form == "own_layer":
            self.bias = nn.Parameter(0.1 * torch.randn(width))
        self.gain = nn.Parameter(torch.tensor(1.5)) if self.form == "own_gain" else None
        self.as_dtype: torch.dtype | None = None
        """Dtype that decides what `own_by_dtype` does, where the reference runs in another."""

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,W] to [B,T,W]."""
        mean, form = x.mean(-1, keepdim=True), self.form
        if form == "own_layer":
            return (x - mean) * (x.var(-1, unbiased=False, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias
        if form == "own_moments":
            variance = x.pow(2).mean(-1, keepdim=True) - mean.pow(2)
            return self.weight * (x - mean) * (variance.clamp(min=0) + self.eps).rsqrt()
        if form == "own_groups":
            parts = x.unflatten(-1, (self.groups, -1))
            return self.weight * (parts * (parts.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2)
        if form == "own_mean_back":
            return self.weight * (x - mean) * (x.var(-1, unbiased=False, keepdim=True) + self.eps).rsqrt() + mean
        if form == "own_l2":
            return F.normalize(x, dim=-1, eps=self.eps) * self.weight
        if form == "own_by_length" and x.shape[1] > 8:
            return self.weight * x
        if form == "own_by_dtype" and (self.as_dtype or x.dtype) == torch.bfloat16:
            return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)
        rstd = (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        y = self.weight * (x * (rstd.detach() if form == "own_detached" else rstd))
        return y if self.gain is None else y * self.gain


def norm(width: int, part: Part) -> nn.Module:
    """Build a norm."""
    form = part.get("form", "layer")
    if form.startswith("own_"):
        return OwnNorm(width, part)
    if form in ("llama", "gemma", "t5"):
        module = _transformers_norm(form)(width, eps=part.get("eps", 1e-6))
    elif form.startswith("layer"):
        module = nn.LayerNorm(width, elementwise_affine=form != "layer_no_affine", bias=form != "layer_no_bias")
    else:
        module = nn.RMSNorm(width, elementwise_affine=form == "rms")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(width)
    return module


def _transformers_norm(form: str) -> Any:
    if form == "llama":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm as Norm
    elif form == "gemma":
        from transformers.models.gemma.modeling_gemma import GemmaRMSNorm as Norm
    else:
        from transformers.models.t5.modeling_t5 import T5LayerNorm as Norm
    return Norm


class Gate(nn.Module):
    """down(act(gate(x)) · up(x)), and code that differs from it in one detail."""

    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.form, hidden = part.get("form", "swiglu"), part.get("hidden", 2 * width)
        bias = part.get("bias", 0.0)
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
        self.as_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,W] to [B,T,W]."""
        form = self.form
        if form == "joint":
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        if form == "clamp":
            gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
        if form == "reversal":
            gate = Reversal.apply(gate)
        if form == "beta":
            act = gate * torch.sigmoid(self.scalar * gate)
        elif form == "sigmoid":
            act = torch.sigmoid(gate)
        else:
            act = self.act_fn(gate)
        if form == "detached":
            act = act.detach()
        if form == "straight_through":
            act = act + (act.round() - act).detach()
        if (form == "by_length" and x.shape[1] > 8) or (form == "by_dtype" and self._dtype(x) == torch.bfloat16):
            act = act * act
        h = act * up
        if form == "bypass":
            h = h + 0.5 * up
        if form == "gain":
            h = h * self.scalar
        if self.dropout is not None:
            h = self.dropout(h)
        if form in ("aux", "aux_list"):
            self.calls += 1
            loss = h.float().pow(2).mean() if h.numel() else h.float().sum()
            if form == "aux":
                self.aux = loss
            else:
                self.collected.append(loss)
        return self.down_proj(h)

    def _dtype(self, x: Tensor) -> torch.dtype:
        return self.as_dtype or x.dtype


def gate(width: int, part: Part) -> nn.Module:
    """Build a gated MLP."""
    form, hidden = part.get("form", "swiglu"), part.get("hidden", 2 * width)
    if form == "llama":
        from transformers.models.llama.configuration_llama import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaMLP

        act = {"gelu_tanh": "gelu_pytorch_tanh"}.get(part.get("act", "silu"), part.get("act", "silu"))
        return LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=hidden, hidden_act=act, num_attention_heads=1))
    if form == "phi3":
        from transformers.models.phi3.configuration_phi3 import Phi3Config
        from transformers.models.phi3.modeling_phi3 import Phi3MLP

        return Phi3MLP(Phi3Config(hidden_size=width, intermediate_size=hidden, pad_token_id=0, num_attention_heads=1))
    return Gate(width, part)


def mlp(width: int, part: Part) -> nn.Module:
    """Build linear, activation, linear; with a dropout if `"dropout"` is positive."""
    hidden = part.get("hidden", 2 * width)
    modules = [nn.Linear(width, hidden), ACTIVATIONS[part.get("act", "gelu")]()]
    if part.get("dropout", 0.0):
        modules.append(nn.Dropout(part["dropout"]))
    return nn.Sequential(*modules, nn.Linear(hidden, width))


class Activation(nn.Module):
    """An activation as a function, without parameters, on a scaled input."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.form, self.factor = part.get("form", "silu"), part.get("factor", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,W] to [B,T,W]."""
        x = x * self.factor
        if self.form == "softmax":
            return torch.softmax(x, -1, torch.promote_types(x.dtype, torch.float32)).to(x.dtype) * x.shape[-1]
        if self.form == "log_softmax":
            return F.log_softmax(x, -1)
        if self.form == "sin":
            return torch.sin(x)
        if self.form == "exp":
            return torch.exp(x.clamp(max=4.0))
        if self.form == "square":
            return F.relu(x).square()
        if self.form == "sigmoid_product":
            return x * torch.sigmoid(x)
        if self.form == "logsumexp":
            return x - torch.logsumexp(x, -1, keepdim=True)
        return F.silu(x) if self.form == "silu" else torch.tanh(x)
