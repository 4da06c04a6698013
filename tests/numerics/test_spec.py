import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.numerics import COLUMN, E4M3, E5M2, E8M0, RECIPES, ROW, TENSOR, Granularity, QuantSpec, first_mismatch, sqnr
from octavo.numerics.formats import widen

SPECS = sorted({spec for recipe in RECIPES.values() for spec in recipe.specs.values() if spec}, key=str)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_format_constants_are_those_of_the_dtype(fmt):
    info = torch.finfo(fmt.dtype)
    assert (fmt.max, fmt.smallest_normal) == (info.max, info.smallest_normal)
    smallest = torch.tensor([1], dtype=torch.uint8).view(fmt.dtype).float().item()
    assert fmt.smallest == smallest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_widen_is_exact_for_every_code(fmt, dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(40).view(80, 128).view(fmt.dtype)
    for view in (codes, codes.t(), codes[::3, 5:], codes[:1, :100], codes[:0]):  # without and with NaN
        expected, actual = torch.tensor(view.double().tolist()).view(view.shape), widen(view, dtype)
        assert actual.dtype == dtype and torch.equal(actual.isnan(), expected.isnan())
        bits = (values.float().nan_to_num(0.5).view(torch.int32) for values in (expected, actual))
        assert torch.equal(*bits)


def test_e8m0_holds_every_power_of_two_it_claims():
    powers = 2.0 ** torch.arange(-127, 128, dtype=torch.float64)
    assert torch.equal(powers.float().to(E8M0.dtype).double(), powers)
    assert (powers[0].item(), powers[-1].item()) == (E8M0.smallest, E8M0.max)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_text_form_round_trips(spec):
    assert QuantSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e4m3", "format/granularity"),
        ("e4m4/row", "unknown format 'e4m4'.*did you mean 'e4m3'"),
        ("e4m3/rows", "unknown granularity 'rows'"),
        ("e4m3/1x", "ROWSxCOLUMNS"),
        ("e4m3/row/pow3", "unknown scale rule 'pow3'.*did you mean 'pow2'"),
    ],
)
def test_malformed_specs_raise(text, message):
    with pytest.raises(ValueError, match=message):
        QuantSpec.parse(text)


@given(
    rows=st.integers(0, 300),
    columns=st.integers(0, 300),
    granularity=st.sampled_from([TENSOR, ROW, COLUMN, Granularity(1, 128), Granularity(128, 128), Granularity(32, 1)]),
)
def test_scale_shape_covers_the_matrix_and_no_more(rows, columns, granularity):
    block_rows, block_columns = granularity.block((rows, columns))
    grid_rows, grid_columns = granularity.scale_shape((rows, columns))
    assert (grid_rows - 1) * block_rows < max(rows, 1) and grid_rows * block_rows >= rows
    assert (grid_columns - 1) * block_columns < max(columns, 1) and grid_columns * block_columns >= columns


def test_only_scales_that_vary_along_one_dimension_alone_fold():
    assert QuantSpec(granularity=ROW).folds_along(0)
    assert not QuantSpec(granularity=ROW).folds_along(1)
    assert QuantSpec(granularity=COLUMN).folds_along(1)
    assert not any(QuantSpec(granularity=g).folds_along(0) for g in (TENSOR, COLUMN, Granularity(1, 128)))


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
