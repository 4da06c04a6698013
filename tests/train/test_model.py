"""Models: what is built, loaded or refused, how weights are drawn, and the tokenizers that come with them."""

import json
import os
from contextlib import nullcontext
from copy import deepcopy
from importlib.util import find_spec

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_runs import LLAMA, curve, load, rejected
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from octavo.train import ConfigError, run
from octavo.train import model as model_module
from octavo.train.config.sections import Model
from octavo.train.data.tokenizer import load_tokenizer, train_tokenizer
from octavo.train.model import PARAMETER_DTYPES, build_model, check_model, draw_once, prepare_loss
from octavo.train.ranks import choose_device
from octavo.train.run_plan import plan_memory


@pytest.fixture
def tokenizer(make_config):
    return load(make_config()).tokenizer


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.thorough
def test_attention_is_chosen(make_config, tokenizer, packing, tmp_path):
    def settings(name):
        own = {"type": "llama", "config": LLAMA, "attention": name}
        return make_config(model=own, data={"packing": packing}, run={"steps": 3, "device": "cpu"})

    model = build_model(settings("eager"), tokenizer)
    assert model.config._attn_implementation == "eager"
    for name in ("auto", "sdpa", "eager"):
        run(settings(name), out=tmp_path / name)
    losses = [[row[2] for row in curve(tmp_path / name)] for name in ("auto", "sdpa", "eager")]
    assert losses[0] == losses[1] and losses[2] == pytest.approx(losses[0], rel=1e-3)
    fixed = make_config(model={"type": "bloom", "config": {"hidden_size": 32, "n_head": 2}, "attention": "sdpa"})
    with pytest.raises(ConfigError, match="parts of BloomForCausalLM compute it as eager"):  # Transformers only warns
        build_model(fixed, tokenizer)
    with pytest.raises(ConfigError, match="model.attention = 'flash_attention_2': .*installed.*Nearest"):
        build_model(settings("flash_attention_2"), tokenizer)
    with pytest.raises(ConfigError, match="flex_attention.* has no backward on a CPU"):
        run(settings("flex_attention"), out=tmp_path / "flex")
    fused, whole = (plan_memory(settings(name)).peak for name in ("flash_attention_3", "eager"))
    auto = plan_memory(settings("auto")).peak
    offsets = 4096 if packing == "documents" else 0  # of variable-length attention
    assert fused <= auto <= fused + offsets and auto < whole


@pytest.mark.parametrize("parameters", ["bf16", "fp16", "fp32"])
def test_parameters_have_the_type_asked_for(parameters, make_config, tokenizer):
    model = build_model(make_config(precision={"parameters": parameters}), tokenizer)
    assert {param.dtype for param in model.parameters()} == {PARAMETER_DTYPES[parameters]} and model.training
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32 and model.config._attn_implementation == "sdpa"
    assert (model.config.vocab_size, model.config.eos_token_id) == (tokenizer.size, tokenizer.end_id)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"type": "lama"}, r'model\.type = "lama" is not a model type .*did you mean \'llama\''),
        ({"type": "vit"}, r'model\.type = "vit" is not a causal language model'),
        ({"type": "llama", "config": {"hiden_size": 3}}, r"model\.config\.hiden_size: .*did you mean 'hidden_size'"),
        ({"type": "llama", "config": {"hidden_size": "x"}}, r"model\.config: llama rejects it: .*hidden_size.*int"),
        ({"type": "llama", "config": LLAMA | {"num_attention_heads": 5}}, r"model\.config: llama rejects it: "),
        ({"type": "llama", "config": LLAMA | {"vocab_size": 100}}, r"vocabulary of 100 is smaller .* 300"),
        ({"type": "llama", "config": LLAMA | {"max_position_embeddings": 8}}, r"longer than the model's context of 8"),
        ({"type": "llama", "config": LLAMA | {"pad_token_id": 100_000}}, r"llama cannot be built .*Padding_idx"),
        ({"type": "llama", "config": LLAMA | {"return_dict": False}}, r"return_dict = false.*leave it out"),
        ({"path": "nowhere"}, r"nowhere holds no transformers checkpoint"),
    ],
)
def test_bad_models(model, message, make_config, tokenizer):
    rejected(message, build_model, make_config(model=model), tokenizer)


