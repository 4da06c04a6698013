"""Products of bf16 tensors on a CPU, beside `reference` and float64."""

import pytest
import torch

from octavo.cli.kernels import doctor
from octavo.kernels.gemm import SCALED_MM, _random_operands, accelerated, reference, torch_bf16
from octavo.kernels.grouped import GROUPED_MM, random_operands
from octavo.kernels.quantize import quantize
from octavo.numerics.error import sqnr
from octavo.numerics.formats import E4M3
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

CPU = torch.device("cpu")
ROUNDING = 51.0
"""dB: two roundings to bf16, of 53 dB each on average in the worst of the cases below."""


@pytest.fixture
def fast(monkeypatch):
    """A CPU with bf16 instructions, and the switch as users have it."""
    monkeypatch.delenv(torch_bf16.SWITCH)
    monkeypatch.setattr(torch_bf16, "has_bf16_instructions", lambda: True)
    _forget_choices()
    yield
    _forget_choices()


def _forget_choices():
    for op in (SCALED_MM, GROUPED_MM):
        op._chosen.clear()
        op._probe_results.clear()


@pytest.mark.parametrize("label", [label for label in SCALED_MM.cases if "blockwise" not in label])
def test_bf16_products_differ_from_the_reference_by_their_rounding(label, fast):
    case = SCALED_MM.cases[label]
    assert torch_bf16.unsupported_reason(CPU, case) is None
    a, b = _random_operands(case, 65, 70, 300, torch.Generator().manual_seed(1), CPU)
    for bias in (None, torch.randn(70)) if case[2] == "nt" else (None,):
        expected = reference.scaled_mm(a, b, case[2], torch.float32, bias, False)
        actual = torch_bf16.scaled_mm(a, b, case[2], torch.bfloat16, bias, False)
        assert actual.dtype == torch.bfloat16
        assert sqnr(expected, actual) >= ROUNDING
        if bias is None:
            # One step of bf16, see `test_sizes_of_zero_and_one`; float32 sums that cancel depend on their order.
            order = 2.0**-17 * expected.abs().max().item()
            torch.testing.assert_close(actual, expected.bfloat16(), rtol=2**-7, atol=order)
        exact = torch_bf16.scaled_mm(a, b, case[2], torch.float32, bias, False)
        assert torch.equal(exact, expected)


@pytest.mark.parametrize("label", [label for label in SCALED_MM.cases if "blockwise" in label])
def test_blocks_with_other_scales_than_powers_of_two_run_on_the_reference(label, fast):
    assert "vary along the contraction" in torch_bf16.unsupported_reason(CPU, SCALED_MM.cases[label])


@pytest.mark.parametrize("label", GROUPED_MM.cases)
def test_grouped_bf16_products(label):
    case = GROUPED_MM.cases[label]
    a, b, offsets, bias = random_operands(case, [5, 0, 1, 33], 70, 167, CPU)
    arguments = (a, b, offsets, case[2], torch.bfloat16, bias, False)
    expected = GROUPED_MM.backends["reference"].run(*arguments[:4], torch.float32, *arguments[5:])
    assert sqnr(expected, GROUPED_MM.backends["torch_bf16"].run(*arguments)) >= ROUNDING


@pytest.mark.parametrize("x_scale, w_scale", [(1e37, 1e-37), (1e-38, 1e30), (3e38, 2e-38)])
def test_scales_whose_product_alone_is_in_range(x_scale, w_scale):
    torch.manual_seed(0)
    q, w = torch.randn(40, 64).to(E4M3.dtype), torch.randn(48, 64).to(E4M3.dtype)
    spec = QuantSpec.parse("e4m3/row")
    a = ScaledTensor(q, torch.full((40, 1), x_scale).clamp(2.0**-126, 2.0**120), spec)
    b = ScaledTensor(w, torch.full((48, 1), w_scale).clamp(2.0**-126, 2.0**120), spec)
    expected = reference.scaled_mm(a, b, "nt", torch.float32, None, False)
    assert sqnr(expected, torch_bf16.scaled_mm(a, b, "nt", torch.bfloat16, None, False)) >= ROUNDING


