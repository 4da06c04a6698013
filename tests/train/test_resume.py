import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import LLAMA, VARIANTS, At, Recorder, assert_same, fail, sentences, terminate

from octavo.train import read_metrics, run
from octavo.train.checkpoint.digests import write_digests
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.config.run_config import ConfigError
from octavo.train.data.tokenizer import train_tokenizer


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sections", [pytest.param(each, marks=[pytest.mark.slow] * (k in (0, 2, 3, 6))) for k, each in enumerate(VARIANTS)]
)
@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_resume_is_bitwise_the_uninterrupted_run(stop, sections, make_config, tmp_path):
    config = make_config(**sections)
    run(config, out=tmp_path / "whole")
    assert run(config, out=tmp_path / "cut", progress=At(stop, terminate)).stopped == "sigterm"
    assert len(read_metrics(tmp_path / "cut")) == stop
    result = run(config, out=tmp_path / "cut", resume=True)
    assert (result.stopped, result.steps) == ("done", 6)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_resume_after_a_kill_drops_the_steps_after_the_checkpoint(make_config, tmp_path):
    config = make_config(run={"save_every": 2, "steps": 7})
    run(config, out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="killed"):
        run(config, out=tmp_path / "cut", progress=At(5, fail))
    assert len(read_metrics(tmp_path / "cut")) == 5
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "los')  # what a kill in the middle of a write leaves
    seen = Recorder()
    with pytest.warns(RuntimeWarning, match=r"metrics.jsonl, line 6 is left out"):
        run(config, out=tmp_path / "cut", resume=True, progress=seen)
    assert [row.step for row in seen.rows] == [5, 6, 7]
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_resume_of_a_finished_run_and_for_more_steps(make_config, tmp_path):
    constant = {"schedule": "constant"}
    first = run(make_config(optim=constant), out=tmp_path / "a")
    seen = Recorder()
    again = run(make_config(optim=constant), out=tmp_path / "a", resume=True, progress=seen)
    assert seen.rows == [] and "the run has taken its 6 steps: to go on, set run.steps to more" in seen.notes
    assert replace(again, startup=first.startup) == first
    run(make_config(optim=constant, run={"steps": 9}), out=tmp_path / "a", resume=True)
    run(make_config(optim=constant, run={"steps": 9}), out=tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"run\.steps = 6, but .*step-000009 is already at step 9"):
        run(make_config(optim=constant), out=tmp_path / "a", resume=True)


def test_resume_with_nothing_there_starts_and_says_so(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"there is no folder .*a, so no run to resume"):
        run(make_config(), out=tmp_path / "a", resume=True)
    (tmp_path / "a").mkdir()
    seen = Recorder()
    assert run(make_config(), out=tmp_path / "a", resume=True, progress=seen).steps == 6
    assert any("no checkpoint" in note and "from the first step" in note for note in seen.notes)


def test_files_of_an_unknown_run_are_not_resumed(make_config, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"holds metrics\.jsonl but no checkpoint and no config\.toml"):
        run(make_config(), out=tmp_path, resume=True)
    assert snapshot(tmp_path) == before


