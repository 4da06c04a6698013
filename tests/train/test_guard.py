"""The spike guard: back to the checkpoint before a loss that leaves its way, and on without the batches since."""

import math
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny_runs import At, Recorder, assert_same, curve, fail, saved

from octavo.train import NonFiniteError, parse_config, run
from octavo.train.checkpoint import latest_checkpoint, read_trainer_state
from octavo.train.config import ConfigError
from octavo.train.data import Corpus
from octavo.train.events import read_events
from octavo.train.guard import SpikeError, SpikeGuard
from octavo.train.metrics import StepMetrics, read_metrics
from octavo.train.sections import GuardConfig
from processes import gloo  # noqa: F401  a fixture

GUARDED = {
    "run": {"steps": 30, "save_every": 5},
    "guard": {"spike": 8.0, "window": 8},
    "optim": {"lr": 1e-2, "schedule": "constant"},
}


def step(number, loss):
    return StepMetrics(
        step=number, tokens=number, loss=loss, lr=1e-3, grad_norm=1.0, loss_scale=None, skipped=False, step_s=1.0,
        tokens_per_s=1.0,
    )  # fmt: skip


def wobble(number):
    """A loss that falls slowly, and up and down by 2 %."""
    return (4.0 - 0.01 * number) * (1 + 0.02 * math.sin(7 * number))


@contextmanager
def garbage(*indices):
    """These batches are noise, which no text is."""
    batch = Corpus.batch

    def spoiled(self, seed, step, size):
        inputs, targets = batch(self, seed, step, size)
        if step in indices:
            targets = torch.randint(300, targets.shape, generator=torch.Generator().manual_seed(step))
        return inputs, targets

    with mock.patch.object(Corpus, "batch", spoiled):
        yield


# --- what a spike is ---


@pytest.mark.parametrize("loss", [6.0, 1e30])
def test_a_rise_is_a_spike(loss):
    guard = SpikeGuard(GuardConfig(spike=8.0))
    for number in range(40):
        guard.check(step(number, wobble(number)))
    with pytest.raises(SpikeError, match=r"step 40: the loss is .* deviations above .*guard.spike = 8") as caught:
        guard.check(step(40, loss))
    assert caught.value.step == 40
    guard.check(step(41, wobble(41)))  # it was not taken for one of the losses that are usual


def test_falls_bumps_and_beginnings_are_none():
    guard = SpikeGuard(GuardConfig(spike=8.0))
    guard.check(step(0, 4.0))
    guard.check(step(1, 400.0))  # who knows what is usual
    for number in range(200):
        guard.check(step(number, 0.1 if number == 100 else wobble(number) * (1.05 if number == 150 else 1.0)))
    flat = SpikeGuard(GuardConfig(spike=8.0))
    for number in range(50):
        flat.check(step(number, 2.0 if number != 45 else 2.15))  # of losses that never vary


@pytest.mark.parametrize("config", [GuardConfig(), GuardConfig(spike=8.0, rollbacks=1)])
def test_it_is_off_unless_asked_for_and_after_enough(config):
    guard = SpikeGuard(config)
    if config.spike:
        guard.went_back(10, 5)
    for number in range(30):
        guard.check(step(number, 2.0))
    guard.check(step(30, 50.0))
    assert not guard.active


def test_a_spike_that_comes_back_goes_further_back(tmp_path):
    guard = SpikeGuard(GuardConfig(spike=8.0, window=16))
    for number in (10, 20, 30):
        (tmp_path / "checkpoints" / f"step-{number:06d}").mkdir(parents=True)
    names = lambda: sorted(path.name[-2:] for path in (tmp_path / "checkpoints").iterdir())  # noqa: E731
    assert guard.way_back(tmp_path, 33).name == "step-000030" and names() == ["10", "20", "30"]
    guard.went_back(33, 30)
    assert guard.way_back(tmp_path, 34).name == "step-000020" and names() == ["10", "20"]
    guard.went_back(34, 20)
    assert guard.way_back(tmp_path, 90).name == "step-000020"  # another one, long after


# --- a run ---


