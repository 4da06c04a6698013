"""Experts of a mixture whose weights are resident in FP8: products, states, loading, the way back."""

import copy

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn import ResidentWeight, change_recipe
from octavo.nn.experts import STACKED
from octavo.numerics.error import sqnr
from support.moe_models import FAMILIES, experts_of, mixture, resident, routed
from tensors import same, saved_and_loaded

RECIPES = ("rowwise", "rowwise_hp_wgrad", "tensorwise", "blockwise")
NAME = "model.layers.1.mlp.experts"
TOKENS = torch.arange(24).view(2, 12) % 64


def run(module, x, index, weights, grad):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = module(x, index, weights)
    y.backward(grad)
    return y.detach(), x.grad, weights.grad


@pytest.mark.parametrize(
    ("family", "recipe"), [*((family, "rowwise") for family in FAMILIES), *(("gpt_oss", name) for name in RECIPES[1:])]
)
def test_products_are_those_of_frozen_experts_bit_for_bit(family, recipe):
    experts = experts_of(family)
    usual = octavo.convert(copy.deepcopy(experts), recipe, verbose=False).requires_grad_(False)
    module = resident(copy.deepcopy(experts), recipe)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    for tokens in (65, 3, 0):
        batch = routed(tokens)
        expected, actual = run(usual, *batch), run(module, *batch)
        ordered = family != "gpt_oss" or recipe not in ("tensorwise", "blockwise", "rowwise_hp_wgrad")
        if ordered or (tokens == 65 and Version(torch.__version__) >= Version("2.13")):
            assert same(expected, actual)
        else:  # the same bytes in another memory order, for which the CPU's product of few rows sums in another order
            assert all(
                one.shape == other.shape and sqnr(one, other) > 100 for one, other in zip(expected, actual, strict=True)
            )
        assert same(run(module, *batch), run(lambda *a: checkpoint(module, *a, use_reentrant=False), *batch))
    with octavo.disabled():
        off = run(module, *routed(65))
    assert same(off, run(octavo.revert(module), *routed(65)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_the_input_against_the_dequantized_base_in_float64(family):
    experts, batch = experts_of(family, hidden_size=128), routed(65, hidden=128)
    module = resident(experts)
    actual = run(module, *batch)
    exact = octavo.revert(copy.deepcopy(module)).double()
    exact.config._experts_implementation = "eager"
    expected = run(exact, batch[0].double(), batch[1], batch[2].double(), batch[3].double())
    # Two products and a gate, each of operands in FP8.
    assert all(sqnr(one, other) > 23 for one, other in zip(expected, actual, strict=True))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bytes_and_the_report(family):
    model = resident(mixture(family, hidden_size=128, intermediate_size=256))
    rows = [row for row in octavo.report(model) if row.experts]
    assert len(rows) == 2 and all("resident in FP8: 1.0" in row.reason for row in rows)
    weights = [p for n, p in model.named_parameters() if n.rpartition(".")[2] in STACKED]
    assert len(weights) == 4 and all(isinstance(weight, ResidentWeight) for weight in weights)
    assert sum(w.data_.nbytes + w.scale.nbytes for w in weights) <= 1.05 * sum(w.numel() for w in weights)


def test_only_frozen_experts_become_resident():
    model = mixture("mixtral")
    model.get_submodule(NAME).requires_grad_(False)
    resident(model)
    kinds = {n: type(p) for n, p in model.named_parameters() if p.ndim > 1 and "layers" in n and "gate.w" not in n}
    assert {n for n, kind in kinds.items() if kind is ResidentWeight} == {f"{NAME}.gate_up_proj", f"{NAME}.down_proj"}
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="is frozen and cannot be trained"):
        model.requires_grad_(True)


@pytest.mark.parametrize(
    ("family", "recipe"), [("mixtral", "rowwise"), ("gpt_oss", "rowwise_hp_wgrad"), ("gpt_oss", "blockwise")]
)
def test_state_round_trips_bit_for_bit(family, recipe, tmp_path):
    model = resident(mixture(family), recipe)
    expected = model(input_ids=TOKENS).logits
    save_file(model.state_dict(), tmp_path / "base.safetensors")
    for state in (saved_and_loaded(model.state_dict()), load_file(tmp_path / "base.safetensors")):
        assert state[f"{NAME}.down_proj"].dtype == torch.float8_e4m3fn and f"{NAME}.down_proj_scale" in state
        for assign in (False, True):
            other = mixture(family)
            nn.init.zeros_(other.get_submodule(NAME).down_proj)
            resident(other, recipe).load_state_dict(state, assign=assign)
            assert same(model.state_dict(), other.state_dict())
            assert torch.equal(other(input_ids=TOKENS).logits, expected)
    values = mixture(family)
    loaded = resident(mixture(family, num_hidden_layers=2), recipe)
    nn.init.zeros_(loaded.get_submodule(NAME).down_proj)
    loaded.load_state_dict(values.state_dict())
    assert same(loaded.state_dict(), model.state_dict())
    bad = {k: v for k, v in model.state_dict().items() if k != f"{NAME}.down_proj_scale"}
    with pytest.raises(RuntimeError, match=r"down_proj is torch.float8_e4m3fn without .*down_proj_scale"):
        loaded.load_state_dict(bad)
    with pytest.raises(RuntimeError, match=r"but the layer's is not resident"):
        octavo.convert(mixture(family), recipe, verbose=False).load_state_dict(model.state_dict(), strict=False)


def test_copies_moves_and_changes_of_the_recipe():
    model = resident(mixture("gpt_oss"))
    expected = model(input_ids=TOKENS).logits
    assert torch.equal(copy.deepcopy(model)(input_ids=TOKENS).logits, expected)
    assert torch.equal(saved_and_loaded(model, weights_only=False)(input_ids=TOKENS).logits, expected)
    on_meta = copy.deepcopy(model).to("meta").get_submodule(NAME).down_proj
    assert isinstance(on_meta, ResidentWeight) and on_meta.device.type == on_meta.data_.device.type == "meta"
    before = {k: v.clone() for k, v in model.state_dict().items() if k.startswith(NAME) and "bias" not in k}
    model.bfloat16()
    assert model.get_submodule(NAME).down_proj.dtype == torch.bfloat16
    assert same(before, {k: v for k, v in model.state_dict().items() if k in before})
    expected = model.float()(input_ids=TOKENS).logits
    with pytest.raises(ValueError, match="'blockwise' cannot read: use one of rowwise, rowwise_hp_wgrad"):
        change_recipe(model, NAME, "blockwise", reason="a test")
    change_recipe(model, NAME, "rowwise_hp_wgrad", reason="a test")
    assert sqnr(expected, model(input_ids=TOKENS).logits) > 40
    change_recipe(model, NAME, None, reason="a test")
    down = model.get_submodule(NAME).down_proj
    assert type(down) is nn.Parameter and not down.requires_grad
    change_recipe(model, NAME, "rowwise", reason="a test")
    octavo.revert(model)
    assert not any(isinstance(p, ResidentWeight) for p in model.parameters())
    assert model.to("meta").get_submodule(NAME).down_proj.is_meta


def test_views_of_one_expert_keep_its_bytes():
    weight = resident(experts_of("gpt_oss")).gate_up_proj
    whole = weight.dequantized(torch.float32)
    for index, expert in enumerate(weight.unbind()):
        assert isinstance(expert, ResidentWeight) and torch.equal(expert.dequantized(torch.float32), whole[index])
        assert torch.equal(weight[index].dequantized(torch.float32), whole[index])
        assert weight[index].data_.data_ptr() == weight.data_[index].data_ptr()
    assert torch.equal(weight.transpose(1, 2).dequantized(torch.float32), whole.transpose(1, 2))
    with pytest.warns(UserWarning, match="reads a weight that is resident in FP8"):
        assert torch.equal(weight.transpose(0, 1), whole.transpose(0, 1))
    with pytest.warns(UserWarning, match="reads a weight that is resident in FP8"):
        assert torch.equal(weight[:, 3], whole[:, 3])
    with pytest.raises(ValueError, match="would change a weight that is resident"):
        weight[2].add_(1)
