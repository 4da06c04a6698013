"""Floating point operations of Octavo's products, as `FlopCounterMode` counts them."""

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.nn.experts import grouped_linear
from octavo.numerics.recipe import RECIPES
from support.graphs import compiled


def count(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", RECIPES)
def test_a_converted_layer_counts_as_a_plain_one(name):
    layer, x = nn.Linear(128, 96), torch.randn(2, 32, 128, requires_grad=True)
    plain = count(lambda: layer(x).sum().backward())
    octavo.convert(layer, name, verbose=False)
    assert count(lambda: layer(x).sum().backward()) == plain == 3 * 2 * 64 * 128 * 96


def test_products_of_experts_count():
    x, weight = torch.randn(64, 128, requires_grad=True), torch.randn(4, 96, 128, requires_grad=True)
    offsets = torch.tensor([10, 10, 40, 64], dtype=torch.int32)
    flops = count(lambda: grouped_linear(x, weight, None, offsets, RECIPES["rowwise"]).sum().backward())
    assert flops == 3 * 2 * 64 * 128 * 96


class TwoProducts(torch.nn.Module):
    def __init__(self, *sizes: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size, 2048) for size in sizes)

    def forward(self, *inputs):
        return sum(F.gelu(layer(x)) for layer, x in zip(self.layers, inputs, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, at the import of its partitioner
@pytest.mark.parametrize("sizes", [(256, 512), (512, 256)])
def test_an_activation_budget_recomputes_the_cheaper_product(sizes):
    """Of two results of one size, of which one fits. PyTorch weighs ops of other libraries on request only."""
    graphs, model = compiled(octavo.convert(TwoProducts(*sizes), "rowwise", verbose=False))
    inputs = [torch.randn(512, size, requires_grad=True) for size in sizes]
    with functorch_config.patch(activation_memory_budget=0.9, is_non_builtin_to_include=True):
        model(*inputs).sum().backward()
    products = ([n for n in g.graph.nodes if n.target == torch.ops.octavo.scaled_mm.default] for g in graphs)
    forward, backward = (
        [n.args[0].meta["val"].shape[1] for n in nodes if n.meta["val"].shape == (512, 2048)] for nodes in products
    )
    assert forward == list(sizes) and backward == [256]
