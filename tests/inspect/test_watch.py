"""Watching: in sampled steps only, and never with an effect on what is computed."""

import math

import pytest
import torch
from families import GPT2
from models import MLP, gradients, llama
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.inspect import Watch, sample
from octavo.inspect.findings import OPERANDS
from octavo.nn.operands import quantize_gradient, quantized_input
from octavo.numerics import RECIPES, Precision
from octavo.numerics.error import sqnr
from tensors import one_thread, same


@pytest.fixture(autouse=True)
def threads():
    with one_thread():
        yield


def tokens(rows=2, seed=0):
    return torch.randint(0, 128, (rows, 24), generator=torch.Generator().manual_seed(seed))


def train(model, micros=1):
    """One step of a language model: its loss, and all gradients."""
    model.zero_grad()
    ids = tokens(2 * micros)
    total = 0.0
    for part in ids.chunk(micros):
        loss = model(input_ids=part, labels=part, use_cache=False).loss / micros
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def no_hooks(model):
    return not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._forward_hooks_with_kwargs
        for m in model.modules()
    )


def converted(level="fp8", recipe="rowwise", dtype=torch.bfloat16, **options):
    return octavo.convert(llama(**options).to(dtype), precision=Precision.level(level, recipe=recipe), verbose=False)


def looked(model, run, **options):
    """A watch that has looked at a step, in which `run` is called."""
    watch = Watch(model, every=1, **options)
    with watch.step():
        run()
    return watch


def assert_unchanged(make, step=train, what_if=("tensorwise", "mxfp8")):
    """A sampled step is bitwise the unsampled one, before and after. Returns its rows."""
    model = make()
    watch = Watch(model, every=2, what_if=what_if)
    results, rows = [], []
    for _ in range(3):
        with watch.step():
            results.append(step(model))
        assert no_hooks(model)
        assert bool(watch.rows) == (watch.number == 2)
        rows += watch.rows
    unsampled = make()  # channel scales change from step to step
    for loss, actual in results:
        expected_loss, expected = step(unsampled)
        assert loss == expected_loss
        assert same(expected, actual)
    return rows


@pytest.mark.thorough
@pytest.mark.parametrize(("recipe", "level"), [*((name, "fp8") for name in RECIPES), ("rowwise", "fp8+activations")])
def test_a_sampled_step_computes_what_an_unsampled_one_does(recipe, level):
    rows = assert_unchanged(lambda: converted(level, recipe))
    seen = {(row.layer, row.operand) for row in rows}
    layers = [name for name, m in converted(level, recipe).named_modules() if isinstance(m, octavo.nn.Linear)]
    operands = [o for o in OPERANDS if o != "wgrad_g" or RECIPES[recipe].wgrad_g is not None]
    assert seen == {(layer, operand) for layer in layers for operand in operands}
    assert len(rows) == len(seen) == 14 * len(operands)
    assert {row.recipe for row in rows} == {recipe}
    assert all(set(row.what_if) == {"tensorwise", "mxfp8"} for row in rows)
    assert all(20 < row.sqnr < 40 and row.nonfinite == 0 for row in rows)


def named(row):
    return row.layer, row.operand


