"""The spike guard: back to the checkpoint before a loss that leaves its way, and on without the batches since."""

import json
import math
import random
from pathlib import Path
from unittest import mock

import fake_runs
import pytest
from tiny_runs import ONE_BLOCK, At, Recorder, curve, fail, recorded, refused_run, saved, scaled_losses

from octavo.train import NonFiniteError, run
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.config.sections import GuardConfig
from octavo.train.data.corpus import Corpus
from octavo.train.guard import STEPS_PER_ALARM, SpikeError, SpikeGuard, steps_in_a_row
from octavo.train.record.metrics import read_events, read_metrics

GUARDED = {
    "run": {"steps": 34, "save_every": 5}, "model": ONE_BLOCK, "guard": {"spike": 8.0, "window": 16},
    "optim": {"lr": 1e-2, "schedule": "constant"},
}  # fmt: skip
LASTING = tuple(range(22, 22 + steps_in_a_row(16)))  # Batches after which a rise is a spike


def wobble(number):
    return (4.0 - 0.01 * number) * (1 + 0.02 * math.sin(7 * number))


def test_a_rollback_killed_while_it_removes_a_checkpoint_leaves_no_partial_one(tmp_path):
    for number in (5, 10):
        folder = tmp_path / "checkpoints" / f"step-{number:06}"
        folder.mkdir(parents=True)
        for name in ("trainer.json", "model.safetensors"):
            (folder / name).touch()

    def killed(path):
        (Path(path) / "trainer.json").unlink()
        raise KeyboardInterrupt

    guard = SpikeGuard(GuardConfig(spike=8.0))
    spike = SpikeError("a spike", step=9, first=8)
    with mock.patch("octavo.train.checkpoint.store.shutil.rmtree", killed), pytest.raises(KeyboardInterrupt):
        guard.checkpoint_before(tmp_path, spike)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000005"]


def harder(indices, factor=5.0, name="loss"):
    return scaled_losses(lambda t: factor if t.step + t.skipped_batches in indices else 1.0, name)


def without_batches(first, count):
    """Runs whose data never had these."""
    batch = Corpus.batch
    without = lambda self, seed, step, size: batch(self, seed, step + (count if step >= first else 0), size)  # noqa: E731
    return mock.patch.object(Corpus, "batch", without)


def recognized(rows, guard=None):
    """The first spike in (loss, norm) after 100 usual steps, as (its last step, its first); counted from 1."""
    guard = guard or SpikeGuard(GuardConfig(spike=8.0))
    for number in range(1, 101):
        guard.check(fake_runs.step(number, wobble(number)))
    for number, (loss, norm) in enumerate(rows, 101):
        try:
            guard.check(fake_runs.step(number, loss, grad_norm=norm))
        except SpikeError as error:
            return error.step - 100, error.first - 100
    return None


@pytest.mark.parametrize("factors", [(2.5, 1.0), (1.4, 10.0), (1.4, 0.1), (1e30, 1.0)])
def test_a_rise_that_lasts_and_damages_is_a_spike(factors):
    rows = [(3.0 * factors[0], factors[1])] * 9
    assert recognized(rows) == (4, 1) and recognized([(3.0, 1.0), *rows]) == (5, 2)


# Steps of a curriculum among them, and the gradient norm alone
STEADY = [(3.0, 1.0), (3.6, 1.0), (3.6, 10.0), (4.6, 1.5), (3.0, 100.0), (0.1, 1.0)]
OVER, AMONG_OTHERS = [(1e30, 1e30)] * 3 + [(3.0, 1.0)] * 9, [(9.0, 1.0), (3.0, 1.0)] * 99


@pytest.mark.parametrize("rows", [OVER, AMONG_OTHERS, *([row] * 200 for row in STEADY)])
def test_what_is_none(rows):
    assert recognized(rows) is None


def test_it_knows_what_is_usual_before_it_judges():
    guard = SpikeGuard(GuardConfig(spike=8.0))
    for number in range(1, 16):
        guard.check(fake_runs.step(number, 4.0 if number < 4 else 400.0))


