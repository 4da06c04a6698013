"""Classes of modules are swapped together or not at all, and nothing that is the user's is lost."""

import copy
import functools
import pickle
from itertools import chain, repeat
from unittest import mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from models import MLP, llama
from torch import nn

import octavo
from octavo.activations import modules as activations
from octavo.nn import convert, filters
from octavo.nn.convert import change_recipe


class ClassAttribute(nn.Linear):
    keep_weights = 7


class Child(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.recipe = nn.Identity()


class Buffer(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("equalizer", torch.zeros(2))


class ReadOnly(nn.Linear):
    @property
    def recipe(self):
        return "soup"


class Tagged(nn.Linear):
    def __init_subclass__(cls, tag):
        pass


class FixedMeta(type):
    def __new__(cls, name, bases, members):
        made = [base for base in bases if isinstance(base, FixedMeta)]
        return made[0] if made else super().__new__(cls, name, bases, members)


class Fixed(nn.Linear, metaclass=FixedMeta):
    pass


class Wrapping(nn.Linear):
    def __init_subclass__(cls):
        inner = cls.forward
        cls.forward = lambda self, input: inner(self, input)


class WrappingWithItsName(nn.Linear):
    def __init_subclass__(cls):
        inner = cls.forward
        cls.forward = functools.wraps(inner)(lambda self, input: 2 * inner(self, input))


class Copied(nn.Linear):
    def __deepcopy__(self, memo):
        return type(self)(self.in_features, self.out_features)


class Pickled(nn.Linear):
    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if key in vars(nn.Linear(1, 1))}


class Refusing(nn.Linear):
    def __setattr__(self, name, value):
        if name in ("recipe", "__class__", "octavo_plan", "amax_history"):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __delattr__(self, name):
        raise AttributeError(name)


class Slotted(nn.Linear):
    __slots__ = ("note",)


class Registry(nn.Linear, metaclass=type("Meta", (type,), {})):
    def __class_getitem__(cls, item):
        raise TypeError(item)


def state(model):
    return [(module, type(module), dict(vars(module))) for module in model.modules()]


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        (ClassAttribute, "attribute 'keep_weights' of its own"),
        (Child, "attribute 'recipe' of its own"),
        (Buffer, "attribute 'equalizer' of its own"),
        (ReadOnly, "attribute 'recipe' of its own"),
        (Tagged, "raises TypeError: .*'tag'"),
        (Fixed, "raises TypeError: .*changes its subclasses"),
        (Wrapping, "raises TypeError: .*changes its subclasses"),
        (WrappingWithItsName, "raises TypeError: .*replaces the forward of its subclasses"),
        (Copied, "copies itself in its own way"),
        (Pickled, "copies itself in its own way"),
    ],
)
def test_a_linear_that_would_lose_something_is_left_alone_with_the_reason(owner, reason):
    model = nn.Sequential(nn.Linear(32, 32), owner(32, 32))
    before, x = state(model), torch.randn(3, 32)
    alone = model[1](x)
    octavo.convert(model, verbose=False)
    rows = octavo.report(model).rows
    assert rows[0].converted and not rows[1].converted
    with pytest.raises(ValueError, match=reason):
        octavo.convert(model[1], verbose=False)
    assert torch.equal(model[1](x), alone)
    octavo.revert(model)
    assert state(model) == before


@pytest.mark.parametrize("owner", [Refusing, Slotted, Registry])
def test_a_class_with_odd_ways_is_converted_and_reverted(owner):
    model = nn.Sequential(nn.Linear(32, 32), owner(32, 32))
    before = state(model)
    octavo.convert(model, "mxfp8", verbose=False)
    assert [row.recipe for row in octavo.report(model)] == ["mxfp8", "mxfp8"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[1]) is type(model[1]) and twin[1].recipe == model[1].recipe
    octavo.revert(model)
    assert state(model) == before
    octavo.convert(model[1], "rowwise_equalized", verbose=False)
    model(torch.randn(3, 32)).sum().backward()
    octavo.revert(model[1])
    assert state(model) == before


