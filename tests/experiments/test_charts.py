"""Line charts: what plotly.js gets, and the arithmetic behind it."""

import json

import fake_runs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.experiments.charts import BUCKETS, Line, line_chart, plain
from octavo.experiments.curves import Curves, gap_percent, smooth, smoothing_window

ANY = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=0, max_size=40)


def line(y, **changes):
    return Line(**{"label": "a", "slot": 0, "x": np.arange(1, len(y) + 1), "y": np.array(y, float), **changes})


def traces(lines, **settings):
    return line_chart("Loss", "nats", lines, **settings).figure["data"]


def curves(steps, losses):
    return Curves.of([fake_runs.step(step, loss) for step, loss in zip(steps, losses, strict=True)])


def test_a_noisy_series_has_its_values_and_their_mean_and_an_exact_one_its_values():
    y = [0.0] * 50 + [1.0] * 50
    raw, strong = traces([line(y)])
    assert raw["y"] == strong["customdata"] == y and raw["hoverinfo"] == "skip" and not raw["showlegend"]
    assert len(set(strong["y"])) > 2 and raw["legendgroup"] == strong["legendgroup"]  # the legend toggles both
    (exact,) = traces([line(y, noisy=False)])
    assert exact["y"] == y and exact["x"] == list(range(1, 101))


def test_a_long_run_is_thinned_and_keeps_its_spikes():
    y = np.full(100_000, 3.0)
    y[[31_234, 77_777]] = 9.0, -4.0
    chart = line_chart("Loss", "nats", [line(list(y))])
    raw, strong = chart.figure["data"]
    assert len(raw["x"]) <= 2 * BUCKETS + 2 and len(strong["x"]) == BUCKETS
    assert dict(zip(raw["x"], raw["y"], strict=True)).items() >= {(31_235, 9.0), (77_778, -4.0)}
    assert (strong["x"][0], strong["x"][-1]) == (1, 100_000) and raw["x"] == sorted(raw["x"])
    assert len(json.dumps(chart.json)) < 100_000


@settings(max_examples=25)
@given(ANY, st.booleans(), st.booleans())
def test_any_values_give_a_figure(y, noisy, banded):
    """JSON has no NaN, and no axis an empty or endless range."""
    one = line([value if abs(value) < 1e150 else value * 0 for value in y], noisy=noisy)
    chart = line_chart("x", "y", [one, one], keep=[0], band=1.0 if banded else None)
    json.dumps(chart.json, allow_nan=False)
    for key in ("xaxis", "yaxis"):
        low, high = chart.figure["layout"][key]["range"]
        assert np.isfinite([low, high]).all() and low < high
    assert chart.log_range is None or chart.log_range[0] < chart.log_range[1]


@pytest.mark.parametrize(
    ("y", "sizes"), [([3.0], [7]), ([1, 2, np.nan, 5, np.nan, 4, 4], [0, 0, 0, 7, 0, 0, 0]), ([1, 2], None)]
)
def test_a_value_alone_is_a_point_and_a_hole_a_gap(y, sizes):
    (trace,) = traces([line(y, noisy=False)])
    assert trace.get("marker", {}).get("size") == sizes
    assert [value is None for value in trace["y"]] == list(np.isnan(y))


def test_the_band_is_in_view_and_spikes_need_not_be():
    chart = line_chart("Gap", "percent", [line([0.1, -0.1, 0.05])], band=1.0)
    (shape,) = chart.figure["layout"]["shapes"]
    low, high = chart.figure["layout"]["yaxis"]["range"]
    assert (shape["y0"], shape["y1"]) == (-1, 1) and low < -1 < 1 < high
    spiky = [1.0] * 999 + [1e6]
    assert line_chart("Loss", "nats", [line(spiky)]).figure["layout"]["yaxis"]["range"][1] < 1e5


@pytest.mark.parametrize(("y", "log"), [([10, 100], True), ([0, 1], True), ([-1, 1], False), ([0, 0], False)])
def test_a_logarithmic_axis_is_for_values_above_zero(y, log):
    chart = line_chart("x", "y", [line(y, noisy=False)])
    assert (chart.log_range is not None) == log
    if y == [10, 100]:
        assert chart.log_range == pytest.approx((0.94, 2.06))


def test_a_shaded_area_lies_between_its_edges_and_in_view():
    y = np.linspace(5, 3, 50)
    low, high = y - 0.5, y + 2.0
    low[7] = np.nan
    chart = line_chart("Loss", "nats", [line(list(y), noisy=False, low=low, high=high)])
    area, _ = chart.figure["data"]
    half = len(area["y"]) // 2
    assert half == 49 and 8 not in area["x"] and area["x"] == area["x"][:half] + area["x"][:half][::-1]
    assert all(up > down for up, down in zip(area["y"][:half], area["y"][half:][::-1], strict=True))
    view = chart.figure["layout"]["yaxis"]["range"]
    assert view[0] < min(area["y"]) and view[1] > max(area["y"])


def test_labels_are_literal_and_short():
    assert plain("<b>&lt;") == "&lt;b&gt;&amp;lt;"
    one, other = (plain("x" * 200 + end, 30) for end in "ab")
    assert len(one) == 30 and one != other
    assert plain("a" * 30, 30) == "a" * 30


@pytest.mark.thorough
def test_figures_are_what_plotly_takes():
    """Its Python package checks every name and value against the schema of plotly.js."""
    from plotly.graph_objects import Figure

    y = np.array([3.0, 2.0, np.nan, 1.0])
    one = line(list(y), low=y - 1, high=y + 1)
    for chart in (line_chart("x", "y", [one, one], band=1.0), line_chart("x", "y", [line([1.0])])):
        Figure(chart.figure)


def test_smoothing_is_centred_and_ignores_what_is_not_finite():
    ramp = np.arange(100.0)
    half = smoothing_window(100) // 2
    assert smoothing_window(100) == 5 and smoothing_window(3) == 1
    assert np.allclose(smooth(ramp)[half:-half], ramp[half:-half])
    holed = np.full(100, 2.0)
    holed[[10, 50]] = np.nan, np.inf
    assert np.allclose(smooth(holed), 2.0)
    assert np.isnan(smooth(np.full(10, np.nan))).all()


def test_the_gap_compares_equal_steps_only():
    baseline = curves([1, 2, 3, 4], [4.0, 2.0, None, 1.0])
    candidate = curves([0, 2, 3, 4, 5], [7.0, 2.1, 9.0, 0.9, 1.0])
    steps, gap = gap_percent(baseline, candidate)
    assert steps.tolist() == [2, 3, 4]
    assert gap[0] == pytest.approx(5) and np.isnan(gap[1]) and gap[2] == pytest.approx(-10)
