import math

import pytest
import torch

from octavo.numerics import first_mismatch, sqnr


def test_sqnr_is_decibels_of_relative_error():
    x = torch.ones(1000)
    assert sqnr(x, x * 1.1) == pytest.approx(20.0, abs=1e-4)
    assert sqnr(x, x) == math.inf
    assert math.isnan(sqnr(x, torch.full((1000,), torch.nan)))
    with pytest.raises(ValueError, match="equal shapes"):
        sqnr(x, x[:10])


def test_first_mismatch_names_the_element():
    x = torch.arange(6.0).reshape(2, 3).to(torch.float8_e4m3fn)
    y = x.clone()
    assert first_mismatch(x, y) is None
    y[1, 2] = 4.0
    assert "1 of 6 elements differ, first at (1, 2): expected 5.0, got 4.0" in first_mismatch(x, y)
    assert "expected torch.float8_e4m3fn" in first_mismatch(x, y.float())


def test_first_mismatch_compares_bytes():
    assert first_mismatch(torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    assert first_mismatch(torch.tensor([torch.nan]), torch.tensor([torch.nan])) is None
