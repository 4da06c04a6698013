"""A backward computes the products whose results it uses, and no others."""

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn.linear import Linear, linear
from octavo.numerics import RECIPES
from octavo.runtime import torch_compat
from releases import requires_torch
from support.dispatch_modes import Passing
from tensors import same

EVERYTHING = ["x", "weight", "bias"]


def products(call):
    """The number of FP8 products in a call, and its result."""
    with Passing() as mode:
        result = call()
    return mode.seen.count(torch.ops.octavo.scaled_mm.default), result


def layer(recipe="rowwise", bias=True):
    torch.manual_seed(0)
    model = octavo.convert(nn.Sequential(nn.Linear(64, 48, bias=bias)), recipe, verbose=False)
    return model[0]


def leaf(seed=1):
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def all_gradients(made, x):
    tensors = {"x": x, "weight": made.weight, "bias": made.bias}
    gradients = torch.autograd.grad(made(x).square().sum(), list(tensors.values()))
    return dict(zip(tensors, gradients, strict=True))


NAMES = [[a] for a in EVERYTHING] + [["x", "bias"], ["weight", "x"], EVERYTHING]


@pytest.mark.parametrize(
    ("recipe", "names", "way"),
    [
        *(("rowwise", names, ("grad", "backward")[index % 2]) for index, names in enumerate(NAMES)),
        *((name, ["x"], "grad") for name in RECIPES if name != "rowwise"),
        *((name, ["weight"], "backward") for name in RECIPES if name != "rowwise"),
    ],
    ids=str,
)
def test_some_gradients_cost_their_products_only(recipe, names, way):
    made, x = layer(recipe), leaf()
    expected = all_gradients(made, x)
    tensors = {"x": x, "weight": made.weight, "bias": made.bias}
    loss = made(x).square().sum()
    for _ in range(2):  # a retained graph is asked again
        asked = [tensors[name] for name in names]
        if way == "grad":
            count, gradients = products(lambda asked=asked: torch.autograd.grad(loss, asked, retain_graph=True))
        else:
            for tensor in tensors.values():
                tensor.grad = None
            count, _ = products(lambda asked=asked: loss.backward(inputs=asked, retain_graph=True))
            gradients = [tensor.grad for tensor in asked]
            assert all(tensor.grad is None for name, tensor in tensors.items() if name not in names)
        wgrad = recipe != "rowwise_hp_wgrad"
        assert count == ("x" in names) + ("weight" in names) * wgrad
        assert same([expected[name] for name in names], gradients)
    count, _ = products(loss.backward)
    assert count == 1 + wgrad
    assert all(tensor.grad is not None for tensor in tensors.values())


@pytest.mark.parametrize("form", ["view", "transposed", "parametrized", "product"])
def test_weights_that_are_no_leaves(form):
    x = leaf()
    parameter = nn.Parameter(torch.randn(48, 64))
    if form == "parametrized":
        made = layer(bias=False)

        class Doubled(nn.Module):
            def forward(self, weight):
                return 2 * weight

        parametrize.register_parametrization(made, "weight", Doubled())
        parameter, y = made.parametrizations.weight.original, made(x)
    else:
        if form == "transposed":
            parameter = nn.Parameter(torch.randn(64, 48))
        weight = {
            "view": parameter.view_as(parameter), "transposed": parameter.t(), "product": parameter * 2.0,
        }.get(form)  # fmt: skip
        y = linear(x, weight, None, RECIPES["rowwise"])
    loss = y.square().sum()
    both = torch.autograd.grad(loss, (x, parameter), retain_graph=True)
    for i, tensor in enumerate((x, parameter)):
        count, (gradient,) = products(lambda tensor=tensor: torch.autograd.grad(loss, tensor, retain_graph=True))
        assert count == 1 and torch.equal(gradient, both[i])
    assert products(loss.backward)[0] == 2 and parameter.grad is not None and x.grad is not None


def test_hooks_and_shared_weights_get_their_gradients():
    made, x = layer(), leaf()
    seen = []
    made.weight.register_hook(seen.append)
    made.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    loss = made(x).square().sum() + made(x * 2).sum()
    products(lambda: torch.autograd.grad(loss, x, retain_graph=True))
    assert not seen
    assert products(lambda: loss.backward(inputs=[made.weight], retain_graph=True))[0] == 2
    assert len(seen) == 2
    assert products(loss.backward)[0] == 4 and len(seen) == 4


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_has_all_gradients(use_reentrant):
    made, x = layer(), leaf()
    expected = all_gradients(made, x)
    loss = checkpoint(made, x, use_reentrant=use_reentrant).square().sum()
    if not use_reentrant:
        count, (gradient,) = products(lambda: torch.autograd.grad(loss, x, retain_graph=True))
        assert count <= 2 and torch.equal(gradient, expected["x"])  # recomputing may repeat the forward product
    loss.backward()
    for tensor, name in ((x, "x"), (made.weight, "weight"), (made.bias, "bias")):
        assert torch.equal(tensor.grad, expected[name]), name


def test_without_the_engines_answer_everything_is_computed(monkeypatch):
    def raising(node):
        raise RuntimeError("not here")

    monkeypatch.setattr(torch_compat, "will_execute", raising)
    made, x = layer(), leaf()
    loss = made(x).square().sum()
    assert products(lambda: torch.autograd.grad(loss, x, retain_graph=True))[0] == 2
    assert products(loss.backward)[0] == 2 and made.weight.grad is not None


def test_a_compiled_layer_traces_whole_and_has_all_gradients():
    made, x = layer(), leaf()
    expected = all_gradients(made, x)
    with torch._functorch.config.patch(donated_buffer=False):  # PyTorch's condition for a second backward
        loss = torch.compile(made, fullgraph=True, backend="aot_eager")(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(gradient, expected["x"])
    loss.backward()
    torch.testing.assert_close(made.weight.grad, expected["weight"])


@requires_torch("2.13", "in 2.11 autograd functions written in Python do not outlive their outputs")
def test_zero_bubble_splits_three_products_per_layer():
    """Input gradients first, weight gradients later: 3 products per layer and micro-batch, as in one backward."""
    layers = [layer("rowwise", bias=False), Linear(48, 64, bias=False), Linear(64, 32, bias=False)]
    stage, x = nn.Sequential(*layers), leaf()
    whole, _ = products(lambda: stage(x).sum().backward())
    expected = [x.grad, *(made.weight.grad for made in layers)]
    stage.zero_grad()
    x.grad = None

    def split():
        y = stage(x)
        inputs, groups = stage_backward_input([y], [torch.ones_like(y)], [x], stage.parameters())
        assert all(made.weight.grad is None for made in layers)
        stage_backward_weight(stage.parameters(), groups)
        return inputs[0]

    count, dx = products(split)
    assert count == whole == 9
    assert same(expected, (dx, *(made.weight.grad for made in layers)))


@pytest.mark.skipif(Version(torch.__version__) >= Version("2.13"), reason="torch 2.13 keeps the node")
@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_zero_bubble_of_an_older_torch_is_refused_by_name(kind):
    stage, x = layer(bias=False), leaf()
    if kind == "norm":
        precision = octavo.Precision(matmul="bf16", activations="fp8")
        stage = octavo.convert(nn.Sequential(nn.LayerNorm(64)), precision=precision, verbose=False)
    y = stage(x)
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], stage.parameters())
    with pytest.raises(RuntimeError, match="before torch 2.13 zero-bubble schedules cannot"):
        stage_backward_weight(stage.parameters(), groups)
