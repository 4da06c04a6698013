"""Losses of any library: what is taken as a number, what is named as none, and the unit to which they are rounded."""

import array
import math
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
