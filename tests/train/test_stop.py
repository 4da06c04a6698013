"""Signals in the middle of a step, an evaluation or a long read: the run stops soon, and loses nothing."""

import signal
import time

import pytest
from tiny_runs import Recorder, assert_same, terminate

from octavo.train import evaluation, loop, read_metrics, run, signals, trainer


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
        assert run(config, out=tmp_path / "cut", progress=Recorder()).stopped == "sigterm"
    assert calls.count == 2
    assert [(row.step, row.held_out) for row in rows] == [(1, None), (2, None)]  # written before its evaluation
    assert run(config, out=tmp_path / "cut", resume=True).stopped == "done"
    assert_same(tmp_path / "whole", tmp_path / "cut")
    cut, whole = (read_metrics(tmp_path / name) for name in ("cut", "whole"))
    assert [row.held_out for row in cut] == [row.held_out for row in whole] and whole[1].held_out


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
