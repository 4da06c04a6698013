"""Heat maps: every cell where it belongs, at the level it should have, and legible for deep models and long runs."""

import json
import math

import fake_runs
import pytest
from test_run_report import charts_of, parse, text_of

from octavo.experiments.charts import COLOUR_LEVELS
from octavo.experiments.heatmap import COLUMNS, ROWS, heatmaps
from octavo.experiments.page import pack
from octavo.experiments.run_report import write_report
from octavo.inspect.findings import OPERANDS, QUANTILES

KINDS = ("self_attn.q_proj", "mlp.down_proj")


def layer_of(block, kind):
    return f"model.layers.{block}.{kind}"


def run_of(blocks=2, steps=3, kinds=KINDS, operands=OPERANDS, changed=None):
    changed = changed or {}
    return [
        fake_runs.operand(step, layer_of(block, kind), operand, **changed.get((step, block, kind, operand), {}))
        for step in range(1, steps + 1)
        for block in range(blocks)
        for kind in kinds
        for operand in operands
    ]


def panels(chart):
    """(title, levels, values) of each panel, by the annotation above it and its trace."""
    titles = [note["text"] for note in chart.figure["layout"]["annotations"] if note["y"] == 1]
    return [
        (title.strip("</b>"), trace["z"], trace["customdata"])
        for title, trace in zip(titles, chart.figure["data"], strict=True)
    ]


def labels(chart):
    return chart.figure["layout"]["yaxis"]["ticktext"]


def test_channel_scales_of_the_last_sample():
    rows = run_of(operands=("x", "w"))
    scales = tuple(float(place - 3) for place in range(QUANTILES))
    layer = layer_of(0, KINDS[1])
    rows += [fake_runs.operand(step, layer, channel_scales=[s + step for s in scales]) for step in (4, 5)]
    *_, chart = heatmaps(rows)
    assert (chart.title, chart.unit) == ("Channel scales", "log2 by layer and percentile, one panel per operand")
    assert labels(chart) == ["mlp.down_proj"]
    ((title, levels, values),) = panels(chart)
    assert title == "x" and [cell[1:] for cell in values[0][:2]] == [["2", 0], ["3", 6]]
    assert levels[0] == sorted(levels[0]) and (levels[0][0], levels[0][-1]) == (0, COLOUR_LEVELS - 1)


def test_a_map_for_each_figure_and_a_panel_for_each_operand():
    maps = heatmaps(run_of())
    assert [heatmap.title for heatmap in maps] == ["SQNR", "Underflow", "Largest magnitude"]
    for heatmap in maps:
        assert [title for title, *_ in panels(heatmap)] == ["x", "w", "G for dgrad", "G for wgrad"]
        assert labels(heatmap) == list(KINDS)
        assert heatmap.figure["layout"]["yaxis"]["tickvals"] == [0.5, 3.5]  # two rows of each, and one between them
        assert [len(keys) for _, keys in heatmap.keys] == [COLOUR_LEVELS + 1] * (4 if heatmap is maps[2] else 1)
    assert [title for title, *_ in panels(heatmaps(run_of(operands=("x", "w")))[0])] == ["x", "w"]


@pytest.mark.parametrize(
    ("number", "changes", "level", "text"),
    [
        (0, {"sqnr": 30.0}, 0, "30 dB"), (0, {"sqnr": 29.9}, 1, "29.9 dB"), (0, {"sqnr": 18.0}, 6, "18 dB"),
        (0, {"sqnr": 17.9}, 7, "17.9 dB"), (0, {"sqnr": math.inf}, 0, "inf dB"), (1, {"underflow": 0.25}, 7, "25 %"),
        (1, {"underflow": 0.02}, 4, "2 %"), (1, {}, 0, "0 %"), (2, {"amax": 16.0}, 7, "4"),
        (0, {"nonfinite": 1, "sqnr": math.nan}, COLOUR_LEVELS, "1 values NaN or infinite"),
        (0, {"sqnr": math.nan}, None, None),
    ],
)  # fmt: skip
def test_a_cell_is_where_it_belongs(number, changes, level, text):
    """The second block's down projection at the third of four steps: in the last row, third column."""
    heatmap = heatmaps(run_of(steps=4, changed={(3, 1, KINDS[1], "w"): changes}))[number]
    for title, levels, values in panels(heatmap):
        assert levels[2] == [None] * 4  # between the kinds
        assert levels[4][2] == (level if title == "w" else 0)
        cell = ["model.layers.1.mlp.down_proj", text, 3] if text else None
        assert title != "w" or values[4][2] == cell
        assert {cell for row in levels for cell in row} <= {0, None, level}
    json.dumps(heatmap.json, allow_nan=False)


def test_what_was_not_sampled_is_left_out():
    rows = [r for r in run_of(steps=4) if not (r.step == 2 and r.layer.endswith("0.mlp.down_proj"))]
    (_, levels, values), *_ = panels(heatmaps(rows)[0])
    assert levels[3] == [0, None, 0, 0] and levels[4] == [0] * 4 and values[3][1] is None


def test_sixty_layers_and_many_samples_stay_legible_and_small():
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    worst = {(70, 59, "down_proj", "x"): {"sqnr": 3.0}}
    heatmap = heatmaps(run_of(64, 100, kinds, ("x",), worst))[0]
    ((_, levels, values),) = panels(heatmap)
    assert len(levels) <= ROWS + 2 * len(kinds) and {len(row) for row in levels} == {COLUMNS}
    assert heatmap.figure["layout"]["height"] >= 16 * len(kinds) and len(labels(heatmap)) == 7  # a line of text each
    ((row, column),) = [(i, j) for i, line in enumerate(levels) for j, level in enumerate(line) if level == 7]
    assert values[row][column] == ["model.layers.59.down_proj", "3 dB", 70]  # the worst of what fell together
    assert len(pack(json.dumps(heatmap.json))) < 100_000


def test_the_report_has_maps_and_findings_of_runs_that_looked(tmp_path):
    folder = fake_runs.folder(tmp_path / "run", arm="fp8 rowwise")
    assert "operands of" not in write_report([folder], tmp_path / "before").read_text(encoding="utf-8")

    rows = run_of(changed={(2, 1, KINDS[0], "w"): {"sqnr": 11.0}})
    fake_runs.sample(folder, *rows)
    html = write_report([folder], tmp_path / "after").read_text(encoding="utf-8")
    text = text_of(html)
    assert "What FP8 does to the operands of" in text
    assert "1 figure crossed a limit." in text
    assert "SQNR 11.0 dB (limit 18)" in text
    assert html.count('class="keys"') == 2 + 4  # of SQNR and underflow one, of amax one for each operand
    assert [chart["title"] for chart in charts_of(html)][-3:] == ["SQNR", "Underflow", "Largest magnitude"]
    parse(html)
