"""`octavo inspect`: the worst of a run's statistics, in a table or as JSON."""

import json
import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from octavo.cli import app
from octavo.inspect import OperandStats
from octavo.numerics.display import shortened
from octavo.runtime import terminal
from octavo.train.record.statistics import StatisticsWriter

ROW = OperandStats(
    step=50, layer="model.layers.0.mlp.up_proj", operand="x", recipe="rowwise", elements=64, nonfinite=0, amax=4.0,
    smallest=0.5, scale_spread=2.0, underflow=0.0, saturation=0.0, sqnr=31.5, what_if={"mxfp8": 30.5},
)  # fmt: skip
NAMES = ("up_proj", "gate_proj", "down_proj")


@pytest.fixture
def looked(tmp_path):
    """Two sampled steps of three layers; in the second one is bad."""
    writer = StatisticsWriter(tmp_path, after_step=0, board=Mock())
    for step, level in ((50, 31.0), (100, 12.0)):
        writer.write([replace(ROW, step=step, layer=f"model.layers.0.mlp.{name}") for name in NAMES[:2]])
        writer.write([replace(ROW, step=step, layer=f"model.layers.0.mlp.{NAMES[2]}", sqnr=level, underflow=0.125)])
    return tmp_path


def inspect(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "120"})


def test_the_last_step_worst_first(looked):
    result = inspect(looked)
    assert result.exit_code == 0
    assert "1 figure crossed a limit in 2 sampled steps." in result.stdout
    assert "step 100: model.layers.0.mlp.down_proj x: SQNR 12.0 dB (limit 18)" in result.stdout
    assert "step 100: 3 of 3, worst sqnr first (rowwise)" in result.stdout
    lines = [line for line in result.stdout.splitlines() if "_proj" in line][1:]
    assert lines[0].split()[:5] == ["model.layers.0.mlp.down_proj", "x", "12.0", "30.5", "12.500%"]
    assert len(lines) == 3
    assert "saturation" not in result.stdout  # nothing was


def test_a_checkpoint_knows_what_was_before_it(looked):
    result = inspect(looked / "checkpoints" / "step-000070")
    assert "No figures crossed a limit in 1 sampled step." in result.stdout
    assert "step 50: 3 of 3" in result.stdout


def test_json_holds_all_rows_of_a_step(looked):
    StatisticsWriter(looked, after_step=100, board=Mock()).write([replace(ROW, step=150, sqnr=math.nan, nonfinite=2)])
    assert "not finite" in inspect(looked).stdout
    (row,) = json.loads(inspect(looked, "--json").stdout, parse_constant=pytest.fail)
    assert (row["step"], row["sqnr"], row["nonfinite"]) == (150, None, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", 60), "step 60 was not sampled; the nearest that was is 50 (--step 50)"),
        (("--by", "sqn"), "--by sqn: no such order (did you mean 'sqnr'?)"),
    ],
)
def test_mistakes(arguments, message, looked):
    result = inspect(looked, *arguments)
    assert (result.exit_code, message in " ".join(result.stderr.split())) == (2, True)


LONG = "model.language_model.layers.17.self_attn.some_long_projection_name"


def test_names_are_whole_in_a_pipe_and_keep_both_ends_in_a_terminal(looked, monkeypatch):
    writer = StatisticsWriter(looked, after_step=100, board=Mock())
    others = {name: 20.0 for name in ("mxfp8", "tensorwise", "rowwise_hp_wgrad", "blockwise")}
    writer.write([replace(ROW, step=150, layer=LONG, what_if=others, saturation=0.5)])
    piped = CliRunner().invoke(app, ["inspect", str(looked)], env={"COLUMNS": "40"})
    (line,) = [line for line in piped.stdout.splitlines() if LONG in line and "31.5" in line]
    assert "50.000%" in line and "2^3" in line
    monkeypatch.setattr(terminal, "_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["inspect", str(looked)]).stdout
    (line,) = [line for line in shown.splitlines() if "31.5" in line]
    assert line.lstrip().startswith("model.l…ion_name") and "50.000%" in line and "2^3" in line
    assert all(f"{name}?" in shown for name in others)


@given(name=st.text(min_size=1, max_size=90), width=st.integers(3, 90))
def test_a_shortened_name_fits_and_keeps_its_ends(name, width):
    short = shortened(name, width)
    assert len(short) <= width and short[0] == name[0] and short[-1] == name[-1]
    assert (short == name) == (len(name) <= width) or "…" in name
