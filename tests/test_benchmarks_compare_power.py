"""False alarms and detection of `octavo compare`: the results kept hold the promises; what the damage is."""

import json

import pytest
import torch
from benchmarks import compare_power
from benchmarks.compare_power import (
    BASELINE,
    COMPARISONS,
    DOCUMENT,
    LEAST_DETECTED,
    MOST_ALARMS,
    RESULTS,
    SEEDS_OF_ONE,
    at_random,
    cut,
    damaged,
    in_order,
)

from octavo.kernels.quantize import QUANTIZE, QUANTIZE_PAIR, quantize
from octavo.numerics.error import sqnr
from octavo.numerics.recipe import ROWWISE

COMMITTED = json.loads((RESULTS / "cpu" / "compare_power.json").read_text())


def test_false_alarms_on_forty_pairs_of_bf16():
    statuses = in_order(COMMITTED["losses"], "again", SEEDS_OF_ONE)
    assert len(statuses) == COMPARISONS
    assert sum(status in ("worse", "better") for status in statuses) <= MOST_ALARMS * COMPARISONS


def test_a_damaged_format_is_found():
    statuses = in_order(COMMITTED["losses"], "damaged", SEEDS_OF_ONE)
    assert len(statuses) >= 20
    assert statuses.count("worse") >= LEAST_DETECTED * len(statuses)


@pytest.mark.thorough
@pytest.mark.parametrize("size", compare_power.SIZES)
def test_rates_of_comparisons_drawn_from_the_kept_losses(size):
    """The same with other groups of seeds: no luck of the order in which they were trained."""
    quiet = at_random(COMMITTED["losses"], "again", size, 500)
    assert quiet["worse"] + quiet["better"] <= 0.08  # 500 draws of 5 %: 3 standard deviations
    if size >= SEEDS_OF_ONE:
        assert at_random(COMMITTED["losses"], "damaged", size, 500)["worse"] >= LEAST_DETECTED - 0.04


def test_pairs_of_bf16_differ_by_rounding_and_nothing_else():
    gaps = [
        100 * (loss / COMMITTED["losses"][BASELINE][seed] - 1) for seed, loss in COMMITTED["losses"]["again"].items()
    ]
    assert all(gap != 0 for gap in gaps)
    assert max(map(abs, gaps)) < 5


def test_the_table_is_that_of_the_results():
    again = "run `python -m benchmarks compare_power --document`"
    assert DOCUMENT.read_text() == compare_power.document(COMMITTED, DOCUMENT.read_text()), again


def test_mantissas_are_cut_to_one_bit():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values, cut_values = codes.float(), cut(codes).float()
    normal = values.isfinite() & (values.abs() >= 2**-6)
    mantissas = torch.frexp(cut_values[normal]).mantissa.abs().unique()
    assert mantissas.tolist() == [0.5, 0.75]
    away = ((cut_values - values).abs() / values.abs())[normal]
    assert away.max() <= 0.2 + 1e-6  # 1.25 → 1 and 1.75 → 2 (384 for 448)
    assert torch.equal(cut_values.isnan(), values.isnan()) and cut_values[values.isfinite()].abs().max() == 384
    assert torch.equal(cut(cut(codes)).view(torch.uint8), cut(codes).view(torch.uint8))
    assert cut(torch.tensor([1.25, 1.75, -1.625, 1.5]).to(codes.dtype)).float().tolist() == [1.0, 2.0, -1.5, 1.5]


def test_damage_ends_with_its_block():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def quality():
        return sqnr(x, quantize(x, ROWWISE.x, order="both").dequantize())

    before = quality()
    with damaged():
        assert quality() < before - 10
    assert quality() == before
    assert "damaged" not in QUANTIZE.backends and "damaged" not in QUANTIZE_PAIR.backends


def test_what_is_there_is_not_trained_again(tmp_path, monkeypatch, capsys):
    asked = []

    def loss(arm, seed, text):
        asked.append((arm, seed))
        return 1 + seed / 10 + 0.001 * len(asked)

    monkeypatch.setattr(compare_power, "loss_of", loss)
    words = ["--seeds", "6", "--fp8-seeds", "5", "--runs", str(tmp_path), "--out", str(tmp_path),
             "--drawn", "10"]  # fmt: skip
    compare_power.main(words)
    assert len(asked) == 2 * 6 + 2 * 5
    compare_power.main(words)
    assert len(asked) == 22
    rows = json.loads((tmp_path / "compare_power.json").read_text())["summary"]
    assert {(row["arm"], row["seeds"], row["comparisons"]) for row in rows} >= {("again", 3, 2), ("damaged", 5, 1)}
    with pytest.raises(SystemExit):
        compare_power.main([*words, "--fp8-seeds", "4"])
    assert "--fp8-seeds is 5 or more" in capsys.readouterr().err


def test_a_run_of_each_arm(tmp_path):
    """The arms do what they say: other rounding, FP8, and worse FP8; from one start."""
    text = compare_power.page(tmp_path / "page.txt")
    losses = {arm: compare_power.loss_of(arm, 1, text, 12) for arm in compare_power.ARMS}
    assert len(set(losses.values())) == len(losses)
    assert losses["again"] == pytest.approx(losses[BASELINE], rel=2e-3)
    assert losses["rowwise"] == pytest.approx(losses[BASELINE], rel=5e-2)


@pytest.mark.slow
def test_promises_hold_for_runs_made_anew(tmp_path):
    """Half of the kept comparisons; chance allows one alarm more."""
    compare_power.main(["--seeds", "60", "--fp8-seeds", "18", "--runs", str(tmp_path), "--out", str(tmp_path)])
    losses = json.loads((tmp_path / "compare_power.json").read_text())["losses"]
    assert sum(status in ("worse", "better") for status in in_order(losses, "again", SEEDS_OF_ONE)) <= 2
    statuses = in_order(losses, "damaged", SEEDS_OF_ONE)
    assert len(statuses) == 6 and statuses.count("worse") >= 5
