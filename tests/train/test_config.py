"""Configurations: files, overrides, mistakes, and small runs of the same architecture and precision (--shrink)."""

import json
import math
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import rejected, sentences, slow
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.nn.convert import rule_plan
from octavo.numerics import Precision
from octavo.numerics.suggestions import pattern
from octavo.train.config import shrink
from octavo.train.config.run_config import ConfigError, check_same_run, flat, load_config, parse_config
from octavo.train.config.sections import hub_folder
from octavo.train.config.shrink import change_of, complete_config, shrink_model
from octavo.train.model import check_model
from octavo.train.record.metrics import RunResult, read_metrics
from support.command import octavo

CONFIGS = Path(__file__).parents[2] / "configs"
TEXT = """
run = {steps = 10}
data = {source = "a.txt", sequence_length = 8}
optim = {lr = 1e-3}
[model]
type = "llama"
config = {hidden_size = 64, rope_parameters = {rope_type = "default", rope_theta = 1e4}}
"""
LARGE = ("optim.batch", "optim.micro_batches", "data.sequence_length", "run.steps", "parallel.tp")


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_defaults_and_overrides(toml):
    settings = ["optim.lr=3e-4", "precision.level=fp8", 'precision.skip=["*lm_head*"]', "model.config.hidden_size=128"]
    config = load_config(toml, [*settings, "run.name=a b", "precision.loss_scale=1024.0"])
    assert (config.optim.lr, config.model.config["hidden_size"], config.run.name) == (3e-4, 128, "a b")
    assert config.model.config["rope_parameters"]["rope_theta"] == 1e4
    assert config.precision.skip == ("*lm_head*",) and config.precision.loss_scale == 1024.0
    assert config.precision_label == "fp8 rowwise" and load_config(toml).precision_label == "bf16"