def test_config_fields_of_other_spellings(make_config, tokenizer):
    config = LLAMA | {"rope_theta": 500.0, "tie_word_embeddings": True, "initializer_range": 0.05}
    model = build_model(make_config(model={"type": "llama", "config": config}), tokenizer)
    assert model.config.rope_parameters["rope_theta"] == 500.0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    gpt2 = {"hidden_size": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = build_model(make_config(model={"type": "gpt2", "config": gpt2}), tokenizer)
    assert model.config.n_embd == 32


def test_a_local_checkpoint_and_its_tokenizer(make_config, tokenizer, saved_model):
    model = build_model(make_config(), tokenizer)
    model.save_pretrained(saved_model)  # in bf16
    precision = {"parameters": "fp32"}
    config = make_config(model={"path": str(saved_model)}, precision=precision, data={"vocab_size": 280})
    loaded = build_model(config, tokenizer).state_dict()
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in model.state_dict().items())
    own = load(config)
    assert own.tokenizer.size == 300
    text = "the leaf folds\n  eight times"
    assert own.tokenizer.encode([text]) == tokenizer.encode([text])
    assert load_tokenizer(saved_model).end_id == tokenizer.end_id


def test_folders_with_damaged_weights(make_config, tokenizer, saved_model):
    config, file = make_config(model={"path": str(saved_model)}), saved_model / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    rejected(r"lacks lm_head\.weight \(1 weights in all\)", build_model, config, tokenizer)
    file.write_bytes(b"damaged")
    rejected("the model cannot be loaded", build_model, config, tokenizer)


def test_choose_device(monkeypatch):
    for usable in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda usable=usable: usable)
        assert choose_device("auto").type == ("cuda" if usable else "cpu") and choose_device("cpu").type == "cpu"
        with nullcontext() if usable else pytest.raises(ConfigError, match=r'run\.device = "cuda"'):
            assert choose_device("cuda").type == "cuda"


ROBERTA = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"is_decoder": True}
XLM = {"emb_dim": 32, "n_layers": 1, "n_heads": 2}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"type": "roberta", "config": ROBERTA}, "cannot compute a loss from token ids alone; .*set it, as to 0"),
        ({"type": "camembert", "config": ROBERTA}, "config.pad_token_id, which is unset"),
        ({"type": "xlm", "config": XLM},
         "XLMWithLMHeadModel cannot compute a loss from token ids alone .AttributeError"),
        ({"type": "git", "config": {"hidden_size": 32, "num_attention_heads": 2}},
         "GitForCausalLM cannot compute a loss from token ids alone .ValueError"),
    ],
)  # fmt: skip
def test_models_that_do_not_run_on_tokens(model, message, make_config, tokenizer):
    config = make_config(model=model)
    rejected(message, lambda: prepare_loss(build_model(config, tokenizer), "chunked"))
    rejected("cannot run a micro-batch of 4 sequences", plan_memory, config, device="cpu")


def test_the_tables_of_a_run_stay_as_they_are(make_config, tokenizer):
    """Transformers writes rope_theta into the table that it is given."""
    for name in ("rope_scaling", "rope_parameters"):
        config = make_config(model={"type": "llama", "config": LLAMA | {name: {"rope_type": "linear", "factor": 2.0}}})
        before = deepcopy(config.model.config)
        build_model(config, tokenizer)
        assert config.model.config == before


CUSTOM = {"AutoConfig": "mod.MyConfig", "AutoModelForCausalLM": "mod.MyModel"}
CODE = [
    ("llama", {"AutoModelForCausalLM": "mod.MyModel"}, "MyModel"), ("llama", "mod.MyModel", "MyModel"),
    ("llama", {"AutoModel": "owner/name--mod.MyModel"}, "MyModel"),
    ("llama", {"AutoConfig": "mod.MyConfig"}, "MyConfig"), ("my-type", CUSTOM, "MyConfig, MyModel"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "auto_map", "asked"), CODE)
