import pytest

from octavo.train.config.sections import Optim
from octavo.train.optimizer import learning_rate


def rates(steps: int, **keys: object) -> list[float]:
    optim = Optim.model_validate({"lr": 2.0, "min_lr_ratio": 0.1} | keys)
    return [learning_rate(optim, step, steps) for step in range(steps)]


def test_cosine() -> None:
    curve = rates(110, schedule="cosine", warmup=10)
    assert curve[:10] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    assert curve[10] == 2.0
    assert curve[60] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert curve[-1] == pytest.approx(0.2, abs=1e-3)
    assert curve[10:] == sorted(curve[10:], reverse=True)


def test_linear() -> None:
    curve = rates(110, schedule="linear", warmup=10)
    assert curve[:10] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    assert curve[10::25] == pytest.approx([2.0 * (1 - 0.9 * step / 100) for step in (0, 25, 50, 75)])


def test_wsd() -> None:
    curve = rates(100, schedule="wsd", warmup=5, decay=0.2)
    assert curve[4:81] == [2.0] * 77
    assert curve[90] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert curve[99] == pytest.approx(2.0 * (0.1 + 0.9 / 20))
    assert rates(10, schedule="wsd", decay=0.0) == [2.0] * 10


def test_constant() -> None:
    assert rates(6, schedule="constant", warmup=2) == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 50])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_rates_stay_in_range(schedule: str, warmup: int, steps: int) -> None:
    assert all(0 < rate <= 2.0 for rate in rates(steps, schedule=schedule, warmup=warmup))
