"""Frozen weights that are stored in FP8 and multiplied in the dtype of the input."""

import copy
import pickle

import pytest
import torch
from models import llama
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.nn import ResidentWeight, change_recipe, load_frozen, rule_plan
from octavo.numerics import weight_only
from octavo.numerics.error import sqnr
from octavo.numerics.spec import ADAPTIVE
from support.moe_models import FAMILIES, mixture
from support.refusals import refused
from tensors import same

TOKENS = torch.arange(24).view(2, 12) % 64


def convert(model, patterns=("*",), recipe="rowwise"):
    return octavo.convert(model, recipe, frozen="fp8", weight_only=patterns, verbose=False)


def run(module, x, g):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(g.to(y.dtype))
    return y.detach(), x.grad


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_hp_wgrad", "tensorwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_dequantized_weight_bit_for_bit(dtype, bias, recipe):
    torch.manual_seed(0)
    layer = convert(nn.Linear(96, 80, bias=bias, dtype=dtype), recipe=recipe)
    plain = octavo.revert(copy.deepcopy(layer))
    assert isinstance(layer.weight, ResidentWeight) and type(plain.weight) is nn.Parameter
    assert layer.recipe.name == f"{recipe}_weight_only"
    for shape in ((7,), (2, 3), (0,), ()):
        x, g = torch.randn(*shape, 96, dtype=dtype), torch.randn(*shape, 80, dtype=dtype)
        assert same(run(layer, x, g), run(plain, x, g))
    x, g = torch.randn(2, 3, 96, dtype=dtype), torch.randn(2, 3, 80)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(run(layer, x, g), run(plain, x, g))
    with octavo.disabled():  # where PyTorch orders the sums of float16 otherwise
        assert all(sqnr(a, b) > 60 for a, b in zip(run(plain, x, g), run(layer, x, g), strict=True))


def test_auto_selects_attention_and_no_mlp_inside_a_module_named_after_it():
    class PoolMLP(nn.Sequential): ...

    class LatentAttention(nn.Sequential): ...

    def layer():
        return nn.Linear(32, 32)

    parts = {
        "self_attn": nn.ModuleDict({"q_proj": layer(), "to_out": nn.Sequential(layer())}),
        "mixer": LatentAttention(layer()),
        "attn_pool": nn.ModuleDict({"kv": layer(), "mlp": nn.Sequential(layer()), "head": PoolMLP(layer())}),
        "attention_free_mlp": nn.Sequential(layer()),
        "attention": nn.ModuleDict({"feed_forward": nn.Sequential(layer())}),
    }
    model = convert(nn.ModuleDict(parts), "auto")
    names = {name for name, module in model.named_modules() if hasattr(module, "recipe") and module.recipe.weight_only}
    assert names == {"self_attn.q_proj", "self_attn.to_out.0", "mixer.0", "attn_pool.kv"}


def test_a_filter_wins_over_the_default():
    recipes = {octavo.nn.filters.name("*.v_proj"): "rowwise"}
    model = convert(llama(), "auto", recipes)
    by_name = {row.name.rpartition(".")[2]: row.recipe for row in octavo.report(model) if row.converted}
    assert by_name["v_proj"] == "rowwise" and by_name["o_proj"] == "rowwise_weight_only"


def test_a_layer_by_itself_and_an_attention_by_itself():
    assert convert(nn.Linear(64, 64), "auto", None).recipe.name == "rowwise"
    attention = convert(llama().model.layers[0].self_attn, "auto", None)
    assert attention.q_proj.recipe.name == "rowwise_weight_only"


def test_auto_leaves_recipes_with_several_forms_of_the_weight_alone():
    model = nn.ModuleDict({"self_attn": nn.Sequential(nn.Linear(64, 64))})
    refused("frozen='fp8' stores one FP8 form of each weight, but recipe 'mxfp8' of", convert, model, "auto", "mxfp8")


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), ()])
def test_a_bias_that_is_trained_gets_its_gradient(shape):
    layer = convert(nn.Linear(96, 80))
    layer.bias.requires_grad_()
    plain = octavo.revert(copy.deepcopy(layer))
    for module in (layer, plain):
        module(torch.ones(*shape, 96)).square().sum().backward()
    assert sqnr(plain.bias.grad, layer.bias.grad) > 100 and plain.weight.grad is None


