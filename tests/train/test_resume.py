"""Resumes: bitwise the uninterrupted run, refused or from the newest whole checkpoint; stops by a signal, and kills."""

import os
import shutil
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_runs
import torch
from test_guard import FP16, GUARDED
from tiny_runs import At, Recorder, assert_same, killed, recorded, refused_run, sentences, terminate

from octavo.inspect import Autopilot, RecipeChange
from octavo.train import evaluation, loop, read_metrics, run, signals, trainer
from octavo.train.checkpoint import retention
from octavo.train.checkpoint import store as checkpoint
from octavo.train.checkpoint.retention import checkpoints, latest_checkpoint
from octavo.train.data.tokenizer import train_tokenizer
from octavo.train.guard import steps_in_a_row
from octavo.train.record import metrics

refused = partial(refused_run, resume=True)


@pytest.mark.thorough
@pytest.mark.parametrize("sections", tiny_runs.VARIANTS, ids=str)
@pytest.mark.parametrize("stop", [tiny_runs.slow(1), 4])
def test_resume_is_bitwise_the_uninterrupted_run(stop, sections, make_config, tmp_path):
    two_blocks = {"type": "llama", "config": tiny_runs.LLAMA | {"num_hidden_layers": 2}}
    config = make_config(**{"model": two_blocks} | sections)
    run(config, out=tmp_path / "whole")
    assert run(config, out=tmp_path / "cut", progress=At(stop, terminate)).stopped == "sigterm"
    assert len(read_metrics(tmp_path / "cut")) == stop
    result = run(config, out=tmp_path / "cut", resume=True)
    assert (result.stopped, result.steps) == ("done", 6)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_resume_after_a_kill_drops_the_steps_after_the_checkpoint(make_config, tmp_path):
    config = make_config(run={"save_every": 2, "steps": 7})
    run(config, out=tmp_path / "whole")
    killed(config, tmp_path / "cut", 5)
    assert len(read_metrics(tmp_path / "cut")) == 5
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "los')  # what a kill in the middle of a write leaves
    with pytest.warns(RuntimeWarning, match=r"metrics.jsonl, line 6 is left out"):
        seen = recorded(config, tmp_path / "cut", resume=True)
    assert [row.step for row in seen.rows] == [5, 6, 7]
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_resume_of_a_finished_run_and_for_more_steps(make_config, tmp_path):
    constant = {"schedule": "constant"}
    first = run(make_config(optim=constant), out=tmp_path / "a")
    again = recorded(make_config(optim=constant), tmp_path / "a", resume=True)
    assert again.rows == [] and "the run has taken its 6 steps: to go on, set run.steps to more" in again.notes
    assert replace(again.result, startup=first.startup) == first
    run(make_config(optim=constant, run={"steps": 9}), out=tmp_path / "a", resume=True)
    run(make_config(optim=constant, run={"steps": 9}), out=tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")
    refused(r"run\.steps = 6, but .*step-000009 is already at step 9", make_config(optim=constant), tmp_path / "a")


def test_resume_with_nothing_there_starts_and_says_so(make_config, tmp_path):
    refused(r"there is no folder .*a, so no run to resume", make_config(), tmp_path / "a")
    (tmp_path / "a").mkdir()
    seen = recorded(make_config(), tmp_path / "a", resume=True)
    assert seen.result.steps == 6
    assert any("no checkpoint" in note and "from the first step" in note for note in seen.notes)


def test_a_folder_with_a_run_is_never_overwritten(make_config, copied, tmp_path):
    refused_run(r"already holds a run .*--resume.*--out", make_config(), copied)
    other = make_config(model={"type": "llama", "config": tiny_runs.LLAMA | {"hidden_size": 64}})
    refused(r"another run: there model\.config\.hidden_size = 32, here 64", other, copied)
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "metrics.jsonl").write_text('{"step": 1}\n')
    refused(r"holds metrics\.jsonl but no checkpoint and no config\.toml", make_config(), tmp_path / "unknown")


