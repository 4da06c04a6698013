"""--shrink: a small run of the same architecture and the same precision."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_runs import sentences, slow
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.nn.convert import rule_plan
from octavo.numerics.suggestions import pattern
from octavo.train.config.run_config import ConfigError, flat, load_config
from octavo.train.config.shrink import SECTIONS, change_of, complete_config, shrink_model
from octavo.train.record.metrics import RunResult, read_metrics
from support.command import octavo

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ("demo", "own-data", "sft-demo")
OTHERS = (*SMALL, "vit-digits", "vlm-digits", "nvila-like-8b", "dit-digits", "dit-xl", "vit-l16")  # with images
MODELS = sorted(path for path in CONFIGS.glob("*.toml") if path.stem not in OTHERS)
MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3-16b")


def shrunk(path, *overrides):
    return load_config(path, overrides, change=change_of(True))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_precision_and_features_of_the_architecture_stay(path):
    large, small = load_config(path), shrunk(path)
    assert small.precision == large.precision and small.optim.states == large.optim.states
    assert small.parallel == type(small.parallel)()
    assert (small.run.steps, small.data.source, small.data.sequence_length) == (60, "python-stdlib", 128)
    assert small.run.name == f"{large.run.name}-shrunk" and small.model.type == large.model.type
    before, after = (complete_config(str(c.model.type), c.model.config) for c in (large, small))
    assert after["num_hidden_layers"] <= (2 if path.stem in MIXTURES else 4)  # two minutes on two CPU cores
    for field in ("num_attention_heads", "num_key_value_heads"):
        assert after[field] <= before[field]
    heads = [sizes["num_attention_heads"] / sizes["num_key_value_heads"] for sizes in (before, after)]
    assert heads[0] == heads[1]
    sizes = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    others = {name for name, value in before.items() if isinstance(value, bool | float | str)}
    assert {name: after[name] for name in others - sizes} == {name: before[name] for name in others - sizes}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(small.model.type, **small.model.config))
    named = {name.replace("model.layers.0.", ""): p for name, p in model.named_parameters()}
    assert sum(p.numel() for p in model.parameters() if p is not model.get_input_embeddings().weight) < 45e6
    if small.model.type.startswith("qwen3"):
        assert "self_attn.q_norm.weight" in named
    if path.stem in MIXTURES:
        experts = next(after[name] for name in ("num_local_experts", "n_routed_experts") if name in after)
        assert experts == 8 and after["num_experts_per_tok"] == 2
    if small.model.type == "deepseek_v3":
        assert {"self_attn.kv_a_proj_with_mqa.weight", "self_attn.q_a_proj.weight"} <= set(named)
        assert after["first_k_dense_replace"] == 1 < after["num_hidden_layers"]


@pytest.mark.thorough
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_the_same_layers_are_in_fp8(path):
    def converted(config):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.model.type, **config.model.config))
        return {pattern(row.name): row.converted for row in rule_plan(model, precision=config.resolved).rows}

    assert converted(shrunk(path)) == converted(load_config(path))


def test_widths_are_divided_by_one_power_of_two():
    llama = complete_config("llama", {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
                                      "num_key_value_heads": 8, "num_hidden_layers": 80})  # fmt: skip
    small = shrink_model("llama", {}, llama)
    assert (small["hidden_size"], small["intermediate_size"], small["num_hidden_layers"]) == (256, 896, 3)
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["head_dim"]) == (16, 2, 64)
    again = complete_config("llama", small)
    assert shrink_model("llama", small, again) == small


def test_groups_of_experts_stay_consistent():
    small = shrink_model("deepseek_v3", {}, complete_config("deepseek_v3", {}))
    assert (small["n_routed_experts"], small["num_experts_per_tok"]) == (8, 2)
    assert (small["n_group"], small["topk_group"]) == (2, 1)
    assert (small["q_lora_rank"], small["kv_lora_rank"], small["qk_nope_head_dim"]) == (192, 128, 64)


def test_it_says_what_changes_and_settings_come_after_it():
    notes = []
    config = load_config(CONFIGS / "llama3-8b.toml", ["run.steps=4", "model.config.num_hidden_layers=2"], notes.append,
                         change_of(True, notes.append))  # fmt: skip
    assert config.run.steps == 4 and config.model.config["num_hidden_layers"] == 2
    assert "model.config.hidden_size 4096 → 256" in notes[0] and "model.config.head_dim unset → 64" in notes[0]
    large = dict(flat("", load_config(CONFIGS / "llama3-8b.toml").model_dump()))
    kept = [key for key in large if key.startswith("precision.")]
    assert kept and not any(key in notes[0] for key in kept)
    assert load_config(CONFIGS / "llama3-8b.toml", change=change_of(False)).model.config["hidden_size"] == 4096


def test_a_guard_keeps_its_checkpoints(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text((CONFIGS / "llama3-8b.toml").read_text() + "[guard]\nspike = 8.0\n")
    assert shrunk(path).run.save_every == SECTIONS["run"]["steps"] // 2


def test_conversations_stay_conversations_and_nothing_of_the_source_stays(tmp_path):
    small = shrunk(CONFIGS / "sft-demo.toml").data
    assert (small.source, small.format, small.chat_template) == ("python-docstrings", "messages", "plain")
    assert small.packing == "documents"
    text = (CONFIGS / "own-data.toml").read_text()
    section = text[text.index("[data]") :].partition("\n[")[0]
    head = '[data]\nsequence_length = 64\nstreaming = true\nchunk_bytes = 5000\ncache_gib = 3.0\ntokenizer = "t"\n'
    messages = 'format = "messages"\nmessages_field = "turns"\n'
    for extra, source in (("", "python-stdlib"), (messages, "python-docstrings")):
        sources = f'[[data.sources]]\nsource = "a"\nweight = 1\n[[data.sources]]\nsource = "b"\nweight = 2\n{extra}'
        (tmp_path / "run.toml").write_text(text.replace(section, head + sources))
        small = shrunk(tmp_path / "run.toml").data
        assert (small.source, small.sources, small.streaming) == (source, (), False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ('path = "somewhere"', "model.path = somewhere is a checkpoint: give model.type"),
        ('type = "gpt2"', "cannot shrink gpt2: its config has no hidden_size"),
        ('type = "mamba2"', "cannot shrink mamba2: its config has no num_attention_heads"),
        ('type = "bamba"', r"does not know what model.config.mamba_n_heads = 128 has to be"),
        ('type = "jetmoe"', r"does not know what model.config"),
        ('type = "llma"', "did you mean 'llama'"),
        ('type = "llama"\nconfig = {hidden_sise = 64}', "did you mean 'hidden_size'"),
        ('type = "qwen3"\nconfig = {num_hidden_layers = 1, layer_types = ["full_attention"]}',
         r"does not know what model.config.layer_types = \['full_attention'\] has to be"),
    ],
)  # fmt: skip
def test_what_it_cannot_shrink_is_an_error(tmp_path, model, message):
    path = tmp_path / "run.toml"
    path.write_text(
        f'[run]\nsteps = 9\n[model]\n{model}\n[data]\nsource = "x"\nsequence_length = 8\n[optim]\nlr = 1e-3\n'
    )
    with pytest.raises(ConfigError, match=message):
        shrunk(path)


def on(text, length):
    cache = f"data.cache={text.parent}"
    return [f"data.source={text}", "data.vocab_size=300", cache, f"data.sequence_length={length}"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama3-8b", slow("command-r-35b"), slow("deepseek-v3-16b")])
def test_a_few_steps_run(name, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(sentences(3000))
    settings = ["run.steps=4", "optim.warmup=1", "run.device=cpu", *on(text, 32)]
    done = octavo("train", CONFIGS / f"{name}.toml", "--shrink", "--out", tmp_path / "run", *settings)
    assert done.exit_code == 0, done.output
    losses, result = [row.loss or math.inf for row in read_metrics(tmp_path / "run")], RunResult.read(tmp_path / "run")
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert result.converted.startswith("converted") and "rowwise" in result.precision


@pytest.mark.slow
def test_plan_and_compare_shrink_too(tmp_path):
    config = CONFIGS / "llama3-8b.toml"
    planned = octavo("plan", config, "--shrink", "--gpu", "h100", "--json")
    assert planned.exit_code == 0 and json.loads(planned.stdout)["tokens"] == 4 * 128, planned.output
    text = tmp_path / "text.txt"
    text.write_text(sentences(3000))
    words = ["compare", config, "--shrink", *on(text, 16), "run.device=cpu", "run.steps=2", "optim.warmup=0"]
    arms = ["--seeds", "2", "--arm", "bf16:precision.level=bf16", "--arm", "fp8", "--out", tmp_path / "out"]
    compared = octavo(*words, *arms)
    assert compared.exit_code in (0, 1, 3), compared.output
    assert all("model.config.hidden_size 4096 → 256" in result.stderr for result in (planned, compared))
