"""How often a verdict is wrong: on recorded losses of real runs, and on simulated ones, with a look after every seed.

Rates of 10,000 comparisons of many more kinds are in docs/compare.md.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.inspect import compare_losses

FILE = Path(__file__).parents[2] / "benchmarks/results/cpu/compare_power.json"
RECORDED = json.loads(FILE.read_text())["losses"]
"""Of a tiny Llama: arm → seed → loss. `again` differs from `bf16` by rounding, `damaged` has mantissas of one bit."""


def verdict(arm, seeds):
    before, after = ([RECORDED[name][seed] for seed in seeds] for name in ("bf16", arm))
    return compare_losses(before, {arm: after}, max_seeds=len(seeds)).arms[0].verdict


def in_order(arm, size):
    """Verdicts of comparisons that share no seed."""
    seeds = sorted(RECORDED[arm], key=int)
    return [verdict(arm, seeds[k : k + size]) for k in range(0, len(seeds) - size + 1, size)]


def test_pairs_of_bf16_raise_few_alarms_and_a_damaged_format_is_found():
    quiet, damaged = in_order("again", 3), in_order("damaged", 3)
    assert len(quiet) == 40 and sum(each in ("worse", "better") for each in quiet) <= 2
    assert len(damaged) == 20 and damaged.count("worse") >= 18


@pytest.mark.parametrize("size", [2, 3, 5])
def test_other_groups_of_the_recorded_seeds(size):
    draw = random.Random(size)
    quiet, damaged = (
        [verdict(arm, draw.sample(sorted(RECORDED[arm]), size)) for _ in range(200)] for arm in ("again", "damaged")
    )
    assert sum(each in ("worse", "better") for each in quiet) <= 16  # of 5 %: 2 standard deviations above
    assert size < 3 or damaged.count("worse") >= 0.86 * len(damaged)


NOISE = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "Student's t, 2 degrees": lambda rng, shape: rng.standard_t(2, shape),
    "log-normal": lambda rng, shape: rng.lognormal(size=shape) - np.exp(0.5),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", NOISE)
def test_simulated_arms(kind):
    """Equal arms are seldom worse, those worse by the margin seldom pass, and clear damage is seen with three seeds."""
    rng = np.random.default_rng(7)
    wrong = passed = found = 0
    for _ in range(100):
        base = 3 * (1 + 0.007 * rng.normal(size=6))
        gaps = 0.1 * NOISE[kind](rng, (2, 6))
        equal, damaged = base + 0.03 * gaps[0], base + 0.03 * (gaps[1] + 1)
        for seeds in range(2, 7):
            look = compare_losses(base[:seeds], {"equal": equal[:seeds], "damaged": damaged[:seeds]}, margin=1.0).arms
            wrong += look[0].verdict == "worse"
            passed += look[1].outcome == "pass"
            found += seeds == 3 and look[1].verdict == "worse"
    assert wrong <= 9 and passed <= 12  # 5 % of comparisons, and two standard deviations or more
    assert found >= (95 if kind == "normal" else 0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rounded", "unit"),
    [
        (lambda losses: np.round(torch.tensor(losses).bfloat16().double().numpy(), 4), 2.0**-6),
        (lambda losses: np.round(losses, 2).astype(np.float32), 0.01),
    ],
    ids=["bf16, printed", "two decimals in fp32"],
)
def test_rounded_losses_keep_the_levels(rounded, unit):
    """Exchangeable arms, at every look; 400 comparisons. By their decimals alone 4 to 6 % are called worse."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(400):
        base, arm = 3 * (1 + 0.007 * rng.normal(size=6)) + unit * rng.normal(size=(2, 6))
        looks = (compare_losses(rounded(base[:n]), {"a": rounded(arm[:n])}) for n in range(2, 7))
        alarms += any(look.arms[0].verdict == "worse" for look in looks)
    assert alarms / 400 <= 0.022
