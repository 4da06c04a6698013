"""A layer of another kind that multiplies in FP8: what its class states is all that the library asks for."""

import pytest
import torch
from torch import nn

import octavo
from octavo.inspect import Watch
from octavo.nn.linear import linear
from octavo.nn.linear_like import LinearLike
from octavo.nn.rules import sizes
from octavo.nn.select import is_linear


class Columns(nn.Module):
    """A linear with a [in, out] weight, of no library that the package knows."""

    def __init__(self, recipe=octavo.RECIPES["rowwise"]):
        super().__init__()
        self.weight, self.bias, self.recipe = nn.Parameter(torch.randn(64, 48)), None, recipe
        self.in_features, self.out_features = 64, 48

    def forward(self, x):
        return x @ self.weight


class Fp8Columns(LinearLike, Columns):
    octavo_original = Columns
    weight_is_transposed = True

    def forward(self, x):
        return linear(x, self.weight.t(), self.bias, self.recipe, self.octavo_keeps_weight(), self.octavo_quantizer())


def test_a_new_kind_of_layer_is_reported_watched_changed_and_reverted():
    model = nn.Sequential(Fp8Columns(), nn.Linear(48, 48))
    assert is_linear(model[0]) and sizes(model[0]) == (64, 48)
    (row, _) = octavo.report(model)
    assert (row.linear, row.converted, row.recipe) == (True, True, "rowwise")
    with pytest.raises(ValueError, match="1 layers of this model are converted already"):
        octavo.convert(model)
    octavo.nn.change_recipe(model, "0", "blockwise", reason="a test")
    watch, x = Watch(model, every=1), torch.randn(8, 64)
    with watch.step(measure={"0": ["blockwise"]}):
        y = model[0](x)
        y.sum().backward()
    assert torch.equal(y, linear(x, model[0].weight.t(), None, octavo.RECIPES["blockwise"]))
    assert {row.recipe for row in watch.rows} == {"blockwise"} and watch.errors["0"]["blockwise"] < 0.1
    with pytest.raises(ValueError, match="no FP8 class for a Columns with recipe 'delayed'"):
        octavo.nn.change_recipe(model, "0", "delayed", reason="a test")
    octavo.revert(model)
    assert type(model[0]) is Columns and torch.equal(model[0](x), x @ model[0].weight)


def test_what_only_looks_like_one_is_none():
    """A recipe, an octavo module path or the name of a class make no converted layer."""
    fake = type("Conv1D", (Columns,), {"__module__": "octavo.nn.conv1d"})()
    assert not octavo.report(fake)[0].converted and not is_linear(fake)
    with pytest.raises(ValueError, match="holds no converted layer"):
        octavo.revert(fake)
    mine = type("Linear", (octavo.nn.Linear,), {"__module__": "octavo.nn.linear"})(8, 8)
    with pytest.raises(ValueError, match="became a Linear after it was converted"):
        octavo.revert(mine)


def test_a_layer_without_parameters_is_reported():
    """As under FSDP1, which puts plain tensors in their place."""
    layer = octavo.convert(nn.Linear(8, 8, bias=False), verbose=False)
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = weight
    assert octavo.report(layer)[0].converted
