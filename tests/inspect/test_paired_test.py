"""The paired test: exact tails, its rates where the truth is known, and what it says of its own power."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from octavo.inspect.compare import (
    PairedTest,
    common_target,
    paired_test,
    steps_to,
    student_inside,
    student_power,
    student_quantile,
)

FREEDOMS = (1, 2, 3, 4, 7, 30, 99)
gaps_of_seeds = st.lists(st.floats(-10, 10), min_size=2, max_size=6)


def of(gaps, **options):
    """The test of these gaps, in percent."""
    return paired_test([1.0] * len(gaps), [1 + gap / 100 for gap in gaps], **options)


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_students_tails_are_those_of_scipy(freedom):
    for level in (0.5, 0.05, 0.025, 0.01, 0.05 / 7, 1e-4):
        critical = student_quantile(freedom, level)
        assert critical == pytest.approx(stats.t.ppf(1 - level / 2, freedom), rel=1e-9)
        assert student_inside(critical, freedom) == pytest.approx(1 - level, abs=1e-12)
    assert student_inside(0.0, freedom) == 0


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_power_is_that_of_the_noncentral_t_of_scipy(freedom):
    for level in (0.05, 0.01):
        critical = student_quantile(freedom, level)
        for noncentrality in (0.0, 0.4, 2.0, 5.0, 12.0, 30.0):
            expected = stats.nct.sf(critical, freedom, noncentrality)
            assert student_power(freedom, critical, noncentrality) == pytest.approx(expected, abs=1e-9)


def test_one_example_by_hand():
    """Gaps 1, 2, 3 %: mean 2, deviation 1, interval 2 ± 4.3027/√3; t = 3.4641, p = 0.0742 (tables)."""
    found = of([1, 2, 3])
    assert found.gaps == pytest.approx((1, 2, 3))
    assert (found.mean, found.deviation) == (pytest.approx(2), pytest.approx(1))
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.p == pytest.approx(0.0742, abs=5e-5)
    assert found.status == "indistinguishable"
    assert of([1, 1.1, 1.2]).status == "worse"
    assert of([-1, -1.1, -1.2]).status == "better"


def test_equal_losses_are_indistinguishable_and_a_constant_gap_is_not():
    same = of([0, 0, 0])
    assert (same.status, same.half_width, same.p, same.detectable(0.9)) == ("indistinguishable", 0, 1, 0)
    assert paired_test([2.0, 2.0], [2.5, 2.5]).status == "worse"
    assert paired_test([2.0, 2.0], [2.5, 2.5]).p == 0


@given(gaps=gaps_of_seeds, scale=st.floats(0.1, 50))
def test_only_the_gaps_within_seeds_matter(gaps, scale):
    """Not how far the seeds lie apart, nor the unit of the loss; and the status is where the interval lies."""
    base = [scale * (1 + k) for k in range(len(gaps))]
    whole = sum(base) / len(base)
    found = paired_test(base, [loss + whole * gap / 100 for loss, gap in zip(base, gaps, strict=True)])
    expected = of(gaps)
    assert found.mean == pytest.approx(expected.mean, abs=1e-9)
    assert found.half_width == pytest.approx(expected.half_width, abs=1e-6)
    assert (found.low > 0, found.high < 0) == (found.status == "worse", found.status == "better")


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("arms", [1, 3])
def test_alarms_without_an_effect_are_five_percent_of_all_arms_together(seeds, arms):
    """20 000 comparisons of arms whose gaps are noise: the share in which any arm is told apart."""
    draws = np.random.default_rng(seeds).normal(0, 0.3, (20_000, arms, seeds))
    error = draws.std(-1, ddof=1) / math.sqrt(seeds)
    critical = student_quantile(seeds - 1, 0.05 / arms)
    alarms = (np.abs(draws.mean(-1)) > critical * error).any(-1).mean()
    assert (0.044 if arms == 1 else 0.035) < alarms < 0.056
    for noise in draws[:50, 0]:  # that is what paired_test computes
        found = of(noise.tolist(), arms=arms)
        assert found.half_width == pytest.approx(critical * noise.std(ddof=1) / math.sqrt(seeds), rel=1e-6)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("power", [0.8, 0.9])
def test_a_detectable_gap_is_found_as_often_as_said(seeds, power):
    noise = 0.25
    known = PairedTest(
        gaps=(0.0,) * seeds, mean=0.0, deviation=noise, half_width=0.0, p=1.0, confidence=0.95, arms=2
    )  # fmt: skip
    gap = known.detectable(power)
    draws = np.random.default_rng(1).normal(gap, noise, (20_000, seeds))
    error = draws.std(-1, ddof=1) / math.sqrt(seeds)
    found = (draws.mean(-1) > student_quantile(seeds - 1, 0.05 / 2) * error).mean()
    assert found == pytest.approx(power, abs=0.012)


def test_more_seeds_find_smaller_gaps_and_the_fewest_are_named():
    found = of([0.3, -0.2, 0.1, -0.1])
    seeds = found.seeds_for(0.3, 0.9)
    noise = found.deviation

    def with_seeds(n):
        return PairedTest(
            gaps=(0.0,) * n, mean=0, deviation=noise, half_width=0, p=1, confidence=0.95, arms=1
        ).detectable(0.9)

    assert with_seeds(seeds) <= 0.3 < with_seeds(seeds - 1)
    assert found.seeds_for(0.01, 0.9) is None
    assert of([0.1, 0.1 + 1e-9]).seeds_for(1, 0.9) == 2
    with pytest.raises(ValueError, match="above zero; got -1"):
        found.seeds_for(-1, 0.9)


def test_arms_and_confidence_widen_the_interval():
    gaps = [0.1, 0.3, 0.2, -0.1]
    assert of(gaps).half_width < of(gaps, arms=3).half_width == of(gaps, confidence=1 - 0.05 / 3).half_width
    assert of(gaps, arms=3).p == of(gaps).p


@pytest.mark.parametrize(
    ("baseline", "candidate", "options", "words"),
    [
        ([1.0], [1.0], {}, "two seeds or more"),
        ([1.0, 2.0], [1.0], {}, "got 2 and 1"),
        ([1.0, math.nan], [1.0, 1.0], {}, "positive and finite"),
        ([1.0, 1.0], [1.0, math.inf], {}, "positive and finite"),
        ([0.0, 1.0], [1.0, 1.0], {}, "positive and finite"),
        ([1.0, 1.0], [1.0, 1.0], {"confidence": 1.0}, "between 0 and 1"),
    ],
)
def test_what_cannot_be_tested_is_named(baseline, candidate, options, words):
    with pytest.raises(ValueError, match=words):
        paired_test(baseline, candidate, **options)


def test_time_to_a_loss_that_all_reach():
    slow, fast = np.array([5.0, np.nan, 4.0, 3.5, 3.6]), np.array([5.0, 3.4, 3.3, 3.2, 3.1])
    target = common_target([slow, fast])
    assert target == 3.5
    assert (steps_to(slow, target), steps_to(fast, target)) == (4, 2)
    assert steps_to(slow, 3.0) is None


def test_simulated_chaos_with_heavy_tails_stays_quiet():
    """Noise of 3 degrees of freedom, as far from normal as what was measured: alarms get fewer, not more."""
    draw = random.Random(0)

    def heavy():
        return draw.gauss(0, 1) / math.sqrt(sum(draw.gauss(0, 1) ** 2 for _ in range(3)) / 3)

    alarms = sum(of([heavy() / 10 for _ in range(3)]).status != "indistinguishable" for _ in range(4000))
    assert alarms / 4000 < 0.055