@pytest.mark.parametrize("before", [8, 16, 64, 200])
def test_chance_makes_a_rise_last_no_more_than_once_in_so_many_steps(before):
    number = steps_in_a_row(before)
    assert math.comb(before + number, number) >= STEPS_PER_ALARM > math.comb(before + number - 1, number - 1)


# --- losses of simulated runs, healthy and with a spike ---


RUN = 5000  # Steps of a run; each begins anew

# Each kind draws factors of the loss and of the gradient norm of a step.


def plain(rng, step):
    return 1 + 0.02 * rng.gauss(0, 1), math.exp(0.1 * rng.gauss(0, 1))


def scaled(factor):
    def drawn(rng, step):
        loss, norm = plain(rng, step)
        level = factor(rng, step)
        return loss * level, norm * level

    return drawn


def student(degrees):
    def t(rng):
        return rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(degrees)) / degrees)

    return lambda rng, step: (max(1 + 0.02 * t(rng), 0.1), math.exp(min(0.3 * t(rng), 50.0)))


def hump(rng, step):
    """A warm-up that is too fast for a while: the loss rises by 20 %, the gradient norm to its double."""
    loss, norm = plain(rng, step)
    height = math.exp(-(((step - 400) / 60) ** 2))
    return loss * (1 + 0.2 * height), norm * (1 + height)