def failing(function, call, error):
    """A function that raises after so many calls."""
    return mock.Mock(wraps=function, side_effect=chain(repeat(mock.DEFAULT, call), repeat(error)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("error", [RuntimeError("full"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (convert, "set_class", 2),
        (activations, "set_class", 1),
        (convert, "convert_activations", 2),
        (convert, "report", 0),
    ],
)
def test_a_conversion_that_stops_midway_leaves_the_model_as_it_was(module, name, call, error, monkeypatch):
    model = llama(num_hidden_layers=1)
    if name == "report":
        model.scripted = torch.jit.script(nn.Linear(8, 8))  # which holds its parameters in no dict
    before = state(model)
    octavo.revert(octavo.convert(copy.deepcopy(model), activations="fp8", verbose=False))  # classes are made now
    monkeypatch.setattr(module, name, failing(getattr(module, name), call, error))
    with pytest.raises(type(error)):
        octavo.convert(model, activations="fp8")
    assert state(model) == before
    monkeypatch.undo()
    octavo.convert(model, activations="fp8", verbose=False)


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "name", "call"),
    [
        (octavo.revert, "restore_original_class", 2),
        (octavo.revert, "revert_activations", 2),
        (lambda model: change_recipe(model, LAYER, None, reason="test"), "_update_plan", 0),
        (lambda model: change_recipe(model, LAYER, "mxfp8", reason="test"), "_update_plan", 0),
    ],
)
def test_a_change_that_stops_midway_leaves_the_model_converted(change, name, call, monkeypatch):
    model = octavo.convert(llama(num_hidden_layers=1), activations="fp8", verbose=False)
    before = state(model)
    monkeypatch.setattr(convert, name, failing(getattr(convert, name), call, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        change(model)
    assert state(model) == before


@pytest.mark.parametrize("arguments", [{}, {"precision": octavo.Precision(matmul="bf16", activations="fp8")}])
def test_a_forward_put_on_the_instance_since_is_to_be_taken_off_first(arguments):
    model, x = nn.Sequential(MLP(), nn.Linear(64, 64)), torch.randn(4, 64)
    exact = model(x)
    octavo.convert(model, verbose=False, **arguments)
    converted = [m for m in model.modules() if hasattr(type(m), "octavo_original")]
    for module in converted:
        add_hook_to_module(module, ModelHook())
    before, result = state(model), model(x)
    with pytest.raises(ValueError, match=r"forward that was put on the instance.*remove_hook_from_submodules"):
        octavo.revert(model)
    if not arguments:
        with pytest.raises(ValueError, match="change_recipe: '1' has a forward that was put on the instance"):
            change_recipe(model, "1", None, reason="test")
    assert state(model) == before and torch.equal(model(x), result)
    if not arguments:
        change_recipe(model, "1", "mxfp8", reason="test")  # which keeps the class
        assert model[1].recipe.name == "mxfp8" and not torch.equal(model(x), result)
    for module in converted:
        remove_hook_from_module(module)
    octavo.revert(model)
    assert torch.equal(model(x), exact)


class Wrapper(nn.Module):
    """As PEFT's and torch.compile's, which have the attributes of what they wrap."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def test_a_linear_with_several_names_is_decided_by_all_of_them():
    shared, other = nn.Linear(128, 32), nn.Linear(128, 128)
    names = {"proj": shared, "lora_A": shared, "other": other, "last": other}
    for order in (names, dict(reversed(names.items()))):
        rows = octavo.report(octavo.convert(copy.deepcopy(nn.ModuleDict(order)), verbose=False))
        reasons = {row.name: row.reason for row in rows if not row.converted}
        assert len(reasons) == 1 and "adapter of low rank" in next(iter(reasons.values()))
    for order in (names, dict(reversed(names.items()))):
        for rule in (filters.name("other"), lambda module, name: name != "last"):
            with pytest.raises(ValueError, match="excluded by filter") as refused:
                octavo.convert(nn.ModuleDict(order), filter=rule, verbose=False)
            first = next(name for name in order if order[name] is other)
            assert ("(as 'last')" in str(refused.value)) == (first != "last")
    model = nn.ModuleDict({"x": other, "y": other})
    rows = octavo.report(octavo.convert(model, {filters.name("y"): "mxfp8"}, verbose=False))
    assert rows[0].recipe == "mxfp8" and "(as 'y')" in rows[0].reason
    change_recipe(model, "y", None, reason="by its second name")
    assert [(row.recipe, row.reason) for row in octavo.report(model)] == [(None, "by its second name")]


def test_a_head_that_peft_has_split_is_still_one():
    model = llama(num_hidden_layers=1)
    head = nn.ModuleDict({"original_module": model.lm_head, "default": copy.deepcopy(model.lm_head)})
    model.lm_head = head
    for whole in (model, Wrapper(model), nn.Sequential(model)):
        rows = octavo.report(octavo.convert(whole, verbose=False))
        kept = [row.reason.startswith("vocabulary head") for row in rows if not row.converted]
        assert kept == [True, True]
        octavo.revert(whole)


class Wrapped(MLP):
    """Wraps the forward of each subclass, as Transformers' layers that checkpoint themselves do."""

    def __init_subclass__(cls):
        inner = cls.forward
        cls.forward = functools.wraps(inner)(lambda self, *args: inner(self, *args))


def test_a_class_that_wraps_the_forward_of_its_subclasses_stores_activations():
    model, x = type("Block", (Wrapped,), {})(), torch.randn(96, 64)
    expected = model(x)
    octavo.convert(model, precision=octavo.Precision(matmul="bf16", activations="fp8"), verbose=False)
    assert octavo.report(model).activations[0].activation_storage and torch.equal(model(x), expected)
