"""The equalization benchmark: its tables are those of its results, and equalization saves what is claimed."""

import json

import pytest
from benchmarks import equalization
from benchmarks.equalization import ARMS, MODELS, OPERANDS, operand_row, operand_table, refresh_table

from octavo.nn.equalized import Equalizer

COMMITTED = json.loads((equalization.RESULTS / "cpu" / "equalization.json").read_text())


def test_the_tables_in_the_docs_are_those_of_the_results():
    again = "copy what `python -m benchmarks equalization` printed into docs/numerics.md"
    text = (equalization.ROOT / "docs" / "numerics.md").read_text()
    assert operand_table(COMMITTED["operands"]) in text and refresh_table(COMMITTED["models"]) in text, again


def test_equalized_operands_are_as_accurate_as_normal_ones():
    rows = {(row["operands"], row["recipe"]): row for row in COMMITTED["operands"]}
    for name in OPERANDS:
        new, plain, normal = rows[name, "rowwise_equalized"], rows[name, "rowwise"], rows["normal", "rowwise"]
        for key in ("y", "dx", "dw"):
            assert new[key] > normal[key] - 1.5 and new[key] > plain[key] - 0.1, (name, key)


def test_refreshed_scales_are_as_good_as_those_of_each_step():
    """Within a percent of each other on every seed; rowwise is worse where channels have outliers."""
    losses = {(row["model"], row["arm"], row["seed"]): row["loss"] for row in COMMITTED["models"]}
    assert {model for model, _, _ in losses} <= set(MODELS)
    for (model, arm, seed), loss in losses.items():
        if arm.startswith("every"):
            assert abs(loss / losses[model, "every 1", seed] - 1) < 0.01, (model, arm, seed)
            assert abs(loss / losses[model, "bf16", seed] - 1) < 0.01, (model, arm, seed)


def test_an_operand_row():
    plain, new = (operand_row("2 channels x 3e5", recipe, 1) for recipe in ("rowwise", "rowwise_equalized"))
    assert plain["y"] < 10 and new["y"] > 28 and new["dx"] > plain["dx"] + 20 and new["dw"] > plain["dw"] + 20


@pytest.mark.thorough
def test_a_trained_model():
    bf16, equalized = (equalization.trained("swiglu_growth", ARMS[arm], 1, 2) for arm in ("bf16", "every 10"))
    assert equalized == pytest.approx(bf16, rel=5e-3) and equalized != bf16


def test_measuring_passes_are_counted():
    equalizer = Equalizer(10, transposed=False)
    assert equalizer.pass_measures and equalization.measuring_passes(10, 33) == 8
