import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.numerics import Precision
from octavo.train.config.run_config import ConfigError, check_same_run, load_config, parse_config
from octavo.train.config.sections import hub_folder
from octavo.train.model import check_model

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
    with pytest.raises(ConfigError, match='there precision.level = "fp8", here "fp8.activations"'):
        check_same_run(saved, config, toml)


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
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(toml, [override, "precision.parameters=fp16"] if "master" in override else [override])
    assert "\n" not in str(caught.value)


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
    with pytest.raises(ConfigError, match=r"missing key optim\.lr"):
        parse_config(tables)
    del tables["optim"]
    with pytest.raises(ConfigError, match="missing section optim"):
        parse_config(tables)
    with pytest.raises(ConfigError, match=r"model\.type"):
        parse_config(tomllib.loads(TEXT) | {"model": {}})


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
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / name)
    (tmp_path / "marked.toml").write_text(TEXT, encoding="utf-8-sig")  # with a byte order mark
    assert load_config(tmp_path / "marked.toml") == load_config(tmp_path / "nine.toml")


def test_a_schedule_that_does_not_fit(toml):
    wsd = ["optim.schedule=wsd", "optim.decay=0.5"]
    assert load_config(toml, [*wsd, "optim.warmup=5"]).optim.warmup == 5
    with pytest.raises(ConfigError, match=r"optim\.warmup = 6 and a decay of 5 steps .* run\.steps = 10"):
        load_config(toml, [*wsd, "optim.warmup=6"])


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
    with pytest.raises(ConfigError, match=message):
        make_config(**sections)


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
