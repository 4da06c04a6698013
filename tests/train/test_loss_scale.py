import json

from octavo.train.loss_scale import GROWTH_INTERVAL, INITIAL, LARGEST, MOST_SKIPS, LossScale


def test_none_and_fixed_never_change() -> None:
    for mode, value, active in (("none", 1.0, False), (512.0, 512.0, True)):
        scale = LossScale(mode)
        for overflow in (True, False, True):
            scale.update(overflow=overflow)
        assert (scale.value, scale.active) == (value, active)


def test_dynamic_halves_and_grows_after_enough_good_steps() -> None:
    scale = LossScale("dynamic")
    scale.update(overflow=True)
    scale.update(overflow=True)
    assert scale.value == INITIAL / 4
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(overflow=False)
    assert scale.value == INITIAL / 4
    scale.update(overflow=False)
    assert scale.value == INITIAL / 2
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(overflow=False)
    scale.update(overflow=True)
    assert scale.value == INITIAL / 4


def test_exhausted_by_overflows_in_a_row() -> None:
    for mode in ("dynamic", 2.0):
        scale = LossScale(mode)
        for _ in range(MOST_SKIPS):
            scale.update(overflow=True)
        assert not scale.exhausted
        scale.update(overflow=False)
        for _ in range(MOST_SKIPS + 1):
            assert not scale.exhausted
            scale.update(overflow=True)
        assert scale.exhausted


def test_state_round_trip_through_json() -> None:
    scale = LossScale("dynamic")
    scale.update(overflow=True)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(overflow=False)
    twin = LossScale("dynamic")
    twin.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    scale.update(overflow=False)
    twin.update(overflow=False)
    assert twin.value == scale.value == INITIAL
    assert twin.state_dict() == scale.state_dict()


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    scale = LossScale("dynamic")
    for _ in range(MOST_SKIPS + 1):
        scale.update(overflow=True, loss_is_finite=False)
    assert scale.value == INITIAL and scale.exhausted


def test_it_grows_up_to_a_bound() -> None:
    scale = LossScale("dynamic")
    for _ in range(20 * GROWTH_INTERVAL):
        scale.update(overflow=False)
    assert scale.value == LARGEST


def test_the_scale_before_the_skipped_steps_comes_back() -> None:
    scale = LossScale("dynamic")
    scale.update(overflow=True)
    scale.update(overflow=False)
    for _ in range(MOST_SKIPS // 2):
        scale.update(overflow=True)
    twin = LossScale("dynamic")
    twin.load_state_dict(json.loads(json.dumps(scale.state_dict())))
    for _ in range(MOST_SKIPS // 2 + 1):
        assert not twin.exhausted
        twin.update(overflow=True)
    assert twin.exhausted
    twin.rewind()
    assert twin.value == INITIAL / 2 and not twin.exhausted
    twin.update(overflow=False)
    twin.rewind()
    assert twin.value == INITIAL / 2
