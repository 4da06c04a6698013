"""The layouts beside the packages that define them: compressed-tensors, and Transformers' FineGrainedFP8."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from exported_models import CONFIGS, RECIPES, auto_class, config_of, logits, make, tensors_of

import octavo
from octavo.numerics.error import sqnr
from octavo.serving.folder import LAYOUTS, get_layout

PRESETS = {"fp8-row": "FP8_DYNAMIC", "mxfp8": "MXFP8"}
BY_COMPRESSED_TENSORS = sorted(PRESETS)
DENSE = ("llama", "vit")


def test_every_recipe_with_one_forward_fits():
    assert {name: layout.recipes for name, layout in LAYOUTS.items()} == {
        "fp8-row": ["rowwise", "rowwise_hp_wgrad"], "fp8-block": ["blockwise"], "mxfp8": ["mxfp8"],
    }  # fmt: skip
    coarser = replace(octavo.RECIPES["rowwise"], w=octavo.RECIPES["tensorwise"].w)
    assert not any(layout.fits(coarser) for layout in LAYOUTS.values())
    assert get_layout("bf16") is None


def export(tmp_path, family, layout, dtype=torch.bfloat16):
    model = octavo.convert(make(family, dtype), RECIPES[layout], verbose=False)
    octavo.export(model, tmp_path / "out", to=layout)
    return model, tmp_path / "out"


@pytest.mark.parametrize("layout", BY_COMPRESSED_TENSORS)
def test_the_configuration_is_a_preset_of_compressed_tensors(layout):
    quantization = pytest.importorskip("compressed_tensors.quantization", exc_type=ImportError)
    ours = LAYOUTS[layout].quantization_config(["lm_head"])
    read = quantization.QuantizationConfig(**ours)
    theirs = quantization.preset_name_to_scheme(PRESETS[layout], ["Linear"])
    for part in ("weights", "input_activations"):
        got, want = getattr(read.config_groups["group_0"], part), getattr(theirs, part)
        assert got.model_dump(exclude={"observer"}) == want.model_dump(exclude={"observer"})
    written = read.model_dump()
    written["config_groups"]["group_0"].pop("format")  # older releases do not know it
    assert set(json.loads(json.dumps(ours))) == set(written) - {"moe_sparsity_config"}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", BY_COMPRESSED_TENSORS)
def test_compressed_tensors_wants_these_tensors(tmp_path, family, layout):
    """Names, dtypes and shapes that the package gives a model whose weights it compressed by this configuration."""
    quantization = pytest.importorskip("compressed_tensors.quantization", exc_type=ImportError)
    from compressed_tensors.compressors import ModelCompressor

    _, folder = export(tmp_path, family, layout)
    config = CONFIGS[family]()
    theirs = auto_class(config).from_config(config, dtype=torch.bfloat16)
    read = quantization.QuantizationConfig(**config_of(folder)["quantization_config"])
    quantization.apply_quantization_config(theirs, read)
    ModelCompressor(quantization_config=read).compress_model(theirs)
    tensors = tensors_of(folder)
    expected = {name: (t.dtype, t.shape) for name, t in theirs.state_dict().items()}
    if theirs.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    for name, (dtype, shape) in expected.items():
        assert tensors[name].shape == shape, name
        # It allocates scales in the model's dtype; float32 holds training's.
        assert tensors[name].dtype == (torch.float32 if name.endswith("scale") and dtype.itemsize > 1 else dtype), name
    assert set(expected) == set(tensors)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*DENSE, "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("layout", BY_COMPRESSED_TENSORS)
def test_transformers_reads_it_with_compressed_tensors(tmp_path, family, layout):
    pytest.importorskip("compressed_tensors.compressors", exc_type=ImportError)
    if layout == "mxfp8" and family not in DENSE:
        pytest.skip("Transformers 5.23 takes the scales of experts for scales by row")
    model, folder = export(tmp_path, family, layout)
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    reloaded = auto_class(model.config).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=settings)
    octavo.convert(reloaded.eval(), RECIPES[layout], verbose=False)
    assert torch.equal(logits(reloaded), logits(model))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("layout", "dtype"), [("fp8-row", torch.float32), ("mxfp8", torch.bfloat16)])
def test_compressed_tensors_computes_the_forward_of_training(tmp_path, layout, dtype):
    """Its emulation: decompressed weights, inputs quantized in the model's dtype, which needs float32 for `fp8-row`."""
    pytest.importorskip("compressed_tensors.compressors", exc_type=ImportError)
    model, folder = export(tmp_path, "vit", layout, dtype)
    reloaded = auto_class(model.config).from_pretrained(folder, dtype=dtype)
    assert sqnr(logits(model), logits(reloaded)) >= 45


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "deepseek_v3_blocks", "vit"])
def test_transformers_reads_blocks(tmp_path, family):
    pytest.importorskip("accelerate")
    model, folder = export(tmp_path, family, "fp8-block")
    settings = transformers.FineGrainedFP8Config(dequantize=True)
    reloaded = auto_class(model.config).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=settings)
    octavo.convert(reloaded.eval(), "blockwise", verbose=False)
    assert torch.equal(logits(reloaded), logits(model))
    octavo.export(reloaded, tmp_path / "again", to="fp8-block")  # Transformers itself would quantize anew, or fail
    first, second = tensors_of(folder), tensors_of(tmp_path / "again")
    assert first.keys() == second.keys() and config_of(folder) == config_of(tmp_path / "again")
    for name in first:
        if name.endswith("e_score_correction_bias"):  # which Transformers loads in float32
            second[name] = second[name].to(first[name].dtype)
        assert torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_transformers_makes_these_parameters_on_a_gpu(tmp_path, family):
    """`FP8Linear` has parameters of the names, dtypes and shapes of the file, partial blocks too."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    _, folder = export(tmp_path, family, "fp8-block")
    settings = transformers.FineGrainedFP8Config(**config_of(folder)["quantization_config"])
    config = CONFIGS[family]()
    with torch.device("meta"):
        theirs = auto_class(config).from_config(config, dtype=torch.bfloat16)
        replace_with_fp8_linear(theirs, settings.modules_to_not_convert, settings, pre_quantized=True)
    tensors = tensors_of(folder)
    expected = {name: (p.dtype, p.shape) for name, p in theirs.named_parameters() if ".experts." not in name}
    assert sum(dtype == torch.float8_e4m3fn for dtype, _ in expected.values()) >= 13
    assert {name: (tensors[name].dtype, tensors[name].shape) for name in expected} == expected