def test_an_alias_of_a_level_is_saved_under_its_name(toml):
    config = load_config(toml, ["precision.level=O1+act"])
    assert config == load_config(toml, ["precision.level=fp8+activations"])
    assert 'level = "fp8+activations"' in config.to_toml()
    saved = config.model_dump(mode="json", exclude_none=True)
    saved["precision"]["level"] = "O1+act"  # a run from before the levels had their names
    assert check_same_run(saved, config, toml) == []
    saved["precision"]["level"] = "O1"
    rejected('there precision.level = "fp8", here "fp8.activations"', check_same_run, saved, config, toml)


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        (["precision.level=fp8+activations+optimizer"], Precision.level("fp8+activations+optimizer")),
        (["precision.level=fp8+activations+optimizer", "optim.states=fp32"],
         Precision.level("fp8+activations+optimizer", states="fp32")),
        (["precision.level=fp8+activations+optimizer", "precision.master=none"],
         Precision.level("fp8+activations+optimizer", master="none")),
        (["precision.level=fp8+activations", "precision.matmul=bf16"], Precision(matmul="bf16", activations="fp8")),
        (["precision.activations=fp8", "optim.states=fp8"], Precision(matmul="bf16", activations="fp8", states="fp8")),
    ],
)  # fmt: skip
def test_a_part_of_the_level_can_be_set_by_itself(toml, overrides, asked):
    config = load_config(toml, overrides)
    assert config.resolved == asked and config.precision_label == asked.label
    assert parse_config(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rate=1", r"unknown key optim.learning_rate; known here: name, .*lr, "),
        ("optim.warm_up=1", r"unknown key optim.warm_up.*did you mean 'warmup'"),
        ("optm.lr=1", r"unknown section optm.*did you mean 'optim'"),
        ('run.steps="12"', r"run.steps: should be a valid integer, got '12'"),
        ("run.steps=0", r"run.steps: should be greater than or equal to 1, got 0"),
        ("optim.lr=nan", r"optim.lr: should be a finite number, got nan"),
        ("optim.schedule=cosin", r"optim.schedule: should be .*got 'cosin'.*did you mean 'cosine'"),
        ("optim.micro_batches=3", r"optim.batch = 8 .* 3 equal .* one of \[1, 2, 4, 8\]"),
        ("precision.loss_scale=dynamc", r"precision.loss_scale: .*got 'dynamc'.*did you mean 'dynamic'"),
        ("run.profile=3", r"run.profile: should be the first and the last step .*, as \[10, 12\], got 3"),
        ("optim.betas=[0.9]", r"optim.betas: should be two numbers in .*, as \[0.9, 0.95\], got \[0.9\]"),
        ("precision.skip=lm_head", r"precision.skip: should be a list .*\[\"lm_head\"\], got 'lm_head'"),
        ("run.name=a/b", r"run.name = 'a/b' names the folder .*run.out"),
        ('run.name="a\\nb"', r"run.name = 'a\\nb' names the folder"),
        ("optim.warmup=10", r"optim.warmup = 10 is not below run.steps = 10"),
        ("precision.level=O7", r"O7"),
        ("precision.recipe=rowise", r"'rowise'.*did you mean 'rowwise'"),
        ("precision.master=none", r"fp16"),
        ("precision.activations=fp4",
         r"precision.activations: should be \"auto\" \| \"bf16\" \| \"fused\" \| \"fp8\", got 'fp4'"),
        ("model.path=x", r"either model.path .* or model.type"),
        ("optim", r'override "optim": write section.key=value'),
        ("lr=1", r'override "lr=1": write section.key=value'),
        ("run.steps.x=1", r"steps is a value, not a table"),
        ("data.source=~nouser/x", r"data.source: there is no home folder for ~nouser/x"),
        *((f"{key}={10**30}", rf"{key}: should be less than or equal to 2147483647, got 1000") for key in LARGE),
        ("optim.batch=1000000000", r"optim.batch = 1000000000 .*_length = 8 are 8,000,000,000 tokens .* lower either"),
        ("optim.micro_batches=1000000000", r"optim.batch = 8 cannot be cut into 1000000000 equal micro-batches"),
        # An override is one value.
        ("optim.lr=3e-4\n[run]\nsteps = 7", "something follows it"),
        ("optim.lr=3e-4 # the usual", "something follows it"),
        ("run.name='a", "look at its quotes"),
        ("optim.lr\n[run]\nsteps=7", "write section.key=value"),
        ("[run.x]=7", "write section.key=value"),
        ("# run.steps=7", "write section.key=value"),
        ("optim.lr=[1e-3]", "optim.lr: should be a valid number"),
        ("optim.lr=1e-3]\nx = [1", "something follows it"),
        ("optim.lr=", "optim.lr: should be a valid number, got ''"),
        ("run.steps=" + "[" * 3000, "run.steps: should be a valid integer"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_clear_line(toml, override, message):
    also = ["precision.parameters=fp16"] if "master" in override else []
    rejected(message, load_config, toml, [override, *also])


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("optim.lr=3e-4\r\n", lambda c: c.optim.lr, 3e-4),
        ('model.config."a.b"=1', lambda c: c.model.config["a.b"], 1),
        ("model.config.'ü 🐙'=3", lambda c: c.model.config["ü 🐙"], 3),
        ("model.config.limit=[0.0, inf]", lambda c: c.model.config["limit"], [0.0, float("inf")]),
        ("run.name=2026-01-02", lambda c: c.run.name, "2026-01-02"),
        ("run.name = 12:30:00", lambda c: c.run.name, "12:30:00"),
        ("run.name='a # b'", lambda c: c.run.name, "a # b"),
        ("data.source=[ab]*.txt", lambda c: c.data.source, "[ab]*.txt"),
        ("data.source=x=y.txt", lambda c: c.data.source, "x=y.txt"),
        ("optim.betas=[\n0.9,\n0.99]", lambda c: c.optim.betas, (0.9, 0.99)),
        ('data.source="""a\nb"""', lambda c: c.data.source, "a\nb"),
    ],
)
def test_what_an_override_may_be(toml, tmp_path, override, read, value):
    config = load_config(toml, [override])
    assert read(config) == value
    (tmp_path / "again.toml").write_text(config.to_toml(), encoding="utf-8")
    assert load_config(tmp_path / "again.toml") == config


SHORT = [
    ("demo", ["run.steps=3"], 1), ("demo", ["run.steps=1"], 0), ("demo", ["run.steps=11"], 10),
    ("demo", ["run.steps=3", "optim.warmup=2"], 2), ("own-data", ["run.steps=60"], 30),
    ("own-data", ["run.steps=3"], 1), ("own-data", ["run.steps=4", "optim.decay=1.0"], 0),
]  # fmt: skip


@pytest.mark.parametrize(("path", "overrides", "warmup"), SHORT)
def test_a_short_run_of_a_shipped_configuration_just_works(path, overrides, warmup):
    notes = []
    config = load_config(CONFIGS / f"{path}.toml", overrides, notes.append)
    assert config.optim.warmup == warmup
    changed = warmup not in (10, 50, 2)
    assert len(notes) == changed and all(f"warms up over {warmup} of the" in note for note in notes)


