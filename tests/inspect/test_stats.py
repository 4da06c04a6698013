"""Rows of statistics: derived figures, and JSON that any reader takes."""

import json
import math
from dataclasses import replace

import pytest

from octavo.inspect import OperandStats

ROW = OperandStats(
    step=50, layer="model.layers.3.mlp.down_proj", operand="x", recipe="rowwise", elements=4096, nonfinite=0, amax=8.0,
    smallest=0.25, scale_spread=2.0, underflow=0.125, saturation=0.0, sqnr=31.5, what_if={"blockwise": 32.5},
)  # fmt: skip


def test_dynamic_range_is_in_powers_of_two():
    assert ROW.dynamic_range == 5
    assert replace(ROW, amax=3e38, smallest=1e-45).dynamic_range == pytest.approx(277.4, abs=0.1)
    assert replace(ROW, amax=0.0, smallest=0.0).dynamic_range == 0


@pytest.mark.parametrize("sqnr", [31.5, math.inf])
def test_json_there_and_back(sqnr):
    row = replace(ROW, sqnr=sqnr, what_if={"a": sqnr, "b": 1.0})
    assert OperandStats.from_json(json.loads(json.dumps(row.to_json(), allow_nan=False))) == row


def test_json_of_nan():
    back = OperandStats.from_json(json.loads(json.dumps(replace(ROW, sqnr=math.nan).to_json(), allow_nan=False)))
    assert math.isnan(back.sqnr)


@pytest.mark.parametrize("fields", [{}, {"step": 1, "what_if": {}}, ROW.to_json() | {"else": 1}])
def test_other_json_is_refused(fields):
    with pytest.raises((TypeError, KeyError)):
        OperandStats.from_json(fields)
