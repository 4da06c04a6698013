"""Odd but healthy models and batches, in which the inspector finds nothing and the autopilot moves nothing."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.inspect import Autopilot

WIDTH, WORDS, HIDDEN = 64, 64, 128


class Block(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.activation = activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(self.norm(x))))


class Adapted(nn.Module):
    """A frozen linear beside a trained product of two, the second of zeros."""

    def __init__(self, base):
        super().__init__()
        self.base, self.a = base.requires_grad_(False), nn.Linear(base.in_features, 8, bias=False)
        self.b = nn.Linear(8, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Experts(nn.Module):
    """Each token goes through one of eight linears; some get a token or none in a step."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 8), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        chosen, y = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().flatten()
            y = y.index_add(0, at, expert(x[at]).to(y.dtype) * weights[at, number, None])
        return x + y


def adapters(model):
    model.requires_grad_(False)
    for block in model[1:3]:
        block.up, block.down = Adapted(block.up), Adapted(block.down)


def experts(model):
    model[2] = Experts()


def zero_outputs(model):
    for layer in (model[1].down, model[2].down, model[4]):
        nn.init.zeros_(layer.weight)


@torch.no_grad()
def prune(model):
    for block in model[1:3]:
        for layer in (block.up, block.down):
            layer.weight[torch.arange(layer.weight.shape[0]) % 8 != 0] = 0


KINDS = {
    "plain": {}, "zeros": {"change": zero_outputs}, "adapters": {"change": adapters}, "padding": {"padding": 0.8},
    "masks": {"masked": 0.95}, "relu": {"activation": F.relu},
    "squared relu": {"activation": lambda x: F.relu(x).square()}, "pruned": {"change": prune, "after_step": prune},
    "experts": {"change": experts}, "tiny batches": {"tokens": 4},
}  # fmt: skip


def batch(step, tokens=128, padding=0.0, masked=0.0):
    """Tokens and what follows them; 0 where there is padding, -100 where there is no loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(1, WORDS, (tokens,), generator=generator)
    draw = torch.rand(tokens, generator=generator)
    targets = torch.where(draw < max(padding, masked), -100, words * 7 % WORDS)
    words = torch.where(draw < padding, 0, words)
    words[0], targets[0] = 1, 7  # one has a loss
    return words, targets


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.thorough] * (kind == "experts")) for kind in KINDS]
)
def test_nothing_is_found_and_nothing_moved(kind):
    options = dict(KINDS[kind])
    activation, change, after = (
        options.pop("activation", F.silu), options.pop("change", None), options.pop("after_step", None)
    )  # fmt: skip
    torch.manual_seed(1)
    embedding, head = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Linear(WIDTH, WORDS)
    model = nn.Sequential(embedding, Block(activation), Block(activation), nn.RMSNorm(WIDTH), head)
    if change:
        change(model)
    octavo.convert(model, "rowwise", skip=["4"], verbose=False)
    pilot = Autopilot(model, every=1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    measure = {layer.name: ["rowwise"] for layer in octavo.report(model) if layer.recipe}
    for step in range(1, 4):
        words, targets = batch(step, **options)
        with pilot.watch.step(step, force=True, measure=measure):
            F.cross_entropy(model(words).float(), targets).backward()
        assert not pilot.watch.findings()
        assert all(error["rowwise"] < 0.125 or math.isnan(error["rowwise"]) for error in pilot.watch.errors.values())
        pilot.act()
        optimizer.step()
        optimizer.zero_grad()
        if after:
            after(model)
    assert not pilot.changes
