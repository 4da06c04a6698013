"""Checkpoints: their files, which stay, what resumes, exports also in FP8, and no damage that goes unnoticed."""

import json
import os
import random
import shutil
import signal
import stat
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import GROUPS, LLAMA, ONE_BLOCK, flip, job, make_trainer, refused_run, rejected, rewrite
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.kernels import quantize
from octavo.nn import change_recipe
from octavo.numerics import RECIPES
from octavo.train import run
from octavo.train.checkpoint import store as checkpoint
from octavo.train.checkpoint.digests import check_digests, write_digests
from octavo.train.checkpoint.export import export
from octavo.train.checkpoint.retention import checkpoints, latest_checkpoint
from octavo.train.checkpoint.store import check_same_model, load_checkpoint, read_trainer_state
from octavo.train.config.run_config import ConfigError, TrainConfig, check_same_run, resume_of
from octavo.train.config.sections import CHANGEABLE_ON_RESUME, IGNORED_ON_RESUME
from support.command import octavo


def test_only_the_newest_are_kept(make_config, tmp_path):
    trainer = make_trainer(make_config(run={"keep": 2}))
    for step in (8, 9, 10, 11):
        trainer.step = step
        trainer.save(tmp_path)
    (tmp_path / "checkpoints" / "step-notes").mkdir()
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-0*"))
    assert names == ["step-000010", "step-000011"]
    trainer.step = 12
    trainer.save(tmp_path, prune=False)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-0*")) == [*names, "step-000012"]
    trainer.step = 1_000_000
    trainer.save(tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-1000000"


def test_a_save_that_dies_leaves_the_previous_checkpoint(make_config, tmp_path, monkeypatch):
    trainer = make_trainer(make_config())
    trainer.step = 1
    trainer.save(tmp_path)
    trainer.step = 2
    for name in ("save_whole", "sync"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.save(tmp_path)
        assert latest_checkpoint(tmp_path).name == "step-000001"
    trainer.save(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_another_model_is_named_by_its_first_difference(make_config, tmp_path):
    saved = make_config().model_dump(mode="json", exclude_none=True)
    cases = [
        ({"model": {"type": "llama", "config": LLAMA | {"hidden_size": 64}}}, "model.config.hidden_size = 32, here 64"),
        ({"model": {"type": "gpt2", "config": {}}}, 'model.type = "llama", here "gpt2"'),
        ({"model": {"type": "llama", "config": {}}}, "model.config.hidden_size = 32, here unset"),
        ({"optim": {"batch": 8}}, "optim.batch = 4, here 8"), ({"run": {"seed": 4}}, "run.seed = 3, here 4"),
        ({"precision": {"level": "fp8"}}, 'precision.level = "bf16", here "fp8"'),
        ({"data": {"sequence_length": 8}, "optim": {"batch": 8}}, "data.sequence_length = 16, here 8"),
    ]  # fmt: skip
    for sections, message in cases:
        with pytest.raises(ConfigError) as caught:
            check_same_run(saved, make_config(**sections), tmp_path)
        assert f"holds another run: there {message}. Set" in str(caught.value)
    evaluated = make_config(eval={"fraction": 0.3}, optim={"groups": GROUPS}).model_dump(mode="json", exclude_none=True)
    changes = ((GROUPS, 0.4, "eval.fraction = 0.3, here 0.4"), (GROUPS[:1], 0.3, "optim.groups = "))
    for groups, fraction, message in changes:
        with pytest.raises(ConfigError, match=f"another run: there {message}"):
            check_same_run(evaluated, make_config(eval={"fraction": fraction}, optim={"groups": groups}), tmp_path)
    free = {"name": "b", "out": "x", "device": "auto", "log_every": 5, "save_every": 1, "keep": 9}
    assert check_same_run(saved, make_config(run=free, data={"cache": "elsewhere"}), tmp_path) == []
    tuned = make_config(run={"steps": 100}, optim={"lr": 0.5, "clip": 0.0}, precision={"skip": ["*head"]})
    assert check_same_run(saved, tuned, tmp_path) == [
        "resumed with run.steps = 100 (was 6)", "resumed with optim.lr = 0.5 (was 0.01)",
        "resumed with optim.clip = 0.0 (was 1.0)", 'resumed with precision.skip = ["*head"] (was [])',
    ]  # fmt: skip


def test_damaged_checkpoints_are_named(make_config, tmp_path):
    trainer = make_trainer(make_config())
    trainer.save(tmp_path)
    folder = latest_checkpoint(tmp_path)
    names = {"step", "loss_scale", "data", "config", "ranks", "skipped_batches", "guard"}
    assert set(read_trainer_state(folder)) == names
    wider = make_trainer(make_config(model={"type": "llama", "config": LLAMA | {"intermediate_size": 96}}))
    rejected("there intermediate_size = 64, here 96", load, wider, folder)
    # What was damaged before its digests were written, or by who can write them.
    for name in ("optimizer.pt", "model.safetensors"):
        content = (folder / name).read_bytes()
        rewrite(folder / name, content[:-50])
        rejected("is damaged", load, trainer, folder)
        (folder / name).write_bytes(content)
    for content in (b"", b"nonsense", {}, {"adamw": 3, "masters": {}}, [1], torch.ones(3), 3):
        path = folder / "optimizer.pt"
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        write_digests(folder, {})
        rejected(r"is damaged \(.*\): remove .*step-000000 to resume from the one before", load, trainer, folder)


def test_each_setting_says_whether_it_may_differ_on_resume(make_config, tmp_path):
    kinds = dict.fromkeys(("run.name", "sample.tokens"), IGNORED_ON_RESUME)
    kinds |= dict.fromkeys(("inspect.limits.sqnr", "optim.lr"), CHANGEABLE_ON_RESUME)
    same = ("run.seed", "model.config.hidden_size", "optim.batch", "data.packing", "run.unknown")
    assert {key: resume_of(key) for key in (*kinds, *same)} == kinds | dict.fromkeys(same, "")
    # A setting that is newer than the saved run, and has its default, is no difference.
    saved = make_config().model_dump(mode="json", exclude_none=True)
    for section, name in ((s, n) for s in saved for n in list(saved[s])):
        older = saved | {section: {key: value for key, value in saved[section].items() if key != name}}
        field = TrainConfig.model_fields[section].annotation.model_fields[name]
        if field.get_default() == getattr(getattr(make_config(), section), name):
            assert check_same_run(older, make_config(), tmp_path) == []


SMALL = ONE_BLOCK["config"]
MODELS = {
    "tied": {"type": "llama", "config": SMALL | {"tie_word_embeddings": True}},
    "mixtral": {"type": "mixtral", "config": SMALL | {"num_local_experts": 4}},
    "gpt2": {"type": "gpt2", "config": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}},
}
OWN = {"trainer.json", "optimizer.pt", "data.json", "digests.json"}


def load(trainer, folder):
    load_checkpoint(folder, trainer.model, trainer.optimizer, trainer.loss_scale, trainer.ranks)


@pytest.fixture(scope="module")
def trained_once(make_config, tmp_path_factory):
    out, trainer = tmp_path_factory.mktemp("run"), make_trainer(make_config(model=ONE_BLOCK))
    trainer.train_step()
    trainer.save(out)
    return trainer, latest_checkpoint(out)


@pytest.fixture
def trained(trained_once, tmp_path):
    """A trainer after a step, and a copy of its checkpoint."""
    trainer, folder = trained_once
    return trainer, Path(shutil.copytree(folder, tmp_path / folder.name))


def content(folder, ignored=()):
    """What each file says: JSON parsed, weights by key."""

    def read(path):
        if path.suffix != ".safetensors":
            return json.loads(path.read_text())
        return {name: (value.dtype, value.tolist()) for name, value in load_file(path).items()}

    return {path.name: read(path) for path in folder.iterdir() if path.name not in ignored}


@pytest.mark.parametrize(("name", "level"), [("tied", "fp8"), ("mixtral", "fp8"), ("gpt2", "bf16")])
def test_checkpoints_and_exports_are_what_save_pretrained_writes(make_config, tmp_path, name, level):
    trainer = make_trainer(make_config(model=MODELS[name], precision={"level": level}))
    trainer.model.generation_config.update(do_sample=True, temperature=0.7, eos_token_id=[1, 2])
    trainer.train_step()
    trainer.save(tmp_path / "run")
    folder = latest_checkpoint(tmp_path / "run")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
    plain = AutoModelForCausalLM.from_config(trainer.model.config, dtype=torch.bfloat16)
    plain.load_state_dict(trainer.model.state_dict())
    plain.generation_config = trainer.model.generation_config
    plain.save_pretrained(tmp_path / "expected")
    trainer.task.data.tokenizer.save(tmp_path / "expected")
    expected = content(tmp_path / "expected")
    assert content(folder, OWN) == expected
    assert content(export(folder, tmp_path / "exported").path, {"digests.json"}) == expected
    other = make_trainer(make_config(model=MODELS[name], precision={"level": level}, run={"seed": 9}))
    load(other, folder)
    state = other.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in trainer.model.state_dict().items())


@pytest.mark.dist
@pytest.mark.parametrize("name", ["tied", "mixtral"])
@pytest.mark.slow
def test_an_export_of_shards_is_what_save_pretrained_writes(gloo, make_config, tmp_path, name):
    tables = make_config(model=MODELS[name], run={"steps": 1}, optim={"warmup": 0}).model_dump(exclude_none=True)
    gloo.run(job, 2, tables | {"parallel": {"fp8_comm": "off"}}, str(tmp_path / "run"))
    folder = checkpoints(tmp_path / "run")[-1]
    assert {"shards", "config.json", "generation_config.json"} <= {path.name for path in folder.iterdir()}
    exported = export(folder, tmp_path / "exported").path
    model = AutoModelForCausalLM.from_pretrained(exported)
    model.save_pretrained(tmp_path / "expected")
    for path in folder.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "expected")
    assert content(exported, {"digests.json"}) == content(tmp_path / "expected")


