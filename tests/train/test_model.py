from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import LLAMA, MakeConfig
from transformers import AutoModelForCausalLM

from octavo.train.config import ConfigError
from octavo.train.data import load_corpus
from octavo.train.device import choose_device
from octavo.train.metrics import Silent
from octavo.train.model import build_model
from octavo.train.tokenizer import TextTokenizer, load_tokenizer


@pytest.fixture
def tokenizer(make_config: MakeConfig) -> TextTokenizer:
    return load_corpus(make_config(), Silent()).tokenizer


@pytest.mark.parametrize("parameters", ["bf16", "fp16", "fp32"])
def test_parameters_have_the_type_asked_for(parameters: str, make_config: MakeConfig, tokenizer: TextTokenizer) -> None:
    model: Any = build_model(make_config(precision={"parameters": parameters}), tokenizer)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[parameters]
    assert {param.dtype for param in model.parameters()} == {wanted}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.config.vocab_size == tokenizer.size
    assert model.config.eos_token_id == tokenizer.end_id


def test_a_seed_decides_the_weights(make_config: MakeConfig, tokenizer: TextTokenizer) -> None:
    weights = [build_model(make_config(run={"seed": seed}), tokenizer).state_dict() for seed in (1, 1, 2)]
    key = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0][key], weights[2][key])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"type": "lama"}, r'model\.type = "lama" is not a model type .*did you mean \'llama\''),
        ({"type": "vit"}, r'model\.type = "vit" is not a causal language model'),
        ({"type": "llama", "config": {"hiden_size": 3}}, r"model\.config\.hiden_size: .*did you mean 'hidden_size'"),
        ({"type": "llama", "config": {"hidden_size": "x"}}, r"model\.config: llama refuses it: .*hidden_size.*int"),
        ({"type": "llama", "config": LLAMA | {"num_attention_heads": 5}}, r"model\.config: llama refuses it: "),
        ({"type": "llama", "config": LLAMA | {"vocab_size": 100}}, r"vocabulary of 100 is smaller .* 300"),
        ({"type": "llama", "config": LLAMA | {"max_position_embeddings": 8}}, r"longer than the model's context of 8"),
        ({"path": "nowhere"}, r"nowhere holds no transformers checkpoint"),
    ],
)
def test_bad_models(model: dict[str, Any], message: str, make_config: MakeConfig, tokenizer: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(make_config(model=model), tokenizer)
    assert "\n" not in str(caught.value)


def test_config_fields_of_other_spellings(make_config: MakeConfig, tokenizer: TextTokenizer) -> None:
    config = LLAMA | {"rope_theta": 500.0, "tie_word_embeddings": True, "initializer_range": 0.05}
    model: Any = build_model(make_config(model={"type": "llama", "config": config}), tokenizer)
    assert model.config.rope_parameters["rope_theta"] == 500.0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    gpt2 = {"hidden_size": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = build_model(make_config(model={"type": "gpt2", "config": gpt2}), tokenizer)
    assert model.config.n_embd == 32


def test_a_local_checkpoint_and_its_tokenizer(
    make_config: MakeConfig, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    model: Any = build_model(make_config(), tokenizer)
    model.save_pretrained(tmp_path)
    config = make_config(model={"path": str(tmp_path)}, precision={"parameters": "fp32"})
    loaded = build_model(config, tokenizer).state_dict()
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in model.state_dict().items())
    tokenizer.save(tmp_path)
    own = load_corpus(make_config(model={"path": str(tmp_path)}, data={"vocab_size": 280}), Silent())
    assert own.tokenizer.size == 300
    text = "the leaf folds\n  eight times"
    assert own.tokenizer.encode([text]) == tokenizer.encode([text])
    assert load_tokenizer(tmp_path).end_id == tokenizer.end_id


def test_folders_without_a_tokenizer_or_with_damaged_weights(
    make_config: MakeConfig, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        load_corpus(make_config(data={"tokenizer": str(tmp_path)}), Silent())
    model: Any = build_model(make_config(), tokenizer)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks lm_head\.weight \(1 weights in all\)"):
        build_model(make_config(model={"path": str(tmp_path)}), tokenizer)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="the model cannot be loaded"):
        build_model(make_config(model={"path": str(tmp_path)}), tokenizer)


def test_choose_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == choose_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match=r'run\.device = "cuda"'):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto").type == choose_device("cuda").type == "cuda"
    assert choose_device("cpu").type == "cpu"


def test_auto_model_reads_what_the_tokenizer_says(make_config: MakeConfig, tokenizer: TextTokenizer) -> None:
    model = build_model(make_config(), tokenizer)
    assert type(model) is AutoModelForCausalLM._model_mapping[type(model.config)]