def test_missing_keys_and_sections():
    tables = tomllib.loads(TEXT)
    del tables["optim"]["lr"]
    rejected(r"missing key optim\.lr", parse_config, tables)
    del tables["optim"]
    rejected("missing section optim", parse_config, tables)
    rejected(r"model\.type", lambda: parse_config(tomllib.loads(TEXT) | {"model": {}}))


def test_a_file_that_is_no_config(tmp_path):
    (tmp_path / "nine.toml").write_text(TEXT)
    (tmp_path / "bad.toml").write_text("[run\n")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    near = r"no such config file: .*none\.toml \(did you mean .*nine\.toml.*give the path"
    (tmp_path / "deep.toml").write_text("x = " + "[" * 3000)
    messages = {"none.toml": near, "": "cannot be read", "bad.toml": "cannot be read", "binary.toml": "cannot be read"}
    messages["deep.toml"] = "cannot be read as a TOML file: maximum recursion"
    messages["x" * 300] = "cannot be read as a TOML file: File name too long"
    for name, message in messages.items():
        rejected(message, load_config, tmp_path / name)
    (tmp_path / "marked.toml").write_text(TEXT, encoding="utf-8-sig")  # with a byte order mark
    assert load_config(tmp_path / "marked.toml") == load_config(tmp_path / "nine.toml")


def test_a_schedule_that_does_not_fit(toml):
    wsd = ["optim.schedule=wsd", "optim.decay=0.5"]
    assert load_config(toml, [*wsd, "optim.warmup=5"]).optim.warmup == 5
    message = r"optim\.warmup = 6 and a decay of 5 steps .* run\.steps = 10"
    rejected(message, load_config, toml, [*wsd, "optim.warmup=6"])


@pytest.mark.thorough
@settings(max_examples=20)
@given(name=st.text(min_size=1).filter(str.isprintable), lr=st.floats(1e-300, 1e300))
def test_toml_round_trip(name, lr):
    tables = tomllib.loads(TEXT)
    tables["run"] |= {"out": name}
    tables["optim"] |= {"lr": lr, "betas": [0.5, 0.75]}
    tables["model"]["config"] |= {'odd "key"': [1, 2.5, True, {"deep": name + "\x7f"}]}
    config = parse_config(tables)
    assert parse_config(tomllib.loads(config.to_toml())) == config


