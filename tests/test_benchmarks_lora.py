"""Adapters on a base in FP8 learn as in bf16: the kept runs, and one of them anew."""

import json

import pytest
from benchmarks.lora import BAND, FILE, SEEDS, STEPS, measure


def test_the_kept_losses_are_within_the_band():
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    assert [(row["seed"], row["steps"]) for row in rows] == [(seed, STEPS) for seed in SEEDS]
    for row in rows:
        assert row["bf16"]["tail"] < 0.9 * row["bf16"]["first"]  # the adapters learn
        assert row["gap"] == pytest.approx(100 * (row["resident FP8"]["tail"] / row["bf16"]["tail"] - 1))
        assert abs(row["gap"]) <= BAND and abs(row["held_out_gap"]) <= BAND


@pytest.mark.slow
def test_a_seed_trained_anew_is_within_the_band(tmp_path):
    pytest.importorskip("peft")
    row = measure(SEEDS[0], STEPS, tmp_path)
    assert abs(row["gap"]) <= BAND and abs(row["held_out_gap"]) <= BAND and row["gap"] != 0
