import json
import math

import pytest
from tiny_runs import ONE_BLOCK, recorded, saved, scaled_losses, slow

from octavo.train import NonFiniteError, read_metrics, run
from octavo.train.loss_scale import (
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    MAX_SCALE,
    MAX_SKIPS,
    QUIET_STEPS,
    RESTORE_FACTOR,
    LossScale,
)
from octavo.train.record.metrics import read_events

SEQUENCES = [  # How many steps overflow, or do not, one after the other; the scale after them
    ("none", [(1, True), (1, False), (1, True)], 1.0), (512.0, [(1, True), (1, False), (1, True)], 512.0),
    ("dynamic", [(2, True)], INITIAL_SCALE / 4),
    ("dynamic", [(2, True), (GROWTH_INTERVAL - 1, False)], INITIAL_SCALE / 4),
    ("dynamic", [(2, True), (GROWTH_INTERVAL, False)], INITIAL_SCALE / 2),
    ("dynamic", [(2, True), (2 * GROWTH_INTERVAL - 1, False), (1, True)], INITIAL_SCALE / 4),
    ("dynamic", [(8, True), (GROWTH_INTERVAL - 1, False)], INITIAL_SCALE / 2**8),  # as torch's
    ("dynamic", [(20 * GROWTH_INTERVAL, False)], MAX_SCALE),
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
    for _ in range(QUIET_STEPS):
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