@pytest.mark.parametrize("templates", ["folder", "table"])
def test_chat_templates_are_exported(make_config, tmp_path, templates):
    make_trainer(make_config()).task.data.tokenizer.save(tmp_path / "tokenizer")
    if templates == "table":
        path = tmp_path / "tokenizer" / "tokenizer_config.json"
        table = [{"name": "default", "template": "{{ 1 }}"}, {"name": "rag", "template": "{{ 2 }}"}]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": table}))
    else:
        (tmp_path / "tokenizer" / "additional_chat_templates").mkdir()
        (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ 1 }}")
        (tmp_path / "tokenizer" / "additional_chat_templates" / "rag.jinja").write_text("{{ 2 }}")
    make_trainer(make_config(model=ONE_BLOCK, data={"tokenizer": str(tmp_path / "tokenizer")})).save(tmp_path / "run")
    exported = export(latest_checkpoint(tmp_path / "run"), tmp_path / "exported").path
    check_digests(exported)
    assert AutoTokenizer.from_pretrained(exported).chat_template == {"default": "{{ 1 }}", "rag": "{{ 2 }}"}


def test_all_files_honour_the_umask(make_config, tmp_path):
    before = os.umask(0o027)
    try:
        make_trainer(make_config()).save(tmp_path)
        folder = latest_checkpoint(tmp_path)
        exported = export(folder, tmp_path / "exported").path
    finally:
        os.umask(before)
    for path in (*folder.iterdir(), *exported.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path


def test_no_flipped_bit_is_loaded(trained):
    trainer, folder = trained
    choice = random.Random(0)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    assert len(files) >= 8
    for number in range(60):
        path = files[number % len(files)]
        bit = choice.randrange(path.stat().st_size * 8)
        flip(path, bit)
        with pytest.raises(ConfigError, match=rf"(?s){path.name}.*remove .*step-000001"):
            load(trainer, folder)
        flip(path, bit)
    load(trainer, folder)


DAMAGE = {
    "tokenizer_config.json is missing": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "tokenizer.json is missing": lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer2.json"),
    "adapter_config.json is not part of it": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "README is not part of it": lambda folder: (folder / "README").write_text(""),
    "digests.json is not what was written": lambda folder: (folder / "digests.json").unlink(),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_stops_a_resume_and_an_export_and_notes_and_hidden_files_are_none(trained, tmp_path, message):
    trainer, folder = trained
    for name in ("README.md", ".nfs0001", ".DS_Store"):
        (folder / name).write_text("")
    load(trainer, folder)
    DAMAGE[message](folder)
    for action in (lambda: load(trainer, folder), lambda: export(folder, tmp_path / "exported")):
        rejected(message, action)
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_damaged_folder_is_no_start(make_config, tmp_path, trained, kind):
    _, folder = trained
    start = folder if kind == "checkpoint" else export(folder, tmp_path / "exported").path
    config = make_config(model={"path": str(start)}, run={"steps": 1}, optim={"warmup": 0})
    run(config, out=tmp_path / "good")
    flip(start / "model.safetensors", 30_000)
    refused_run(r"model\.safetensors is not what was written", config, tmp_path / "bad")
    (start / "digests.json").unlink()  # changed on purpose
    run(config, out=tmp_path / "on-purpose")


def test_files_of_a_checkpoint_may_be_links_to_another_disk(trained, tmp_path):
    trainer, folder = trained
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    load(trainer, folder)
    exported = export(folder, tmp_path / "exported").path
    for name in ("model.safetensors", "tokenizer.json"):
        assert (exported / name).is_file() and not (exported / name).is_symlink()


def test_a_checkpoint_that_cannot_be_removed_ends_no_run(make_config, tmp_path):
    trainer = make_trainer(make_config(run={"keep": 1}))
    trainer.save(tmp_path)
    trainer.step = 1
    denied = mock.patch("octavo.train.checkpoint.store.shutil.rmtree", side_effect=OSError(13, "Permission denied"))
    with denied, pytest.warns(RuntimeWarning, match=r"step-000000 cannot be removed: .*Permission denied"):
        trainer.save(tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [".removing-step-000000", "step-000001"]  # removed in part at most: not to be resumed
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000001"]
    trainer.step = 2
    trainer.save(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


@pytest.fixture
def started(make_config, tmp_path, trained):
    """A run of one step from an export, and its config for two."""
    start = export(trained[1], tmp_path / "start").path
    config = make_config(model={"path": str(start)}, run={"steps": 1}, optim={"warmup": 0, "schedule": "constant"})
    run(config, out=tmp_path / "out")
    return start, config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})})