def test_the_code_of_a_model_is_never_run_nor_left_out(kind, auto_map, asked, make_config, tokenizer, saved_model):
    folder, ran = saved_model, saved_model / "ran"
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": kind, "auto_map": auto_map}))
    (folder / "mod.py").write_text(f"open({str(ran)!r}, 'w')")
    config = make_config(model={"path": str(folder)})
    for action in (lambda: build_model(config, tokenizer), lambda: plan_memory(config, device="cpu")):
        error = rejected(rf"needs its own code \({asked}\), which Octavo", action)
        assert "trust_remote_code" not in error
    assert not ran.exists()


def test_code_that_transformers_has_by_now_is_not_asked_for(make_config, tokenizer, tmp_path):
    model = build_model(make_config(), tokenizer)
    names = {"AutoConfig": "LlamaConfig", "AutoModel": "LlamaModel", "AutoModelForCausalLM": "LlamaForCausalLM"}
    model.config.auto_map = {key: f"modeling.{name}" for key, name in names.items()} | {"AutoTokenizer": ["x.Y", None]}
    model.save_pretrained(tmp_path)
    assert build_model(make_config(model={"path": str(tmp_path)}), tokenizer)


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "[" * 100_000, '{"model_type": 3}', '{"model_type": "no"}'])
def test_a_damaged_config_is_named(content, make_config, tokenizer, tmp_path):
    (tmp_path / "config.json").write_text(content)
    config = make_config(model={"path": str(tmp_path)})
    rejected(r"config\.json cannot be read: .", build_model, config, tokenizer)
    rejected(r"config\.json cannot be read: .", plan_memory, config, device="cpu")


def test_fields_that_only_the_models_code_reads_are_known():
    """Qwen3-30B-A3B has heads of 128 with a width of 2048 and 32 heads."""
    check_model(Model(type="qwen3_moe", config={"head_dim": 128}))
    with pytest.raises(ConfigError, match=r"config.head_dims: qwen3_moe has no such field .did you mean 'head_dim'"):
        check_model(Model(type="qwen3_moe", config={"head_dims": 128}))


SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}


def language_model():
    config = AutoConfig.for_model("llama", vocab_size=500, **SHAPE)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def vision_model():  # draws a normal distribution that is cut off, in several steps
    config = AutoConfig.for_model("vit", image_size=32, patch_size=8, **SHAPE)
    return transformers.AutoModelForImageClassification.from_config(config)


class Handmade(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32, padding_idx=3)
        self.copy = nn.Parameter(self.embedding.weight.detach().clone())
        self.partly = nn.Linear(32, 64, bias=False)
        nn.init.normal_(self.partly.weight[:32])
        self.rotation = nn.Linear(32, 32)
        nn.init.orthogonal_(self.rotation.weight)
        nn.init.constant_(self.rotation.bias, 7)
        self.scale = nn.Parameter(torch.randn(10))
        self.joined = nn.Parameter(torch.cat([nn.Linear(32, 8).weight, nn.Linear(32, 8).weight]).detach())
        self.replaced = nn.Linear(32, 32)
        self.replaced.weight.data = torch.zeros(32, 32)


def weights(build, seed=1):
    return draw_once(build, seed).state_dict()


@pytest.mark.parametrize("build", [language_model, vision_model, Handmade])
def test_weights_depend_on_the_seed_and_not_on_threads(monkeypatch, build):
    monkeypatch.setattr(model_module, "CHUNK", 1000)
    first = weights(build)
    torch.randn(100)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    again, other = weights(build), weights(build, 2)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert [name for name, value in first.items() if value.std() > 0 and torch.equal(value, other[name])] == []


@pytest.mark.parametrize("build", [language_model, vision_model])
def test_they_are_distributed_as_those_of_transformers(build):
    torch.manual_seed(1)
    for name, plain in build().state_dict().items():
        drawn = weights(build)[name].double()
        assert drawn.mean().item() == pytest.approx(plain.double().mean().item(), abs=0.1 / plain.numel() ** 0.5), name
        if plain.numel() > 1000:
            assert drawn.std().item() == pytest.approx(plain.double().std().item(), rel=0.1), name
            assert drawn.abs().max().item() == pytest.approx(plain.double().abs().max().item(), rel=0.5), name


def test_each_weight_is_drawn_once(monkeypatch):
    drawn = []
    draw = model_module._draw
    monkeypatch.setattr(model_module, "_draw", lambda chunk: drawn.append(chunk[1].numel()) or draw(chunk))
    model = draw_once(language_model, 1)
    assert sum(drawn) == sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)


