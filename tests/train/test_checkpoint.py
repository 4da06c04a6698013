import io
import json

import pytest
import tiny_runs
import torch
from tiny_runs import GROUPS, LLAMA

from octavo.train.checkpoint import store as checkpoint
from octavo.train.checkpoint.digests import write_digests
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.checkpoint.store import load_checkpoint, read_trainer_state
from octavo.train.config.run_config import ConfigError, TrainConfig, check_same_run, resume_of
from octavo.train.config.sections import FREE, TUNABLE


def make_trainer(make_config, **sections):
    config = make_config(**sections)
    return tiny_runs.make_trainer(config)


def test_only_the_newest_are_kept(make_config, tmp_path):
    trainer = make_trainer(make_config, run={"keep": 2})
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
    trainer = make_trainer(make_config)
    trainer.step = 1
    trainer.save(tmp_path)
    trainer.step = 2
    for name in ("save_whole", "sync"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.save(tmp_path)
        newest = latest_checkpoint(tmp_path)
        assert newest is not None
        assert newest.name == "step-000001"
    trainer.save(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


def test_another_model_is_named_by_its_first_difference(make_config, tmp_path):
    saved = make_config().model_dump(mode="json", exclude_none=True)
    cases = [
        ({"model": {"type": "llama", "config": LLAMA | {"hidden_size": 64}}}, "model.config.hidden_size = 32, here 64"),
        ({"model": {"type": "gpt2", "config": {}}}, 'model.type = "llama", here "gpt2"'),
        ({"model": {"type": "llama", "config": {}}}, "model.config.hidden_size = 32, here unset"),
        ({"optim": {"batch": 8}}, "optim.batch = 4, here 8"),
        ({"run": {"seed": 4}}, "run.seed = 3, here 4"),
        ({"precision": {"level": "fp8"}}, 'precision.level = "bf16", here "fp8"'),
        ({"data": {"sequence_length": 8}, "optim": {"batch": 8}}, "data.sequence_length = 16, here 8"),
    ]
    for sections, message in cases:
        with pytest.raises(ConfigError) as caught:
            check_same_run(saved, make_config(**sections), tmp_path)
        assert f"holds another run: there {message}. Set" in str(caught.value)
    evaluated = make_config(eval={"fraction": 0.3}, optim={"groups": GROUPS}).model_dump(mode="json", exclude_none=True)
    for groups, fraction, message in (
        (GROUPS, 0.4, "eval.fraction = 0.3, here 0.4"),
        (GROUPS[:1], 0.3, "optim.groups = "),
    ):
        with pytest.raises(ConfigError, match=f"another run: there {message}"):
            check_same_run(evaluated, make_config(eval={"fraction": fraction}, optim={"groups": groups}), tmp_path)
    free = {"name": "b", "out": "x", "device": "auto", "log_every": 5, "save_every": 1, "keep": 9}
    assert check_same_run(saved, make_config(run=free, data={"cache": "elsewhere"}), tmp_path) == []
    tuned = make_config(run={"steps": 100}, optim={"lr": 0.5, "clip": 0.0}, precision={"skip": ["*head"]})
    assert check_same_run(saved, tuned, tmp_path) == [
        "resumed with run.steps = 100 (was 6)",
        "resumed with optim.lr = 0.5 (was 0.01)",
        "resumed with optim.clip = 0.0 (was 1.0)",
        'resumed with precision.skip = ["*head"] (was [])',
    ]


def pickled(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


WRONG = [("step", "2"), ("step", 2.5), ("step", True), ("step", -1), ("skipped_batches", "x"), ("skipped_batches", -7)]
WRONG += [("config", "x"), ("loss_scale", 3), ("data", 3), ("ranks", 0), ("guard", 3)]


def test_damaged_checkpoints_are_named(make_config, tmp_path):
    trainer = make_trainer(make_config)
    trainer.save(tmp_path)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    assert set(read_trainer_state(folder)) == {
        "step", "loss_scale", "data", "config", "ranks", "skipped_batches", "guard",
    }  # fmt: skip
    wider = make_trainer(make_config, model={"type": "llama", "config": LLAMA | {"intermediate_size": 96}})
    with pytest.raises(ConfigError, match="there intermediate_size = 64, here 96"):
        load_checkpoint(folder, wider.model, wider.optimizer, wider.loss_scale, wider.ranks)
    good = json.loads((folder / "trainer.json").read_text())
    # What was damaged before its digests were written, or by who can write them.
    for name in ("optimizer.pt", "model.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-50])
        write_digests(folder, {})
        with pytest.raises(ConfigError, match="is damaged"):
            load_checkpoint(folder, trainer.model, trainer.optimizer, trainer.loss_scale, trainer.ranks)
        (folder / name).write_bytes(content)
    states = ({}, {"adamw": 3, "masters": {}}, [1], torch.ones(3), 3)
    for content in (b"", b"nonsense", *map(pickled, states)):
        (folder / "optimizer.pt").write_bytes(content)
        write_digests(folder, {})
        message = r"is damaged \(.*\): remove .*step-000000 to resume from the one before"
        with pytest.raises(ConfigError, match=message):
            load_checkpoint(folder, trainer.model, trainer.optimizer, trainer.loss_scale, trainer.ranks)
    for text in ("{}", "null", '{"step": 1}', "[]", *(json.dumps(good | {key: value}) for key, value in WRONG)):
        (folder / "trainer.json").write_text(text)
        write_digests(folder, {})
        with pytest.raises(ConfigError, match=r"trainer\.json is not the state of a trainer \(.*step-000000"):
            read_trainer_state(folder)
    (folder / "trainer.json").write_text(json.dumps({"step": 1})[:-1])
    write_digests(folder, {})
    with pytest.raises(ConfigError, match=r"trainer\.json cannot be read .*: remove .*step-000000"):
        read_trainer_state(folder)


def test_each_setting_says_whether_it_may_differ_on_resume(make_config, tmp_path):
    kinds = {"run.name": FREE, "sample.tokens": FREE, "inspect.limits.sqnr": TUNABLE, "optim.lr": TUNABLE}
    same = ("run.seed", "model.config.hidden_size", "optim.batch", "data.packing", "run.unknown")
    assert {key: resume_of(key) for key in (*kinds, *same)} == kinds | dict.fromkeys(same, "")
    # A setting that is newer than the saved run, and has its default, is no difference.
    saved = make_config().model_dump(mode="json", exclude_none=True)
    for section, name in ((s, n) for s in saved for n in list(saved[s])):
        older = saved | {section: {key: value for key, value in saved[section].items() if key != name}}
        field = TrainConfig.model_fields[section].annotation.model_fields[name]
        if field.get_default() == getattr(getattr(make_config(), section), name):
            assert check_same_run(older, make_config(), tmp_path) == []
