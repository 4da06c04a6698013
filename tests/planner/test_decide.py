"""Linears decided by predicted cost, with the reasons; measured times in its place; the host's time."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from octavo.cli.kernels import measure_host
from octavo.kernels.calibration import Entry
from octavo.kernels.quantize.quantize_timing import quantizations as measured_quantizations
from octavo.kernels.timing import bf16_gemms, fp8_gemms
from octavo.numerics import RECIPES, Plan, equalized
from octavo.numerics.plan import Decision
from octavo.planner.decide import MIN_SPEEDUP, TIE_FACTOR, break_even, candidates, decide
from octavo.planner.devices import DEVICES, Measurements, read_measurements
from octavo.planner.roofline import RATIOS, LinearCall, bf16_linear, fp8_linear, host_seconds, quantize_calls

H100, ALL = DEVICES["h100"], candidates("auto")


def decide_call(m, k, n, gpu=H100, recipes=ALL, eager=False, **flags):
    return decide(gpu, [LinearCall(m=m, k=k, n=n, **flags)], recipes, eager=eager)


def test_a_large_linear_gains_and_says_how_much():
    decided = decide_call(16384, 4096, 14336)
    assert decided.decision.recipe is RECIPES["rowwise"]
    assert decided.decision.gain == pytest.approx(decided.bf16 / decided.planned)
    assert 1.4 < decided.decision.gain < 1.7
    for text in (f"{decided.decision.gain:.2f}×: 16384×4096×14336", "bf16 7.", "rowwise ", "quantizing"):
        assert text in decided.decision.reason


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((16384, 4096, 8), "narrow (8)"),  # a LoRA rank
        ((16384, 4096, 128), "narrow (128)"),
        ((16384, 4096, 2), "narrow (2)"),  # a classifier
        ((1, 4096, 4096), "few tokens (1)"),
        ((512, 512, 512), "narrow (512) and few tokens (512)"),
    ],
)
@pytest.mark.parametrize("device", sorted(DEVICES))
def test_what_would_lose_stays(shape, words, device):
    decided = decide_call(*shape, gpu=DEVICES[device], eager=True)
    assert decided.decision.recipe is None
    assert decided.decision.gain == 1.0 and decided.planned == decided.bf16
    if DEVICES[device].fp8_tflops:
        assert "would be 0." in decided.decision.reason or "would be 1.0" in decided.decision.reason
        assert decided.decision.reason.endswith(words)


def test_automatic_decisions_choose_no_recipe_with_state():
    """Not even one whose measured time is shorter by chance."""
    assert {recipe.name for recipe in ALL} == set(RECIPES) - {"rowwise_equalized"}
    assert decide_call(16384, 4096, 14336, recipes=candidates("rowwise_equalized")).decision.gain > 1.4


def test_cost_decides_and_not_the_rule_of_thumb():
    """Narrow by the rule, and still worth it where the other dimension is large."""
    decided = decide_call(65536, 16384, 768)
    assert decided.decision.recipe is not None
    assert "narrow" not in decided.decision.reason


def test_what_is_emulated_is_not_taken():
    decided = decide_call(16384, 8192, 8192, gpu=DEVICES["a100"])
    assert decided.decision.recipe is None and "no FP8 matrix units" in decided.decision.reason
    decided = decide_call(16384, 8192, 8192, recipes=candidates("mxfp8"))
    assert decided.decision.recipe is None and "mxfp8 is only emulated on H100 SXM" in decided.decision.reason
    assert decide_call(16384, 8192, 8192, gpu=DEVICES["b200"], recipes=candidates("mxfp8")).decision.recipe is not None


def test_the_preferred_recipe_among_equals():
    for shape in ((16384, 4096, 4096), (8192, 8192, 28672)):
        for gpu in (H100, DEVICES["b200"]):
            call = LinearCall(m=shape[0], k=shape[1], n=shape[2])
            chosen = decide_call(*shape, gpu=gpu)
            usable = [r for r in ALL if gpu.native_mx or r.name != "mxfp8"]
            fastest = min(fp8_linear(gpu, call, recipe).total for recipe in usable)
            assert fastest <= chosen.planned <= fastest * TIE_FACTOR


def test_the_host_is_counted_in_eager_code():
    shape = (2048, 1408, 1408)
    assert decide_call(*shape).decision.recipe is not None
    decided = decide_call(*shape, replace(H100, host_us=10), eager=True)
    assert decided.decision.recipe is None and "bound by the host" in decided.decision.reason


@pytest.mark.parametrize("tokens", [2048, 16384])
def test_break_even_is_where_decisions_change(tokens):
    side = break_even(H100, tokens, ALL, eager=False)
    assert side is not None and side % 64 == 0 and 256 < side < 4096
    assert decide_call(tokens, side, side).decision.gain >= MIN_SPEEDUP
    assert decide_call(tokens, side - 64, side - 64).decision.recipe is None
    assert break_even(H100, 16, ALL, eager=False) is None
    assert break_even(DEVICES["a100"], tokens, ALL, eager=False) is None


def test_a_gain_goes_through_json():
    plan = Plan({"a": Decision(recipe=RECIPES["rowwise"], reason="r", gain=1.5), "b": Decision(recipe=None, reason="")})
    assert Plan.from_json(plan.to_json()) == plan
    assert '"gain": 1.5' in plan.to_json() and plan.to_json().count("gain") == 1


# --- measured times in the place of predicted ones ---


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


# --- host time: the table is the benchmark's result, and measurements take its place ---


RESULT = Path(__file__).parents[2] / "benchmarks/results/simulated/host.json"


def test_ratios_are_those_of_the_result_file():
    rows = {row["name"]: row["ratio"] for row in json.loads(RESULT.read_text())["rows"]}
    assert {name: rows[name] for name in RECIPES if name in rows} == RATIOS


def test_small_layers_wait_for_the_host_and_large_ones_do_not():
    small, large = LinearCall(m=16, k=512, n=512), LinearCall(m=16384, k=8192, n=8192)
    rowwise, bf16 = fp8_linear(H100, small, RECIPES["rowwise"]), bf16_linear(H100, small)
    assert rowwise.wall(H100, eager=True) == pytest.approx(RATIOS["rowwise"] * bf16.wall(H100, eager=True))
    assert rowwise.wall(H100, eager=False) == rowwise.total
    assert fp8_linear(H100, large, RECIPES["rowwise"]).wall(H100, eager=True) > 2 * RATIOS["rowwise"] * 24e-6
    frozen = replace(small, dgrad=False, wgrad=False)
    assert fp8_linear(H100, frozen, RECIPES["rowwise"]).host == pytest.approx(rowwise.host / 3)


@pytest.mark.parametrize(
    ("recipe", "known"),
    [
        (RECIPES["rowwise"], "rowwise"),
        (RECIPES["mxfp8"], "blockwise"),
        (equalized("rowwise", every=7), "rowwise"),
        (equalized("rowwise_hp_wgrad"), "rowwise_hp_wgrad"),
    ],
)
def test_a_recipe_of_ones_own_counts_as_the_most_similar(recipe, known):
    recipe = replace(recipe, name="my own")
    assert host_seconds(H100, recipe, 3) == pytest.approx(RATIOS[known] * host_seconds(H100, None, 3))


def test_measurements_replace_the_table():
    recipes = [RECIPES[name] for name in ("rowwise", "rowwise_equalized")]
    entries = measure_host(torch.device("cpu"), recipes, seconds=0.0)
    assert [entry.case for entry in entries] == [("bf16",), ("rowwise",), ("rowwise_equalized",)]
    gpu = replace(H100, measured=Measurements("H100", entries))
    for recipe, entry in zip((None, *recipes), entries, strict=True):
        assert host_seconds(gpu, recipe, 3) == pytest.approx(entry.microseconds * 1e-6)
    unmeasured = host_seconds(gpu, RECIPES["tensorwise"], 3)  # in this machine's unit, not in the table's
    assert unmeasured == pytest.approx(RATIOS["tensorwise"] * entries[0].microseconds * 1e-6)
