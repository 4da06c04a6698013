"""Exports of models whose weights are resident in FP8, and of models with adapters."""

import copy

import pytest
import torch
from exported_models import RECIPES, config_of, logits, make, reload, tensors_of

import octavo
from octavo.nn import ResidentWeight, load_frozen, meta_parameters


def resident(layout, **changes):
    return octavo.convert(make("llama", **changes), RECIPES[layout], frozen="fp8", weight_only=(), verbose=False)


@pytest.mark.parametrize("layout", ["fp8-row", "fp8-block"])
def test_the_bytes_of_resident_weights_are_written(tmp_path, layout):
    model = resident(layout)
    exported = octavo.export(model, tmp_path / "out", to=layout)
    assert len(exported.fp8) == 14 and set(exported.high_precision) == {"lm_head"}
    tensors = tensors_of(tmp_path / "out")
    for name, weight in model.named_parameters():
        if isinstance(weight, ResidentWeight):
            scale = tensors.pop(f"{name}_scale" + ("_inv" if layout == "fp8-block" else ""))
            assert torch.equal(tensors[name].view(torch.uint8), weight.data_.view(torch.uint8))
            assert torch.equal(scale, weight.scale)
        else:
            assert torch.equal(tensors[name], weight)
    assert set(tensors) == {name for name, _ in model.named_parameters()}
    usual = octavo.convert(make("llama"), RECIPES[layout], verbose=False)
    octavo.export(usual, tmp_path / "usual", to=layout)
    assert config_of(tmp_path / "usual") == config_of(tmp_path / "out")


def test_an_export_loads_as_a_resident_base(tmp_path):
    model = resident("fp8-row")
    octavo.export(model, tmp_path / "out")
    with meta_parameters():
        other = type(model)(model.config).bfloat16()
    octavo.convert(other, "rowwise", frozen="fp8", weight_only=(), verbose=False)
    load_frozen(other, tmp_path / "out")
    other.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # .bfloat16() rounded it
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("layout", ["fp8-row", "fp8-block"])
def test_weight_only_layers_are_written_in_high_precision(tmp_path, layout):
    """As no layout has adaptive FP8; the others as their bytes."""
    model = octavo.convert(make("llama"), RECIPES[layout], frozen="fp8", verbose=False)
    with pytest.warns(UserWarning, match=r"self_attn.*high precision here: its weight is resident as fp8/1x128"):
        exported = octavo.export(model, tmp_path / "out", to=layout)
    assert len(exported.fp8) == 6 and len(exported.high_precision) == 9
    octavo.export(resident(layout), tmp_path / "usual", to=layout)
    one, other = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "usual")
    for name, tensor in one.items():
        if "self_attn" in name:
            assert torch.equal(tensor, model.get_parameter(name).dequantized(torch.bfloat16))
        else:
            assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8))


def test_weight_only_layers_of_a_base_in_fp8_are_written_as_their_bytes(tmp_path):
    """A base that was read in FP8 keeps its format."""
    octavo.export(resident("fp8-row"), tmp_path / "base")
    with meta_parameters():
        model = type(make("llama"))(make("llama").config).bfloat16()
    load_frozen(octavo.convert(model, "rowwise", frozen="fp8", verbose=False), tmp_path / "base")
    with pytest.warns(UserWarning, match=r"self_attn.*: training did not round their inputs.*engines of fp8-row do"):
        octavo.export(model, tmp_path / "out")
    one, other = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "out")
    assert one.keys() == other.keys() and config_of(tmp_path / "base") == config_of(tmp_path / "out")
    assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


def test_resident_weights_in_another_recipe_are_dequantized(tmp_path):
    blocks, name = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj.weight"
    recipes = {octavo.nn.filters.name(blocks): "blockwise"}
    model = octavo.convert(make("llama"), recipes, frozen="fp8", weight_only=(), verbose=False)
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.down_proj: .*recipe blockwise, which fp8-row does not"):
        octavo.export(model, tmp_path / "out")
    tensors = tensors_of(tmp_path / "out")
    expected = model.get_submodule(blocks).weight.dequantized(torch.bfloat16)
    assert torch.equal(tensors[name], expected) and f"{name}_scale" not in tensors
    assert blocks in config_of(tmp_path / "out")["quantization_config"]["ignore"]
    reload(tmp_path / "out", tmp_path / "plain", torch.bfloat16)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT asks Transformers for it
@pytest.mark.parametrize("frozen", ["bf16", "fp8"])
@pytest.mark.parametrize("to", ["bf16", "fp8-row"])
def test_adapters_in_the_model_are_refused(tmp_path, frozen, to):
    """Their layers are named `q_proj.base_layer`, which no reader of the folder knows."""
    peft = pytest.importorskip("peft")
    model = octavo.convert(make("llama"), "rowwise", frozen=frozen, verbose=False, weight_only=())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"adapters of PEFT .first: 'model\.layers\.0\.self_attn\.q_proj'"):
        octavo.export(adapted.get_base_model(), tmp_path / "out", to=to)
    assert not list(tmp_path.iterdir())
    octavo.export(adapted.unload(), tmp_path / "out", to=to)


def test_files_have_the_mode_of_the_umask(tmp_path):
    octavo.export(resident("fp8-row"), tmp_path / "out")
    (tmp_path / "file").touch()
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {(tmp_path / "file").stat().st_mode}