def test_changed_data_or_tokenizers_are_named_and_moved_data_is_not(make_config, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text(sentences(60))
    train_tokenizer([sentences(60)], 300).save(tmp_path / "tokenizer")
    data = {"source": str(tmp_path / "a" / "*.txt"), "tokenizer": str(tmp_path / "tokenizer")}
    run(make_config(data=data), out=tmp_path / "out")
    (tmp_path / "a").rename(tmp_path / "b")
    again = make_config(data=data | {"source": str(tmp_path / "b" / "*.txt")}, run={"steps": 7})
    train_tokenizer([sentences(60, seed=1), "zzz " * 9], 290).save(tmp_path / "tokenizer")
    refused(r"b/\*\.txt has now: the tokenizer: then digest [0-9a-f]{16}, now", again, tmp_path / "out")
    train_tokenizer([sentences(60)], 300).save(tmp_path / "tokenizer")
    (tmp_path / "b" / "a.txt").write_text(sentences(60, seed=2))
    refused(r"a run on other data than .*\.txt has now: .*a\.txt: then [\d,]+ bytes", again, tmp_path / "out")
    (tmp_path / "b" / "a.txt").write_text(sentences(60))
    run(again, out=tmp_path / "out", resume=True)


SAVING = {"save_every": 2, "keep": 9}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, make_config):
    out = tmp_path_factory.mktemp("finished") / "run"
    run(make_config(run=SAVING), out=out)
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_no_lock_is_taken_through_a_link(make_config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "gone")
    refused_run("out cannot be written", make_config(), tmp_path / "out")
    assert not (tmp_path / "gone").exists()


def test_folders_may_be_elsewhere_and_files_elsewhere_are_not_changed(copied, make_config, tmp_path):
    for name in ("tensorboard", "checkpoints"):  # which may be on another disk
        (copied / name).rename(tmp_path / name)
        (copied / name).symlink_to(tmp_path / name)
    os.link(copied / "metrics.jsonl", tmp_path / "metrics.jsonl")
    (copied / ".metrics.jsonl.tmp").symlink_to(tmp_path / "gone")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert run(make_config(run={"steps": 7}), out=copied, resume=True).steps == 7
    assert (tmp_path / "metrics.jsonl").read_bytes() == before != (copied / "metrics.jsonl").read_bytes()
    assert not (tmp_path / "gone").exists()
    (tmp_path / "checkpoints").rename(tmp_path / "unmounted")
    refused("checkpoints is no folder, or a link to one that is not there", make_config(run={"steps": 8}), copied)


def test_folders_that_are_no_checkpoints_are_passed_over(copied, make_config):
    for name in ("step-999999", "step-000007", "step-0000010"):
        (copied / "checkpoints" / name).mkdir()
    (copied / "checkpoints" / "step-0000010" / "mine").touch()
    (copied / "checkpoints" / "step-000100").touch()
    seen = recorded(make_config(run={"steps": 7}), copied, resume=True)
    assert [row.step for row in seen.rows] == [7]
    last = latest_checkpoint(copied)
    assert last.name == "step-000007"  # in place of the empty folder


def test_a_checkpoint_without_its_state_is_not_passed_over(copied, make_config):
    (latest_checkpoint(copied) / "trainer.json").unlink()
    refused("to resume from the one before", make_config(run={"steps": 7}), copied)


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
    assert tiny_runs.curve(tmp_path / "plain") == tiny_runs.curve(tmp_path / "deterministic")


def damage(folder):
    tiny_runs.flip(folder / "model.safetensors", 30_000)


def test_a_resume_goes_on_from_the_newest_whole_checkpoint(make_config, copied, tmp_path):
    shutil.copytree(copied, tmp_path / "whole")
    damage(checkpoints(copied)[-1])
    (checkpoints(copied)[-2] / "trainer.json").write_text("{}")
    refused("is damaged: .*or add --best-effort", make_config(run=SAVING), copied)
    seen = recorded(make_config(run=SAVING), copied, resume=True, best_effort=True)
    assert [row.step for row in seen.rows] == [3, 4, 5, 6]
    notes = [note for note in seen.notes if "damaged" in note]
    assert len(notes) == 2 and "model.safetensors" in notes[0] and notes[1].endswith("It is damaged-step-000004 now")
    assert_same(copied, tmp_path / "whole")
    damage(checkpoints(copied)[-1])
    other = make_config(run=SAVING, optim={"batch": 8})
    refused_run("optim.lr|of another|differs|Set", other, copied, resume=True, best_effort=True)
    again = recorded(make_config(run=SAVING), copied, resume=True, best_effort=True)
    assert any(note.endswith("It is damaged-step-000006-1 now") for note in again.notes)


def test_no_whole_checkpoint_is_an_error_and_loses_nothing(make_config, copied):
    for folder in checkpoints(copied):
        damage(folder)
    message = "none of the 3 checkpoints of .* is whole: .*model.safetensors"
    refused_run(message, make_config(run=SAVING), copied, resume=True, best_effort=True)


