"""Floating point operations of Octavo's products, as `FlopCounterMode` counts them."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.nn.experts import grouped_linear
from octavo.numerics.recipe import RECIPES


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
    assert (
        count(lambda: grouped_linear(x, weight, None, offsets, RECIPES["rowwise"]).sum().backward())
        == 3 * 2 * 64 * 128 * 96
    )
