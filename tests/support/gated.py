"""Gated MLPs, whose code `activations="fp8"` knows."""

from torch import nn


class GatedMLP(nn.Module):
    """Gate and up by themselves, as in a Llama."""

    def __init__(self, width=64, inner=96):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(*sizes) for sizes in ((width, inner), (width, inner), (inner, width))
        )
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class JointlyGatedMLP(nn.Module):
    """Gate and up in one product, as in a Phi-3."""

    def __init__(self, width=64, inner=96):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act_fn(gate))
