"""Loading safetensors into a model with resident weights: tensor by tensor, expert by expert, all or nothing."""

import copy
import json
import weakref
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import octavo
from octavo.nn import ResidentWeight, load_frozen, meta_parameters
from octavo.numerics import QuantSpec
from support.dispatch_modes import Passing
from support.moe_models import FAMILIES, mixture, resident
from support.refusals import refused
from tensors import same

LAYERS, WIDTH = 24, 128


def stack(layers=LAYERS):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)))


def on_meta(make=stack, recipe="rowwise"):
    with meta_parameters():
        model = make()
    return octavo.convert(model, recipe, frozen="fp8", verbose=False)


@pytest.fixture
def base(tmp_path):
    """A model and the folder of its checkpoint, in two files."""
    torch.manual_seed(0)
    model = stack()
    state = model.state_dict()
    names = sorted(state)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:])):
        file = f"model-{number}.safetensors"
        save_file({name: state[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model, tmp_path


class Live(Passing):
    """Bytes of the storages that operations inside returned and that are alive, now and at the most."""

    def __init__(self):
        super().__init__(self._count)
        self.now = self.most = 0
        self._alive = {}

    def _count(self, tensor):
        if isinstance(tensor, ResidentWeight) or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.finalize(storage, self._end, key, size)
            self.now += size
            self.most = max(self.most, self.now)

    def _end(self, key, size):
        del self._alive[key]
        self.now -= size


def test_it_never_holds_the_model_in_high_precision(base):
    plain, folder = base
    model = on_meta()
    with Live() as live:
        load_frozen(model, folder)
    parameters = LAYERS * WIDTH * WIDTH
    size = sum(p.data_.nbytes + p.scale.nbytes for p in model.parameters())
    assert size <= 1.05 * parameters
    assert size <= live.most <= 1.2 * 1.05 * parameters + 4 * WIDTH * WIDTH
    expected = octavo.convert(plain, "rowwise", frozen="fp8", verbose=False).state_dict()
    assert same(expected, model.state_dict())


@pytest.mark.parametrize(("recipe", "another"), [("rowwise", "tensorwise"), ("blockwise", "rowwise")])
def test_bytes_with_their_scales_load_bit_for_bit(recipe, another, base, tmp_path):
    model = load_frozen(on_meta(recipe=recipe), base[1])
    state = model.state_dict()
    if recipe == "blockwise":  # as DeepSeek's checkpoints name the scales
        state = {name.replace("weight_scale", "weight_scale_inv"): tensor for name, tensor in state.items()}
    save_file(state, tmp_path / "fp8.safetensors")
    for other in (on_meta(recipe=recipe), octavo.convert(stack(), recipe, frozen="fp8", verbose=False)):
        before = other[0].weight
        load_frozen(other, tmp_path / "fp8.safetensors")
        assert before.is_meta or other[0].weight is before
        x = torch.randn(2, WIDTH).bfloat16()
        assert torch.equal(other(x), model(x))
    with pytest.raises(ValueError, match=r"0.weight(_scale(_inv)?)? in .*Nothing was loaded"):
        load_frozen(on_meta(recipe=another), tmp_path / "fp8.safetensors")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, WIDTH), nn.LayerNorm(WIDTH)
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight
        self.lm_head = nn.Linear(WIDTH, 32, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("rotary", torch.arange(4.0), persistent=False)

    def forward(self, tokens):
        return self.lm_head(self.other(self.one(self.norm(self.embed(tokens)))))


def test_tied_weights_buffers_and_other_parameters(tmp_path):
    torch.manual_seed(0)
    plain = Tied()
    state = {k: v for k, v in plain.state_dict().items() if k not in ("lm_head.weight", "one.weight")}
    save_file(state, tmp_path / "m.safetensors")
    model = load_frozen(on_meta(Tied), tmp_path / "m.safetensors")
    assert model.one.weight is model.other.weight and model.lm_head.weight is model.embed.weight
    assert isinstance(model.one.weight, ResidentWeight) and model.norm.weight.requires_grad
    tokens = torch.arange(8)[None]
    expected = octavo.convert(copy.deepcopy(plain), "rowwise", frozen="fp8", verbose=False)(tokens)
    assert torch.equal(model(tokens), expected) and torch.equal(model.rotary, plain.rotary)
    (tmp_path / "m.safetensors").write_bytes(b"\0" * (tmp_path / "m.safetensors").stat().st_size)
    assert torch.equal(model(tokens), expected)  # nothing is mapped to the file


def test_what_does_not_fit_raises_before_anything_is_loaded(base, tmp_path):
    _, folder = base
    model = on_meta()
    with pytest.raises(ValueError, match=r"lacks 1 tensors of the model \(24.weight\), and has no others"):
        load_frozen(on_meta(lambda: stack(LAYERS + 1)), folder)
    with pytest.raises(ValueError, match=r"lacks 24 .*has 24 tensors that the model lacks .* before get_peft_model"):
        load_frozen(on_meta(lambda: nn.ModuleDict({"base": stack()})), folder)
    with pytest.warns(UserWarning, match=r"has 1 tensors that the model lacks \(23.weight\): not loaded"):
        load_frozen(on_meta(lambda: stack(LAYERS - 1)), folder)
    refused("there is no file or folder .*none", load_frozen, model, tmp_path / "none", kind=FileNotFoundError)
    other = tmp_path / "other.safetensors"
    state = {name: p.clone() for name, p in base[0].state_dict().items()}
    save_file(state | {"3.weight": torch.zeros(8, 8)}, other)
    refused(r"3.weight in .* has shape \[8, 8\], the model's has \[128, 128\]", load_frozen, model, other)
    save_file(state | {"3.weight": state["3.weight"].to(torch.float8_e4m3fn)}, other)
    with pytest.raises(
        ValueError, match=r"3.weight in .* has dtype F8_E4M3, without scales .3.weight_scale.; expected torch.float32"
    ):
        load_frozen(model, other)
    assert all(p.is_meta for p in model.parameters())
    with torch.device("meta"):
        model = octavo.convert(Tied(), "rowwise", frozen="fp8", verbose=False)
    save_file({k: v.clone() for k, v in Tied().state_dict().items()}, other)
    refused(r"1 buffers on the meta device are in no checkpoint \(rotary\): build", load_frozen, model, other)
    for number in (0, 1):
        (folder / f"model-{number}.safetensors").unlink()
    (folder.parent / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"lacks model-0.safetensors, model-1.safetensors, which .*index.json"):
        load_frozen(on_meta(), folder)
    refused(r"has no \*.safetensors file", load_frozen, on_meta(), folder.parent / "empty", kind=FileNotFoundError)


def test_damaged_files_are_named(base, tmp_path):
    _, folder = base
    model = on_meta()
    shard, index = folder / "model-1.safetensors", folder / "model.safetensors.index.json"
    whole = shard.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\xff" * 100):
        shard.write_bytes(content)
        refused(r"load_frozen: .*model-1\.safetensors is damaged: .*Nothing was loaded", load_frozen, model, folder)
    for content in ("{", "[]", '{"metadata": {}}', '{"weight_map": [1]}'):
        index.write_text(content)
        refused(r"load_frozen: .*model\.safetensors\.index\.json is damaged", load_frozen, model, folder)
    assert all(p.is_meta for p in model.parameters())


def test_a_folder_is_read_as_from_pretrained_reads_it(base, tmp_path):
    plain, _ = base
    other = tmp_path / "other"
    other.mkdir()
    state = {name: p.clone() for name, p in plain.state_dict().items()}
    zeros = {name: torch.zeros_like(p) for name, p in state.items()}
    save_file(state, other / "a.safetensors")
    save_file(zeros, other / "model.fp16.safetensors")
    refused(r"a\.safetensors and .*fp16\.safetensors both have 0\.weight", load_frozen, on_meta(), other)
    (other / "a.safetensors").rename(other / "model.safetensors")
    loaded = load_frozen(on_meta(), other)
    assert all(layer.weight.dequantized(torch.float32).any() for layer in loaded)


def test_scales_are_never_left_out(base, tmp_path):
    """FP8 values without their scales are other numbers, so a plain parameter takes none."""
    file, plain = tmp_path / "fp8.safetensors", base[0]
    resident = octavo.convert(copy.deepcopy(plain), "rowwise", frozen="fp8", verbose=False)
    save_file(resident.state_dict(), file)
    with meta_parameters():
        model = stack()
    octavo.convert(model, "rowwise", frozen="fp8", skip=["3"], verbose=False)
    refused(r"3\.weight in .* has dtype F8_E4M3, but its layer is not resident in FP8", load_frozen, model, file)
    state = resident.state_dict()
    save_file(state | {"3.weight": plain[3].weight.detach().clone()}, file)
    refused(r"3\.weight in .* has dtype BF16; expected torch\.float8_e4m3fn", load_frozen, on_meta(), file)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_weights_and_scales_of_other_dtypes(dtype, base, tmp_path):
    plain, file = base[0].float(), tmp_path / "other.safetensors"
    save_file(plain.to(dtype).state_dict(), file)
    expected = resident(copy.deepcopy(plain).float())
    loaded = load_frozen(on_meta(), file)
    for one, other in zip(expected, loaded, strict=True):
        assert same(one.weight, other.weight) and other.weight.dtype == torch.bfloat16
    state = {k: v.bfloat16() if "scale" in k else v for k, v in loaded.state_dict().items()}  # llm-compressor's
    save_file(state, file)
    again = load_frozen(on_meta(), file)
    assert torch.equal(again[0].weight.scale, loaded[0].weight.scale.bfloat16().float())


def test_an_error_while_reading_leaves_the_model(base, monkeypatch):
    """At the fifth weight."""
    model = on_meta()
    weights = [ResidentWeight.quantized(base[0][0].weight, QuantSpec.parse("e4m3/row")) for _ in range(4)]
    monkeypatch.setattr(ResidentWeight, "quantized", mock.Mock(side_effect=[*weights, OSError("disk")]))
    refused("disk", load_frozen, model, base[1], kind=OSError)
    assert all(p.is_meta for p in model.parameters())


def test_meta_parameters_leaves_no_hook():
    with pytest.raises(KeyError), meta_parameters():
        assert nn.Linear(2, 2).bias.is_meta and not nn.BatchNorm1d(2).running_mean.is_meta
        raise KeyError
    assert not nn.Linear(2, 2).weight.is_meta


# --- experts ---


def resident_on_meta(model):
    return on_meta(lambda: type(model)(model.config).bfloat16())


@pytest.mark.parametrize(("family", "published"), [*((family, True) for family in FAMILIES), ("mixtral", False)])
def test_checkpoints_load_expert_by_expert(family, published, tmp_path):
    model = mixture(family).bfloat16()
    model.save_pretrained(tmp_path, save_original_format=published)
    other = resident_on_meta(model)
    load_frozen(other, tmp_path)
    assert same(other.state_dict(), resident(copy.deepcopy(model)).state_dict())


def test_loading_holds_little_more_than_the_experts(tmp_path):
    sizes = {"num_hidden_layers": 12, "vocab_size": 8, "hidden_size": 128, "intermediate_size": 192}
    model = mixture("mixtral", **sizes, num_attention_heads=2, num_key_value_heads=2).bfloat16()
    model.save_pretrained(tmp_path)
    parameters = sum(p.numel() for p in model.parameters())
    other = resident_on_meta(model)
    with Live() as live:
        load_frozen(other, tmp_path)
    tensors = [t for p in other.parameters() for t in ((p.data_, p.scale) if isinstance(p, ResidentWeight) else (p,))]
    size = sum(tensor.nbytes for tensor in tensors)
    assert size <= 1.05 * parameters and size <= live.most <= 1.2 * size + 3 * 8 * 384 * 128


def test_a_missing_expert_is_named(tmp_path):
    model = mixture("mixtral").bfloat16()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    other = resident_on_meta(model)
    save_file({k: v for k, v in state.items() if k != name}, file, metadata={"format": "pt"})
    refused(r"lacks 1 tensors of the model \(model.layers.1.mlp.experts.down_proj\)", load_frozen, other, tmp_path)
    save_file(state | {name: state[name][:-1].contiguous()}, file, metadata={"format": "pt"})
    refused(r"experts.3.w2.weight in .* has shape \[63, 96\], the model's has \[64, 96\]", load_frozen, other, tmp_path)
    assert all(parameter.is_meta for parameter in other.parameters())
