"""Equalized layers are measured with the channel scales that they use."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.inspect import Watch, sample
from octavo.inspect.findings import QUANTILES
from octavo.inspect.sample import products
from octavo.nn.convert import change_recipe
from octavo.nn.equalized import EqualizedQuantizer, current_channels
from octavo.numerics import equalized, sqnr
from tensors import randn, same

NAME = "rowwise_equalized"


class Attention(nn.Module):
    """q and k share an X; `twice` is called on two."""

    def __init__(self, mode=None):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.twice = nn.LayerNorm(64), nn.Linear(64, 64)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.mode = mode

    def inner(self, x):
        x = self.norm(x)
        return self.twice(self.twice(self.q(x).tanh() * self.k(x) + x))

    def forward(self, x):
        return self.inner(x) if self.mode is None else checkpoint(self.inner, x, use_reentrant=self.mode)


def train(model, steps, watch=None, micros=2):
    """Gradients of all steps; an outlier channel grows, so s changes."""
    gradients = []
    for index in range(steps):
        model.zero_grad()
        with watch.step() if watch is not None else torch.enable_grad():
            for micro in range(micros):
                size = torch.where(torch.arange(64) == 5, 4.0**index, 1.0)
                model((randn(24, 64, seed=2 * index + micro) * size).requires_grad_()).square().mean().backward()
                model.q.weight.data[:, 7] *= 2
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return gradients


@pytest.mark.parametrize("mode", [None, False, True])
def test_a_layer_is_measured_with_the_s_that_it_uses(mode, monkeypatch):
    """In every pass, of shared inputs, repeated calls, recomputed forwards, and layers that began to equalize later."""
    predicted, pairs, unsampled_channels = {}, [], EqualizedQuantizer.channels

    def channels(quantizer, input, w_NK):
        scales = unsampled_channels(quantizer, input, w_NK)
        if quantizer.equalizer in predicted:
            pairs.append((predicted.pop(quantizer.equalizer), scales))
        return scales

    def predict(module, input):
        scales = predicted[module.equalizer] = current_channels(module, input)
        return scales

    def make():
        recipe = equalized("rowwise", every=3)
        model = octavo.convert(Attention(mode), recipe, skip=["k"], verbose=False)
        change_recipe(model, "q", "tensorwise", reason="test")
        train(model, 2)
        for name in "qk":
            change_recipe(model, name, recipe, reason="test")
        return model

    unsampled = train(make(), 5)
    model = make()
    monkeypatch.setattr(EqualizedQuantizer, "channels", channels)
    monkeypatch.setattr(sample, "current_channels", predict)
    for expected, gradients in zip(unsampled, train(model, 5, Watch(model, every=1, what_if=(NAME,))), strict=True):
        assert same(expected, gradients)
    assert len(pairs) == 5 * 2 * 4 * (2 if mode else 1) and len({id(scales) for _, scales in pairs}) > 8
    assert all(torch.equal(expected.factor, scales.factor) for expected, scales in pairs)


def outlier_layer(recipe):
    torch.manual_seed(0)
    layer = nn.Linear(96, 48, bias=False)
    layer.weight.data[:, 7] *= 1e-3
    return octavo.convert(nn.Sequential(layer), recipe, verbose=False)


def outlier_step(model, factor=1.0):
    x = (randn(40, 96) * torch.where(torch.arange(96) == 7, 3e5 * factor, 1.0)).requires_grad_()
    y = model(x)
    y.backward(g := randn(40, 48, seed=2) * 1e-4)
    return [y.detach(), x.grad, model[0].weight.grad], (x.detach(), model[0].weight.detach(), g)


def test_rows_and_product_errors_are_those_of_scaled_operands():
    """With an old s, which the what-if recipe does not have."""
    model, errors, rows = outlier_layer(NAME), {}, {}
    outlier_step(model, factor=1e-3)
    outlier_step(model, factor=1e-3)
    model[0].equalizer.advance(5)  # measures no more
    watch = Watch(model, every=1, what_if=("rowwise", "rowwise_equalized"))
    model.zero_grad()
    other = equalized("rowwise_hp_wgrad")
    with watch.step(measure={"0": [NAME, "rowwise", other]}):
        computed, (x, w, g) = outlier_step(model)
    s, errors, rows = model[0].equalizer.scales, watch.errors["0"], {row.operand: row for row in watch.rows}
    # The products that it compares are those that the layer computed, and the operands those that they read.
    exact = [x @ w.t(), g @ w, g.t() @ x]
    emulated = products(x, w, g, model[0].recipe, s, exact)
    assert all(sqnr(a.double(), b) > 100 for a, b in zip(computed, emulated, strict=True))
    row_errors = [(a - b).norm(dim=1) / b.norm(dim=1) for a, b in zip(computed, exact, strict=True)]
    row_errors.append((computed[2] - exact[2]).norm(dim=0) / exact[2].norm(dim=0))
    assert errors[NAME] == pytest.approx(max(e.mean().item() for e in row_errors), rel=1e-3)
    assert errors["rowwise"] > 3 * errors[NAME] > 3 * errors[other.name]
    assert rows["x"].amax == (x * s.inverse).abs().max() and rows["w"].amax == (w * s.factor).abs().max()
    assert all(row.what_if[NAME] == row.sqnr for row in rows.values())
    exponents = s.exponents().sort().values.tolist()
    assert rows["x"].channel_scales[:: QUANTILES - 1] == (exponents[0], exponents[-1])
    assert rows["x"].channel_scales[QUANTILES // 2] == exponents[48] and not rows["w"].channel_scales
    # A layer that does not equalize shows what it would gain: what the first pass of one that does has.
    plain = outlier_layer("tensorwise")
    watch = Watch(plain, every=1, what_if=(NAME,))
    with watch.step(measure={"0": [NAME]}):
        outlier_step(plain)
    fresh = outlier_layer(NAME)
    reference = Watch(fresh, every=1)
    with reference.step(measure={"0": [NAME]}):
        outlier_step(fresh)
    assert watch.errors["0"][NAME] == reference.errors["0"][NAME] < errors[NAME]
    assert [row.what_if[NAME] for row in watch.rows] == [row.sqnr for row in reference.rows]
