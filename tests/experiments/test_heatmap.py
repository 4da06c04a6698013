"""Heat maps: every cell where it belongs, at the level it should have, and legible for deep models and long runs."""

import math
import re
from pathlib import Path

import fake_runs
import pytest
from test_run_report import References, text_of

from octavo.experiments.heatmap import COLUMNS, LEFT, LEVELS, ROWS, WIDTH, heatmaps
from octavo.experiments.run_report import write_report
from octavo.inspect.stats import OPERANDS, OperandStats
from octavo.train.record.statistics import StatisticsWriter

KINDS = ("self_attn.q_proj", "mlp.down_proj")


def row(step=1, block=0, kind=KINDS[0], operand="x", **changes):
    fields = {"sqnr": 31.0, "underflow": 0.0, "amax": 4.0, "nonfinite": 0}
    return OperandStats(
        step=step, layer=f"model.layers.{block}.{kind}", operand=operand, recipe="rowwise", elements=64, smallest=0.5,
        scale_spread=1.0, saturation=0.0, **fields | changes,
    )  # fmt: skip


def run_of(blocks=2, steps=3, kinds=KINDS, operands=OPERANDS, changed=None):
    changed = changed or {}
    return [
        row(step, block, kind, operand, **changed.get((step, block, kind, operand), {}))
        for step in range(1, steps + 1)
        for block in range(blocks)
        for kind in kinds
        for operand in operands
    ]


def cells(panel):
    """(left, top, width, height, level) of every rectangle."""
    found = []
    for level, path in panel.paths:
        for rectangle in path.split("z")[:-1]:
            left, top, width, height, back = map(float, re.findall(r"-?[\d.]+", rectangle))
            assert back == -width
            found.append((left, top, width, height, level))
    return found


def test_no_statistics_no_maps():
    assert heatmaps([]) == []


def test_a_map_for_each_figure_and_a_panel_for_each_operand():
    maps = heatmaps(run_of())
    assert [found.title for found in maps] == ["SQNR", "Underflow", "Largest magnitude"]
    for found in maps:
        assert [panel.title for panel in found.panels] == ["x", "w", "G for dgrad", "G for wgrad"]
        assert [label for _, _, label in found.labels] == list(KINDS)
    assert [panel.title for panel in heatmaps(run_of(operands=("x", "w")))[0].panels] == ["x", "w"]


@pytest.mark.parametrize(
    ("number", "changes", "level"),
    [
        (0, {"sqnr": 30.0}, 0), (0, {"sqnr": 29.9}, 1), (0, {"sqnr": 18.0}, 6), (0, {"sqnr": 17.9}, 7),
        (0, {"sqnr": math.inf}, 0), (1, {"underflow": 0.25}, 7), (1, {"underflow": 0.02}, 4), (1, {}, 0),
        (2, {"amax": 16.0}, 7), (0, {"nonfinite": 1, "sqnr": math.nan}, LEVELS),
    ],
)  # fmt: skip
def test_a_cell_is_where_it_belongs(number, changes, level):
    """The second block's down projection at the third of four steps: in the last row, third column."""
    found = heatmaps(run_of(steps=4, changed={(3, 1, KINDS[1], "w"): changes}))[number]
    (_, top, height, _) = (0, *found.labels[1])
    panel = found.panels[1]
    if level == 0:
        assert {cell[4] for cell in cells(panel)} == {0}
        return
    ((left, at, width, size, _),) = [cell for cell in cells(panel) if cell[4] == level]
    assert at == pytest.approx(top + height / 2, abs=0.06)
    assert size == pytest.approx(height / 2, abs=0.06)
    assert left == pytest.approx(panel.left + panel.width / 2, abs=0.06)
    assert width == pytest.approx(panel.width / 4, abs=0.06)
    assert all(cell[4] == 0 for other in found.panels if other is not panel for cell in cells(other))


def test_equal_neighbours_are_one_rectangle_and_what_was_not_sampled_is_left_out():
    rows = [r for r in run_of(steps=4) if not (r.step == 2 and r.layer.endswith("0.mlp.down_proj"))]
    panel = heatmaps(rows)[0].panels[0]
    whole = [cell for cell in cells(panel) if cell[2] == pytest.approx(panel.width, abs=0.06)]
    rest = [cell for cell in cells(panel) if cell not in whole]
    assert len(whole) == 3
    assert [round(cell[2] / panel.width, 2) for cell in rest] == [0.25, 0.5]


def test_sixty_layers_and_many_samples_stay_legible():
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    worst = {(140, 59, "down_proj", "x"): {"sqnr": 3.0}}
    found = heatmaps(run_of(64, 200, kinds, ("x",), worst))[0]
    (panel,) = found.panels
    assert len({cell[1] for cell in cells(panel)}) <= ROWS + len(kinds)
    assert len(panel.hits) <= ROWS + len(kinds)
    assert min(size for _, size, _ in panel.hits) >= 4
    assert all(height >= 12 for _, height, _ in found.labels)  # a line of text
    (bad,) = [cell for cell in cells(panel) if cell[4] == 7]  # the worst of what fell together
    assert bad[2] == pytest.approx(panel.width / COLUMNS, abs=0.06)
    assert "model.layers.59.down_proj x: 3 dB at step 140" in [text for _, _, text in panel.hits]
    assert found.width == WIDTH
    assert all(LEFT <= cell[0] and cell[0] + cell[2] <= WIDTH + 0.1 for cell in cells(panel))


def test_names_that_differ_before_the_block_are_told_apart_and_long_ones_cut():
    rows = [
        OperandStats(**row().to_json() | {"layer": name})
        for name in ("encoder.layers.0.fc", "decoder.layers.0.fc", "a.very.long.name.of.a.linear.layer")
    ]
    labels = [text for *_, text in heatmaps(rows)[0].labels]
    assert labels == ["encoder.layers.#.fc", "decoder.layers.#.fc", "…ong.name.of.a.linear.layer"]


def test_the_report_has_maps_and_findings_of_runs_that_looked(tmp_path: Path):
    folder = fake_runs.folder(tmp_path / "run", arm="fp8 rowwise")
    assert "operands of" not in write_report([folder], tmp_path / "before").html.read_text(encoding="utf-8")

    class Board:
        def add_scalar(self, *_: object) -> None: ...

    rows = run_of(changed={(2, 1, KINDS[0], "w"): {"sqnr": 11.0}})
    StatisticsWriter(folder, after_step=0, board=Board()).write(rows)
    html = write_report([folder], tmp_path / "after").html.read_text(encoding="utf-8")
    text = text_of(html)
    assert "What FP8 does to the operands of" in text
    assert "1 figure crossed a limit." in text
    assert "SQNR 11.0 dB (limit 18)" in text
    assert html.count('<figure class="heat">') == 3
    parser = References()
    parser.feed(html)
    assert parser.found == []
    defined = set(re.findall(r"(--[a-z0-9-]+):", html))
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", html)) <= defined