def snapshot(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_with_a_run_is_never_overwritten(make_config, tmp_path):
    run(make_config(), out=tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"already holds a run .*--resume.*--out"):
        run(make_config(), out=tmp_path)
    other = {"type": "llama", "config": LLAMA | {"hidden_size": 64}}
    with pytest.raises(ConfigError, match=r"another run: there model\.config\.hidden_size = 32, here 64"):
        run(make_config(model=other), out=tmp_path, resume=True)
    assert snapshot(tmp_path) == before


def test_other_data_under_the_same_name_is_noticed(make_config, tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("the leaf folds eight times " * 100)
    run(make_config(data={"source": str(source)}), out=tmp_path / "out")
    before = snapshot(tmp_path / "out")
    source.write_text("the leaf folds nine times " * 100)
    with pytest.raises(ConfigError, match=r"a run on other data than .*a\.txt has now: .*a\.txt: then 2,700 bytes"):
        run(make_config(data={"source": str(source)}, run={"steps": 9}), out=tmp_path / "out", resume=True)
    assert snapshot(tmp_path / "out") == before


def test_a_changed_tokenizer_is_named_and_moved_data_is_not(make_config, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text(sentences(60))
    train_tokenizer([sentences(60)], 300).save(tmp_path / "tokenizer")
    data = {"source": str(tmp_path / "a" / "*.txt"), "tokenizer": str(tmp_path / "tokenizer")}
    run(make_config(data=data), out=tmp_path / "out")
    (tmp_path / "a").rename(tmp_path / "b")
    again = make_config(data=data | {"source": str(tmp_path / "b" / "*.txt")}, run={"steps": 7})
    train_tokenizer([sentences(60, seed=1), "zzz " * 9], 290).save(tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match=r"b/\*\.txt has now: the tokenizer: then digest [0-9a-f]{16}, now"):
        run(again, out=tmp_path / "out", resume=True)
    train_tokenizer([sentences(60)], 300).save(tmp_path / "tokenizer")
    run(again, out=tmp_path / "out", resume=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tmp_path_factory.mktemp("finished") / "run"


@pytest.fixture
def copied(finished, make_config, tmp_path):
    """A copy of a run of six steps."""
    if not finished.exists():
        run(make_config(run={"save_every": 3}), out=finished)
    return Path(shutil.copytree(finished, tmp_path / "run"))


WRITTEN = ["config.toml", "tokenizer.json", "layers.json", "events.jsonl", "metrics.jsonl", "statistics.jsonl"]
WRITTEN += ["run.json", "report.html"]


@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_is_written_through_a_link(name, copied, make_config, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (copied / name).unlink(missing_ok=True)
    (copied / name).symlink_to(mine)
    with pytest.raises(ConfigError, match=rf"{name} is a link to .*mine, and a run writes a file there"):
        run(make_config(run={"steps": 7}), out=copied, resume=True)
    assert mine.read_text() == "mine"
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=rf"{name} is a link to .*gone, and a run writes a file there"):
        run(make_config(), out=tmp_path / "new")
    assert not (tmp_path / "gone").exists()


def test_a_file_with_another_name_elsewhere_is_not_changed(copied, make_config, tmp_path):
    names = ["config.toml", "tokenizer.json", "metrics.jsonl", "run.json"]
    for name in names:
        os.link(copied / name, tmp_path / name)
        (copied / f".{name}.tmp").symlink_to(tmp_path / "gone")
    before = [(tmp_path / name).read_bytes() for name in names]
    run(make_config(run={"steps": 7}), out=copied, resume=True)
    assert [(tmp_path / name).read_bytes() for name in names] == before
    assert not (tmp_path / "gone").exists()


def test_a_lock_is_no_link(make_config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="out cannot be written"):
        run(make_config(), out=tmp_path / "out")
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("name", ["tensorboard", "checkpoints", "tokenizer.json", "config.toml"])
def test_a_folder_for_a_file_and_the_reverse(name, copied, make_config, tmp_path):
    path = copied / name
    folder = path.is_dir()
    if folder:
        path.rename(tmp_path / "elsewhere")
        path.write_text("x")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(ConfigError, match=rf"{name} is .*, and a run writes a {'folder' if folder else 'file'} there"):
        run(make_config(run={"steps": 7}), out=copied, resume=True)
    if folder:  # which may be on another disk
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        assert run(make_config(run={"steps": 7}), out=copied, resume=True).steps == 7
        path.unlink()
        path.symlink_to(tmp_path / "gone")
        with pytest.raises(ConfigError, match=rf"{name} is a link to .*gone"):
            run(make_config(run={"steps": 8}), out=copied, resume=True)


EVENT = '{"step": 1, "event": "rollback", "text": "x"'


@pytest.mark.parametrize(
    "line",
    ["[]", "3", "{}", EVENT, EVENT + ', "to": "x"}', EVENT + ', "to": -1}', EVENT + ', "rollbacks": 9}', "[" * 100_000],
)
def test_events_that_are_damaged(line, copied, make_config):
    (copied / "events.jsonl").write_text(f"{EVENT}}}\n{line}\n")
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2 is not an event of a run"):
        run(make_config(run={"steps": 7}), out=copied, resume=True)


@pytest.mark.parametrize(
    ("key", "value"), [("loss_scale", {"value": "x"}), ("guard", {"last": 3}), ("guard", {"rollbacks": "x"})]
)
def test_states_of_other_types(key, value, copied, make_config):
    last = latest_checkpoint(copied)
    state = json.loads((last / "trainer.json").read_text())
    (last / "trainer.json").write_text(json.dumps(state | {key: value}))
    write_digests(last, {})
    with pytest.raises(ConfigError, match=r"trainer\.json is not the state of a trainer"):
        run(make_config(run={"steps": 7}), out=copied, resume=True)


def test_folders_that_are_no_checkpoints_are_passed_over(copied, make_config):
    for name in ("step-999999", "step-000007", "step-0000010"):
        (copied / "checkpoints" / name).mkdir()
    (copied / "checkpoints" / "step-0000010" / "mine").touch()
    (copied / "checkpoints" / "step-000100").touch()
    seen = Recorder()
    run(make_config(run={"steps": 7}), out=copied, resume=True, progress=seen)
    assert seen.rows[0].step == 7
    assert sum("is no checkpoint and is ignored" in note for note in seen.notes) == 4
    saved = latest_checkpoint(copied)
    assert saved is not None and saved.name == "step-000007"  # in place of the empty folder


def test_a_checkpoint_without_its_state_is_not_passed_over(copied, make_config):
    last = latest_checkpoint(copied)
    assert last is not None
    (last / "trainer.json").unlink()
    with pytest.raises(ConfigError, match="to resume from the one before"):
        run(make_config(run={"steps": 7}), out=copied, resume=True)


@pytest.fixture
def interruptible():
    """SIGINT as a terminal's programs have it: shells let those in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_sigint_and_a_run_outside_the_main_thread(make_config, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stop = At(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = run(make_config(), out=tmp_path / "a", progress=stop)
    assert (result.stopped, result.steps) == ("sigterm", 2)
    assert "Ctrl-C: finishing the step, then saving; Ctrl-C again stops without saving" in stop.notes
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    results = []
    thread = threading.Thread(target=lambda: results.append(run(make_config(), out=tmp_path / "b")))
    thread.start()
    thread.join()
    assert results[0].stopped == "done"


def test_deterministic_algorithms_are_used_in_the_run_alone(make_config, tmp_path):
    states = []

    class Asking(Recorder):
        def step(self, metrics):
            states.append(torch.are_deterministic_algorithms_enabled())
            super().step(metrics)

    run(make_config(), out=tmp_path / "plain", progress=Asking())
    run(make_config(run={"deterministic": True}), out=tmp_path / "deterministic", progress=Asking())
    assert states == [False] * 6 + [True] * 6 and not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert [row.loss for row in read_metrics(tmp_path / "plain")] == [
        row.loss for row in read_metrics(tmp_path / "deterministic")
    ]
