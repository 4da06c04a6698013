"""Losses of any library, the unit to which they are rounded, and the verdicts on pairs of them."""

import array
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from octavo.inspect import compare_losses
from octavo.inspect.paired_test import losses_of, resolution, seed_names

LOSSES = [3.0, 3.25, 2.5]
NAN = math.nan


@pytest.mark.parametrize(
    "values",
    [
        LOSSES,
        tuple(LOSSES),
        np.array(LOSSES),
        np.array(LOSSES, dtype=np.float16),
        torch.tensor(LOSSES),
        torch.tensor(LOSSES, dtype=torch.bfloat16, requires_grad=True),
        array.array("f", LOSSES),
        (loss for loss in LOSSES),
        [np.float32(3.0), torch.tensor(3.25, dtype=torch.bfloat16), Fraction(5, 2)],
        [3, Decimal("3.25"), np.longdouble(2.5)],
    ],
    ids=lambda values: type(values).__name__,
)
def test_numbers_of_any_library(values):
    assert losses_of("a", values) == LOSSES


@pytest.mark.parametrize("value", [NAN, math.inf, np.float32("nan"), torch.tensor(math.inf), Decimal("NaN")])
def test_what_is_not_finite_has_diverged(value):
    losses = losses_of("a", [3.0, value])
    assert losses[0] == 3.0 and math.isnan(losses[1])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "holds True at index 1: a loss is a number"),
        (None, "holds None at index 1"),
        ("3.0", "holds '3.0' at index 1"),
        (3 + 0j, "at index 1: a loss is a number"),
        ([3.0], r"holds \[3.0\] at index 1"),
        (0.0, "index 1: a loss is above zero"),
        (-math.inf, "above zero"),
        (1e-310, "above zero"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_what_is_no_loss_is_named(value, words):
    with pytest.raises(ValueError, match=f"arm 'x' .*{words}|arm 'x' {words}"):
        compare_losses([3.0, 3.1], {"x": [3.0, value]})


@pytest.mark.parametrize(
    "values",
    [{3.0, 3.1}, frozenset([3.0]), {1: 3.0, 2: 3.1}, "33", b"33", bytearray(b"33"), None, 3.0, np.float64(3.0),
     torch.tensor(3.0)],
    ids=lambda values: type(values).__name__,
)  # fmt: skip
def test_losses_have_an_order(values):
    with pytest.raises(ValueError, match="arm 'x' is a list with one number per seed, in order; got"):
        compare_losses([3.0, 3.1], {"x": values})


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ([1, 2], "there are 2 seeds and 3 losses of the baseline"),
        ([1, 2, 1], "seed 1 is named twice"),
        (torch.tensor([5, 5, 6]), "seed 5 is named twice"),
        ([1, 2.0, 3], "seeds holds 2.0 at index 1"),
        ([1, 2, True], "seeds holds True at index 2"),
        ({1, 2, 3}, "seeds is a list"),
        (3, "seeds is a list"),
    ],
)
@pytest.mark.parametrize("last", [2.98, 30.0, NAN])
def test_seeds_that_do_not_fit(seeds, words, last):
    with pytest.raises(ValueError, match=words):
        compare_losses([3.0, 3.02, 2.98], {"a": [3.0, 3.02, last]}, seeds=seeds)


def test_seeds_are_named_in_the_verdict():
    arm = compare_losses([3.0, 3.02, 2.98], {"a": [3.0, 3.02, 30.0]}, seeds=np.array([7, 2**60, 9])).arms[0]
    assert "seed 9 ended at 30" in arm.sentence and arm.to_json()["failed_seeds"] == [9]
    assert set(arm.to_json()["gaps_percent"]) == {"7", str(2**60)}
    assert seed_names(range(3), 3) == (0, 1, 2)