@pytest.mark.thorough
def test_micro_batches_are_all_counted_and_the_weight_once():
    model = converted()
    one, four = (
        {named(row): row for row in looked(model, lambda n=n: train(model, micros=n)).rows} for n in (1, 4)
    )  # fmt: skip
    assert one.keys() == four.keys()
    for key, row in four.items():
        assert row.elements == one[key].elements * (1 if key[1] == "w" else 4)
    assert_unchanged(converted, lambda model: train(model, micros=4))


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_figures_are_those_of_the_forms_that_products_read(recipe):
    """X, W and both forms of G, with the scales of the others folded in as the layer itself does it."""
    torch.manual_seed(0)
    recipe = RECIPES[recipe]
    linear = octavo.convert(torch.nn.Linear(300, 200, bias=False), recipe, verbose=False)
    x = (torch.randn(2, 70, 300) * torch.rand(2, 70, 1) ** 4).requires_grad_()
    g = torch.randn(2, 70, 200) * torch.rand(200) ** 4
    actual = {row.operand: row.sqnr for row in looked(linear, lambda: linear(x).backward(g)).rows}
    x_MK, g_MN, w_NK = x.detach().flatten(0, 1), g.flatten(0, 1), linear.weight.detach()
    if recipe.equalization:
        x_MK, w_NK = x_MK * linear.equalizer.scales.inverse, w_NK * linear.equalizer.scales.factor
    x_q, kept = quantized_input(x_MK, recipe, True, None)
    w_q, w_back = octavo.kernels.quantize(w_NK, recipe.w), octavo.kernels.quantize(w_NK, recipe.dgrad_w)
    g_dgrad, g_wgrad = quantize_gradient(g_MN, w_back, kept, recipe)
    reference = {"x": sqnr(x_MK, x_q.dequantize()), "w": sqnr(w_NK, w_q.dequantize())}
    reference["dgrad_g"] = sqnr(g_MN * w_back.scale.t() if recipe.folds_w else g_MN, g_dgrad.dequantize())
    if g_wgrad is not None:
        reference["wgrad_g"] = sqnr(g_MN * kept.scale if recipe.folds_x else g_MN, g_wgrad.dequantize())
    assert list(actual) == list(reference)
    for operand, level in reference.items():
        assert actual[operand] == pytest.approx(level, abs=1e-4), operand


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_what_if_is_what_a_model_of_that_recipe_would_show(recipe):
    def rows(own, what_if):
        torch.manual_seed(0)
        linear = octavo.convert(torch.nn.Linear(300, 200, bias=False), own, verbose=False)
        x = (torch.randn(70, 300) * torch.rand(70, 1) ** 4).requires_grad_()
        g = torch.randn(70, 200) * torch.rand(200) ** 4
        return {row.operand: row for row in looked(linear, lambda: linear(x).backward(g), what_if=what_if).rows}

    itself, others = rows(recipe, ()), rows("tensorwise", (recipe,))
    for operand, row in others.items():
        expected = itself[operand].sqnr if operand in itself else math.inf
        assert row.what_if[recipe] == pytest.approx(expected, rel=1e-9)


def test_when_a_step_is_sampled():
    model = octavo.nn.Linear(32, 32)
    watch = Watch(model, every=3)
    sampled = []
    for number in range(1, 8):
        with watch.step(force=number == 4):
            model(torch.randn(4, 32)).sum().backward()
        if watch.rows:
            sampled.append(watch.rows[0].step)
    assert sampled == [3, 4, 6]
    with watch.step(300):
        model(torch.randn(4, 32))
    assert {(row.step, row.operand) for row in watch.rows} == {(300, "x"), (300, "w")}  # no backward, no G
    with Watch(model, every=0).step(300):
        assert no_hooks(model)


def test_a_step_that_is_taken_again_counts_once():
    model = converted()
    watch = Watch(model, every=1)
    for number in (1, 1, 1, 2):
        with watch.step(number):
            train(model)
    row = watch.rows[0]
    assert watch.history.median(row) is None  # of one earlier step
    with watch.step():
        train(model)
    assert watch.history.median(row) == row.amax


def test_a_step_that_fails_leaves_no_hooks():
    model = converted()
    watch = Watch(model, every=1)
    with pytest.raises(RuntimeError, match="in the step"), watch.step():
        assert not no_hooks(model)
        raise RuntimeError("in the step")
    assert no_hooks(model)
    assert watch.rows == []


def test_frozen_weights_and_inputs_have_no_gradient_for_their_products():
    model = MLP()
    model.up_proj.requires_grad_(False)
    octavo.convert(model, verbose=False)
    seen = {named(row) for row in looked(model, lambda: model(torch.randn(8, 64)).sum().backward()).rows}
    gradients_of = {layer: {o for name, o in seen if name == layer} - {"x", "w"} for layer, _ in seen}
    assert gradients_of == {"gate_proj": {"wgrad_g"}, "up_proj": set(), "down_proj": {"dgrad_g", "wgrad_g"}}


def test_layers_called_twice_or_with_a_keyword_or_on_nothing():
    model = nn.Sequential(octavo.nn.Linear(32, 32))
    watch = Watch(model, every=1)
    with watch.step():
        y = model[0](input=torch.randn(4, 32)) + model[0](torch.randn(0, 32)).sum() + model[0](torch.randn(6, 32))[:4]
        y.sum().backward()
    elements = {row.operand: row.elements for row in watch.rows}
    assert elements == {"x": 320, "w": 1024, "wgrad_g": 320}


def test_layers_in_high_precision_on_request():
    model = MLP()
    octavo.convert(model, skip=["up_proj"], verbose=False)
    for high_precision, reference in (
        (False, {"gate_proj", "down_proj"}),
        (True, {"gate_proj", "up_proj", "down_proj"}),
    ):
        options = {"what_if": ("rowwise",), "high_precision": high_precision}
        watch = looked(model, lambda: model(torch.randn(8, 64)).sum().backward(), **options)
        assert {row.layer for row in watch.rows} == reference
    kept = [row for row in watch.rows if row.recipe == "bf16"]
    assert {row.layer for row in kept} == {"up_proj"}
    assert all(row.sqnr == row.what_if["rowwise"] for row in kept)  # measured by the default recipe


