from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import quantize, scaled_mm
from octavo.kernels.gemm import SCALED_MM
from octavo.numerics import E4M3, E5M2, RECIPES, QuantSpec, sqnr
from octavo.tensor import ScaledTensor

sizes = st.one_of(st.sampled_from([0, 1, 2, 16, 17, 127, 128]), st.integers(0, 300))
LAYOUTS = ("nt", "nn", "tn")
PRODUCTS = sorted({case for case in SCALED_MM.cases.values()})


def shifted(operand):
    """The same operand, with vectors and blocks of scales where no 16 bytes begin."""
    scale = operand.scale
    if scale is None or scale.numel() <= 1:
        return operand
    memory = torch.empty(scale.numel() + 1, dtype=scale.dtype)[1:]
    assert memory.data_ptr() % 16
    return ScaledTensor(operand.data, memory.view(scale.shape).copy_(scale), operand.spec)


def operands(m, n, k, case, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a_text, b_text, layout = case
    made = []
    for text, shape, transposed in ((a_text, (m, k), layout[0] == "t"), (b_text, (k, n), layout[1] == "t")):
        values = torch.randn(shape[::-1] if transposed else shape, generator=generator)
        q = quantize(values, QuantSpec.parse("e4m3/tensor" if text == "unit" else text))
        made.append(q.unscaled if text == "unit" else q)
    return *made, layout


def exact(a, b, layout):
    left, right = a.dequantize(torch.float64), b.dequantize(torch.float64)
    return (left.t() if layout[0] == "t" else left) @ (right.t() if layout[1] == "t" else right)


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
@settings(max_examples=6, deadline=None)
@given(m=sizes, n=sizes, k=sizes)
def test_reference_is_exact_up_to_float32_sums(case, m, n, k):
    a, b, layout = operands(m, n, k, case)
    y = scaled_mm(a, b, layout, out_dtype=torch.float32)
    assert y.shape == (m, n) and y.is_contiguous()
    if y.numel() and k:
        assert sqnr(exact(a, b, layout), y) > 110


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bias_is_added_before_the_one_rounding(layout, dtype):
    a, b, _ = operands(33, 70, 129, ("e4m3/tensor", "e4m3/tensor", layout))
    bias = torch.randn(70, generator=torch.Generator().manual_seed(5)).to(dtype)
    y = scaled_mm(a, b, layout, out_dtype=dtype, bias=bias)
    assert y.dtype == dtype
    expected = (exact(a, b, layout) + bias.double()).to(dtype)
    assert sqnr(expected, y) > {torch.float32: 110, torch.float16: 75, torch.bfloat16: 60}[dtype]


SCALES = [2.0**-126, 1.3e-37, 3e-20, 1.7e-3, 1.0, 5e4, 3e20, 1.1e35, 7.5e35]
"""From the smallest that quantize gives to the largest, that of 3.4e38."""


def wide(case, seed=0):
    """Operands of a product 9 × 9 whose scales meet in all pairs, and values from the smallest to the largest."""
    a, b, layout = operands(9, 9, 40, case, seed)

    def scaled(operand):
        if operand.scale is None or operand.scale.numel() == 1:
            return operand
        return replace(operand, scale=torch.tensor(SCALES).view(operand.scale.shape))

    a, b = scaled(a), scaled(b)
    a.data.view(torch.uint8)[:, ::3] &= 0x81  # subnormals
    b.data.view(torch.uint8)[:] &= 0x83 if seed % 2 else 0xFF
    return a, b, layout


def assert_exact_in_range(y, a, b, layout, at_least=20):
    """Equal to the float64 product where float32 has it as a normal number, else rounded to infinity or to zero."""
    expected, y = exact(a, b, layout), y.double()
    normal = (expected.abs() < 3.3e38) & (expected.abs() > 2.0**-126)
    assert normal.sum() >= at_least and y[normal].isfinite().all()
    magnitude = exact(replace(a, data=a.data.float().abs()), replace(b, data=b.data.float().abs()), layout)
    assert ((y - expected).abs() <= magnitude * 1e-6 + 2.0**-149)[normal].all()
    assert (y.abs() < 2.0**-125)[expected.abs() < 2.0**-126].all() and y[expected.abs() > 3.5e38].isinf().all()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_of_any_size_multiply_without_overflow_or_underflow(layout, seed):
    texts = [("column" if layout[0] == "t" else "row"), ("column" if layout[1] == "n" else "row")]
    a, b, _ = wide((f"e4m3/{texts[0]}", f"e4m3/{texts[1]}", layout), seed)
    assert_exact_in_range(scaled_mm(a, b, layout, out_dtype=torch.float32), a, b, layout)


@pytest.mark.parametrize("left", SCALES)
@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("tensor", "row"), ("row", "tensor")])
def test_a_scale_by_tensor_of_any_size_multiplies_the_others(kinds, left):
    a, b, layout = operands(9, 9, 40, (f"e4m3/{kinds[0]}", f"e4m3/{kinds[1]}", "nt"))
    for right in SCALES:
        a = replace(a, scale=torch.full_like(a.scale, left))
        b = replace(b, scale=torch.full_like(b.scale, right))
        assert_exact_in_range(scaled_mm(a, b, layout, out_dtype=torch.float32), a, b, layout, 0)


