import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import quantize, scaled_mm
from octavo.kernels.gemm import SCALED_MM, torch_scaled
from octavo.kernels.gemm.reference import widen
from octavo.numerics import E4M3, E5M2, RECIPES, QuantSpec, sqnr

sizes = st.one_of(st.sampled_from([0, 1, 2, 16, 17, 127, 128]), st.integers(0, 300))
LAYOUTS = ("nt", "nn", "tn")
PRODUCTS = sorted({case for case in SCALED_MM.cases.values()})


def operands(m, n, k, case, seed=0):
    """Random quantized operands of a product m × k × n for a case of the registry."""
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
@settings(max_examples=15, deadline=None)
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scales", [("tensor", "tensor"), ("row", "row"), ("row", "unit"), ("tensor", "row")])
@pytest.mark.parametrize("shape", [(48, 80, 176), (1, 17, 5), (0, 4, 4), (3, 0, 4), (3, 4, 0), (129, 2, 768)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_torch_scaled_agrees_with_reference(layout, scales, shape, with_bias):
    """Runs through PyTorch's slow CPU kernel: what is checked is the padding, layout and scales around it."""
    along = {"row": ("row", "column"), "tensor": ("tensor", "tensor"), "unit": ("unit", "unit")}
    a_text, b_text = along[scales[0]][layout[0] == "t"], along[scales[1]][layout[1] == "n"]
    case = (*(t if t == "unit" else f"e4m3/{t}" for t in (a_text, b_text)), layout)
    a, b, _ = operands(*shape, case)
    bias = torch.linspace(-1, 1, shape[1]) if with_bias else None
    for dtype in (torch.bfloat16, torch.float32):
        expected = scaled_mm(a, b, layout, out_dtype=dtype, bias=bias)
        with SCALED_MM.force("torch_scaled"):
            actual = scaled_mm(a, b, layout, out_dtype=dtype, bias=bias)
        assert actual.shape == expected.shape and actual.dtype == dtype
        if expected.numel() and expected.abs().max() > 0:
            assert sqnr(expected, actual) > (50 if dtype == torch.bfloat16 else 110)
        else:
            assert torch.equal(expected, actual)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_scaled_hands_over_what_the_hardware_wants(monkeypatch, layout, scales, dtype):
    """K and N in multiples of 16, operands contiguous along the contraction, scales dense: what CUDA insists on."""
    seen = []

    def multiply(a, b, a_scale, b_scale, out_dtype, fast_accum):
        assert all(size % 16 == 0 for size in (a.shape[1], *b.shape))
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        if a_scale.dim() == 2:
            assert out_dtype == torch.bfloat16 and a_scale.shape == (a.shape[0], 1) and b_scale.shape == (1, b.shape[1])
            assert a_scale.is_contiguous() and b_scale.is_contiguous() and a_scale.stride(1) == 1
        seen.append(a_scale.dim())
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch_scaled, "_multiply", multiply)
    a_text = {"row": ("row", "column"), "tensor": ("tensor", "tensor")}[scales][layout[0] == "t"]
    a, b, _ = operands(33, 70, 129, (f"e4m3/{a_text}", "unit", layout))
    with SCALED_MM.force("torch_scaled"):
        assert scaled_mm(a, b, layout, out_dtype=dtype).shape == (33, 70)
    assert seen == [2 if scales == "row" and dtype == torch.bfloat16 else 0]


@pytest.mark.parametrize("name", RECIPES)
def test_torch_scaled_serves_scales_by_tensor_and_by_row_on_cuda(name):
    cases = [case for label, case in SCALED_MM.cases.items() if label.split()[0] == name]
    reasons = [torch_scaled.refuses(torch.device("cuda"), case) for case in cases]
    if name in ("blockwise", "mxfp8"):
        assert all("vary along the contraction" in reason for reason in reasons)
    else:
        assert reasons == [None] * len(reasons) and reasons


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_widen_is_exact_for_every_code(fmt):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    assert torch.equal(widen(codes).float().nan_to_num(-1.5), codes.float().nan_to_num(-1.5))
    finite = codes[codes.float().isfinite()]
    assert torch.equal(widen(finite).float(), finite.float())


def test_nan_reaches_the_product():
    a, b, layout = operands(8, 8, 8, ("e4m3/row", "e4m3/row", "nt"))
    a.data.view(torch.uint8)[2, 3] = 0x7F
    y = scaled_mm(a, b, layout, out_dtype=torch.bfloat16)
    assert y[2].isnan().all() and not y[[0, 1, 3, 4, 5, 6, 7]].isnan().any()


def test_float32_settings_of_the_process_neither_matter_nor_change():
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


def test_wrong_operands_are_named():
    a, b, _ = operands(8, 8, 16, ("e4m3/row", "e4m3/row", "nt"))
    with pytest.raises(ValueError, match=r"contract over different sizes: A is \(8, 16\), B is \(8, 16\)"):
        scaled_mm(a, b, "nn", out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bias is \[8\]"):
        scaled_mm(a, b, "nt", out_dtype=torch.bfloat16, bias=torch.zeros(7))


@pytest.mark.parametrize("name", RECIPES)
def test_ops_have_fake_implementations(name):
    recipe = RECIPES[name]
    x = torch.randn(20, 40)
    torch.library.opcheck(torch.ops.octavo.quantize.default, (x, recipe.x.text, None, False))
    a, b = quantize(x, recipe.x), quantize(torch.randn(30, 40), recipe.w)
    arguments = (a.data, a.scale, a.spec.text, b.data, b.scale, b.spec.text, "nt", torch.bfloat16, None, False)
    # test_schema compares inputs before and after with arithmetic that PyTorch lacks for FP8; the op is functional
    # anyway.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.octavo.scaled_mm.default, arguments, test_utils=checks)
