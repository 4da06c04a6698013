"""Host time of linears: the table is the benchmark's result, and measurements take its place."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.numerics.recipe import RECIPES, equalized
from octavo.planner.devices import DEVICES, Measurements
from octavo.planner.host_time import RATIOS, host_seconds, measure
from octavo.planner.roofline import LinearCall, bf16_linear, fp8_linear

H100 = DEVICES["h100"]
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
    entries = measure(torch.device("cpu"), recipes, seconds=0.0)
    assert [entry.case for entry in entries] == [("bf16",), ("rowwise",), ("rowwise_equalized",)]
    gpu = replace(H100, measured=Measurements("H100", entries))
    for recipe, entry in zip((None, *recipes), entries, strict=True):
        assert host_seconds(gpu, recipe, 3) == pytest.approx(entry.microseconds * 1e-6)
    unmeasured = host_seconds(gpu, RECIPES["tensorwise"], 3)  # in this machine's unit, not in the table's
    assert unmeasured == pytest.approx(RATIOS["tensorwise"] * entries[0].microseconds * 1e-6)
