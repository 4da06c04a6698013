"""The spike guard, back to the checkpoint before a loss that leaves its way, and the dynamic loss scale."""

import json
import math
import random
from pathlib import Path
from unittest import mock

import fake_runs
import pytest
from tiny_runs import ONE_BLOCK, At, Recorder, curve, fail, recorded, refused_run, saved, scaled_losses, slow

from octavo.train import NonFiniteError, loss_scale, read_metrics, run
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.config.sections import GuardConfig
from octavo.train.data.corpus import Corpus
from octavo.train.guard import STEPS_PER_ALARM, SpikeError, SpikeGuard, steps_in_a_row
from octavo.train.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE, MAX_SKIPS, RESTORE_FACTOR, LossScale
from octavo.train.record.metrics import read_events

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
    usual = [(wobble(number), 1.0) for number in range(1, 101)]
    taken = [fake_runs.step(number, loss, grad_norm=norm) for number, (loss, norm) in enumerate([*usual, *rows], 1)]
    found = [(step - 100, first - 100) for first, step in alarms(taken, guard)]
    return found[0] if found else None


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


def alarms(taken, guard=None):
    """The spikes that a guard sees, first step and step in which each is recognized; after one a new guard goes on."""
    spikes, guard = [], guard or SpikeGuard(GuardConfig(spike=8.0))
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


# --- the loss scale: steps that overflow, faults that pass, and a range that is really smaller ---


SEQUENCES = [  # How many steps overflow, or do not, one after the other; the scale after them
    ("none", [(1, True), (1, False), (1, True)], 1.0), (512.0, [(1, True), (1, False), (1, True)], 512.0),
    ("dynamic", [(2, True)], INITIAL_SCALE / 4),
    ("dynamic", [(2, True), (GROWTH_INTERVAL - 1, False)], INITIAL_SCALE / 4),
    ("dynamic", [(2, True), (GROWTH_INTERVAL, False)], INITIAL_SCALE / 2),
    ("dynamic", [(2, True), (2 * GROWTH_INTERVAL - 1, False), (1, True)], INITIAL_SCALE / 4),
    ("dynamic", [(8, True), (GROWTH_INTERVAL - 1, False)], INITIAL_SCALE / 2**8),  # as torch's
    ("dynamic", [(20 * GROWTH_INTERVAL, False)], loss_scale.MAX_SCALE),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "sequence", "value"), SEQUENCES)
def test_scales_after_sequences_of_steps(mode, sequence, value):
    scale = LossScale(mode)
    for count, overflow in sequence:
        for _ in range(count):
            scale.update(overflow=overflow)
    assert (scale.value, scale.active) == (value, mode != "none")


@pytest.mark.parametrize(("mode", "finite"), [("dynamic", True), (2.0, True), ("dynamic", False)])
def test_exhausted_by_overflows_in_a_row(mode, finite):
    scale = LossScale(mode)
    for overflows in (MAX_SKIPS, MAX_SKIPS + 1):
        assert not scale.exhausted
        scale.update(overflow=False)
        for _ in range(overflows):
            assert not scale.exhausted
            scale.update(overflow=True, loss_is_finite=finite)
    assert scale.exhausted and (finite or scale.value == INITIAL_SCALE)  # a loss that is not finite is no overflow


