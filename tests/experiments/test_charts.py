import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.experiments.charts import BUCKETS, LARGE, Line, draw, nice_ticks
from octavo.experiments.curves import Curves, gap_percent, smooth, smoothing_window
from octavo.train.record.metrics import StepMetrics

EDGE = 1e-3


def line(y: list[float], **changes: object) -> Line:
    return Line(**{"label": "a", "slot": 0, "x": np.arange(1, len(y) + 1), "y": np.array(y, float), **changes})


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) (-?[\d.]+)", path)]


def curves(steps: list[int], loss: list[float | None]) -> Curves:
    rows = [
        StepMetrics(
            step=step,
            tokens=step,
            loss=value,
            lr=1.0,
            grad_norm=1.0,
            loss_scale=None,
            skipped=value is None,
            step_s=1.0,
            tokens_per_s=1.0,
        )
        for step, value in zip(steps, loss, strict=True)
    ]
    return Curves.of(rows)


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-6, 1e6), wanted=st.integers(2, 10))
def test_ticks_are_round_evenly_spaced_and_inside(low: float, span: float, wanted: int) -> None:
    high = low + span
    if high - low < 1e-9 * abs(low):
        return
    ticks = nice_ticks(low, high, wanted)
    assert 1 <= len(ticks) <= 2 * wanted
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        rounding = 1e-4  # of the differences of large ticks
        assert np.allclose(np.diff(ticks), step, rtol=rounding)
        leading = step / 10 ** np.floor(np.log10(step) + rounding)
        assert min(abs(leading - round_number) for round_number in (1, 2, 2.5, 5)) < 10 * rounding
    assert not any(str(tick) == "-0.0" for tick in ticks)


def test_the_strong_line_lies_inside_the_plot_and_spans_it() -> None:
    chart = draw("Loss", "nats", [line([8, 5, 4, 3.5, 3.2])])
    drawn = points(chart.traces[0].smoothed)
    assert len(drawn) == 5
    assert drawn[0][0] == pytest.approx(LARGE.left, abs=0.1)
    assert drawn[-1][0] == pytest.approx(LARGE.width - LARGE.right, abs=0.1)
    assert all(LARGE.top <= y <= LARGE.height - LARGE.bottom for _, y in drawn)
    assert drawn == sorted(drawn) and drawn[0][1] < drawn[-1][1]  # a falling loss goes down the page


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    path = draw("Loss", "nats", [line([3, 3, float("nan"), 3, 3])]).traces[0].raw
    assert path.count("M") == 2 and len(points(path)) == 4


def test_a_long_run_is_reduced_and_keeps_its_spike() -> None:
    y = np.full(50_000, 3.0)
    y[31_234] = 9.0
    trace = draw("Loss", "nats", [line(list(y))]).traces[0]
    raw = points(trace.raw)
    assert len(raw) <= 2 * BUCKETS + 2 and len(trace.points) == BUCKETS
    assert min(y for _, y in raw) < min(y for _, y in points(trace.smoothed)) - 10
    assert trace.points[0][0] == 1 and trace.points[-1][0] == 50_000


@pytest.mark.parametrize("y", [[3.0], [0.0, 0.0], [3.0, 3.0, 3.0], [1e-9, 2e-9], [-5.0, 1e6]])
def test_flat_and_single_values_can_be_drawn(y: list[float]) -> None:
    chart = draw("x", "y", [line(y)], keep=[0])
    assert len(points(chart.traces[0].smoothed)) == len(y)
    assert chart.y_ticks


def test_the_band_is_in_view_and_symmetric_about_zero() -> None:
    chart = draw("Gap", "percent", [line([0.1, -0.1, 0.05])], band=1.0)
    top, height = chart.band
    zero = next(tick.at for tick in chart.y_ticks if tick.text == "0")
    assert LARGE.top < top and top + height < LARGE.height - LARGE.bottom
    assert top + height / 2 == pytest.approx(zero, abs=EDGE)


def test_what_is_exact_is_not_smoothed() -> None:
    y = [0.0] * 50 + [1.0] * 50
    exact, noisy = (draw("lr", "lr", [line(y, noisy=noisy)]).traces[0] for noisy in (False, True))
    assert exact.raw == "" and {value for _, value in exact.points} == {0.0, 1.0}
    assert len({value for _, value in noisy.points}) > 2


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=200))
def test_smoothing_stays_between_the_extremes_and_keeps_the_length(values: list[float]) -> None:
    smoothed = smooth(np.array(values))
    assert len(smoothed) == len(values)
    assert np.all((smoothed >= min(values) - 1e-9) & (smoothed <= max(values) + 1e-9))


def test_smoothing_is_centred_and_ignores_what_is_not_finite() -> None:
    ramp = np.arange(100.0)
    half = smoothing_window(100) // 2
    assert smoothing_window(100) == 5 and smoothing_window(3) == 1
    assert np.allclose(smooth(ramp)[half:-half], ramp[half:-half])
    holed = np.full(100, 2.0)
    holed[[10, 50]] = np.nan, np.inf
    assert np.allclose(smooth(holed), 2.0)
    assert np.isnan(smooth(np.full(10, np.nan))).all()


def test_the_gap_compares_equal_steps_only() -> None:
    baseline = curves([1, 2, 3, 4], [4.0, 2.0, None, 1.0])
    candidate = curves([0, 2, 3, 4, 5], [7.0, 2.1, 9.0, 0.9, 1.0])
    steps, gap = gap_percent(baseline, candidate)
    assert steps.tolist() == [2, 3, 4]
    assert gap[0] == pytest.approx(5) and np.isnan(gap[1]) and gap[2] == pytest.approx(-10)
