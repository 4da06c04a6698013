"""A layer of a converted model in another recipe: the model that converting it so at once would have made."""

import copy
from dataclasses import replace

import pytest
import torch
from models import llama

import octavo
from octavo.nn import Linear, change_recipe
from octavo.numerics import Plan

LAYER = "model.layers.1.mlp.down_proj"


def gradients(model):
    tokens = torch.arange(48).view(2, 24) % 97
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def planned(model, layers, recipe):
    """The plan that `convert` would make of a model, with some layers otherwise."""
    plan = octavo.convert(copy.deepcopy(model), activations="fp8", verbose=False).octavo_plan
    new_recipe = None if recipe is None else octavo.RECIPES[recipe]
    return Plan({n: replace(d, recipe=new_recipe) if n in layers else d for n, d in plan.decisions.items()}, "fp8")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "recipe"),
    [
        (LAYER, "tensorwise"), (LAYER, None), ("model.layers.0.self_attn.q_proj", "blockwise"),
        ("model.layers.0.mlp.gate_proj", "rowwise_hp_wgrad"), ("model.layers.0.mlp.gate_proj", None),
    ],
)  # fmt: skip
def test_as_if_converted_so_at_once(recipe, layer):
    model = llama().bfloat16()
    reference = octavo.convert(copy.deepcopy(model), plan=planned(model, [layer], recipe), verbose=False)
    octavo.convert(model, activations="fp8", verbose=False)
    before = gradients(model)
    change_recipe(model, layer, recipe, reason="a test")
    actual, exact = gradients(model), gradients(reference)
    assert all(torch.equal(a, b) for a, b in zip(actual, exact, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(actual, before, strict=True))
    rows = {row.name: row for row in octavo.report(model)}
    assert (rows[layer].recipe, rows[layer].reason) == (recipe, "a test")


def test_there_and_back_is_as_before():
    model = octavo.convert(llama().bfloat16(), keep_weights=True, verbose=False)
    before = gradients(model)
    for recipe in (None, "blockwise", "rowwise"):
        change_recipe(model, LAYER, recipe, reason="a test")
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), before, strict=True))
    octavo.revert(model)
    assert not any(isinstance(module, Linear) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        ("model.layers.1.mlp.down_prj", None, "no module 'model.layers.1.mlp.down_prj' .did you mean"),
        ("model.norm", "rowwise", "is not a linear layer"),
        (LAYER, "rowise", "did you mean 'rowwise'"),
    ],
)
def test_mistakes_leave_the_model_as_it_was(name, recipe, message):
    model = octavo.convert(llama(), verbose=False)
    before = str(octavo.report(model))
    with pytest.raises(ValueError, match=message):
        change_recipe(model, name, recipe, reason="a test")
    assert str(octavo.report(model)) == before