def test_the_scale_before_the_skipped_steps_comes_back():
    """That before both faults: the first one lowered it too, and one step tells whether it was right to."""
    scale = LossScale("dynamic")
    scale.update(overflow=True)
    for _ in range(loss_scale.QUIET_STEPS):
        scale.update(overflow=False)
    for _ in range(MAX_SKIPS // 2):
        scale.update(overflow=True)
    twin = LossScale("dynamic")
    twin.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    for _ in range(MAX_SKIPS // 2 + 1):
        assert not twin.exhausted
        twin.update(overflow=True)
    assert twin.exhausted
    twin.undo_fall()
    assert twin.value == INITIAL_SCALE and not twin.exhausted
    twin.update(overflow=False)
    twin.undo_fall()
    assert twin.value == INITIAL_SCALE


def skipped_under(fails, steps, scale):
    skips = 0
    for step in range(steps):
        skips += (overflow := fails(step, scale.value))
        scale.update(overflow=overflow)
        twin = LossScale("dynamic")
        twin.load_state_dict(json.loads(json.dumps(scale.state_dict())))
        assert twin.state_dict() == scale.state_dict()
    return skips


FAULTS = [
    range(9), range(36), range(MAX_SKIPS), range(0, 120, 2), {step for step in range(120) if step % 3},
    {*range(36), *range(37, 43)},  # back for a while, just when the scale is on trial
    {*range(20), *range(21, 41), *range(42, 62)}, {*range(0, 60, 2), *range(60, 90)},
]  # fmt: skip


@pytest.mark.parametrize("faulty", FAULTS, ids=str)
def test_a_fault_that_has_passed_leaves_a_scale_as_before(faulty):
    scale, faults = LossScale("dynamic"), {100 + step for step in faulty}
    assert skipped_under(lambda step, _: step in faults, 100 + max(faulty) + 4, scale) == len(faults)
    assert scale.value * RESTORE_FACTOR >= INITIAL_SCALE
    if faulty in (range(9), range(36), range(MAX_SKIPS)):
        assert scale.value == INITIAL_SCALE


@pytest.mark.parametrize("fall", range(MAX_SKIPS + 1))
def test_a_range_that_is_really_smaller_costs_few_more_steps(fall):
    scale, largest = LossScale("dynamic"), INITIAL_SCALE / 2**fall
    skips = skipped_under(lambda step, value: step >= 50 and value > largest, 3000, scale)
    growth = math.ceil(3000 / GROWTH_INTERVAL)
    assert fall <= skips <= fall + max(0, fall - math.log2(RESTORE_FACTOR)) + growth
    assert largest / 2 <= scale.value <= 2 * largest
    assert fall <= 8 or skipped_under(lambda _, value: value > largest, 500, scale) <= 1  # and no more


@pytest.mark.parametrize("real", range(1, 20))
def test_a_fault_and_a_smaller_range_at_once(real):
    scale, largest = LossScale("dynamic"), INITIAL_SCALE / 2**real
    skipped_under(lambda step, value: 50 <= step < 80 or (step >= 80 and value > largest), 400, scale)
    assert largest / RESTORE_FACTOR <= scale.value <= largest


def test_zeros_alone_restore_a_scale_that_fell_and_no_other():
    scale = LossScale("dynamic")
    assert not any(each.skip_zero_gradient() for each in (scale, LossScale("none"), LossScale(1e-9)))
    for _ in range(5):
        scale.update(overflow=True)
    assert scale.skip_zero_gradient() and (scale.value, scale.restored_from) == (INITIAL_SCALE, INITIAL_SCALE / 32)
    scale.update(overflow=True)
    assert scale.value == INITIAL_SCALE / 32
    state = {"value": 2.0**-24, "good_steps": 7, "overflows": 0, "before": 2.0**-24, "trial_from": 0.0, "wait": 1}
    scale.load_state_dict(state)  # of a run that had gone on with it
    assert scale.skip_zero_gradient() and scale.value == INITIAL_SCALE
    for _ in range(MAX_SKIPS):  # overflow there and zeros here
        if not scale.skip_zero_gradient():
            scale.update(overflow=True)
    assert scale.exhausted or not scale.skip_zero_gradient()


def spoiled(overflowing, vanishing=()):
    return scaled_losses(lambda t: 1e30 if t.step in overflowing else 1e-30 if t.step in vanishing else 1.0)


def learned(rows):
    before, after = rows[9].loss, rows[-1].loss
    return before is not None and after is not None and after < 0.9 * before


FP16 = {
    "precision": {"parameters": "fp16", "loss_scale": "dynamic"}, "optim": {"lr": 3e-3, "schedule": "constant"},
    "model": ONE_BLOCK,
}  # fmt: skip


@pytest.mark.parametrize("faults", [30, slow(MAX_SKIPS)])
def test_a_run_learns_again_after_a_fault(faults, make_config, tmp_path):
    with spoiled(range(10, 10 + faults)):
        seen = recorded(make_config(**FP16, run={"steps": faults + 30, "save_every": 0}), tmp_path)
    rows = read_metrics(tmp_path)
    assert sum(row.skipped for row in rows) in (faults, faults + 1)  # where all vanishes, that step is skipped as well
    assert {row.loss_scale for row in rows[12 + faults :]} == {INITIAL_SCALE}
    assert learned(rows)
    (event,) = read_events(tmp_path)
    assert event["event"] == "loss_scale"
    assert "at which most gradients underflow: restored to 65536" in event["text"] and event["text"] in seen.notes


@pytest.mark.thorough
def test_a_run_that_stops_can_be_resumed(make_config, tmp_path):
    config = make_config(**FP16, run={"steps": 70, "save_every": 20})
    with spoiled(range(10, 70)), pytest.raises(NonFiniteError, match="--resume"):
        run(config, out=tmp_path / "overflow")
    zeros = spoiled(range(10, 45), vanishing=range(45, 70))
    with zeros, pytest.raises(NonFiniteError, match=r"exactly zero.*--resume"):
        run(config, out=tmp_path / "zeros")
    for name in ("overflow", "zeros"):
        assert saved(tmp_path / name)["trainer"]["loss_scale"]["value"] == INITIAL_SCALE
        run(config, out=tmp_path / name, resume=True)
        rows = read_metrics(tmp_path / name)
        assert [row.step for row in rows] == list(range(1, 71))
        assert rows[-1].loss_scale == INITIAL_SCALE and learned(rows)


@pytest.mark.parametrize(("faults", "period"), [(1, 17), (1, 200), (3, 50), (7, 30)])
def test_faults_that_recur_lower_the_scale_no_further_than_one_alone(faults, period):
    scale, lowest = LossScale("dynamic"), INITIAL_SCALE
    for step in range(20_000):
        scale.update(overflow=step % period < faults)
        lowest = min(lowest, scale.value if step % period >= faults else INITIAL_SCALE)
    assert lowest >= INITIAL_SCALE / RESTORE_FACTOR / 2**faults