HEALTHY = {
    "5 % of batches 30 % harder": scaled(lambda rng, step: 1 + 0.3 * (rng.random() < 0.05)),
    "20 % of batches 100 % harder": scaled(lambda rng, step: 1 + (rng.random() < 0.2)),
    "1 % of batches 10 times harder": scaled(lambda rng, step: 1 + 9 * (rng.random() < 0.01)),
    "curriculum, ±60 % every 500 steps": scaled(lambda rng, step: 1 + 0.6 * (step // 500 % 2)),
    "shards of 40 steps, 1 in 10 of 30 % more": scaled(
        lambda rng, step: 1 + 0.3 * (random.Random(step // 40).random() < 0.1)
    ),
    "hump of the learning rate, +20 %": hump, "Student's t, 3 degrees of freedom": student(3),
    "Cauchy noise": student(1),
    "Pareto noise, α = 1.5": lambda rng, step: (0.95 + 0.05 * rng.paretovariate(1.5), rng.paretovariate(1.5)),
    "tiny batches, log-normal noise of 30 %": lambda rng, step: (
        math.exp(0.3 * rng.gauss(0, 1)), math.exp(0.8 * rng.gauss(0, 1))
    ),
}  # fmt: skip
SPIKES = ((1.4, 10.0), (1.5, 5.0), (2.5, 1.0), (3.0, 0.1))  # Factors of loss and gradient norm from one step on


def steps(kind, seed, count=RUN, factors=(1.0, 1.0), since=RUN):
    """The steps of a run, with loss and norm times `factors` after the step `since`."""
    rng = random.Random(seed)
    for step in range(count):
        loss, norm = (a * b for a, b in zip(kind(rng, step), factors if step >= since else (1.0, 1.0), strict=True))
        norm *= 0.5 + math.exp(-step / 100)
        yield fake_runs.step(step + 1, (2 + 4 * math.exp(-step / 300)) * loss, grad_norm=norm)


def alarms(taken):
    """The spikes that a guard sees, first step and step in which each is recognized; after one a new guard goes on."""
    spikes, guard = [], SpikeGuard(GuardConfig(spike=8.0))
    for step in taken:
        try:
            guard.check(step)
        except SpikeError as error:
            spikes.append((error.first, error.step))
            guard = SpikeGuard(GuardConfig(spike=8.0))
    return spikes


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_losses_raise_no_alarm(kind):
    assert not any(alarms(steps(HEALTHY[kind], seed)) for seed in range(2))


@pytest.mark.parametrize("factors", SPIKES)
def test_spikes_are_recognized_with_the_step_in_which_they_begin(factors):
    for seed in range(20):
        since = 200 + seed % 300
        first = alarms(steps(plain, seed, since + 50, factors, since))[0]
        assert first == (since + 1, since + 4)


def test_it_is_off_unless_asked_for_and_after_enough():
    for config in (GuardConfig(), GuardConfig(spike=8.0, rollbacks=1)):
        guard = SpikeGuard(config)
        guard.record_rollback(10, 5, 1)
        assert recognized([(50.0, 9.0)] * 99, guard) is None and not guard.active


def test_its_state_goes_through_json_in_the_middle_of_a_rise():
    guard = SpikeGuard(GuardConfig(spike=8.0))
    assert recognized([(9.0, 1.0)] * 3, guard) is None and guard.rising
    other = SpikeGuard(GuardConfig(spike=8.0))
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    with pytest.raises(SpikeError, match=r"steps 101 to 104: the loss is 9 .*guard.spike = 8") as caught:
        other.check(fake_runs.step(104, 9.0))
    assert (caught.value.first, caught.value.step) == (101, 104)


def test_the_way_back_is_before_the_rise_and_further_if_it_comes_back(tmp_path):
    guard = SpikeGuard(GuardConfig(spike=8.0, window=16))
    for number in (10, 20, 30, 32):
        (tmp_path / "checkpoints" / f"step-{number:06d}" / "shards").mkdir(parents=True)
    names = lambda: sorted(path.name[-2:] for path in (tmp_path / "checkpoints").iterdir())  # noqa: E731
    spike = lambda first, step: SpikeError("", first=first, step=step)  # noqa: E731
    assert guard.checkpoint_before(tmp_path, spike(32, 35)).name == "step-000030" and names() == ["10", "20", "30"]
    guard.record_rollback(35, 30, 1)
    assert guard.checkpoint_before(tmp_path, spike(34, 36)).name == "step-000020" and names() == ["10", "20"]
    guard.record_rollback(36, 20, 2)
    assert guard.checkpoint_before(tmp_path, spike(90, 94)).name == "step-000020"  # another one, long after


@pytest.mark.thorough
def test_a_run_goes_back_and_around(make_config, tmp_path):
    config = make_config(**GUARDED)
    with harder(LASTING):
        recorder = recorded(config, tmp_path / "guarded")
    (event,) = read_events(tmp_path / "guarded")
    assert (event["step"], event["event"], event["to"]) == (29, "rollback", 20) and event["text"] in recorder.notes
    assert "steps 23 to 29: the loss is" in event["text"]
    assert "Back to step 20, and on without the 9 batches since" in event["text"]
    rows = read_metrics(tmp_path / "guarded")
    assert [row.step for row in rows] == list(range(1, 35)) and recorder.result.steps == 34
    assert saved(tmp_path / "guarded")["trainer"]["skipped_batches"] == 9
    with without_batches(20, 9):
        run(config, out=tmp_path / "without")
    assert curve(tmp_path / "guarded") == curve(tmp_path / "without")
    refused_run("holds a run", config, tmp_path / "guarded")  # also by files that only a guarded run writes


class KilledInRollback(Recorder):
    def note(self, text):
        if "Back to" in text:
            fail()


def test_a_rollback_is_counted_once_however_often_the_run_is_killed(make_config, tmp_path):
    once = GUARDED | {"guard": {"spike": 8.0, "window": 16, "rollbacks": 1}}
    config = make_config(**once)
    with harder({*LASTING, *range(31, 60)}):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="killed"):
                killed = At(21, fail) if read_events(tmp_path) else KilledInRollback()
                run(config, out=tmp_path, progress=killed, resume=True)
        run(config, out=tmp_path, resume=True)
    assert [event["to"] for event in read_events(tmp_path)] == [20]
    assert saved(tmp_path)["trainer"]["skipped_batches"] == 9


@pytest.mark.thorough
def test_what_is_not_finite_is_a_spike_too_until_it_has_gone_back_enough(make_config, tmp_path):
    with harder({12}, math.nan, "forward_backward"):
        run(make_config(**GUARDED), out=tmp_path / "once")
    (event,) = read_events(tmp_path / "once")
    assert "step 13: the loss is nan" in event["text"] and "without the 3 batches" in event["text"]
    failing = harder(range(12, 99), math.nan, "forward_backward")
    with failing, pytest.raises(NonFiniteError, match="step 6: the loss is nan"):
        run(make_config(**GUARDED), out=tmp_path / "often")
    texts = [event["text"] for event in read_events(tmp_path / "often")]
    assert len(texts) == 3 and texts[-1].endswith("the guard goes off after this one (guard.rollbacks)")