# --- signals in the middle of a step, an evaluation or a long read ---


class Calls:
    def __init__(self, function, at):
        self._function, self._at, self.count = function, at, 0

    def __call__(self, *arguments, **named):
        self.count += 1
        if self.count == self._at:
            terminate()
        return self._function(*arguments, **named)


@pytest.mark.thorough
def test_a_signal_in_an_evaluation(make_config, tmp_path, monkeypatch):
    config = make_config(eval={"every": 2, "batches": 20}, run={"steps": 4})
    run(config, out=tmp_path / "whole")
    calls = Calls(evaluation.tree_map, at=2)
    rows = []

    def at_first(*arguments):
        rows.extend(read_metrics(tmp_path / "cut")[len(rows) :])
        return calls(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "tree_map", at_first)
        assert run(config, out=tmp_path / "cut").stopped == "sigterm"
    assert calls.count == 2
    assert [(row.step, row.held_out) for row in rows] == [(1, None), (2, None)]  # written before its evaluation
    assert run(config, out=tmp_path / "cut", resume=True).stopped == "done"
    assert_same(tmp_path / "whole", tmp_path / "cut")
    assert read_metrics(tmp_path / "whole")[1].held_out


@pytest.mark.thorough
def test_a_signal_between_micro_batches(make_config, tmp_path, monkeypatch):
    config = make_config(optim={"micro_batches": 4}, precision={"level": "fp8"}, run={"steps": 3})
    run(config, out=tmp_path / "whole")
    calls = Calls(trainer.counted, at=6)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "SLOW_STEP_SECONDS", -1.0)
        patch.setattr(trainer, "counted", calls)
        result = run(config, out=tmp_path / "cut")
    assert (result.stopped, result.steps, calls.count) == ("sigterm", 1, 6)
    assert run(config, out=tmp_path / "cut", resume=True).stopped == "done"
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_layers_with_channel_scales_finish_their_step(make_config, tmp_path, monkeypatch):
    precision = {"level": "fp8", "recipe": "rowwise_equalized"}
    config = make_config(optim={"micro_batches": 2}, precision=precision, run={"steps": 3})
    monkeypatch.setattr(loop, "SLOW_STEP_SECONDS", -1.0)
    calls = Calls(trainer.counted, at=3)
    monkeypatch.setattr(trainer, "counted", calls)
    result = run(config, out=tmp_path)
    assert (result.stopped, result.steps, calls.count) == ("sigterm", 2, 4)


def test_a_long_read_ends(make_config, tmp_path, monkeypatch):
    class Slow(Recorder):
        def stage(self, text):
            if not self.stages:
                terminate()
                while not self.stages:
                    time.sleep(0.01)

    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.1)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        run(make_config(), out=tmp_path / "out", progress=Slow())
    assert end.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is handler
    assert not list((tmp_path / "out").glob("[!.]*"))


# --- runs that are killed at a named point, in and around rollbacks, moves and skipped steps ---


LAYER = "model.layers.0.mlp.up_proj"
LASTING = steps_in_a_row(16)
BAD = {*range(22, 22 + LASTING), *range(32, 32 + LASTING)}
"""Batches of two spikes, the second of which goes back further."""
PILOTED = {"run": {"steps": 36, "save_every": 5, "keep": 2}, "precision": {"level": "fp8", "autopilot": True}}
CONFIGS = {"guard": GUARDED | PILOTED, "fp16": FP16 | {"run": {"steps": 32, "save_every": 4, "keep": 2}}}
OVERFLOWS = {5, *range(10, 22), 26}  # Steps before which gradients overflow: the scale falls, collapses and is restored


class Killed(BaseException):
    """What ends a process."""


def remove_half(folder, ignore_errors=False):
    """What `shutil.rmtree` has done when it is killed."""
    if Path(folder).exists():
        for path in sorted(Path(folder).iterdir())[::2]:
            path.unlink() if path.is_file() else shutil.rmtree(path)
        raise Killed


POINTS = {
    "event": (metrics, "add_event"), "event shown": (loop, "_record_event"), "state put": (loop, "_load_state"),
    "row": (metrics.MetricsWriter, "write"), "removal": (checkpoint, "remove_checkpoint"),
    "save": (checkpoint.CheckpointSaver, "save"), "save begun": (checkpoint._NewCheckpoint, "begin"),
    "save published": (checkpoint._NewCheckpoint, "publish"), "prune": (checkpoint._NewCheckpoint, "prune"),
    "beginning of rows": (metrics, "drop_later_events"),
}  # fmt: skip


