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


@pytest.mark.parametrize(("sqnr", "expected"), [(31.5, 31.5), (math.inf, "inf"), (math.nan, None)])
def test_json_is_strict(sqnr, expected):
    fields = replace(ROW, sqnr=sqnr, what_if={"a": sqnr, "b": 1.0}).to_json()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert fields["sqnr"] == fields["what_if"]["a"] == expected