def test_ordinary_scales_give_the_bits_of_two_multiplications():
    a, b, layout = operands(70, 90, 130, ("e4m3/row", "e4m3/row", "nt"))
    sums = scaled_mm(a.unscaled, b.unscaled, layout, out_dtype=torch.float32)
    assert torch.equal(scaled_mm(a, b, layout, out_dtype=torch.float32), sums * a.scale * b.scale.t())


def test_float32_settings_have_no_effect_and_do_not_change():
    a, b, layout = operands(256, 256, 256, ("e4m3/1x128", "e4m3/128x128", "nt"))
    expected = scaled_mm(a, b, layout, out_dtype=torch.float32)
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    try:
        setting.fp32_precision = "bf16"
        assert torch.equal(scaled_mm(a, b, layout, out_dtype=torch.float32), expected)
        assert setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = before


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_autocast_does_not_reach_inside(case):
    a, b, layout = operands(64, 64, 256, case)
    expected = scaled_mm(a, b, layout, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scaled_mm(a, b, layout, out_dtype=torch.float32), expected)


ROW = QuantSpec.parse("e4m3/row")


def wrong(**changes):
    return replace(quantize(torch.ones(8, 16), ROW), **changes)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (wrong(data=torch.zeros(8, 16)), wrong(), r"A by e4m3/row must be torch.float8_e4m3fn .*got torch.float32"),
        (wrong(), wrong(data=torch.zeros(8, 16).to(E5M2.dtype)), r"B by .*e4m3fn.*got torch.float8_e5m2"),
        (wrong(), wrong(data=torch.zeros(8, 16, 1).to(E4M3.dtype)), r"B by .* \[8, 16\] .*got .* \[8, 16, 1\]"),
        (wrong(), wrong(scale=torch.ones(1, 16)), r"scales of B \(8, 16\) by e4m3/row .*\[8, 1\].*got .*\[1, 16\]"),
        (wrong(scale=torch.ones(())), wrong(), r"scales of A \(8, 16\) by e4m3/row must be .*\[8, 1\].*got .*\[\]"),
        (wrong(scale=torch.ones(8, 1).double()), wrong(), r"scales of A .*torch.float32 .*got torch.float64 \[8, 1\]"),
        (wrong(spec=QuantSpec.parse("e4m3/1x128/e8m0")), wrong(), r"e4m3/1x128/e8m0 must be .*e8m0fnu \[8, 1\]"),
        (wrong(), wrong(spec=QuantSpec.parse("e4m3/tensor")), r"scales of B \(8, 16\) by e4m3/tensor must .*\[1, 1\]"),
        (wrong(), wrong(data=torch.zeros(8, 17).to(E4M3.dtype)), r"different sizes: A is \(8, 16\), B is \(8, 17\)"),
        (wrong(), wrong(data=torch.zeros(8, 16, device="meta").to(E4M3.dtype)), r"B by .* cpu; got .* meta"),
        (wrong(), wrong(scale=torch.ones(8, 1, device="meta")), r"scales of B .* on cpu; got .* on meta"),
    ],
)  # fmt: skip
def test_wrong_operands_are_named(a, b, message):
    with pytest.raises(ValueError, match=message):
        scaled_mm(a, b, "nt", out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "nn"}, r"scaled_mm nn: .* different sizes: A is \(8, 16\), B is \(8, 16\)"),
        ({"layout": "tt"}, r"layout is 'nt', 'nn' or 'tn'; got 'tt'"),
        ({"bias": torch.zeros(7)}, r"bias must be .*\[8\].*got .*\[7\]"),
        ({"bias": torch.zeros(8, dtype=torch.int32)}, r"bias must be .*\[8\].*got torch.int32 \[8\]"),
        ({"bias": torch.zeros(8, device="meta")}, r"bias must be .*\[8\] on cpu; got .* on meta"),
        ({"out_dtype": E4M3.dtype}, r"out_dtype must be float32, bfloat16 or float16; got torch.float8_e4m3fn"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arguments = {"layout": "nt", "out_dtype": torch.bfloat16, **changes}
    with pytest.raises(ValueError, match=message):
        scaled_mm(wrong(), wrong(), **arguments)


@pytest.mark.parametrize("name", RECIPES)
def test_ops_have_fake_implementations(name):
    recipe = RECIPES[name]
    x = torch.randn(20, 40)
    a, b = quantize(x, recipe.x), quantize(torch.randn(30, 40), recipe.w)
    arguments = (a.data, a.scale, a.spec.text, b.data, b.scale, b.spec.text, "nt", torch.bfloat16, None, False)
    # test_schema compares inputs before and after with arithmetic that PyTorch lacks for FP8; the op is functional
    # anyway.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.octavo.scaled_mm.default, arguments, test_utils=checks)