def test_conv1d_has_its_weight_the_other_way_round():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(**GPT2 | {"n_layer": 1}))
    with torch.no_grad():  # rows of W, columns of the parameter, differ in size
        plain.transformer.h[0].mlp.c_fc.weight.mul_(torch.rand(512) + 0.01)
    reference = octavo.kernels.quantize(plain.transformer.h[0].mlp.c_fc.weight.detach().t(), RECIPES["rowwise"].w)
    model = octavo.convert(plain, verbose=False)
    watch = looked(model, lambda: model(input_ids=tokens() % 64).logits.sum().backward())
    row = next(row for row in watch.rows if named(row) == ("transformer.h.0.mlp.c_fc", "w"))
    assert row.scale_spread == pytest.approx((reference.scale.max() / reference.scale.min()).item())
    assert {row.operand for row in watch.rows} == set(OPERANDS)


def test_recipes_that_change_between_steps_are_seen():
    model = converted()
    watch = Watch(model, every=1)
    name = "model.layers.0.mlp.up_proj"
    labels = []
    for recipe in ("blockwise", None):
        octavo.nn.change_recipe(model, name, recipe, reason="test")
        with watch.step():
            train(model)
        labels.append({row.recipe for row in watch.rows if row.layer == name})
    assert labels == [{"blockwise"}, set()]


def test_mistakes():
    with pytest.raises(ValueError, match="got -1"):
        Watch(MLP(), every=-1)
    with pytest.raises(ValueError, match="did you mean 'blockwise'"):
        Watch(MLP(), what_if=("blokwise",))
    with pytest.raises(ValueError, match=r"what_if=\('blockwise',\)"):
        Watch(MLP(), what_if="blockwise")


def test_compiled_models_have_hooks_and_are_not_compiled_again():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, model, results = CompileCounter(), octavo.convert(MLP(), verbose=False), []
    model.compile(backend=counter, fullgraph=True)
    watch, x = Watch(model, every=3), torch.randn(8, 64)
    for _ in range(7):
        model.zero_grad()
        with watch.step():
            y = model(x)
            y.sum().backward()
        results.append((y.detach(), gradients(model)))
        assert bool(watch.rows) == (watch.number % 3 == 0) and counter.frame_count == 1
    for y, actual in results:
        assert torch.equal(y, results[0][0])
        assert same(results[0][1], actual)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("zeros", ["weight", "rows of the weight", "tokens"])
def test_rows_of_zeros_are_no_underflow(recipe, zeros):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)), torch.randn(48, 64, requires_grad=True)
    with torch.no_grad():
        model[0].weight[{"weight": slice(None), "rows of the weight": slice(0, 32, 2), "tokens": slice(0)}[zeros]] = 0
        x[:24] *= zeros != "tokens"
    octavo.convert(model, recipe, verbose=False)
    watch = looked(model, lambda: (model(x) * torch.randn(48, 32)).sum().backward())
    assert {row.operand for row in watch.rows} == {"x", "w", "dgrad_g", "wgrad_g"} and not watch.findings()
    assert max(row.underflow for row in watch.rows) < 0.02


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_shared_linear_under_checkpointing_counts_each_call(reentrant):
    torch.manual_seed(0)
    shared = torch.nn.Linear(32, 32)
    model = octavo.convert(torch.nn.Sequential(shared, shared, shared), "rowwise", verbose=False)
    x = torch.randn(16, 32, requires_grad=True)
    counts = []
    for checkpointed in (False, True):
        watch = Watch(model, every=1)
        with watch.step():
            y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
            y.square().sum().backward()
        counts.append({row.operand: row.elements for row in watch.rows})
    assert counts[0] == counts[1] and counts[0]["dgrad_g"] == 3 * 16 * 32


def test_a_sampled_step_is_not_captured(monkeypatch):
    model = octavo.convert(MLP(), verbose=False)
    watch = Watch(model, every=2)
    monkeypatch.setattr(sample, "is_capturing", lambda device: True)
    with watch.step():  # not sampled
        model(torch.randn(4, 64))
    with pytest.raises(RuntimeError, match=r"capture it outside of Watch.step\(\)"), watch.step():
        model(torch.randn(4, 64))