def test_values_that_are_not_finite_reach_the_same_results():
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    x[3, 5], x[7, 1] = torch.inf, torch.nan
    a = quantize(x, QuantSpec.parse("e4m3/row"))
    b = quantize(torch.randn(48, 64), QuantSpec.parse("e4m3/row"))
    expected = reference.scaled_mm(a, b, "nt", torch.bfloat16, None, False)
    actual = torch_bf16.scaled_mm(a, b, "nt", torch.bfloat16, None, False)
    assert expected.isnan().sum() == 2 * 48
    assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize("m, n, k", [(0, 8, 4), (8, 0, 4), (8, 8, 0), (1, 1, 1)])
def test_sizes_of_zero_and_one(m, n, k):
    spec = QuantSpec.parse("e4m3/row")
    a, b = quantize(torch.randn(m, k), spec), quantize(torch.randn(n, k), spec)
    bias = torch.randn(n)
    expected = reference.scaled_mm(a, b, "nt", torch.bfloat16, bias, False)
    actual = torch_bf16.scaled_mm(a, b, "nt", torch.bfloat16, bias, False)
    # One step of bf16: x = m · 2^e with 1 <= m < 2 has a step of 2^(e - 7), at most 2^-7 of x.
    #   - Rounding a sum to bf16 moves it by half a step at most, 2^-8 / m of its size.
    #   - Scaling keeps that ratio, so the result, of mantissa m', moves by m' / 2m < 1 step.
    #   - Rounding is monotone, so two numbers less than a step apart round to the same or to neighbours.
    # A bias would add the step of a larger sum; here sums are 0 or 448², exact in bf16.
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_neither_the_choice_nor_the_result(dtype, fast):
    """Extreme scales beside unit scales, as of tiny gradients."""
    case = SCALED_MM.cases["rowwise dgrad"]
    a, b = _random_operands(case, 40, 48, 64, torch.Generator().manual_seed(0), CPU)
    a = ScaledTensor(a.data, a.scale * 2.0**-60, a.spec)
    expected = torch_bf16.scaled_mm(a, b, "nn", torch.bfloat16, None, False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(torch_bf16.scaled_mm(a, b, "nn", torch.bfloat16, None, False), expected)
        assert SCALED_MM.choose(CPU, case).name == "torch_bf16"
        assert GROUPED_MM.choose(CPU, GROUPED_MM.cases["rowwise forward"]).name == "torch_bf16"
        assert quantize(torch.zeros(0, 64).bfloat16(), QuantSpec.parse("e4m3/tensor")).scale.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_the_switch_and_the_instructions_decide(monkeypatch, capsys, fast):
    case = SCALED_MM.cases["rowwise forward"]
    assert SCALED_MM.choose(CPU, case).name == GROUPED_MM.choose(CPU, (*case, "")).name == "torch_bf16"
    assert not any(accelerated(recipe, CPU) for recipe in RECIPES.values())
    monkeypatch.setenv(torch_bf16.SWITCH, "exact")
    _forget_choices()
    assert torch_bf16.unsupported_reason(CPU, case) == "OCTAVO_CPU_PRODUCTS=exact"
    doctor(CPU, as_json=True)
    assert "OCTAVO_CPU_PRODUCTS=exact" in capsys.readouterr().out
    monkeypatch.setenv(torch_bf16.SWITCH, "exakt")
    with pytest.raises(ValueError, match="must be 'fast' or 'exact'; got 'exakt'"):
        torch_bf16.unsupported_reason(CPU, case)
    monkeypatch.delenv(torch_bf16.SWITCH)
    monkeypatch.setattr(torch_bf16, "has_bf16_instructions", lambda: False)
    assert "no bf16 instructions" in torch_bf16.unsupported_reason(CPU, case)
    assert "for CPUs" in torch_bf16.unsupported_reason(torch.device("meta"), case)