DDP = {"dp_replicate": 2, "dp_shard": 1}
PARALLEL = [
    ({"tp": 2, "cp": 2}, "not supported together"), ({"tp": 2, "ep": 2}, "not supported together"),
    ({"ep": 2, "dp_replicate": 2}, "leave dp_replicate out"), ({"pp": 2, "cp": 2}, "leave ep and cp out"),
    ({"tp": 2} | DDP, "does not join DDP"), ({"pp": 2} | DDP, "does not join DDP"),
    ({"pp": 2, "schedule": "1f1b"}, "parallel.schedule: should be .*'1f1b'"),
    ({"pp": 2, "schedule": "ZBVZeroBubble"}, "set parallel.reshard_after_forward = false"),
    ({"tensor_parallel": 2}, "unknown key parallel.tensor_parallel"), ({"tp": 0}, "greater than or equal to 1"),
]  # fmt: skip
PROMPT, VARLEN = {"sample": {"prompts": ["a"]}}, {"model": {"type": "llama", "attention": "varlen"}}
SECTIONS = [
    ({"run": {"steps": 4, "profile": [3, 2]}}, "run.profile"),
    ({"run": {"steps": 4, "profile": [2, 5]}}, "run.profile"),
    ({"run": {"keep_best": 1, "save_every": 2}}, r"run.keep_best = 1 .* no section \[eval\]: add one"),
    ({"run": {"keep_best": 1}, "eval": {}}, "run.keep_best = 1 .*run.save_every = 0"),
    ({"run": {"keep_every": 5, "save_every": 2}}, "run.keep_every = 5 is not a multiple of run.save_every = 2"),
    ({"optim": {"rewarm": 5}}, "optim.rewarm = 5 without optim.rewarm_from"),
    ({"optim": {"rewarm_from": 0}}, "optim.rewarm_from = 0 without optim.rewarm:"),
    ({"optim": {"groups": [{"lr": 1.0}]}}, r"missing key optim.groups.match"),
    ({"optim": {"groups": [{"match": "a", "weight_decy": 1.0}]}},
     r"unknown key optim.groups.weight_decy .*.weight_decay."),
    ({"optim": {"groups": [{"match": "a", "lr": 0.0}]}}, r"optim.groups.lr: should be greater than 0, got 0.0"),
    ({"optim": {"groups": [{"match": "*.o_proj", "muon": False}]}}, 'optim.groups: muon is for optim.name = "muon"'),
    ({"optim": {"name": "muon"}, "parallel": {"tp": 2}},
     'optim.name = "muon" with parallel.tp = 2: Muon needs whole matrices'),
    ({"eval": {"ema": True}}, "eval.ema measures averaged weights, and there are none"),
    ({"eval": {"every": 0, "patience": 2}}, "eval.patience = 2 counts measurements, and eval.every = 0"),
    (VARLEN, '"varlen" is for packed documents: set data.packing = "documents"'),
    (VARLEN | {"data": {"task": "image-text"}}, 'for packed text, and data.task is "image-text": leave it out'),
    ({"guard": {"spike": 8.0}}, r"guard.spike = 8 rolls back to checkpoints, and run.save_every = 0 saves none"),
    ({"precision": {"autopilot": True}}, "precision.autopilot .* FP8 layers, and precision.level = 'bf16' has none"),
    ({"inspect": {"every": -1}}, "inspect.every"),
    ({"inspect": {"what_if": ["rowise"]}}, r"inspect.what_if: unknown recipe 'rowise' \(did you mean 'rowwise'"),
    ({"inspect": {"what_if": "rowwise"}}, r'inspect.what_if: should be a list of recipes, as \["blockwise"\]'),
    ({"inspect": {"limits": {"underflow": 1.5}}}, "inspect.limits.underflow: .* less than or equal to 1, got 1.5"),
    ({"inspect": {"limits": {"saturation": -0.1}}}, "inspect.limits.saturation: .* greater than or equal to 0"),
    ({"inspect": {"limits": {"amax_jump": 1.0}}}, "inspect.limits.amax_jump: .* greater than 1, got 1.0"),
    ({"inspect": {"limits": {"sqnr": float("inf")}}}, "inspect.limits.sqnr: .* finite number"),
    ({"inspect": {"limits": {"snqr": 20.0}}}, r"unknown key inspect.limits.snqr \(did you mean 'sqnr'"),
    ({"sample": {"every": 2}}, "missing key sample.prompts"),
    ({"sample": {"prompts": []}}, "sample.prompts: should be a list of one text or more"),
    ({"sample": {"prompts": ["a"], "temperature": -1.0}}, "sample.temperature: should be greater than or equal"),
    (PROMPT | {"parallel": {"tp": 2}}, r"\[sample\] with parallel.tp = 2.*dp_shard"),
    (PROMPT | {"parallel": {"pp": 2}}, r"\[sample\] with parallel.pp = 2"),
    ({"lora": {"rank": 0}}, "lora.rank"),
    ({"lora": {"targets": ["all-linear", "q_proj"]}}, '"all-linear" alone'),
    ({"lora": {}, "model": {"type": "llama", "frozen": ["lm_head"]}}, "freezes all of the model"),
    ({"lora": {"weight_only": ["*"], "base": "bf16"}}, "is for weights in FP8, and lora.base = 'bf16'"),
    ({"lora": {}, "parallel": {"tp": 2}}, r"\[lora\] with parallel.tp = 2"),
    *(({"parallel": parallel}, message) for parallel, message in PARALLEL),
    # Targets that do not count need data parallelism.
    *(({"parallel": {name: 2}, "data": {key: value}},
       f'data.{key} = "{value}" with parallel.{name} = 2: only data parallelism')
      for name in ("tp", "pp", "cp", "ep")
      for key, value in (("packing", "documents"), ("packing", "none"), ("format", "messages"))),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "message"), SECTIONS, ids=str)
def test_sections_that_do_not_fit(sections, message, make_config):
    rejected(message, make_config, **sections)


def test_names_of_the_hub_are_looked_up_in_its_cache(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("1234")
    (snapshot / "config.json").write_text("{}")
    assert hub_folder("org/tiny") == snapshot and hub_folder(str(tmp_path)) == tmp_path
    check_model(make_config(model={"path": "org/tiny"}).model)
    with pytest.raises(ConfigError, match="org/other holds no .*bring it to this machine: hf download org/other"):
        check_model(make_config(model={"path": "org/other"}).model)


# --- --shrink ---


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
    assert shrunk(path).run.save_every == shrink.SECTIONS["run"]["steps"] // 2


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
    path.write_text(f'run.steps = 9\ndata = {{source = "x", sequence_length = 8}}\noptim.lr = 1e-3\n[model]\n{model}\n')
    rejected(message, shrunk, path)


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