def test_chunks_have_different_numbers(monkeypatch):
    monkeypatch.setattr(model_module, "CHUNK", 64)
    chunks = [row for value in weights(language_model).values() if value.dim() == 2 for row in value.view(-1).split(64)]
    assert len({tuple(chunk.tolist()) for chunk in chunks}) == len(chunks)


def test_a_tensor_is_drawn_before_something_else_touches_it():
    model = draw_once(Handmade, 1)
    assert torch.equal(model.copy, model.embedding.weight) and not model.embedding.weight[3].any()
    assert 0.9 < model.embedding.weight.std() < 1.1
    assert model.partly.weight[:32].std() > 0.8 and model.partly.weight[32:].abs().max() <= 32**-0.5
    assert torch.allclose(model.rotation.weight @ model.rotation.weight.T, torch.eye(32), atol=1e-5)
    assert (model.rotation.bias == 7).all() and model.scale.std() > 0.3
    assert model.joined.abs().max() <= 32**-0.5 and all(part.std() > 0.05 for part in model.joined.split(8))
    assert not model.replaced.weight.any()


# --- tokenizers of a model: any layout is used as it is, and saved whole; none runs code or is made up ---


LETTERS = "abcdefghijklmnopqrstuvwxyz."
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "leaf"]
GPT2 = {token: number for number, token in enumerate(["<|endoftext|>", *LETTERS, "Ġ", "Ċ", "th", "the", "Ġt"])}
TEXT = "the leaf [SEP] folds <|endoftext|>"
FILES = {
    "vocab.txt": {"config.json": {"model_type": "bert"}, "vocab.txt": "\n".join(BERT)},
    "vocab.txt of a named class": {
        "config.json": {"model_type": "llama"}, "vocab.txt": "\n".join(BERT),
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
    },
    "vocab.json and merges.txt": {
        "config.json": {"model_type": "gpt2"}, "vocab.json": GPT2, "merges.txt": "#version: 0.2\nt h\nth e\nĠ t\n",
    },
    "in Python, merges": {
        "config.json": {"model_type": "ctrl"}, "vocab.json": {"<unk>": 0, "t@@": 1, "h@@": 2, "the": 3, "</s>": 4},
        "merges.txt": "#version: 0.2\nt h\nth e</w>\n", "tokenizer_config.json": {"eos_token": "</s>"},
    },
    "in Python, bytes": {
        "config.json": {"model_type": "llama"}, "tokenizer_config.json": {"tokenizer_class": "ByT5Tokenizer"},
    },
}  # fmt: skip
REFUSED = {
    "nothing": ({}, "no tokenizer could be loaded .*save one there.*data.tokenizer"),
    "llama": ({"config.json": {"model_type": "llama"}}, "no tokenizer could be loaded"),
    "gpt2": ({"config.json": {"model_type": "gpt2"}}, "none of the files of GPT2Tokenizer .*vocab.json, merges.txt"),
    "bert": ({"config.json": {"model_type": "bert"}}, "none of the files of BertTokenizer"),
    "llama, named": (
        {"config.json": {"model_type": "llama"}, "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}},
        "none of the files of LlamaTokenizer .tokenizer.model, tokenizer.json.",
    ),
    "damaged": ({"config.json": {"model_type": "llama"}, "tokenizer.json": "{"}, "no tokenizer could be loaded"),
    "empty": ({"config.json": {"model_type": "llama"}, "tokenizer.json": {}}, "could be loaded from .*: KeyError"),
    "no end": ({"config.json": {"model_type": "ctrl"}, "vocab.json": {"<unk>": 0, "a": 1}, "merges.txt": "#\n"}, "eos"),
}


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("layout", FILES)
def test_any_layout_is_used_as_it_is(layout, tmp_path, make_config):
    folder = write(tmp_path / "model", FILES[layout])
    theirs = AutoTokenizer.from_pretrained(str(folder))
    config = make_config(model={"path": str(folder)})
    corpus = load(config)
    ours = corpus.tokenizer
    expected = theirs([TEXT], add_special_tokens=False, split_special_tokens=True).input_ids
    assert ours.encode([TEXT]) == expected
    assert ours.end_id == theirs.convert_tokens_to_ids(theirs.eos_token or theirs.sep_token)
    assert ours.size == max(theirs.get_vocab().values()) + 1
    assert int(corpus.batch(0, 0, 4)[0].max()) < ours.size
    assert load(config).fingerprint == corpus.fingerprint
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours.save(tmp_path / "ours")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert load_tokenizer(tmp_path / "ours").encode([TEXT]) == expected


def test_everything_of_a_tokenizer_and_the_generation_config_survive(tmp_path, make_config):
    made = train_tokenizer(["the leaf folds eight times"] * 9, 280)
    source = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made.backend, eos_token=made.end, bos_token="<s>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<|im_end|>"], model_max_length=77, padding_side="left",
    )  # fmt: skip
    source.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    source.backend_tokenizer.enable_truncation(3)
    folder = tmp_path / "model"
    model = build_model(make_config(model={"type": "llama", "config": LLAMA | {"vocab_size": 300}}), made)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[0, 283])
    model.save_pretrained(folder)
    source.save_pretrained(str(folder))
    config = make_config(data={"tokenizer": str(folder)})
    corpus = load(config)
    assert len(corpus.tokenizer.encode(["the leaf folds eight times"] * 2)[1]) == 5  # not cut to 3
    (tmp_path / "saved").mkdir()
    corpus.tokenizer.save(tmp_path / "saved")
    original = tmp_path / "original"
    AutoTokenizer.from_pretrained(str(folder)).save_pretrained(str(original))
    assert contents(tmp_path / "saved") == contents(original)
    assert "chat_template.jinja" in contents(original)
    back = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert (back.bos_token, back.pad_token, back.unk_token, back.model_max_length) == ("<s>", "<pad>", "<unk>", 77)
    assert "<|im_end|>" in back.all_special_tokens and back.padding_side == "left"
    loaded = build_model(make_config(model={"path": str(folder)}), corpus.tokenizer)
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    assert loaded.generation_config.eos_token_id == [0, 283]