@pytest.mark.parametrize(
    ("losses", "unit"),
    [
        ([3.0, 3.02, 2.99], 0.01),
        (np.float32([3.0, 3.02, 2.99]), 0.01),
        (np.float16([3.0, 3.02, 2.99]), 0.01),
        ([3.0, 4.0], 1),
        ([98.7, 100.0, 101.2, 101.4], 0.1),
        ([9.98, 10.1], 0.1),  # three digits
        ([3.02e30, 3e30], 1e28),
        ([3.015625, 2.984375], 2.0**-6),
        ([3.0156, 2.9844], 2.0**-6),  # of bf16, printed
        ([1.9921875, 2.015625], 2.0**-6),
        ([2.5e-308, 2.25e-308], 1e-310),
    ],
)
def test_the_unit_of_rounded_losses(losses, unit):
    assert resolution([float(loss) for loss in losses]) == pytest.approx(unit, rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.bfloat16, 2.0**-6), (torch.float16, 2.0**-9), (torch.float32, 2.0**-22)]
)
def test_the_unit_of_a_format(dtype, unit):
    values = (3 + 0.1 * torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert resolution(values.double().tolist()) == unit
    assert resolution([float(f"{value:.7f}") for value in values.tolist()]) == max(unit, 1e-7)


# --- verdicts: what blew up, what is worse, what passes, and what is neither ---


BASE = [3.0, 3.02, 2.98, 3.01, 2.99]


def judged(losses, base=BASE, **options):
    comparison = compare_losses(base[: len(losses)], {"arm": losses}, **options)
    assert comparison.exit_code == {"pass": 0, "fail": 1, "inconclusive": 3}[comparison.arms[0].outcome]
    return comparison.arms[0]


def shifted(*percent, base=BASE):
    return [loss * (1 + value / 100) for loss, value in zip(base, percent, strict=False)]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([6, 9, 30], "seed 3 ended at 30, 10.1 times the loss"),
        ([3.0, 3.02, 2.98, 3.01, 9.0], "seed 5 ended at 9, 3.01 times"),
        ([3.03, 3.05, 3.01, 3.04, 8], "seed 5 ended at 8"),
        ([3.001, 6.05], "seed 2 ended at 6.05, 2.02 times"),
        ([NAN, 6.05, 3.0], "seed 2 ended at 6.05"),
        ([NAN, NAN, NAN], "it failed on 3 of 3 seeds, the baseline on 0"),
        (shifted(1.1, 0.9, 1.0), r"worse than the baseline by 1.00 % of the loss \(\+"),
    ],
)
def test_damage_is_worse(losses, words):
    arm = judged(losses)
    assert (arm.verdict, arm.outcome) == ("worse", "fail")
    assert re.search(words, arm.sentence)


@pytest.mark.parametrize(
    ("losses", "seeds_needed"),
    [
        (shifted(0.5, -0.7, 0.3), True),  # noise as large as the limit
        ([3.0, 3.02, 5.5], True),  # below twice the loss, and far too far to pass
        ([NAN, 3.02, 2.98], True),  # one divergence is no evidence, and no reason to pass
        ([NAN, NAN], True),
        (shifted(1.0, 1.01), True),  # two seeds
        (shifted(*[3, -3] * 2), False),
    ],
)
def test_what_cannot_be_told_is_inconclusive(losses, seeds_needed):
    arm = judged(losses)
    assert (arm.verdict, arm.outcome) == ("inconclusive", "inconclusive")
    assert bool(arm.seeds_needed) == seeds_needed
    words = rf"about {arm.seeds_needed} seeds decide" if seeds_needed else "no number of seeds up to 40 decides"
    assert words in arm.notes[-1] and arm.sentence.startswith("Inconclusive")


@pytest.mark.parametrize(
    ("percent", "margin", "verdict", "outcome"),
    [
        ((0.02, -0.03, 0.01), None, "indistinguishable", "pass"),
        ((0.02, -0.03, 0.01), 0.5, "indistinguishable", "pass"),
        ((0.02, -0.03, 0.01), 0.1, "inconclusive", "inconclusive"),
        ((1.02, 0.98, 1.0), 2.0, "worse", "pass"),
        ((1.02, 0.98, 1.0), 0.5, "worse", "fail"),
        ((1.02, 0.98, 1.0), 1.0, "worse", "inconclusive"),
        ((-3.02, -2.98, -3.0), None, "better", "pass"),
    ],
)
def test_the_margin(percent, margin, verdict, outcome):
    arm = judged(shifted(*percent), margin=margin)
    assert (arm.verdict, arm.outcome) == (verdict, outcome)
    if margin is not None and outcome != "inconclusive":
        assert f"{margin:g} %" in arm.notes[-1]


@pytest.mark.parametrize(
    ("base", "losses"),
    [
        ([1000, 1001], [1001, 1002]),
        ([1000.0, 1001.0], [1001.0, 1002.0]),
        ([3, 3, 3], [4, 4, 4]),
        ([3.015625, 3.0], [3.03125, 3.015625]),  # bf16
        ([3.0156, 3.0], [3.0312, 3.0156]),  # and printed
        ([9.98, 9.96], [10.1, 10.1]),
    ],
)
def test_a_gap_of_one_unit_is_not_worse(base, losses):
    """All of them were, as two gaps of one unit each have no deviation."""
    for numbers in (list, np.array, torch.tensor):
        assert judged(numbers(losses), numbers(base)).verdict == "inconclusive"


def test_equal_losses_pass_where_their_digits_show_it():
    exact = [loss + 1e-9 for loss in BASE]
    arm = judged(exact[:3], exact, margin=0.01)
    assert arm.outcome == "pass" and "not a digit of the losses differs" in arm.sentence
    rounded = judged(BASE[:3], BASE, margin=0.5)
    assert rounded.outcome == "inconclusive" and "few digits, which hides up to 0.33 %" in " ".join(rounded.notes)
    assert judged([3, 3, 3], [3, 3, 3]).outcome == "inconclusive"
    assert judged(BASE[:3]).outcome == "pass"  # no more than 2 % worse


