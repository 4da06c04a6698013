"""Second derivatives, torch.func, forward mode, batched gradients: the right value or Octavo's error, never zero."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.comm import all_gather, all_reduce, all_to_all_single, reduce_scatter
from octavo.comm.collectives import exchange_rows
from octavo.nn.experts import gather_rows, inverse_order
from support.gated import GatedMLP, JointlyGatedMLP

ACTIVATIONS = octavo.Precision(matmul="bf16", activations="fp8")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 64, 64) / 8)

    def forward(self, x):
        return octavo.nn.grouped_linear(x, self.weight, None, torch.tensor([7, 16]).int(), octavo.RECIPES["rowwise"])


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 64) / 8)

    def forward(self, x):
        return octavo.nn.loss.linear_cross_entropy(x, self.weight, torch.arange(16))


def with_norm(norm):
    return nn.Sequential(norm(64), nn.Linear(64, 64))


def converted(make, recipe="rowwise", **options):
    torch.manual_seed(0)
    return octavo.convert(make(), *(() if "precision" in options else (recipe,)), verbose=False, **options)


TO_3D = nn.Unflatten(0, (2, 8))
CASES = {
    "linear": partial(converted, lambda: nn.Linear(64, 64)),
    "linear 3-D": partial(converted, lambda: nn.Sequential(TO_3D, nn.Linear(64, 64)), keep_weights=True),
    "mxfp8": partial(converted, lambda: nn.Linear(64, 64), "mxfp8"),
    "experts": Experts,
    "layer norm": partial(converted, partial(with_norm, nn.LayerNorm), precision=ACTIVATIONS),
    "RMS norm": partial(converted, partial(with_norm, nn.RMSNorm), precision=ACTIVATIONS),
    "activation": partial(converted, lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU()), precision=ACTIVATIONS),
    "gated": partial(converted, lambda: nn.Sequential(GatedMLP()), precision=ACTIVATIONS),
    "gated jointly": partial(converted, lambda: nn.Sequential(JointlyGatedMLP()), precision=ACTIVATIONS),
    "loss": Head,
}
STORES = ("layer norm", "RMS norm", "activation", "gated", "gated jointly")


def offloaded(module, x):
    with torch.autograd.graph.save_on_cpu():
        return module(x)


ROUTES = {
    "eager": lambda module, x: module(x),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "offload": offloaded,
}


def data():
    torch.manual_seed(1)
    return torch.randn(16, 64, requires_grad=True)


def penalty(y, by):
    """A gradient penalty as of WGAN-GP: no gradient that arrives in the first backward requires one. Nothing but the
    backward that computes the gradients can notice it: where the sum is differentiated by what autograd does not reach
    through them, as a tensor that is no leaf, it executes nothing of the penalty.
    """
    gradients = torch.autograd.grad(y, by, torch.ones_like(y), create_graph=True)
    return y.sum() + sum(g.square().sum() for g in gradients)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_penalty_raises(case, route):
    module, x = CASES[case](), data()
    h = x.sin()
    for by in ([x], list(module.parameters()), [h]) if route == "eager" else ([x],):
        y = ROUTES[route](module, h)
        with pytest.raises(RuntimeError, match=r"^octavo: .* (has no|there is no) second derivative"):
            penalty(y, by)


def per_sample(module, x):
    parameters = dict(module.named_parameters())
    return torch.func.grad(lambda p: torch.func.functional_call(module, p, (x.detach(),)).sum())(parameters)


def dual(module, x):
    with forward_ad.dual_level():
        return module(forward_ad.make_dual(x.detach(), torch.ones_like(x)))


def batched(module, x):
    y = module(x)
    return torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)


TRANSFORMS = {
    "func.grad": per_sample,
    "vmap": lambda module, x: torch.func.vmap(module)(x.detach().expand(3, 16, 64)),
    "jvp": lambda module, x: torch.func.jvp(module, (x.detach(),), (torch.ones_like(x),)),
    "dual": dual,
    "batched": batched,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # forward mode uses it
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
def test_transforms_raise_or_run_what_stores_as_before_conversion(case, transform):
    module, x, run = CASES[case](), data(), TRANSFORMS[transform]
    if case in STORES and transform != "batched":
        expected = run(octavo.revert(copy.deepcopy(module)), x)
        torch.testing.assert_close(run(module, x), expected, rtol=0, atol=0)
        return
    with pytest.raises(RuntimeError, match=r"^octavo: .* works with ordinary backward only"):
        run(module, x)
    if case not in ("loss", "experts"):
        with octavo.disabled():
            run(module, x)


def test_a_penalty_inside_disabled_is_that_of_the_original():
    module, values = CASES["gated"](), []
    octavo.revert(module)
    for convert in (False, True):
        model = octavo.convert(module, "rowwise", activations="fp8", verbose=False) if convert else module
        x = data()
        with octavo.disabled():
            values.append(torch.autograd.grad(penalty(model(x), [x]), list(model.parameters())))
    assert all(map(torch.equal, *values))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_exchanges_have_second_derivatives(one_rank):
    order = torch.randperm(16)
    exchanges = {
        "rows": lambda x: gather_rows(x, order, inverse_order(order)),
        "all_gather": lambda x: all_gather(x, one_rank),
        "reduce_scatter": lambda x: reduce_scatter(x, one_rank, op="avg"),
        "all_reduce": lambda x: all_reduce(x, one_rank),
        "all_to_all": lambda x: all_to_all_single(x, None, None, one_rank),
        "exact": lambda x: exchange_rows(x, [16], [16], one_rank, fp8=False),
    }
    for name, exchange in exchanges.items():
        x, g = torch.randn(16, 64).requires_grad_(), torch.randn(16, 64).requires_grad_()
        (dx,) = torch.autograd.grad(exchange(x.sin()), x, g, create_graph=True)
        got = torch.autograd.grad(dx.square().sum(), (x, g))
        plain = x.sin()[order] if name == "rows" else x.sin()
        (dx,) = torch.autograd.grad(plain, x, g, create_graph=True)
        for a, b in zip(got, torch.autograd.grad(dx.square().sum(), (x, g)), strict=True):
            assert (a - b).norm() < 0.1 * b.norm(), name


def test_weight_only_layers_have_second_derivatives():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).requires_grad_(False)
    model, results = octavo.convert(copy.deepcopy(plain), frozen="fp8", weight_only=["0", "2"], verbose=False), []
    for module in (plain, model):
        x = data()
        results.append(torch.autograd.grad(penalty(module(x), [x]), x)[0])
    assert (results[1] - results[0]).norm() < 0.05 * results[0].norm()
    assert F.cosine_similarity(*results).min() > 0.99
