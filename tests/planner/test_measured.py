"""Measured times in the place of predicted ones: where they hold, where they do not, and that the reason says so."""

import json
from dataclasses import asdict, replace

import pytest

from octavo.kernels.calibration import Entry
from octavo.kernels.gemm.product_timing import bf16_gemms, fp8_gemms
from octavo.kernels.quantize.quantize_timing import quantizations as measured_quantizations
from octavo.numerics import RECIPES
from octavo.planner.decide import decide
from octavo.planner.devices import DEVICES, Measurements, read_measurements
from octavo.planner.roofline import LinearCall, bf16_linear, fp8_linear, quantize_calls

H100 = DEVICES["h100"]
SHAPE = (8192, 4096, 14336)
CALL = LinearCall(m=SHAPE[0], k=SHAPE[1], n=SHAPE[2])


def entries(recipe, shape, microseconds, bf16=None):
    """A table in which everything that a linear takes was measured at the same time."""
    cases = [("scaled_mm", t) for t in fp8_gemms(recipe, [shape])]
    cases += [("quantize", q) for q in measured_quantizations(recipe, [shape])]
    made = [Entry(op=op, case=what.case, shape=what.shape, backend="x", config=None, microseconds=microseconds)
            for op, what in cases]  # fmt: skip
    for what in bf16_gemms([shape]) if bf16 is not None else ():
        made.append(Entry(op="matmul", case=what.case, shape=what.shape, backend="x", config=None, microseconds=bf16))
    return made


def gpu(*tables):
    return replace(H100, measured=Measurements("NVIDIA H100", [each for table in tables for each in table]))


@pytest.mark.parametrize("name", list(RECIPES))
def test_everything_that_a_linear_takes_is_found_under_the_keys_of_calibrate(name):
    device = DEVICES["b200"] if name == "mxfp8" else H100
    table = gpu(entries(RECIPES[name], SHAPE, 100.0)).measured
    cost = fp8_linear(replace(device, measured=table), CALL, RECIPES[name])
    wgrad = name == "rowwise_hp_wgrad"
    assert cost.measured == pytest.approx((6 if wgrad else 7) * 100e-6)  # X, W, W again and G; the FP8 products
    refreshes = RECIPES[name].equalization > 0  # of which `calibrate` measures nothing
    assert cost.total == pytest.approx(cost.measured, rel=0.02 if refreshes else None) or wgrad


def test_bf16_too_and_both_decide_together():
    rowwise = RECIPES["rowwise"]
    fast = gpu(entries(rowwise, SHAPE, 100.0, bf16=500.0))
    assert bf16_linear(fast, CALL).total == bf16_linear(fast, CALL).measured == pytest.approx(1500e-6)
    decided = decide(fast, [CALL], (rowwise,), eager=False)
    assert decided.decision.gain == pytest.approx(1500 / 700)
    assert "bf16 1.5 ms measured, rowwise 0.7 ms measured, of it quantizing 0.4 ms" in decided.decision.reason
    slow = decide(gpu(entries(rowwise, SHAPE, 300.0, bf16=500.0)), [CALL], (rowwise,), eager=False)
    assert slow.decision.recipe is None and "rowwise would be 0.71×" in slow.decision.reason
    half = decide(gpu(entries(rowwise, SHAPE, 100.0)), [CALL], (rowwise,), eager=False)
    assert "bf16 3.91" in half.decision.reason and "rowwise 0.7 ms measured" in half.decision.reason


def test_times_are_interpolated_along_one_dimension_between_neighbours_and_nowhere_else():
    times_by_shape = {(1024, 64, 64): 10.0, (2048, 64, 64): 30.0, (8192, 64, 64): 90.0, (2048, 64, 128): 50.0}
    measurements = Measurements("x", [
        Entry(op="matmul", case=("c",), shape=shape, backend="x", config=None, microseconds=time)
        for shape, time in times_by_shape.items()
    ])  # fmt: skip
    times = {
        (1024, 64, 64): 10, (1536, 64, 64): 20, (2048, 64, 96): 40, (2048, 64, 128): 50,
        (512, 64, 64): None, (16384, 64, 64): None,  # outside
        (4096, 64, 64): None,  # too far apart
        (1536, 64, 96): None, (1024, 32, 64): None,  # two dimensions, or none of these
    }  # fmt: skip
    for shape, time in times.items():
        seconds = measurements.seconds("matmul", ("c",), shape)
        assert seconds == (None if time is None else pytest.approx(time * 1e-6)), shape
    assert measurements.seconds("matmul", ("d",), (1024, 64, 64)) is None and len(measurements) == 4


def test_frozen_weights_and_siblings_have_keys_of_their_own():
    frozen, _ = quantize_calls(replace(CALL, wgrad=False), RECIPES["rowwise"])
    whole, _ = quantize_calls(CALL, RECIPES["rowwise"])
    assert [q.case for q in frozen] == [("e4m3/row", "rows", "nothing")] * 2
    assert whole[0].case == ("e4m3/row", "both", "nothing")
    assert len(quantize_calls(replace(CALL, first=False), RECIPES["rowwise"])[0]) == 1


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[1]"])
def test_files_that_are_no_tables(tmp_path, text):
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json is not a table of `octavo calibrate`"):
        read_measurements(file)
    with pytest.raises(ValueError, match="cannot read the calibration from"):
        read_measurements(tmp_path / "none.json")
    file.write_text('{"format": 1, "device": "NVIDIA H200", "entries": []}')
    with pytest.raises(ValueError, match=r"table\.json has format 1, not 2: another release .* Run `octavo calibrate`"):
        read_measurements(file)


def test_a_file_is_read(tmp_path):
    file = tmp_path / "table.json"
    made = entries(RECIPES["rowwise"], SHAPE, 7.0)
    file.write_text(json.dumps({"format": 2, "device": "NVIDIA H100 80GB HBM3", "entries": [asdict(e) for e in made]}))
    measurements = read_measurements(file)
    assert measurements.device == "NVIDIA H100 80GB HBM3" and len(measurements) == len(made)
    assert measurements.seconds("scaled_mm", made[0].case, made[0].shape) == pytest.approx(7e-6)
