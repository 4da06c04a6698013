"""What is counted is what it is said to be: against the plain formulas, element by element, in float64."""

import math

import pytest
import torch

from octavo.inspect.accumulator import Accumulators, OperandFormat, as_stats
from octavo.kernels import quantize
from octavo.numerics.spec import QuantSpec

SPECS = ["e4m3/tensor", "e5m2/tensor", "e4m3/row", "e4m3/column", "e4m3/1x128", "e4m3/128x128", "e4m3/32x1/e8m0"]
KEY = ("layer", "x")


def stats(x, form, others=(), calls=1):
    accumulators = Accumulators([f"other{i}" for i in range(len(others))])
    for _ in range(calls):
        accumulators.count(KEY, x, [form, *others])
    reduced = accumulators.reduced([KEY], None, x.device)
    if not reduced:
        return None
    return as_stats(KEY, reduced[KEY], step=1, recipe="r", what_if=accumulators.what_if, copies=1)


def wide(rows=150, columns=300, dtype=torch.bfloat16):
    """Magnitudes over 2⁻³⁰ … 2⁸, zeros among them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-30, 8, x.shape, generator=generator)
    return torch.where(torch.rand(x.shape, generator=generator) < 0.1, 0.0, x).to(dtype)


def by_formula(x, spec, fold=None, scale=None):
    q = quantize(x, spec, fold, scale=scale)
    exact = x.float() if fold is None else x.float() * fold
    there = q.data.float() * q.expanded_scale()
    exact, there = exact.double(), there.double()
    nonzero = exact != 0
    scales = q.scale.double()[q.scale.double() > 2.0**-126]
    return {
        "amax": exact.abs().max().item(),
        "smallest": exact[nonzero].abs().min().item(),
        "underflow": ((there == 0) & nonzero).sum().item() / nonzero.sum().item(),
        "sqnr": 10 * math.log10((exact**2).sum() / ((exact - there) ** 2).sum()),
        "scale_spread": (scales.max() / scales.min()).item(),
    }


CASES = [(text, dtype, None) for text in SPECS for dtype in (torch.bfloat16, torch.float32, torch.float16)]
FOLDED = [(text, torch.bfloat16, shape) for text in ("e4m3/row", "e4m3/column") for shape in ((150, 1), (1, 300))]


@pytest.mark.parametrize(("text", "dtype", "folded"), CASES + FOLDED)
def test_figures_are_those_of_the_formulas(text, dtype, folded, monkeypatch):
    monkeypatch.setattr("octavo.numerics.formats.CHUNK_ELEMENTS", 10000)  # more bands than one
    x, spec = wide(dtype=dtype), QuantSpec.parse(text)
    fold = folded and torch.rand(folded, generator=torch.Generator().manual_seed(1)) + 0.1
    row = stats(x, OperandFormat(spec, fold))
    for name, value in by_formula(x, spec, fold).items():
        assert getattr(row, name) == pytest.approx(value, rel=1e-9), name
    assert (row.elements, row.nonfinite, row.saturation) == (x.numel(), 0, 0)
    assert row.underflow > 0


def test_what_if_is_what_the_other_form_would_have():
    x, fold = wide(), torch.rand(1, 300, generator=torch.Generator().manual_seed(1)) + 0.1
    specs = [QuantSpec.parse(text) for text in ("e5m2/tensor", "e4m3/1x128")]
    others = [OperandFormat(specs[0]), OperandFormat(specs[1], fold), OperandFormat(None)]
    row = stats(x, OperandFormat(QuantSpec.parse("e4m3/row")), others)
    assert row.what_if["other0"] == pytest.approx(by_formula(x, specs[0])["sqnr"], rel=1e-9)
    assert row.what_if["other1"] == pytest.approx(by_formula(x, specs[1], fold)["sqnr"], rel=1e-9)
    assert row.what_if["other2"] == math.inf  # high precision loses nothing


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_left_out(bad):
    """By row the rest of the row is lost, and the other rows are compared; by tensor there is nothing to compare."""
    x = wide()
    x[3, 5] = bad
    others = x.clone()
    others[3] = 0
    row = stats(x, OperandFormat(QuantSpec.parse("e4m3/row")), [OperandFormat(QuantSpec.parse("e4m3/tensor"))])
    assert row.nonfinite == 1
    assert row.sqnr == pytest.approx(by_formula(others, QuantSpec.parse("e4m3/row"))["sqnr"], rel=1e-9)
    assert row.amax == x[x.isfinite()].abs().max()
    assert math.isnan(row.what_if["other0"])
    assert math.isnan(stats(x, OperandFormat(QuantSpec.parse("e4m3/tensor"))).sqnr)


def test_zeros_are_exact():
    row = stats(torch.zeros(4, 8), OperandFormat(QuantSpec.parse("e4m3/row")))
    assert (row.sqnr, row.amax, row.smallest, row.underflow, row.scale_spread) == (math.inf, 0, 0, 0, 1)
    assert row.dynamic_range == 0


def test_scales_that_are_given_saturate():
    x = torch.tensor([[1.0, -2.0, 500.0, -1000.0, 448.0, 0.0, math.inf, 3.0]])
    spec = QuantSpec.parse("e4m3/tensor")
    row = stats(x, OperandFormat(spec, scale=torch.ones(1, 1)))
    assert (row.saturation, row.nonfinite) == (2 / 7, 1)
    assert stats(x, OperandFormat(spec)).saturation == 0
    for amax in (*torch.linspace(7, 8, 200).tolist(), 7.8436):  # not its own maximum, however its scale was rounded
        own = torch.tensor([[amax, -1.0]])
        assert stats(own, OperandFormat(spec, scale=quantize(own, spec).scale)).saturation == 0


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_an_operand_without_elements_is_no_row(shape):
    forms = [OperandFormat(QuantSpec.parse(text)) for text in ("e4m3/row", "e4m3/1x128")]
    assert stats(torch.zeros(shape), forms[0], forms[1:]) is None


def test_what_is_multiplied_by_zeros_is_not_lost():
    x, spec = wide(dtype=torch.float32), QuantSpec.parse("e5m2/tensor")
    read = (torch.arange(150) % 3 == 0).float().view(-1, 1)
    assert stats(x, OperandFormat(spec, read=torch.ones(150, 1))) == stats(x, OperandFormat(spec))
    x[1::3] *= 1e-30
    x[2::3] *= 1e-30
    row, of_read = stats(x, OperandFormat(spec, read=read)), stats(x[::3], OperandFormat(spec))
    assert (row.underflow, row.sqnr, row.amax, row.smallest) == pytest.approx(
        (of_read.underflow, of_read.sqnr, of_read.amax, of_read.smallest)
    )
    assert stats(x, OperandFormat(spec)).underflow > 0.6
    x[1] = torch.inf
    assert stats(x, OperandFormat(spec, read=read)).nonfinite == 300
