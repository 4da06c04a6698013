"""What the saved-tensor hooks leave alone for where it comes from: parameters, and masked scores."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from test_saved import randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo.nn.saved import compressing
from octavo.nn.storage import kept_for_backward
from octavo.numerics import sqnr


class Derived(nn.Module):
    """A product with what is made of parameters, of another module's as well."""

    def __init__(self, make):
        super().__init__()
        self.make, self.weight = make, nn.Parameter(randn(64, 64, seed=1))

    def forward(self, x):
        return x @ self.make(self.weight)


OTHER = nn.Parameter(randn(64, 64, seed=2))
SMALL = nn.Parameter(randn(64, 4, seed=3))
DERIVED = {
    "scaled": lambda w: w * 2.0,
    "normed": lambda w: w / w.norm(dim=1, keepdim=True),
    "of another module": lambda w: OTHER,
    "a cast of another module's": lambda w: OTHER.double().float(),
    "a sum": lambda w: w + OTHER,
    "merged adapters": lambda w: w + 0.5 * SMALL @ SMALL.t(),
    "masked": lambda w: w.masked_fill(torch.eye(64).bool(), 0.0),
    "a part": lambda w: torch.cat([w, OTHER])[:64].t(),
}


@pytest.mark.parametrize("name", DERIVED)
def test_what_is_made_of_parameters_alone_is_never_rounded(name):
    layer, x = Derived(DERIVED[name]), randn(64, 64).requires_grad_()
    with compressing(layer):
        y = layer(x * 1)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.ones(64, 64) @ DERIVED[name](layer.weight).t())


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_parametrized_weights_are_never_rounded(norm):
    layer, x = nn.Linear(64, 64), randn(64, 64).requires_grad_()
    getattr(torch.nn.utils.parametrizations, norm)(layer).eval()
    with compressing(layer):
        y = layer(x * 1)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.ones(64, 64) @ layer.weight)


def test_activations_behind_which_there_are_only_parameters_are_rounded():
    """As in the first layer of a language model; with as many tokens as a weight has rows, too."""
    embedding, first, second = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
    x = randn(64, 64)
    with kept_for_backward(nn.ModuleList([embedding, first, second])) as kept, compressing(nn.Module()):
        second(first(embedding(torch.arange(64))))
        second(first(x))
    assert kept.by_dtype[torch.float8_e4m3fn] == 3 * 64 * 64  # the third input of a product is x


def scores():
    return randn(4, 64, 64).requires_grad_() * 1


HIDDEN = torch.ones(64, 64).triu(1).bool()
MINUS_INFINITY = torch.zeros(64, 64).masked_fill(HIDDEN, float("-inf"))
MASKINGS = {
    "added": lambda s: s + MINUS_INFINITY,
    "added in place": lambda s: s.clone().add_(MINUS_INFINITY),
    "filled": lambda s: s.masked_fill(HIDDEN, float("-inf")),
    "where": lambda s: torch.where(HIDDEN, float("-inf"), s),
    "written": lambda s: s.clone().index_put_((torch.tensor([1]),), MINUS_INFINITY),
    "with a learned bias": lambda s: s + (randn(64, 64).requires_grad_() * 1 + MINUS_INFINITY),
    "cast and scaled": lambda s: (s + MINUS_INFINITY).double().float().view(2, 2, 64, 64) * 0.5,
}


@pytest.mark.parametrize("masking", MASKINGS)
def test_masked_scores_are_kept_as_they_are(masking):
    """Saved by an operation, as the maximum is in some attention, they would lose a group of 32 for each -inf."""
    grads = []
    for scope in (nullcontext(), compressing(nn.Module())):
        with scope:
            x = scores()
            masked = MASKINGS[masking](x)
            y = torch.maximum(masked, torch.full_like(masked, -1.0, requires_grad=True)).softmax(-1)
        grads.append(torch.autograd.grad(y[..., :3].sum(), x)[0])
    assert grads[1].isfinite().all() and sqnr(*grads) > 24


def test_probabilities_and_rotated_heads_are_stored():
    cos = randn(64, 64)
    with kept_for_backward(nn.Module()) as kept, compressing(nn.Module()):
        p = (scores() + MINUS_INFINITY).softmax(-1)
        q = scores() * cos + torch.cat([scores()[..., 32:], scores()[..., :32]], -1) * cos
        (p @ q).sum()
    assert kept.by_dtype[torch.float8_e4m3fn] == p.numel() + q.numel()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["positions added", "learned tokens", "a parameter"])
def test_a_checkpointed_region_that_begins_there_decides_alike(name, reentrant):
    layer, tokens = nn.Linear(64, 64), nn.Parameter(randn(1, 64, 64))
    makes = {
        "positions added": lambda: randn(2, 64, 64).requires_grad_() * 1 + MINUS_INFINITY.exp(),
        "learned tokens": lambda: tokens.expand(2, -1, -1),
        "a parameter": lambda: tokens,
    }

    def region(h):
        with compressing(layer):
            return layer(h)

    grads = []
    for run in (region, partial(checkpoint, region, use_reentrant=reentrant)):
        run(makes[name]()).pow(2).sum().backward()
        grads.append(layer.weight.grad)
        layer.weight.grad = None
    assert sqnr(*grads) > (100 if not reentrant else 24)  # what begins a reentrant region has no past
