"""Floating point operations of Octavo's products, as `FlopCounterMode` counts them."""

import subprocess
import sys

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


@pytest.mark.parametrize("first", ["octavo", "torch.utils.flop_counter"])
@pytest.mark.slow
def test_the_order_of_imports_does_not_matter(first):
    second = {"octavo": "torch.utils.flop_counter"}.get(first, "octavo")
    program = f"""
import sys, torch, {first}
assert {first != "octavo"} or "torch.utils.flop_counter" not in sys.modules
import {second}, octavo
layer = octavo.convert(torch.nn.Linear(64, 64), verbose=False)
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    layer(torch.ones(16, 64))
assert counter.get_total_flops() == 2 * 16 * 64 * 64
"""
    subprocess.run([sys.executable, "-c", program], check=True)
