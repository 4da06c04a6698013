"""Runs that end early, and resumes that leave damaged checkpoints aside."""

import shutil

import pytest
from tiny_runs import Recorder, assert_same, flip, terminate

from octavo.experiments.compare_runs import make_arms
from octavo.train import ConfigError, read_metrics, run
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.evaluation import Patience
from octavo.train.trainer import Trainer

RISING = {"optim": {"lr": 3.0, "schedule": "constant"}, "run": {"steps": 12}}
SAVING = {"run": {"save_every": 2, "keep": 9}}


@pytest.fixture
def held_out(text_files):
    return lambda **settings: {"eval": {"source": str(text_files / "*.txt"), "every": 1, "batches": 1, **settings}}


def test_what_counts():
    patience = Patience(2)
    for loss, since in ((3.0, 0), (3.0, 1), (2.0, 0), (None, 1)):
        patience.note(loss)
        assert patience.since == since and not patience.over
    patience.note(2.5)
    assert patience.over and patience.best == 2.0
    other = Patience(3)
    other.restart([3.0, 3.0, 2.0, None, 2.5])
    assert not other.over
    other.note(2.0)
    assert other.over and not Patience(0).over
    other.restart([None, None, None])
    assert other.over and "has not been finite in 3 measurements" in str(other)


def test_a_run_ends_early_and_goes_on(make_config, held_out, tmp_path):
    seen = Recorder()
    result = run(make_config(**RISING, **held_out(patience=2)), out=tmp_path / "a", progress=seen)
    losses = [row.held_out["loss"] for row in seen.rows]
    assert result.stopped == "early" and result.steps == losses.index(min(losses)) + 3 < 12
    assert any("measurements (eval.patience): the run ends early" in note for note in seen.notes)
    again = run(make_config(**RISING, **held_out(patience=2)), out=tmp_path / "a", resume=True)
    assert (again.stopped, again.steps) == ("early", result.steps)
    more = run(make_config(**RISING, **held_out(patience=20)), out=tmp_path / "a", resume=True)
    assert (more.stopped, more.steps) == ("done", 12)
    run(make_config(**RISING, **held_out()), out=tmp_path / "b")
    assert [row.loss for row in read_metrics(tmp_path / "a")] == [row.loss for row in read_metrics(tmp_path / "b")]


def test_a_measurement_that_a_signal_interrupted_counts(make_config, held_out, tmp_path, monkeypatch):
    config = make_config(**RISING, **held_out(patience=2))
    whole = run(config, out=tmp_path / "whole")
    stop, original = whole.steps, Trainer.evaluate

    def evaluate(trainer):
        if trainer.step == stop and not (tmp_path / "asked").exists():
            (tmp_path / "asked").touch()
            terminate()
        return original(trainer)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    assert run(config, out=tmp_path / "cut").stopped == "sigterm"
    for _ in range(2):
        result = run(config, out=tmp_path / "cut", resume=True)
        assert (result.stopped, result.steps) == ("early", stop)


def test_a_comparison_takes_no_patience(make_config, held_out, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(make_config(**held_out(patience=2)).to_toml())
    with pytest.raises(ConfigError, match="eval.patience = 2 would end arms after unequal steps"):
        make_arms(path, [], ["a:", "b:precision.level=fp8"], "0")


@pytest.fixture
def saved(make_config, tmp_path):
    run(make_config(**SAVING), out=tmp_path / "run")
    return tmp_path / "run"


def damage(folder):
    flip(folder / "model.safetensors", 30_000)


def test_a_resume_goes_on_from_the_newest_whole_checkpoint(make_config, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "whole")
    damage(checkpoints(saved)[-1])
    (checkpoints(saved)[-2] / "trainer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is damaged: .*or add --best-effort"):
        run(make_config(**SAVING), out=saved, resume=True)
    seen = Recorder()
    assert run(make_config(**SAVING), out=saved, resume=True, best_effort=True, progress=seen).stopped == "done"
    assert [row.step for row in seen.rows] == [3, 4, 5, 6]
    notes = [note for note in seen.notes if "damaged" in note]
    assert len(notes) == 2 and "model.safetensors" in notes[0] and notes[1].endswith("It is damaged-step-000004 now")
    assert_same(saved, tmp_path / "whole")
    damage(checkpoints(saved)[-1])
    with pytest.raises(ConfigError, match="optim.lr|of another|differs|Set"):
        run(make_config(optim={"batch": 8}, **SAVING), out=saved, resume=True, best_effort=True)
    again = Recorder()
    run(make_config(**SAVING), out=saved, resume=True, best_effort=True, progress=again)
    assert any(note.endswith("It is damaged-step-000006-1 now") for note in again.notes)


def test_no_whole_checkpoint_is_an_error_and_loses_nothing(make_config, saved):
    before = checkpoints(saved)
    for folder in before:
        damage(folder)
    with pytest.raises(ConfigError, match="none of the 3 checkpoints of .* is whole: .*model.safetensors"):
        run(make_config(**SAVING), out=saved, resume=True, best_effort=True)
    assert checkpoints(saved) == before