def test_a_changed_model_is_not_resumed(started, tmp_path):
    start, config = started
    path, times = start / "config.json", (start / "config.json").stat()
    path.write_text(path.read_text().replace('"silu"', '"relu"'))  # of the same size
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    message = "step-000001 holds another model: there hidden_act = .*, here "
    refused_run(message, config, tmp_path / "out", resume=True)


def test_the_order_of_keys_is_no_change(trained):
    trainer, folder = trained
    config = trainer.model.config
    config.id2label, config.label2id = {1: "b", 0: "a"}, {"b": 1, "a": 0}
    config.rope_parameters = dict(reversed(config.rope_parameters.items()))
    saved = json.loads((folder / "config.json").read_text())
    saved |= {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (folder / "config.json").write_text(json.dumps(saved))
    check_same_model(folder, config)
    config.rope_parameters = config.rope_parameters | {"rope_theta": 5.0}
    rejected("holds another model: there rope_parameters", check_same_model, folder, config)


def test_changed_weights_at_the_start_do_not_matter_to_a_resume(started, tmp_path):
    start, config = started
    shutil.copytree(tmp_path / "out", tmp_path / "same")
    run(config, out=tmp_path / "same", resume=True)
    flip(start / "model.safetensors", 30_000)
    run(config, out=tmp_path / "out", resume=True)
    one, other = (load_file(latest_checkpoint(tmp_path / name) / "model.safetensors") for name in ("same", "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_missing_package_stops_a_run_before_it_begins(make_config, tmp_path):
    for name in ("plotly", "tensorboard", "jinja2"):
        with mock.patch("octavo.train.loop.find_spec", lambda asked, name=name: asked != name or None):
            refused_run(rf"{name} is not installed: pip install 'octavo\[train\]'", make_config(), tmp_path / "out")


@pytest.fixture
def trained_in_fp8(make_config, tmp_path):
    trainer = make_trainer(make_config(model=ONE_BLOCK, precision={"level": "fp8"}))
    trainer.train_step()
    trainer.save(tmp_path / "run")
    return trainer, latest_checkpoint(tmp_path / "run")


def check_rows(model, folder, without=()):
    tensors = load_file(folder / "model.safetensors")
    rows = [name for name in model.state_dict() if "proj" in name and not any(part in name for part in without)]
    for name in rows:
        expected = quantize(model.state_dict()[name].detach(), RECIPES["rowwise"].w)
        assert torch.equal(tensors[name].view(torch.uint8), expected.data.view(torch.uint8)), name
        assert torch.equal(tensors[f"{name}_scale"], expected.scale)
    assert sum(name.endswith("_scale") for name in tensors) == len(rows)


def test_an_export_holds_the_values_of_training(trained_in_fp8, tmp_path):
    trainer, folder = trained_in_fp8
    recipes = json.loads((folder / "trainer.json").read_text())["recipes"]
    assert set(recipes.values()) == {"rowwise"} and len(recipes) == 7
    exported = export(folder, tmp_path / "out", "fp8-row")
    check_rows(trainer.model, exported.path)
    assert str(exported) == f"written: {tmp_path / 'out'} (fp8-row: 7 modules in FP8, 1 in high precision)"
    check_digests(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "digests.json", "generation_config.json", "tokenizer.json"} <= names
    assert not {"trainer.json", "optimizer.pt"} & names
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| base model | none: a new llama |" in card and ", step 1 |" in card and "verdict" not in card
    assert str(tmp_path) not in card


def test_layers_that_moved_in_training_are_exported_as_they_ended(trained_in_fp8, tmp_path):
    trainer, _ = trained_in_fp8
    change_recipe(trainer.model, "model.layers.0.mlp.up_proj", "blockwise", reason="outliers")
    change_recipe(trainer.model, "model.layers.0.mlp.down_proj", None, reason="outliers")
    trainer.step = 2
    trainer.save(tmp_path / "run")
    exported = export(latest_checkpoint(tmp_path / "run"), tmp_path / "out", "fp8-row")
    assert exported.high_precision["model.layers.0.mlp.down_proj"] == "in high precision in training"
    assert "recipe blockwise" in exported.high_precision["model.layers.0.mlp.up_proj"]
    check_rows(trainer.model, exported.path, without=("up_proj", "down_proj"))
    assert any("up_proj: FP8 in training, high precision here" in note for note in exported.notes)
    assert any("vLLM joins" in note for note in exported.notes)


def test_mistakes_are_named_and_write_nothing(make_config, trained_in_fp8, tmp_path):
    _, folder = trained_in_fp8

    def fails(checkpoint, match, to="fp8-row"):
        with pytest.raises(ValueError, match=match):
            export(checkpoint, tmp_path / "out", to)
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))

    fails(folder, "computes in recipe rowwise, which fp8-block does not describe", "fp8-block")
    fails(folder, "unknown layout 'fp8-col'", "fp8-col")
    fails(tmp_path, "is no checkpoint of a run")
    rejected("inside the checkpoint, which it would damage", export, folder, folder / "new" / "out", "fp8-row")
    assert not (folder / "new").exists()
    with pytest.raises(ValueError, match="is not empty: choose another folder"):
        export(folder, folder.parent, "fp8-row")
    older = shutil.copytree(folder, tmp_path / "older")
    state = json.loads((older / "trainer.json").read_text())
    del state["recipes"]
    rewrite(older / "trainer.json", json.dumps(state))
    fails(older, "has no layer that computed in FP8")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    fails(folder, "is damaged: model.safetensors is not what was written")
    plain = make_trainer(make_config(model=ONE_BLOCK))
    plain.save(tmp_path / "plain")
    fails(latest_checkpoint(tmp_path / "plain"), r"has no layer that computed in FP8.*precision\.recipe=rowwise")


def test_sigterm_leaves_nothing(trained_in_fp8, tmp_path, monkeypatch):
    def terminated(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("octavo.train.checkpoint.export.write", terminated)
    result = octavo("export", trained_in_fp8[1], tmp_path / "out")
    assert result.exit_code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is handler
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