def test_backward_reads_the_bytes_of_the_weight_and_saves_nothing_else():
    layer, saved = convert(nn.Linear(96, 80, bias=False)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.ones(5, 96, requires_grad=True))
    assert {t.data_ptr() for t in saved} == {layer.weight.data_.data_ptr(), layer.weight.scale.data_ptr()}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts(family):
    model = convert(mixture(family))
    experts = [row for row in octavo.report(model) if row.experts]
    assert experts and all(row.recipe == "rowwise_weight_only" and row.resident_bytes for row in experts)
    plain = octavo.revert(copy.deepcopy(model))
    assert sqnr(plain(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits) > 100


def test_patterns_select_layers_and_the_rest_computes_in_fp8():
    model = convert(llama(), ["*.v_proj", "model.layers.1.mlp"])
    recipes = {row.name: row.recipe for row in octavo.report(model) if row.converted}
    chosen = {name for name, recipe in recipes.items() if recipe == "rowwise_weight_only"}
    assert chosen == {
        *(f"model.layers.{i}.self_attn.v_proj" for i in range(2)),
        *(f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")),
    }
    assert set(recipes.values()) == {"rowwise", "rowwise_weight_only"}
    row = next(row for row in octavo.report(model) if row.name.endswith("v_proj"))
    assert "weight only: products in the dtype of the input" in row.reason and "resident in FP8" in row.reason


@pytest.mark.parametrize("shape", [(80, 96), (1, 130), (130, 1), (3, 129), (256, 256)])
def test_weights_are_in_adaptive_fp8(shape):
    """Which loses less than e4m3 in the same bytes."""
    torch.manual_seed(0)
    plain = nn.Linear(shape[1], shape[0], bias=False)
    nn.init.normal_(plain.weight, std=0.02)
    layer = convert(copy.deepcopy(plain))
    other = convert(copy.deepcopy(plain), ())
    assert layer.weight.spec == ADAPTIVE and layer.weight.data_.dtype == torch.uint8
    assert layer.weight.scale.shape == (shape[0], -(-shape[1] // 128))
    if shape[0] > 1 < shape[1]:
        error, of_e4m3 = (sqnr(plain.weight, one.weight.dequantized(torch.float32)) for one in (layer, other))
        assert error > 42 > 33 > of_e4m3
    for one in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).half().float()):
        assert torch.equal(one.weight.data_, layer.weight.data_) and torch.equal(one.weight.scale, layer.weight.scale)
    transposed, other = layer.weight.t(), torch.randn(shape)
    assert torch.equal(transposed.dequantized(torch.float32), layer.weight.dequantized(torch.float32).t())
    assert torch.equal(pickle.loads(pickle.dumps(transposed)).data_, transposed.data_)
    transposed.copy_(other.t())
    assert torch.equal(layer.weight.data_, ResidentWeight.quantized(other, ADAPTIVE).data_)


def test_states_and_files(tmp_path):
    layer = convert(nn.Sequential(nn.Linear(300, 80)))
    state, file = layer.state_dict(), tmp_path / "base.safetensors"
    assert state["0.weight"].dtype == torch.uint8 and state["0.weight_scale"].dtype == torch.int32
    save_file(state, file)
    others = [convert(nn.Sequential(nn.Linear(300, 80))), convert(nn.Sequential(nn.Linear(300, 80, device="meta")))]
    for other in others:
        load_frozen(other, file)
    others.append(convert(nn.Sequential(nn.Linear(300, 80))))
    others[-1].load_state_dict(state)
    x, g = torch.randn(5, 300), torch.randn(5, 80)
    assert all(same(run(layer, x, g), run(other, x, g)) for other in others)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
@pytest.mark.parametrize("make", [nn.Linear, lambda k, n: Conv1D(n, k)], ids=["linear", "conv1d"])
def test_a_weight_as_fp8_products_read_it_is_read_as_it_is(make, recipe, tmp_path):
    """As of a checkpoint in FP8: rounding it again would lose."""
    stored, layer = (convert(nn.Sequential(make(130, 260)), patterns, recipe) for patterns in ((), ("*",)))
    save_file(stored.state_dict(), tmp_path / "base.safetensors")
    with torch.device("meta"):
        on_meta = convert(nn.Sequential(make(130, 260)), ("*",), recipe)
    for model in (layer, on_meta):
        load_frozen(model, tmp_path / "base.safetensors")
        assert model[0].weight.spec == stored[0].weight.spec and model[0].recipe.weight_only
        assert torch.equal(model[0].weight.data_.view(torch.uint8), stored[0].weight.data_.view(torch.uint8))
        x, g = torch.randn(5, 130), torch.randn(5, 260)
        assert same(run(model, x, g), run(octavo.revert(copy.deepcopy(model)), x, g))
    state = stored.state_dict()
    with pytest.raises(RuntimeError, match=r"resident as fp8/1x128, .*convert in the recipe, and with the weight_only"):
        convert(nn.Sequential(make(130, 260)), ("*",), recipe).load_state_dict(state)
    state["0.weight_scale"] = torch.ones(3, 2, 1)
    save_file(state, tmp_path / "base.safetensors")
    with pytest.raises(ValueError, match=r"0.weight_scale in .* has shape \[3, 2, 1\], the model's has \["):
        load_frozen(convert(nn.Sequential(make(130, 260)), ("*",), recipe), tmp_path / "base.safetensors")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("saved", "loaded"), [((), ("*",)), (("*",), ())])
def test_no_distributed_checkpoint_converts_one_format_to_another(saved, loaded, tmp_path):
    """Of at most 128 input features both have one scale per row."""
    stored, layer = (convert(nn.Sequential(nn.Linear(96, 80)), patterns) for patterns in (saved, loaded))
    dcp.save(stored.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state, before = layer.state_dict(), layer[0].weight.dequantized(torch.float32)
    with pytest.raises(dcp.api.CheckpointException, match=r"Size mismatch .* for 0.weight_scale"):
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(layer[0].weight.dequantized(torch.float32), before)


@pytest.mark.parametrize("patterns", [(), ("*",)])
def test_bytes_are_not_copied_as_values(patterns):
    """As `set_model_state_dict(full_state_dict=True)` would, which does not call `load_state_dict`."""
    layer = convert(nn.Linear(96, 80), patterns)
    before = layer.weight.dequantized(torch.float32)
    for other in (layer.state_dict()["weight"], torch.ones(80, 96, dtype=torch.int64)):
        refused(r"copy_ of .* resident in FP8: its bytes lack their scales", layer.weight.copy_, other)
    assert torch.equal(layer.weight.dequantized(torch.float32), before)


def test_auto_leaves_attention_alone_that_shares_its_weight_with_an_mlp():
    def model():
        parts = {name: nn.Sequential(nn.Linear(64, 64)) for name in ("self_attn", "cross_attn", "mlp")}
        parts["mlp"][0].weight = parts["cross_attn"][0].weight
        return nn.ModuleDict(parts)

    weights = {name: part[0].weight for name, part in convert(model(), "auto").items()}
    assert weights["mlp"] is weights["cross_attn"] and str(weights["mlp"].spec) == "e4m3/row"
    assert weights["self_attn"].spec == ADAPTIVE
    refused("convert both in one recipe, both with weight_only or neither", convert, model(), ["mlp"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_scales_are_refused(dtype, tmp_path):
    """Their last two bits number the format of a group."""
    layer = convert(nn.Sequential(nn.Linear(96, 80)))
    state, before = layer.state_dict(), layer[0].weight.scale.clone()
    state["0.weight_scale"] = layer[0].weight.scale.to(dtype).unsqueeze(-1)
    with pytest.raises(RuntimeError, match=r"scales torch.int32 \(80, 1, 1\); the checkpoint has torch.uint8"):
        layer.load_state_dict(state)
    save_file(state, tmp_path / "base.safetensors")
    with pytest.raises(ValueError, match=r"0.weight_scale in .* has dtype .*; expected torch.int32. Nothing was"):
        load_frozen(layer, tmp_path / "base.safetensors")
    assert torch.equal(layer[0].weight.scale, before)


def test_no_other_recipe_reads_adaptive_fp8():
    model = nn.Sequential(convert(nn.Linear(96, 80)))
    with pytest.raises(ValueError, match=r"'rowwise' cannot read: its products are weight-only; use None for"):
        change_recipe(model, "0", "rowwise", reason="a test")
    expected = model[0].weight.dequantized(torch.float32)
    change_recipe(model, "0", None, reason="a test")
    assert torch.equal(model[0].weight, expected)


def test_a_recipe_can_change_to_it_and_back():
    model = convert(llama(), ())
    name, before = "model.layers.0.self_attn.v_proj", model(input_ids=TOKENS).logits
    change_recipe(model, name, "rowwise_weight_only", reason="a test")
    assert not torch.equal(model(input_ids=TOKENS).logits, before)
    change_recipe(model, name, "rowwise", reason="a test")
    assert torch.equal(model(input_ids=TOKENS).logits, before)


def trained_and_frozen():
    return nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64).requires_grad_(False)})


MISTAKES = {
    "not frozen": (lambda: octavo.convert(nn.Linear(64, 64), weight_only=["*"]), "frozen='fp8' stores: add that"),
    "of a plan": (
        lambda: octavo.convert(llama(), plan=rule_plan(llama()), frozen="fp8", weight_only=["*"]), "so leave it out"
    ),
    "no match": (lambda: convert(llama(), ["*.v_prjo"]), "'\\*.v_prjo' matches no layer .*v_proj"),
    "trained": (lambda: convert(trained_and_frozen(), ["a"]), "'a' needs a weight that is resident .* is trained"),
    "a recipe": (lambda: octavo.convert(llama(), weight_only("rowwise"), verbose=False), "but frozen='bf16'"),
    "change": (
        lambda: change_recipe(octavo.convert(llama(), verbose=False), "model.layers.0.mlp.up_proj",
                              "rowwise_weight_only", reason="a test"),
        "but its weight is plain",
    ),
    "several forms": (lambda: weight_only("mxfp8"), "one FP8 form of W"),
    "channel scales": (lambda: weight_only("rowwise_equalized"), "no equalization"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    make, message = MISTAKES[name]
    refused(message, make)
