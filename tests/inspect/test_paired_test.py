"""Quantiles, power, the levels, and the interval of the gaps."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from octavo.inspect.paired_test import (
    MOST_SEEDS,
    SIGNIFICANCE_LEVELS,
    TOTAL_ALPHA,
    PairedTest,
    Rule,
    average_noncentrality,
    fisher,
    floor_of,
    level_of,
    paired_test,
    student_quantile,
)


def of(gaps, **options):
    base = 1.000000001  # all digits
    return paired_test([base] * len(gaps), [base * (1 + gap / 100) for gap in gaps], Rule(**options))


def unit(pairs, **options):
    return PairedTest(gaps=(0.0,) * pairs, mean=0, deviation=1, rule=Rule(**options))


@pytest.mark.parametrize(
    ("freedom", "level", "power", "quantile", "noncentrality"),
    [
        (1, 0.001, 0.8, 318.3088389855402, 979.6587635874748),
        (2, 0.008 / 7, 0.9, 20.880626716705592, 62.70568577200174),
        (4, 0.0015, 0.9, 6.434848355146187, 13.273862323723733),
        (39, 0.0015, 0.8, 3.165615381617954, 4.148883452871814),
        (1, 2.5e-6, 0.9, 127323.9544686228, 803844.216796875),  # beyond what SciPy's noncentral t computes
    ],
)
def test_quantiles_and_power_by_an_independent_integration(freedom, level, power, quantile, noncentrality):
    """Expected: finite sums for Student's t, and Gauss's rule over the normal numerator of the noncentral t."""
    assert student_quantile(freedom, level) == pytest.approx(quantile, rel=1e-9)
    assert average_noncentrality(freedom, level, power) == pytest.approx(noncentrality, rel=1e-6)


@pytest.mark.parametrize(("arm", "base", "seeds"), [(3, 0, 3), (4, 0, 4), (2, 1, 5), (0, 3, 7), (8, 2, 40), (0, 0, 2)])
def test_fisher_is_that_of_scipy(arm, base, seeds):
    table = [[arm, seeds - arm], [base, seeds - base]]
    assert fisher(arm, base, seeds) == pytest.approx(stats.fisher_exact(table, alternative="greater").pvalue, rel=1e-12)


@pytest.mark.parametrize("pairs", [2, 3, 5, 40])
@pytest.mark.parametrize("power", [0.8, 0.9])
def test_a_detectable_gap_is_found_as_often_as_printed(pairs, power):
    """On average over what the pairs measure as deviation: with the deviation itself three pairs would find 70 %."""
    rng = np.random.default_rng(1)
    seen, later = rng.normal(size=(2, 20_000, pairs))
    gap = unit(pairs).detectable(power) * seen.std(-1, ddof=1)
    detected = gap + later.mean(-1) + unit(pairs).low * later.std(-1, ddof=1) > 0
    assert detected.mean() == pytest.approx(power, abs=0.012)


def test_one_example_by_hand():
    """Gaps 1, 2, 3 %: mean 2, deviation 1; t(0.992; 2) = 7.811, t(0.99733; 2) = 13.64."""
    test = of([1, 2, 3])
    assert test.gaps == pytest.approx((1, 2, 3))
    assert test.mean == pytest.approx(2) and test.deviation == pytest.approx(1, abs=1e-4)
    assert test.low == pytest.approx(2 - 7.8110 / math.sqrt(3), abs=2e-3)
    assert test.high == pytest.approx(2 + 13.637 / math.sqrt(3) + 1 + 10 / 4, abs=2e-3)


@pytest.mark.parametrize("planned", range(2, MOST_SEEDS + 1))
def test_levels_of_a_plan(planned):
    """What a small plan leaves is spent at its last seed; all other levels are those of 40."""
    levels = [level_of(pairs, planned) for pairs in range(2, planned + 1)]
    assert sum(levels) == pytest.approx(TOTAL_ALPHA) if planned <= 11 else sum(levels) > TOTAL_ALPHA
    assert levels[:-1] == [SIGNIFICANCE_LEVELS[min(k, 3)] for k in range(planned - 2)]
    assert level_of(planned + 1, planned) == SIGNIFICANCE_LEVELS[min(planned - 1, 3)]


@given(st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_floor_is_that_of_the_smallest_set_on_top(arms):
    """Beside a search of all sets, smallest first; gaps that are equal do not separate."""
    gaps, *others = arms
    for size in range(len(others) + 1):
        for chosen in itertools.combinations(range(len(others)), size):
            top = [gaps, *(others[k] for k in chosen)]
            rest = [other for k, other in enumerate(others) if k not in chosen]
            if all(min(a[k] for a in top) > max([b[k] for b in rest], default=-9) for k in range(3)):
                assert floor_of(gaps, others) == min(min(a) for a in top)
                return


def test_a_separated_arm_is_tested_as_one_arm():
    """Its gap, bound and seeds; the remainder of a small plan and two pairs are not for separation."""
    shared, one = (of([0.9, 1.1, 1.0], arms=arms) for arms in (8, 1))
    assert shared.low < 0 < one.low and not shared.separated and not one.separated
    apart = replace(shared, others=((0.2, -0.1, 0.1),) * 7)
    assert apart.low == one.low and apart.separated
    assert apart.detectable(0.9) == one.detectable(0.9) < shared.detectable(0.9)
    for low, others in (
        (min(one.low, 0.3), ((0.3, 2.0, 1.1), (0.2, -0.1, 0.1))),  # a set of two, and its floor
        (shared.low, ((0.3, 2.0, 1.1), (0.5, -0.1, 0.1))),  # a third arm above one of the two
        (shared.low, ((0.0, 2.0, 0.0),)),
    ):
        beside = replace(shared, others=others)
        assert beside.low == pytest.approx(low, abs=1e-9) and beside.separated == (low > 0)
    assert replace(shared, others=((0.1, 2.0, 0.1),)).detectable(0.9) == one.detectable(0.9)  # in a set of both
    separating = 1.9  # the gap at which the second seed, 0.1 above the mean, passes the other arm's 2.0
    assert one.detectable(0.9) < separating < shared.detectable(0.9)
    assert replace(shared, others=((0, 2.0, -1.0),)).detectable(0.9) == pytest.approx(separating, rel=1e-5)
    loose = of([0.8, 1.2, 1.0], arms=8)
    assert loose.pairs_to_decide(0, 0.1) > replace(loose, others=((0.0, 0.0, 0.0),)).pairs_to_decide(0, 0.1) == 4
    plan = of([0.6, 1.3, 0.9], arms=8, planned=3)
    assert of(plan.gaps, planned=3).low > 0 > replace(plan, others=()).low
    assert not replace(of([1.0, 1.005], arms=8), others=()).separated


def test_rounded_losses_are_not_exact():
    """Two decimals: a gap of one unit on every seed may be nothing; all digits: it is not; equal losses are equal."""
    base = [3.01, 3.05, 2.98]
    assert paired_test(base, [round(loss + 0.01, 2) for loss in base], Rule()).low < 0
    exact = [loss + 1e-9 * k for k, loss in enumerate(base)]
    assert paired_test(exact, [loss + 0.01 for loss in exact], Rule()).low > 0
    assert 0 < paired_test(exact, exact, Rule()).high < 1e-6 and paired_test(base, base, Rule()).high > 1


def test_pairs_to_decide():
    test = of([0.3123456, -0.2123456, 0.1123456, -0.1123456])
    assert test.high > 1 and test.low < 0
    pairs = test.pairs_to_decide(0, 1.0)
    again = PairedTest(**vars(test) | {"gaps": (0.0,) * pairs})
    before = PairedTest(**vars(test) | {"gaps": (0.0,) * (pairs - 1)})
    assert again.high <= 1 < before.high
    assert test.pairs_to_decide(0, 0.1) is None


def test_the_costs_and_levels_in_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) s \| ([\d.]+) s \|$", text, re.M)
    assert len(rows) == 8
    for pairs, detected, passes in rows:
        one = unit(int(pairs))
        for printed, exact in ((detected, one.detectable(0.9)), (passes, one.high)):
            assert float(printed) == pytest.approx(exact, abs=0.051, rel=5e-3), pairs
    spent = 100 * sum(level_of(pairs, 41) for pairs in range(2, 41))
    assert f"would be {spent:.1f} %" in text
