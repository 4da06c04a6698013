"""A Llama 3 8B decoder layer of fake tensors, in bf16, and the arms that it is compiled in."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo

TOKENS, WIDTH, HIDDEN, HEADS, KV_HEADS = 8192, 4096, 14336, 32, 8
RECIPES = ("rowwise", "tensorwise", "blockwise")
ARMS = ("bf16", *(f"octavo {recipe}" for recipe in RECIPES), *(f"stored {recipe}" for recipe in RECIPES[:2]))
"""`stored` with activations="fp8"."""

_ATTENTION = torch.library.Library("octavo_benchmarks", "DEF")
_ATTENTION.define("attention(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
_ATTENTION.define(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) -> (Tensor, Tensor, Tensor)"
)
torch.library.register_fake(
    "octavo_benchmarks::attention",
    lambda q, k, v: (torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)), lib=_ATTENTION,
)  # fmt: skip
torch.library.register_fake(
    "octavo_benchmarks::attention_backward", lambda g, *saved: tuple(map(torch.empty_like, saved[:3])), lib=_ATTENTION
)
torch.library.register_autograd(
    "octavo_benchmarks::attention",
    lambda ctx, g, _: torch.ops.octavo_benchmarks.attention_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output), lib=_ATTENTION,
)  # fmt: skip


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)
    layer.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda"))
    return layer


class Norm(nn.Module):
    def __init__(self, width: int, device: str = "cuda") -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width, dtype=torch.bfloat16, device=device)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A decoder layer. Attention is an op of its own, as FlashAttention is."""

    def __init__(self) -> None:
        super().__init__()
        small = WIDTH // HEADS * KV_HEADS
        self.norm, self.mlp_norm = Norm(WIDTH), Norm(WIDTH)
        self.q, self.k, self.v = _linear(WIDTH, WIDTH), _linear(WIDTH, small), _linear(WIDTH, small)
        self.o = _linear(WIDTH, WIDTH)
        self.mlp = Mlp(_linear(WIDTH, HIDDEN), _linear(WIDTH, HIDDEN), _linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = torch.ops.octavo_benchmarks.attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v)[0]
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def built(arm: str) -> nn.Module:
    kind, _, recipe = arm.partition(" ")
    if kind == "bf16":
        return Block()
    return octavo.convert(Block(), recipe, verbose=False, activations="fp8" if kind == "stored" else "bf16")
