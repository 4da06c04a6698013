"""Where a `Linear` finds its weight and bias: where `nn.Linear` finds them, whoever put them there."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import octavo


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


def with_property(layer, name):
    """Make a property of a new class, which reads the parameter, as torchtitan's simple FSDP does."""
    double = property(lambda self: 2 * self._parameters[name])
    layer.__class__ = type(f"Own{type(layer).__name__}", (type(layer),), {name: double})


def with_subclass(layer, name):
    def lookup(self, attribute):
        value = nn.Module.__getattr__(self, attribute)
        return 2 * value if attribute == name else value

    layer.__class__ = type(f"Own{type(layer).__name__}", (type(layer),), {"__getattr__": lookup})


def as_plain_tensor(layer, name):
    value = getattr(layer, name).detach() * 2
    delattr(layer, name)
    setattr(layer, name, value)


def as_buffer(layer, name):
    value = getattr(layer, name).detach() * 2
    delattr(layer, name)
    layer.register_buffer(name, value)


CHANGES = {
    "parametrized": lambda layer, name: parametrize.register_parametrization(layer, name, Doubled()),
    "pruned": lambda layer, name: prune.random_unstructured(layer, name, 0.5),
    "property": with_property,
    "lookup": with_subclass,
    "plain tensor": as_plain_tensor,
    "buffer": as_buffer,
    "hidden": lambda layer, name: vars(layer).update({name: getattr(layer, name).detach() * 2}),
    "another": lambda layer, name: setattr(layer, name, nn.Parameter(getattr(layer, name).detach() * 2)),
}


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_are_those_that_attributes_name(change, name):
    """After a first forward, too."""
    torch.manual_seed(0)
    layer, x = octavo.convert(nn.Linear(32, 48), "rowwise", verbose=False), torch.randn(16, 32)
    before = layer(x)
    CHANGES[change](layer, name)
    expected = octavo.nn.linear(x, layer.weight, layer.bias, layer.recipe)
    assert torch.equal(layer(x), expected) and not torch.equal(expected, before)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_without_a_parameter_the_error_is_that_of_torch(name):
    layer, x = octavo.convert(nn.Linear(32, 48), "rowwise", verbose=False), torch.randn(16, 32)
    delattr(layer, name)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        layer(x)
    setattr(layer, name, None)
    if name == "bias":
        assert layer(x).shape == (16, 48)
