"""Dropout between column-parallel layers and a row-parallel one, on one rank at a time."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo.parallel.tensor_parallel import divide_dropout
from tensors import same

ONES = torch.ones(4, 16)


class Mlp(nn.Module):
    """Two column-parallel layers, dropout of features, a row-parallel layer; a part may be checkpointed."""

    def __init__(self, checkpointed, reentrant):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(16, 16) for _ in range(3))
        self.dropout, self.checkpointed, self.reentrant, self.masks = 0.5, checkpointed, reentrant, []

    def forward(self, x):
        part = self.inner if self.checkpointed == "dropout too" else lambda x: self.up(x).tanh()
        inner = checkpoint(part, x, use_reentrant=self.reentrant) if self.checkpointed else part(x)
        return self.down(inner if part == self.inner else self.drop(inner * self.gate(x)))

    def inner(self, x):
        return self.drop(self.up(x).tanh() * self.gate(x)).tanh()

    def drop(self, x):
        mask = F.dropout(torch.ones_like(x), self.dropout)
        self.masks.append(mask)
        return x * mask


def divided(module, rank, columns=("up", "gate"), rows=("down",)):
    divide_dropout(nn.ModuleDict({"m": module}), [f"m.{c}" for c in columns], [f"m.{r}" for r in rows], rank)
    return module


def train(rank, checkpointed=None, reentrant=False, steps=3):
    """Return the masks of the features, those recomputed last, and of the residual stream."""
    mlp, residual = divided(Mlp(checkpointed, reentrant), rank), []
    torch.manual_seed(1)
    for _ in range(steps):
        x = ONES.clone().requires_grad_()
        outputs = mlp(x), mlp(x)
        residual += [F.dropout(ONES, 0.5) for _ in range(2)]
        for y in outputs:  # not in the order in which the engine would run them
            y.sum().backward()
    return mlp.masks, residual


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_that_is_recomputed_alone_leaves_random_numbers_as_they_were(reentrant):
    masks, residual = train(0)
    again, again_residual = train(0, "first layer", reentrant)
    assert same(masks, again) and same(residual, again_residual)
    assert not any(torch.equal(a, b) for i, a in enumerate(residual) for b in residual[:i])
    other, other_residual = train(1, "first layer", reentrant)
    assert same(residual, other_residual) and not any(map(torch.equal, masks, other))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_part_drops_the_same_features(reentrant):
    masks, residual = train(0, "dropout too", reentrant)
    assert same(residual, train(0)[1])
    for first, second, *recomputed in (masks[i : i + 4] for i in range(0, len(masks), 4)):
        assert same([first, second], recomputed)


def test_a_layer_that_is_called_alone_leaves_random_numbers_as_they_were():
    mlp = divided(Mlp(None, False), 0)
    before = torch.get_rng_state()
    mlp.up(ONES)
    assert torch.equal(before, torch.get_rng_state())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o, self.up, self.down = (nn.Linear(16, 16) for _ in range(4))
        self.dropout, self.inner, self.residual = 0.5, [], []

    def forward(self, x):
        for first, last in ((self.q, self.o), (self.up, self.down)):
            inner = first(x)
            self.inner.append(F.dropout(torch.ones_like(inner), self.dropout))
            y = last(inner * self.inner[-1])
            self.residual.append(F.dropout(torch.ones_like(y), self.dropout))
            x = x + y * self.residual[-1]
        return x


def test_a_module_may_have_two_row_parallel_layers():
    blocks = []
    for rank in range(2):
        blocks.append(divided(Block(), rank, ("q", "up"), ("o", "down")))
        torch.manual_seed(1)
        blocks[-1](ONES)
    assert same(*(block.residual for block in blocks))
    assert not any(map(torch.equal, *(block.inner for block in blocks)))


class Small(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(16, 16), nn.Linear(16, 16), drop
        if drop is None:
            self.config = SimpleNamespace(attention_dropout=0.5)

    def forward(self, x):
        up = self.up(x)
        ones = torch.ones(4, 16, 1, 1)
        self.mask = F.dropout(ones, self.config.attention_dropout) if self.act is None else self.act(ones)
        return self.down(up)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout, None])
def test_dropout_of_every_kind_is_divided(kind):
    masks = []
    for rank in range(2):
        module = divided(Small(None if kind is None else kind(0.5)), rank, ("up",))
        torch.manual_seed(1)
        module(ONES)
        masks.append(module.mask)
    assert not torch.equal(*masks)


def test_modules_without_dropout_get_no_hooks():
    module = divided(Small(nn.Dropout(0.0)), 0, ("up",))
    assert not module._forward_hooks and not module.up._forward_hooks and not module.down._forward_pre_hooks


def test_masks_differ_under_any_default_device():
    mlp = divided(Mlp(None, False), 0)
    with torch.device("meta"):
        mlp(ONES), mlp(ONES)
    assert not torch.equal(*mlp.masks)