@contextmanager
def killed_at(point, number, after):
    """Die before or after call `number` of a point, 1, 2, …; number 0 for never. Gives a list of the calls."""
    owner, name = POINTS[point]
    function, calls = getattr(owner, name), []

    def counted(*args, **options):
        calls.append(args)
        result = None if len(calls) == number and not after else function(*args, **options)
        if len(calls) == number:
            raise Killed
        return result

    with mock.patch.object(owner, name, counted):
        yield calls


@contextmanager
def faults():
    act = Autopilot.act

    def factor(trainer):
        if trainer.loss_scale.active:
            return 1e30 if trainer.step in OVERFLOWS else 1.0
        return 6.0 if trainer.step + trainer.skipped_batches in BAD else 1.0

    def moving(pilot, *args, **options):
        moves = act(pilot, *args, **options)
        for step, after in ((6, "blockwise"), (24, "tensorwise")):
            if pilot.watch.number == step:
                move = RecipeChange(step=step, layer=LAYER, before="rowwise", after=after, why="test")
                pilot._move(move)
                moves = [*moves, move]
        return moves

    with tiny_runs.scaled_losses(factor), mock.patch.object(Autopilot, "act", moving):
        yield


def events(out):
    path = out / "events.jsonl"
    return path.read_bytes() if path.exists() else b""


def names(out):
    return [path.name for path in checkpoints(out)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    trained = {}

    def get(name, config):
        if name not in trained:
            out = tmp_path_factory.mktemp("undisturbed") / name
            with faults(), ExitStack() as stack:
                calls = {point: stack.enter_context(killed_at(point, 0, False)) for point in POINTS}
                run(config, out=out)
            trained[name] = out, {point: len(each) for point, each in calls.items()}
        return trained[name]

    return get


GUARD_KILLS = [
    *(("event", number, after) for number in (2, 3) for after in (False, True)),
    *(("state put", number, after) for number in (1, 2) for after in (False, True)),
    *(("removal", number, after) for number in (1, 3, 4) for after in (False, True)),
    *(("save begun", number, True) for number in (5, 6)),
    *(("save published", number, after) for number in (5, 6) for after in (False, True)),
    ("beginning of rows", 2, False), ("beginning of rows", 2, True), ("prune", 4, False),
    ("row", 6, False), ("row", 6, True), ("row", 24, True), ("row", 22 + LASTING, True),
]  # fmt: skip


@pytest.mark.thorough
def test_what_the_undisturbed_run_goes_through(undisturbed, make_config):
    out, calls = undisturbed("guard", make_config(**CONFIGS["guard"]))
    text = events(out).decode()
    assert text.count('"rollback"') == 2 and text.count('"move"') >= 2 and "taken back" in text
    assert calls["state put"] == 2 and calls["removal"] >= 4 and calls["beginning of rows"] == 3
    out, calls = undisturbed("fp16", make_config(**CONFIGS["fp16"]))
    assert events(out).decode().count('"loss_scale"') == 1
    assert sum(row[-1] for row in tiny_runs.curve(out)) == len(OVERFLOWS)


KILLS = [
    *(tiny_runs.slow("guard", [kill]) for kill in GUARD_KILLS), tiny_runs.slow("guard", ["half", "half", "half"]),
    # After an event and before anything is saved, and in what follows.
    ("guard", [("event", 2, True), ("removal", 1, True), ("save published", 1, False)]),
    ("fp16", [("row", 6, True), ("row", 9, False)]), ("fp16", [("save published", 4, True), ("event", 1, False)]),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kills"), KILLS, ids=str)
def test_killed_at_one_point_after_the_other_and_resumed_to_the_end(name, kills, undisturbed, make_config, tmp_path):
    config, out = make_config(**CONFIGS[name]), tmp_path / "out"
    whole, _ = undisturbed(name, config)
    for kill in (*kills, None):
        try:
            with faults(), ExitStack() as stack:
                if kill == "half":
                    stack.enter_context(mock.patch.object(retention, "shutil", SimpleNamespace(rmtree=remove_half)))
                elif kill is not None:
                    stack.enter_context(killed_at(*kill))
                run(config, out=out, resume=out.exists())
                assert kill is None, "not killed"
        except Killed:
            assert kill is not None
    assert_same(whole, out)
    assert events(out) == events(whole) and names(out) == names(whole)
    assert not list((out / "checkpoints").glob(".*"))