def test_failures_of_the_baseline_count_too():
    """What fails in both arms alike is left out of the gaps, and no evidence."""
    arm = judged([3.001, 3.0195, 2.9805, 9.4], [3, 3.02, 2.98, 9])
    assert arm.verdict == "indistinguishable" and arm.seeds == (1, 2, 3)
    assert arm.failed == arm.baseline_failed == (4,)
    assert judged([3.001, 9.4, 2.9805, 3.011], [9, 3.02, 2.98, 3.01]).outcome != "fail"
    assert judged([NAN, 3.0195, 2.9805, 3.011], [3.0, 3.02, NAN, 3.01]).outcome != "fail"
    assert judged(BASE, [NAN] * 5).sentence.startswith("Inconclusive: fewer than two pairs")
    many = [NAN] * 7 + BASE[:3]
    assert judged(many, BASE * 2).verdict == "worse"
    assert judged(many, [NAN] * 2 + BASE[:3] + BASE).verdict == "inconclusive"


GOOD = shifted(0.02, -0.03, 0.01)


def test_arms_share_the_confidence_and_the_worst_counts():
    """Unless they are separated."""
    bad, noisy = shifted(0.9, 1.1, 1.0), shifted(2.0, -1.0, 0.5)
    alone = compare_losses(BASE[:3], {"bad": bad})
    together = compare_losses(BASE[:3], {"good": GOOD, "bad": bad, "noisy": noisy} | {f"{k}": GOOD for k in range(5)})
    assert (alone.exit_code, together.exit_code) == (1, 3)
    assert together.arms[1].verdict == "inconclusive" and together.arms[0].outcome == "pass"
    assert compare_losses(BASE[:3], {"good": GOOD, "blown": [9, 9, 9]}).exit_code == 1


@pytest.mark.parametrize("damaged", [1, 3, 8])
def test_separated_arms_are_worse_as_each_alone(damaged):
    """Of 8 arms and on 3 seeds; the report says by which rule, and the bound is above zero."""
    bad, good = shifted(0.85, 1.1, 1.0), {f"good {k}": GOOD for k in range(8 - damaged)}
    comparison = compare_losses(BASE[:3], good | {f"bad {k}": bad for k in range(damaged)}, baseline_name="bf16")
    (alone,) = compare_losses(BASE[:3], {"bad": bad}).arms
    for arm in comparison.arms:
        assert arm.verdict == ("worse" if "bad" in arm.name else "indistinguishable")
        assert arm.test.separated == arm.to_json()["separated"] == ("bad" in arm.name)
        assert ("above bf16 and all remaining arms without failures" in " ".join(arm.notes)) == arm.test.separated
        assert not arm.test.separated or arm.test.low == alone.test.low > 0
    assert comparison.exit_code == 1 and "separation" not in " ".join(alone.notes)


def test_an_arm_that_failed_takes_no_part_in_separation():
    """It has fewer seeds than the others, holds none of them up, and keeps the level of all arms."""
    base = BASE[:4]
    good = shifted(0.02, -0.03, 0.01, 0.02)
    bad, noisy = shifted(0.9, 1.2, 1.0, 0.8), shifted(2.0, -1.0, 0.5, 3.0)

    def verdicts(base=base, **arms):
        comparison = compare_losses(base, {f"{k}": good for k in range(40 - len(arms))} | arms)
        return [arm.verdict for arm in comparison.arms[-len(arms) :]]

    assert verdicts(bad=bad) == ["worse"]
    assert verdicts(bad=bad, noisy=noisy) == ["inconclusive"] * 2
    assert verdicts(bad=bad, noisy=[*noisy[:3], NAN]) == ["worse", "inconclusive"]
    assert verdicts(bad=[*bad[:3], NAN]) == ["inconclusive"]
    assert verdicts([*base[:3], NAN], bad=[*bad[:3], NAN]) == ["worse"]  # the baseline has no such seed either


@pytest.mark.parametrize(
    ("baseline", "arms", "options", "words"),
    [
        ([3.0], {"a": [3.0]}, {}, "two seeds or more; the baseline has 1"),
        ([3.0, 3.0], {}, {}, "got none"),
        ([3.0, 3.0], {"a": [3.0]}, {}, "arm 'a' has 1 losses and the baseline 2"),
        ([3.0, 3.0], {"a": [3.0] * 3}, {}, "arm 'a' has 3 losses"),
        ([3.0, True], {"a": [3.0, 3.0]}, {}, "the baseline holds True at index 1"),
        (BASE, [BASE], {}, "arms are a mapping of names to losses"),
        (BASE, {"a": BASE}, {"margin": 0}, "above 0 and below 100"),
        (BASE, {"a": BASE}, {"margin": NAN}, "above 0 and below 100"),
        (BASE, {"a": BASE}, {"seeds": [torch.tensor(1.5), 2, 3, 4, 5]}, "a seed is a whole number"),
        (BASE, {"a": BASE}, {"confidence": 1.0}, "below 100 %"),
        (BASE, {"a": BASE}, {"max_seeds": 1}, "2 to 40 seeds; got 1"),
        (BASE, {"a": BASE}, {"max_seeds": 41}, "2 to 40 seeds; got 41"),
    ],
)
def test_what_cannot_be_compared_is_named(baseline, arms, options, words):
    with pytest.raises(ValueError, match=words):
        compare_losses(baseline, arms, **options)
