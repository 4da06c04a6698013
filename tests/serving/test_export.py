"""Exported folders: their layout to the key, and the forward of training after a reload."""

import copy
import errno
import json
import os
import runpy
import warnings
from pathlib import Path

import pytest
import torch
from exported_models import HEADS, RECIPES, config_of, logits, make, reload, run_as_engine, tensors_of
from torch import nn

import octavo
from octavo.kernels import quantize
from octavo.nn import ResidentWeight, load_frozen, meta_parameters
from octavo.numerics.error import sqnr
from octavo.serving.writer import check_shard_size

E4M3 = torch.float8_e4m3fn
GROUP = {"targets": ["Linear"], "output_activations": None}
COMMON = {"num_bits": 8, "type": "float", "symmetric": True}
CONFIGS = {
    "fp8-row": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": GROUP | {
            "weights": COMMON | {"strategy": "channel", "group_size": None, "dynamic": False},
            "input_activations": COMMON | {"strategy": "token", "group_size": None, "dynamic": True},
        }},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": None,
    },
    "fp8-block": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    "mxfp8": {
        "quant_method": "compressed-tensors", "format": "mxfp8-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": GROUP | {
            "weights": COMMON | {
                "strategy": "group", "group_size": 32, "dynamic": False, "scale_dtype": "torch.uint8"},
            "input_activations": COMMON | {
                "strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"},
        }},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": None,
    },
}  # fmt: skip
SCALES = {
    "fp8-row": ("weight_scale", torch.float32, lambda n, k: (n, 1)),
    "fp8-block": ("weight_scale_inv", torch.float32, lambda n, k: (-(-n // 128), -(-k // 128))),
    "mxfp8": ("weight_scale", torch.uint8, lambda n, k: (n, k // 32)),
}
FAMILIES = [
    pytest.param(family, layout, marks=[] if (family, layout) == ("llama", "fp8-block") else pytest.mark.thorough)
    for family in ("llama", "qwen3", "mixtral", "deepseek_v3", "vit") for layout in RECIPES
]  # fmt: skip


def converted(family, layout, dtype=torch.bfloat16, **changes):
    return octavo.convert(make(family, dtype, **changes), RECIPES[layout], verbose=False)


def export(model, path, **options):
    """Without the warnings about partial blocks and about Transformers' reader, which tests of their own hold."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "octavo.export: (.*partial blocks|Transformers 5.23)")
        return octavo.export(model, path, **options)


@pytest.mark.parametrize(("family", "layout"), FAMILIES)
def test_a_reloaded_model_computes_the_forward_of_training(tmp_path, family, layout):
    """Dequantized weights are those of training: quantizing them again, as training does, changes no bit."""
    for dtype in (torch.bfloat16, torch.float32):
        model = converted(family, layout, dtype)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        export(model, tmp_path / f"{dtype}", to=layout)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        reloaded = reload(tmp_path / f"{dtype}", tmp_path / f"plain-{dtype}", dtype)
        octavo.convert(reloaded, RECIPES[layout], verbose=False)
        assert torch.equal(logits(reloaded), logits(model))


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("layout", RECIPES)
def test_an_engine_without_octavo_computes_the_forward_of_training(tmp_path, family, layout):
    """Weights and inputs as the layouts document them, in plain PyTorch."""
    model = converted(family, layout, torch.float32)
    exported = export(model, tmp_path / "out", to=layout)
    engine = reload(tmp_path / "out", tmp_path / "plain", torch.float32)
    assert sqnr(logits(model), logits(engine)) < 40  # without the quantization of inputs
    run_as_engine(engine, exported.fp8, layout, tmp_path / "out")
    assert sqnr(logits(model), logits(engine)) >= 45


ATTENTION = [f"self_attn.{part}_proj" for part in "qkvo"]
LATENT_ATTENTION = [
    *(f"self_attn.{part}_proj" for part in ("q_a", "q_b", "kv_b", "o")), "self_attn.kv_a_proj_with_mqa"
]  # fmt: skip
MLP = [f"{part}_proj" for part in ("gate", "up", "down")]
VIT = [*(f"attention.attention.{part}" for part in ("query", "key", "value")), "attention.output.dense",
       "intermediate.dense", "output.dense"]  # fmt: skip
DENSE = [f"model.layers.{n}.{part}" for n in (0, 1) for part in (*ATTENTION, *(f"mlp.{m}" for m in MLP))]
IN_FP8 = {
    "llama": DENSE, "qwen3": DENSE,
    "mixtral": [
        f"model.layers.{n}.{part}" for n in (0, 1)
        for part in (*ATTENTION, *(f"block_sparse_moe.experts.{e}.w{w}" for e in range(4) for w in (1, 2, 3)))
    ],
    "deepseek_v3": [
        *(f"model.layers.{n}.{part}" for n in (0, 1) for part in LATENT_ATTENTION),
        *(f"model.layers.0.mlp.{part}" for part in MLP),
        *(f"model.layers.1.mlp.shared_experts.{part}" for part in MLP),
        *(f"model.layers.1.mlp.experts.{e}.{part}" for e in range(4) for part in MLP),
    ],
    "vit": [f"vit.encoder.layer.{n}.{part}" for n in (0, 1) for part in VIT],
}  # fmt: skip
"""The weights that published FP8 checkpoints of these families have in FP8; routers, heads and norms are not."""


@pytest.mark.parametrize("layout", RECIPES)
@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.thorough) for f in [*IN_FP8][1:])])
def test_the_layout_to_the_key(tmp_path, family, layout):
    """Every tensor's name, dtype, shape and bytes, and every key of the configuration."""
    model = converted(family, layout)
    export(model, tmp_path / "plain", to="bf16")
    exported = export(model, tmp_path / "out", to=layout)
    plain, tensors = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "out")
    scale_name, scale_dtype, shape = SCALES[layout]
    expected = {}
    for name, tensor in plain.items():
        stem = name.removesuffix(".weight")
        if stem in IN_FP8[family] and tensor.ndim == 2:
            q = quantize(tensor, octavo.RECIPES[RECIPES[layout]].w)
            expected |= {name: (E4M3, tuple(tensor.shape)), f"{stem}.{scale_name}": (scale_dtype, shape(*tensor.shape))}
            assert torch.equal(tensors[name].view(torch.uint8), q.data.view(torch.uint8))
            assert torch.equal(tensors[f"{stem}.{scale_name}"], q.scale.view(scale_dtype))
        else:
            expected[name] = (tensor.dtype, tuple(tensor.shape))
            assert torch.equal(tensors[name], tensor)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == expected
    assert sum(dtype == E4M3 for dtype, _ in expected.values()) == len(IN_FP8[family])
    ours, unquantized = config_of(tmp_path / "out"), config_of(tmp_path / "plain")
    quantization, ignored = (
        ours.pop("quantization_config"),
        "modules_to_not_convert" if layout == "fp8-block" else "ignore",
    )
    heads = {"classifier"} if family == "vit" else {"lm_head"}
    assert heads <= set(quantization[ignored])
    assert quantization == CONFIGS[layout] | {ignored: quantization[ignored]} and ours == unquantized
    assert not set(IN_FP8[family]) & set(quantization[ignored])
    if family == "llama":
        assert set(exported.high_precision) == {"lm_head"} and exported.notes == ()


def test_experts_whose_blocks_are_divided_stay_in_high_precision(tmp_path):
    """192 rows of gate and 192 of up are blocks of 128 in training, the second of both."""
    model = converted("mixtral", "fp8-block", intermediate_size=192)
    with pytest.warns(UserWarning, match=r"mlp\.experts: FP8 in training.*blocks of training's scales belong to two"):
        exported = octavo.export(model, tmp_path / "out", to="fp8-block")
    assert all("experts" not in fqn for fqn in exported.fp8)
    tensors = tensors_of(tmp_path / "out")
    name = "model.layers.0.block_sparse_moe.experts.1.w3"
    w3 = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"][1, 192:]
    assert torch.equal(tensors[f"{name}.weight"], w3)
    assert {name, "model.layers.0.mlp.experts"} <= set(
        config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    )


@pytest.mark.thorough
def test_partial_blocks_are_written_and_noted(tmp_path):
    model = converted("llama", "fp8-block", intermediate_size=200)
    with pytest.warns(UserWarning, match=r"6 weights have partial blocks .first: model.layers.0.mlp.gate_proj"):
        octavo.export(model, tmp_path / "out", to="fp8-block")
    assert tensors_of(tmp_path / "out")["model.layers.0.mlp.gate_proj.weight_scale_inv"].shape == (2, 1)
    reloaded = octavo.convert(reload(tmp_path / "out", tmp_path / "plain", torch.bfloat16), "blockwise", verbose=False)
    assert torch.equal(logits(reloaded), logits(model))


def test_partial_groups_stay_in_high_precision(tmp_path):
    model = converted("llama", "mxfp8", intermediate_size=200)
    with pytest.warns(UserWarning, match=r"down_proj: .* its 200 input features are no multiple of 32"):
        exported = octavo.export(model, tmp_path / "out", to="mxfp8")
    assert sorted(exported.high_precision) == ["lm_head", *(f"model.layers.{n}.mlp.down_proj" for n in (0, 1))]
    assert "model.layers.1.mlp.down_proj" in config_of(tmp_path / "out")["quantization_config"]["ignore"]


@pytest.mark.thorough
def test_shards_are_no_larger_than_asked(tmp_path):
    model = converted("llama", "fp8-row")
    octavo.export(model, tmp_path / "one")
    octavo.export(model, tmp_path / "many", max_shard_size="100KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    whole, parts = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert set(index["weight_map"]) == set(whole) == set(parts)
    assert all(torch.equal(whole[name].view(torch.uint8), parts[name].view(torch.uint8)) for name in whole)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    sizes = [path.stat().st_size for path in (tmp_path / "many").glob("*.safetensors")]
    assert len(sizes) > 4 and max(sizes) < 110_000


def test_bf16_is_what_save_pretrained_writes(tmp_path):
    model = converted("llama", "fp8-row")
    print(octavo.export(model, tmp_path / "out", to="bf16"))
    model.save_pretrained(tmp_path / "expected")
    names = sorted(path.name for path in (tmp_path / "expected").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "expected" / n).read_bytes() for n in names)


def test_the_model_card(tmp_path):
    model = converted("llama", "fp8-row")
    octavo.nn.change_recipe(model, "model.layers.0.self_attn.k_proj", None, reason="outliers in x")
    with pytest.warns(UserWarning, match="vLLM joins"):
        exported = octavo.export(model, tmp_path / "out", details={"base model": "my/model"})
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "| base model | my/model |", "| recipe of training | rowwise |", "weights e4m3/row",
        f"torch {torch.__version__.partition('+')[0]}", f"octavo {octavo.__version__}",
        "- model.layers.0.self_attn.k_proj: outliers in x", "13 modules",
    ):  # fmt: skip
        assert text in card, text
    assert exported.high_precision["model.layers.0.self_attn.k_proj"] == "outliers in x"
    assert "model.layers.0.self_attn.k_proj" in config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert str(tmp_path) not in card


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise_equalized", marks=pytest.mark.thorough)])
def test_a_layout_of_another_recipe_is_refused(tmp_path, recipe):
    model = octavo.convert(make("llama"), recipe, verbose=False)
    logits(model)
    with pytest.raises(ValueError, match=rf"compute in recipe|computes in recipe {recipe}, which fp8-row"):
        octavo.export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_tied_and_transposed_weights_stay_in_high_precision(tmp_path):
    model = converted("qwen3", "fp8-row")
    octavo.convert(model.lm_head, "rowwise", verbose=False)
    with pytest.warns(UserWarning, match=r"lm_head: .*tied .model\.embed_tokens\.weight, lm_head\.weight"):
        octavo.export(model, tmp_path / "out")
    tensors = tensors_of(tmp_path / "out")
    assert "lm_head.weight" not in tensors and tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert "lm_head" in config_of(tmp_path / "out")["quantization_config"]["ignore"]
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, n_positions=16, vocab_size=64))
    with pytest.raises(ValueError, match=r"stored as \[in, out\]"):
        octavo.export(octavo.convert(gpt2, verbose=False), tmp_path / "gpt2")


@pytest.mark.parametrize("layout", RECIPES)
def test_a_model_that_its_reader_builds_otherwise_is_refused(tmp_path, layout):
    """Transformers replaces the experts of Llama 4 by linear layers, if compressed-tensors quantized the checkpoint."""
    from transformers import FineGrainedFP8Config, Llama4ForCausalLM, Llama4TextConfig

    sizes = HEADS | {"intermediate_size_mlp": 256, "head_dim": 128, "num_local_experts": 2, "pad_token_id": 0}
    model = octavo.convert(Llama4ForCausalLM(Llama4TextConfig(**sizes)).bfloat16(), RECIPES[layout], verbose=False)
    if layout == "fp8-block":
        octavo.export(model, tmp_path / "out", to=layout)
        settings = FineGrainedFP8Config(dequantize=True)
        _, info = Llama4ForCausalLM.from_pretrained(
            tmp_path / "out", quantization_config=settings, output_loading_info=True
        )
        assert not any(info.values())
        return
    with pytest.raises(ValueError, match=r"would lack 12 \(.*experts\.\{0-1\}\.gate_proj.*nothing would read 4 \("):
        octavo.export(model, tmp_path / "out", to=layout)
    assert not list(tmp_path.iterdir())


def test_a_model_that_its_config_does_not_describe_is_refused(tmp_path):
    model = make("llama")
    model.lm_head, model.extra = nn.Linear(128, 70, bias=False), nn.Linear(16, 16, bias=False)
    octavo.convert(model, skip=["extra"], verbose=False)
    with pytest.raises(ValueError, match=r"nothing would read 1 \(extra.weight\); of another shape are 1 \(lm_head"):
        octavo.export(model, tmp_path / "out")


def test_mistakes_are_named_and_write_nothing(tmp_path, monkeypatch):
    model = converted("llama", "fp8-row")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"unknown layout 'fp8_row' \(did you mean 'fp8-row'\?\)"):
        octavo.export(model, "out", to="fp8_row")
    with pytest.raises(ValueError, match=r"no layer of this model computes in FP8.*convert\(model, 'rowwise'\)"):
        octavo.export(make("llama"), "out")
    with pytest.raises(TypeError, match="models of Transformers; got Sequential"):
        octavo.export(nn.Sequential(nn.Linear(2, 2)), "out")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN"):
        octavo.export(model, "out")
    with pytest.raises(ValueError, match="no values .it is on the meta device"):
        octavo.export(model.to("meta"), "out")
    tied = make("llama")
    tied.model.layers[1].mlp.up_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match="Transformers cannot save this model.*shared tensors"):
        octavo.export(octavo.convert(tied, verbose=False), "out")
    tied.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="is quantized already"):
        octavo.export(tied, "out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for name, error, match in (
        ("file", ValueError, "is not a folder"), ("full", ValueError, "is not empty"),
        ("file/below", OSError, "file/below cannot be written"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            octavo.export(converted("llama", "fp8-row"), name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine"]


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("new/folder", "card"),
        *(pytest.param(p, "weights", marks=pytest.mark.thorough) for p in ("new/folder", "empty")),
    ],
)
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, place, what):
    (tmp_path / "empty").mkdir()

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "weights":
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    else:
        monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=rf"{place} cannot be written: .*No space left on device"):
        octavo.export(converted("llama", "fp8-row"), tmp_path / place)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.slow
def test_the_example_reloads_its_logits(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "export_fp8.py"))
    printed = capsys.readouterr().out
    assert "(fp8-row: 14 modules in FP8, 1 in high precision)" in printed and "equal training's: True" in printed


@pytest.mark.parametrize("size", ["50GB", "5 MB", "4GiB", "1.5gb", 10])
def test_sizes(size):
    check_shard_size(size)


@pytest.mark.parametrize("size", ["-5KB", "banana", "0", "0GB", "GB", 0, "5"])
def test_other_sizes_are_errors(size):
    with pytest.raises(ValueError, match='max_shard_size is a size such as "5GB"'):
        check_shard_size(size)


# --- weights that are resident in FP8, and adapters ---


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
