"""Rows of statistics, and limits: what crosses one is named, what does not is not, faults in their first step."""

import json
import math
from dataclasses import replace

import pytest
import torch
from models import MLP
from torch import nn

import octavo
from octavo.inspect import Finding, History, OperandStats, Thresholds, Watch
from octavo.inspect.findings import findings

LIMITS = Thresholds()
ROW = OperandStats(
    step=50, layer="model.layers.3.mlp.down_proj", operand="x", recipe="rowwise", elements=4096, nonfinite=0, amax=8.0,
    smallest=0.25, scale_spread=2.0, underflow=0.125, saturation=0.0, sqnr=31.5, what_if={"blockwise": 32.5},
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "what", "text"),
    [
        ({"sqnr": 11.2}, "sqnr", "SQNR 11.2 dB (limit 18)"),
        ({"underflow": 0.5}, "underflow", "underflow 50 % (limit 20)"),
        ({"saturation": 0.025}, "saturation", "saturation 2.5 % (limit 1)"),
        ({"nonfinite": 3, "sqnr": math.nan}, "nonfinite", "3 values are NaN or infinite"),
    ],
)
def test_each_limit(changes, what, text):
    (finding,) = findings([replace(ROW, **changes)], LIMITS)
    assert (finding.step, finding.layer, finding.operand, finding.what) == (50, ROW.layer, "x", what)
    assert str(finding) == f"step 50: model.layers.3.mlp.down_proj x: {text}"


def test_at_the_limit_is_within_it():
    assert findings([replace(ROW, sqnr=18.0, underflow=0.2, saturation=0.01)], LIMITS) == []
    assert findings([replace(ROW, sqnr=math.inf)], LIMITS) == []
    loose = Thresholds(sqnr=-math.inf, underflow=1, saturation=1, amax_jump=math.inf, nonfinite=10)
    assert findings([replace(ROW, sqnr=-5.0, underflow=1, saturation=1, nonfinite=10)], loose) == []


def test_gradients_may_underflow_twice_as_much():
    rows = [replace(ROW, operand=operand, underflow=0.4) for operand in ("x", "w", "dgrad_g", "wgrad_g")]
    assert [finding.operand for finding in findings(rows, LIMITS)] == ["x", "w"]
    (finding,) = findings([replace(rows[2], underflow=0.41)], LIMITS)
    assert finding.measured == "underflow 41 % (limit 40)"


def test_limits_out_of_range():
    for limit, value, expected in (
        ("sqnr", math.nan, "a number of dB"), ("underflow", 1.5, "a share, 0 to 1"), ("saturation", -0.1, "a share"),
        ("amax_jump", 1.0, "a factor above 1"), ("nonfinite", -1, "a number of elements"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{limit} = {value} is not {expected}"):
            Thresholds(**{limit: value})


def samples(*amaxes):
    history = History()
    for step, amax in enumerate(amaxes):
        history.add([replace(ROW, step=step, amax=amax)])
    return history


@pytest.mark.parametrize(("amax", "text"), [(801.0, "rose 200-fold"), (0.004, "fell 1e+03-fold"), (0.0, "fell inf")])
def test_jumps_both_ways(amax, text):
    (finding,) = findings([replace(ROW, amax=amax)], LIMITS, samples(4.0, 3.0, 5.0))
    assert finding.what == "amax_jump"
    assert text in str(finding)


def test_jumps_need_a_past_and_outlive_one_odd_step():
    wild = replace(ROW, amax=1e6)
    assert findings([wild], LIMITS) == []
    assert findings([wild], LIMITS, samples(4.0)) == []
    assert findings([wild], LIMITS, samples(0.0, 0.0, 0.0)) == []
    assert findings([replace(ROW, amax=4.0)], LIMITS, samples(4.0, 1e6, 4.0)) == []
    assert findings([replace(wild, layer="another")], LIMITS, samples(4.0, 4.0, 4.0)) == []


def test_what_is_not_finite_is_named_where_it_began():
    def bad(layer, operand):
        return replace(ROW, layer=layer, operand=operand, nonfinite=1)

    rows = [ROW, bad("1", "x"), bad("1", "w"), bad("2", "x"), bad("2", "dgrad_g"), bad("2", "wgrad_g")]
    assert [(f.layer, f.operand) for f in findings(rows, LIMITS)] == [("1", "x"), ("1", "w")]
    assert [(f.layer, f.operand) for f in findings(rows[4:], LIMITS)] == [("2", "dgrad_g")]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def run(recipe, fault=None, steps=20, every=4):
    """Trains three blocks, with a fault from step 16 on. Returns all findings."""
    torch.manual_seed(0)
    model = octavo.convert(nn.Sequential(*(Residual() for _ in range(3))), recipe, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    target = torch.randn(64, 64) / 8
    watch, crossings = Watch(model, every=every), []
    for step in range(1, steps + 1):
        if step == 16 and fault is not None:
            fault(model[1].mlp.down_proj)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        with watch.step():
            nn.functional.mse_loss(model(x), x @ target).backward()
        crossings += watch.findings()
        if any(not p.grad.isfinite().all() for p in model.parameters()):
            break
        optimizer.step()
    return crossings


def outliers(linear):
    """Two channels of the input a thousand times as large."""
    factor = torch.ones(linear.in_features)
    factor[[3, 40]] = 1000
    linear.register_forward_pre_hook(lambda _, args: args[0] * factor)


def tiny_gradients(linear):
    linear.register_forward_hook(lambda _, __, y: y.register_hook(lambda g: g * 1e-12) and None)


def infinity(linear):
    def put(_, args):
        x = args[0].clone()
        x[5, 7] = math.inf
        return x

    linear.register_forward_pre_hook(put)


FAULTS = {
    "outliers": (outliers, "x", "amax_jump"),
    "tiny gradients": (tiny_gradients, "dgrad_g", "amax_jump"),
    "infinity": (infinity, "x", "nonfinite"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.slow)])
def test_faults_are_named_in_the_step_in_which_they_come(fault, recipe):
    put_in, operand, what = FAULTS[fault]
    first = run(recipe, put_in)[0]
    assert isinstance(first, Finding)
    assert (first.step, first.layer, first.operand, first.what) == (16, "1.mlp.down_proj", operand, what)


SLOW = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.parametrize(
    "recipe", ["rowwise", "tensorwise", pytest.param("blockwise", marks=SLOW), pytest.param("mxfp8", marks=SLOW)]
)
def test_a_healthy_run_has_none(recipe):
    assert run(recipe) == []


def test_dynamic_range_is_in_powers_of_two():
    assert ROW.dynamic_range == 5
    assert replace(ROW, amax=3e38, smallest=1e-45).dynamic_range == pytest.approx(277.4, abs=0.1)
    assert replace(ROW, amax=0.0, smallest=0.0).dynamic_range == 0


@pytest.mark.parametrize(("sqnr", "expected"), [(31.5, 31.5), (math.inf, "inf"), (math.nan, None)])
def test_json_is_strict(sqnr, expected):
    fields = replace(ROW, sqnr=sqnr, what_if={"a": sqnr, "b": 1.0}).to_json()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert fields["sqnr"] == fields["what_if"]["a"] == expected