@pytest.mark.parametrize("where", REFUSED)
def test_a_pretrained_model_without_a_tokenizer_is_refused(where, tmp_path, make_config):
    files, message = REFUSED[where]
    folder = write(tmp_path / "model", files)
    config = make_config(model={"path": str(folder)})
    assert str(folder) in rejected(message, load, config)


@pytest.mark.parametrize("known", [False, True])
def test_code_in_the_folder_never_runs(known, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run it"))
    ran = tmp_path / "ran"
    settings = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}
    evil = {"evil.py": f"open({str(ran)!r}, 'w')\nclass EvilTokenizer: pass\n", "tokenizer_config.json": settings}
    files = FILES["vocab.json and merges.txt" if known else "vocab.txt of a named class"]
    folder = write(tmp_path / "model", files | evil)
    rejected(r"needs its own code \(EvilTokenizer\), which Octavo never runs", load_tokenizer, folder)
    assert not ran.exists()


def test_own_code_of_a_known_name_is_not_taken_for_another_class(tmp_path):
    settings = {"auto_map": {"AutoTokenizer": ["own.BertTokenizer", None]}}
    folder = write(tmp_path, FILES["vocab.json and merges.txt"] | {"tokenizer_config.json": settings})
    rejected(r"own code \(BertTokenizer\), .*; GPT2Tokenizer.* may encode differently", load_tokenizer, folder)


@pytest.mark.parametrize(
    ("name", "content", "package"),
    [
        ("tokenizer.model", b"\n\x0e\n\x05<unk>", "sentencepiece"),
        ("spiece.model", b"\n\x0e\n\x05<unk>", "sentencepiece"),
        ("tokenizer.model", b"YQ== 0\nYg== 1\n", "tiktoken"),
    ],
)
def test_a_missing_package_is_named(name, content, package, tmp_path):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    kind = "xlnet" if name == "spiece.model" else "llama"
    folder = write(tmp_path, {"config.json": {"model_type": kind}})
    (folder / name).write_bytes(content)
    rejected(f"{name} needs a package that is not installed: pip install {package}", load_tokenizer, folder)
