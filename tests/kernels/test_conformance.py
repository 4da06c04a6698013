"""`octavo doctor --deep` runs all kernels and finds mismatches."""

import json
from dataclasses import replace

import pytest
import torch

from octavo.kernels.conformance import mismatches
from octavo.kernels.conformance.cases import checks

pytest.importorskip("triton", reason="Triton is not installed (macOS, Windows)")

from benchmarks.variants import ALL, cross_entropies, grouped_products, quantizations

from octavo.kernels.launch import INTERPRETED
from octavo.kernels.quantize import triton as quantizers

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU: octavo doctor --deep, and tests/test_gpu.py")
CPU = torch.device("cpu")


ALL_CONFIGS = mismatches.INTERPRETER._replace(configs=None)


def compare(only, seed=0, budget=mismatches.INTERPRETER):
    return mismatches.compare(checks(CPU, only), CPU, seconds=0, seed=seed, budget=budget)


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [mismatches.INTERPRETER, pytest.param(ALL_CONFIGS, marks=pytest.mark.slow)])
def test_all_kernels_equal_the_reference(budget):
    """Each case of each op on one small input of any values, strides and sizes; `octavo doctor --deep` runs more."""
    outcomes = compare("", budget=budget)
    assert {outcome.op for outcome in outcomes} == {
        "quantize", "quantize_pair", "scaled_mm", "grouped_mm", "quantize_grouped", "rms_norm", "layer_norm",
        "rms_norm_backward", "layer_norm_backward", "glu", "glu_backward", "dequantize", "adaptive_quantize",
        "adaptive_dequantize", "adamw",
    }  # fmt: skip
    assert [o for o in outcomes if o.mismatches] == []
    assert all(outcome.runs == 1 for outcome in outcomes)


def test_every_variant_that_can_be_launched_is_compared():
    """The same ops and configurations as in `benchmarks.variants`, which are cross-compiled."""
    compared = {(c.op, c.case, config) for c in checks(CPU) for config in c.configs}
    quantizers = [*quantizations()]
    assert {(v.op, v.case, v.config) for v in quantizers} <= compared
    others = {
        (v.op, v.config) for of in (*ALL, grouped_products) if of not in (quantizations, cross_entropies) for v in of()
    }
    assert others == {(op, config) for op, _, config in compared} - {(v.op, v.config) for v in quantizers}


@pytest.fixture
def broken_launches(monkeypatch):
    """Configuration 1 of every quantizer divides by a largest value that is one rounding step too small."""
    launches = quantizers.launches

    def broken(task, config=0, *strip):
        steps = launches(task, config, *strip)
        return [replace(s, constants={**s.constants, "FP8_MAX": 447.99997}) for s in steps] if config == 1 else steps

    monkeypatch.setattr(quantizers, "launches", broken)