def test_a_run_goes_back_and_around(make_config, tmp_path):
    config, told = make_config(**GUARDED), Recorder()
    with garbage(22):
        result = run(config, out=tmp_path / "guarded", progress=told)
    (event,) = read_events(tmp_path / "guarded")
    assert event["step"] == 23 and event["event"] == "rollback"
    assert event["text"] in told.notes
    assert "Back to step 20, and on without the 3 batches since" in event["text"]
    rows = read_metrics(tmp_path / "guarded")
    assert [row.step for row in rows] == list(range(1, 31)) and result.steps == 30
    assert saved(tmp_path / "guarded")["trainer"]["skipped_batches"] == 3
    # The same as a run whose data never had those batches.
    batch = Corpus.batch
    without = lambda self, seed, step, size: batch(self, seed, step + (3 if step >= 20 else 0), size)  # noqa: E731
    with mock.patch.object(Corpus, "batch", without):
        run(config, out=tmp_path / "without")
    assert curve(tmp_path / "guarded") == curve(tmp_path / "without")


def test_a_resumed_run_goes_around_as_well(make_config, tmp_path):
    config = make_config(**GUARDED)
    with garbage(22):
        run(config, out=tmp_path / "whole")
        with pytest.raises(RuntimeError, match="killed"):
            run(config, out=tmp_path / "killed", progress=At(27, fail))
        run(config, out=tmp_path / "killed", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "killed")
    assert len(read_events(tmp_path / "killed")) == 1


def test_the_beginning_is_something_to_go_back_to(make_config, tmp_path):
    late = GUARDED | {"run": {"steps": 24, "save_every": 24}}
    with garbage(20):
        run(make_config(**late), out=tmp_path)
    (event,) = read_events(tmp_path)
    assert "Back to step 0, and on without the 21 batches since" in event["text"]


def test_what_is_not_finite_is_a_spike_too_until_it_has_gone_back_enough(make_config, tmp_path, monkeypatch):
    from octavo.train.trainer import Trainer

    take, failing = Trainer.forward_backward, {12}
    monkeypatch.setattr(
        Trainer,
        "forward_backward",
        lambda self, *batch: take(self, *batch) * (math.nan if self.step + self.skipped_batches in failing else 1),
    )
    run(make_config(**GUARDED), out=tmp_path / "once")
    (event,) = read_events(tmp_path / "once")
    assert "step 13: the loss is nan" in event["text"] and "without the 3 batches" in event["text"]
    failing |= set(range(12, 99))
    with pytest.raises(NonFiniteError, match="step 6: the loss is nan"):
        run(make_config(**GUARDED), out=tmp_path / "often")
    texts = [event["text"] for event in read_events(tmp_path / "often")]
    assert len(texts) == 3 and texts[-1].endswith("the guard goes off after this one (guard.rollbacks)")


def test_it_needs_checkpoints(make_config):
    with pytest.raises(
        ConfigError, match=r"guard.spike = 8 goes back to checkpoints, and run.save_every = 0 makes none"
    ):
        make_config(guard={"spike": 8.0})


def test_files_of_a_run_are_known(make_config, tmp_path):
    """What it writes is nobody else's file, to the next run."""
    with garbage(22):
        run(make_config(**GUARDED), out=tmp_path)
    assert (Path(tmp_path) / "events.jsonl").exists()
    with pytest.raises(ConfigError, match="holds a run"):
        run(make_config(**GUARDED), out=tmp_path)


def ranks_job(tables, out):
    with garbage(22):
        return run(parse_config(tables), out=Path(out)).steps


@pytest.mark.dist
def test_ranks_go_back_together(gloo, make_config, tmp_path):  # noqa: F811
    wanted = make_config(**GUARDED, precision={"level": "O1"}).model_dump(exclude_none=True)
    assert gloo.run(ranks_job, 2, wanted, str(tmp_path)) == [30, 30]
    assert [(event["step"], event["event"]) for event in read_events(tmp_path)] == [(23, "rollback")]
    assert read_trainer_state(latest_checkpoint(tmp_path))["skipped_batches"] == 3