def test_a_configuration_that_raises_is_found(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("out of resource: shared memory\nand more lines")

    (check,) = checks(CPU, "quantize e4m3/tensor fold=none columns")
    (outcome,) = mismatches.compare(
        [replace(check, actual=fails)], CPU, seconds=0, seed=0, budget=mismatches.INTERPRETER
    )
    assert (outcome.runs, outcome.mismatches) == (1, 1)
    assert outcome.first.endswith("RuntimeError: out of resource: shared memory")


def test_one_run_in_many_that_differs_is_counted():
    (check,) = checks(CPU, "quantize e4m3/1x128 fold=none both")
    calls = []

    def sometimes(*arguments):
        outputs = check.actual(*arguments)
        calls.append(1)
        if len(calls) == 5:
            outputs[1].view(torch.uint8)[0, 0] ^= 1
        return outputs

    budget = mismatches.INTERPRETER._replace(repeats=6)
    (outcome,) = mismatches.compare([replace(check, actual=sometimes)], CPU, seconds=0, seed=0, budget=budget)
    assert (outcome.mismatches, outcome.runs, len(calls)) == (1, 6, 6)
    assert outcome.first.startswith("round 0, ") and "output 1 of 3 differs from reference: 1 of" in outcome.first


def test_inputs_depend_on_seed_round_and_case_only():
    def notes_of(seed):
        notes = []
        for check in checks(CPU, "e4m3/row"):
            rng = mismatches.RandomInputs(f"{seed}/0/{check.op}/{check.case}", mismatches.GPU)
            check.inputs(rng)
            notes.append(rng.notes)
        return notes

    assert notes_of(0) == notes_of(0) != notes_of(1)


def test_inputs_are_of_every_kind():
    """Inputs cover the values, strides and sizes that have broken kernels, and notes describe them."""
    notes, kinds = [], set()
    for number in range(150):
        rng = mismatches.RandomInputs(str(number), mismatches.GPU._replace(size=40))
        x = rng.matrix()
        notes.append(rng.notes[0])
        values, limits = x.float(), torch.finfo(x.dtype)
        largest = values.abs().max()
        kinds |= {
            ("nan", bool(values.isnan().any())), ("inf", bool(values.isinf().any())), ("row", x.shape[0] == 1),
            ("zero rows", bool((values == 0).all(1).any())), ("contiguous", x.is_contiguous()),
            ("aligned", x.data_ptr() % 16 == 0), ("tiny", bool(0 < largest < limits.smallest_normal)),
            ("huge", bool(limits.max / 10 < largest <= limits.max)), ("dtype", x.dtype),
        }  # fmt: skip
        assert ("not finite" in notes[-1]) or x.dtype == torch.float16 or values.isfinite().all()
    assert len(kinds) == 8 * 2 + 3


def test_difference_ignores_the_sign_of_nan_and_nothing_else():
    e4m3 = torch.tensor([0x7F, 0xFF, 0x00, 0x38], dtype=torch.uint8)
    as_fp8 = [t.view(torch.float8_e4m3fn) for t in (e4m3, e4m3 ^ torch.tensor([0x80, 0x80, 0, 0], dtype=torch.uint8))]
    assert mismatches.difference([as_fp8[0]], [as_fp8[1]]) is None
    assert "1 of 4" in mismatches.difference(
        [as_fp8[0]], [(e4m3 ^ torch.tensor([0, 0, 0x80, 0])).byte().view(as_fp8[0].dtype)]
    )
    nan = torch.tensor([torch.nan, 1.0])
    assert mismatches.difference([nan], [-nan * torch.tensor([1.0, -1.0])]) is None
    assert "expected nan, got 1.0" in mismatches.difference([nan], [torch.ones(2)])
    with pytest.raises(ValueError, match="zip"):
        mismatches.difference([nan], [])
    integers, doubles = torch.arange(3), torch.tensor([1.0, torch.nan], dtype=torch.float64)
    assert mismatches.difference([integers, doubles], [integers, -doubles.abs().neg()]) is None
    assert mismatches.difference([doubles, integers], [doubles, integers + 1], ["y", "dx"]).startswith("dx differs")


def test_low_sqnr_names_the_output_below_the_limit():
    exact = torch.tensor([3.0, 4.0])
    close = torch.tensor([3.0, 4.5])  # 20 dB
    assert mismatches.low_sqnr([exact, exact], [close.bfloat16(), exact], 19.9) is None
    assert "output 1 of 2 has an SQNR of 20.0 dB" in mismatches.low_sqnr([exact, exact], [exact, close], 20.1)
    assert "nan dB" in mismatches.low_sqnr([exact], [exact * torch.nan], 20)
    assert mismatches.low_sqnr([exact[:0]], [exact[:0]], 99) is None


def test_the_command_shows_each_configuration_and_returns_agreement(broken_launches, monkeypatch, capsys):
    from octavo.cli.kernels import doctor_deep

    monkeypatch.setattr("octavo.cli.kernels.INTERPRETER", ALL_CONFIGS)

    arguments = {"seconds": 0, "seed": 3, "only": "quantize e4m3/row fold=none both"}
    assert not doctor_deep(CPU, as_json=False, **arguments)
    shown = capsys.readouterr().out
    assert "0: 1 ok" in shown and "1: 1 of 1 differ" in shown
    assert "configuration 1: round 0" in shown and "seed 3: 1 of" in shown
    assert not doctor_deep(CPU, as_json=True, **arguments)
    report = json.loads(capsys.readouterr().out)
    outcomes = report["outcomes"]
    assert report["seed"] == 3 and [o["mismatches"] for o in outcomes] == [int(o["config"] == 1) for o in outcomes]
    assert all(text in outcomes[1]["first"] for text in ("round 0", "elements differ", "expected"))
