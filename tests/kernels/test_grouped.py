"""Grouped products: every backend computes what the reference does."""

import pytest
import torch
from compiling import run_python

from octavo.kernels.conformance.mismatches import difference
from octavo.kernels.grouped import GROUPED_MM, gradient, quantize_grouped, random_operands, reference, torch_scaled
from octavo.kernels.quantize import quantize
from octavo.numerics import QuantSpec, sqnr
from octavo.tensor import ScaledTensor
from tensors import needs_triton

CASES = sorted(set(GROUPED_MM.cases.values()))
COUNTS = [5, 0, 1, 150, 16]
PYTORCH = [case for case in CASES if case[2] != "tn" and not case[3]]


def moved(operand, device):
    scale = None if operand.scale is None else operand.scale.to(device)
    return ScaledTensor(operand.data.to(device), scale, operand.spec)


@pytest.mark.parametrize(("n", "k"), [(70, 167), (272, 384)])
@pytest.mark.parametrize("case", PYTORCH, ids=" ".join)
def test_pytorch_takes_the_operands_that_it_is_given(case, n, k, monkeypatch):
    """Its checks of dtypes, strides and scales run on meta tensors too, on which Triton does not."""
    monkeypatch.setattr(torch_scaled, "zero_tail", lambda product, offsets: None)
    a, b, offsets, bias = random_operands(case, COUNTS, n, k, torch.device("cpu"))
    columns_first = b.data.t().contiguous().t()
    for data in (b.data, columns_first) if case[2] == "nn" else (b.data,):
        operands = moved(a, "meta"), moved(ScaledTensor(data, b.scale, b.spec), "meta"), offsets.to("meta")
        y = torch_scaled.grouped_mm(*operands, case[2], torch.bfloat16, bias, True)
        assert y.shape == (sum(COUNTS) + 3, n if case[2] == "nt" else k) and y.dtype == torch.bfloat16


def test_pytorch_says_what_it_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    reasons = {case[2] + case[3]: torch_scaled.unsupported_reason(device, case) for case in CASES}
    assert reasons["nt"] is None and reasons["nn"] is None
    assert "multiples of 16" in reasons["tn"] and "no bias" in reasons["ntbias"]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@needs_triton
@pytest.mark.parametrize("tma", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["tma", "pointers"])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_triton_computes_every_expert_as_the_reference_and_reads_no_other_rows(case, tma, monkeypatch):
    """Also if the rows of other experts, and of none, and their weights are NaN."""
    from octavo.kernels.gemm.triton import target_of
    from octavo.kernels.grouped import triton

    if DEVICE == "cpu":
        monkeypatch.setattr(triton.gemm, "target_for", lambda device: target_of(90 if tma else 89, 3))
    layout = case[2]
    a, b, offsets, bias = random_operands(case, COUNTS, 70, 135, torch.device(DEVICE))
    arguments = offsets, layout, torch.float32, bias, layout == "nt"
    expected = reference.grouped_mm(a, b, *arguments)
    assert sqnr(expected, triton.grouped_mm(a, b, *arguments)) > 120
    poisoned = [operand.data.clone() for operand in (a, b)]
    start, end = (offsets[2].item(), offsets[3].item())  # of the fourth expert
    for data, by_weight in zip(poisoned, (False, layout != "tn"), strict=True):
        keep = slice(3 * 70, 4 * 70) if by_weight else slice(start, end)
        own = data[keep].clone()
        data.fill_(torch.nan)
        data[keep] = own
    a, b = (ScaledTensor(data, t.scale, t.spec) for data, t in zip(poisoned, (a, b), strict=True))
    actual = triton.grouped_mm(a, b, *arguments)
    rows = slice(3, 4) if layout == "tn" else slice(start, end)
    assert sqnr(expected[rows], actual[rows]) > 120
    assert layout == "tn" or not actual[sum(COUNTS) :].any()


ENDS = {
    "tiles of one expert": [64, 64, 130], "experts within a tile": [5, 5, 6, 100, 110], "none": [0, 0], "one": [70],
    "rows of no expert": [3, 64],
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize(
    "text", ["e4m3/row", *(pytest.param(t, marks=pytest.mark.thorough) for t in ("e5m2/row", "e4m3/row/pow2"))]
)
@pytest.mark.parametrize("ends", ENDS)
def test_triton_quantizes_gradients_byte_for_byte(ends, text, monkeypatch):
    from octavo.kernels.grouped import gradient_triton

    spec, offsets = QuantSpec.parse(text), torch.tensor(ENDS[ends], device=DEVICE).int()
    monkeypatch.setattr(gradient_triton, "STRIP", 4)  # 64 rows
    gradient_triton.launches.cache_clear()
    rows, columns = max(ENDS[ends][-1], 21) + 13 * (ends == "rows of no expert"), 150
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.rand(shape, generator=generator).to(DEVICE)

    g = ((draw(rows, columns) - 0.5) * 2.0 ** (20 * draw(rows, 1) - 10)).bfloat16()
    g[7, 3], g[1, 9], g[20, 5] = torch.inf, torch.nan, -0.0
    w_scale, x_scale = 10 * draw(len(ENDS[ends]), columns), draw(rows, 1)
    calls = [(g, w_scale, x_scale, True)]
    if ends == "experts within a tile":
        apart = w_scale.t().contiguous().t(), x_scale.expand(-1, 2).contiguous()[:, :1]
        calls += [(g.t().contiguous().t(), *apart, False), (g, w_scale, None, True), (g, None, x_scale, True)]
    for matrix, *given, transposed in calls:
        call = matrix, offsets, spec, *given, transposed
        assert difference(gradient.reference(*call), gradient_triton.quantize_grouped(*call)) is None


@needs_triton
@pytest.mark.parametrize("ends", [[0, 0], [3, 70], [33, 100]])
def test_rows_of_no_expert_become_zero(ends):
    from octavo.kernels.grouped.gradient_triton import zero_tail

    out = torch.full((100, 150), torch.nan, device=DEVICE)
    zero_tail(out, torch.tensor(ends, device=DEVICE).int())
    assert out[: ends[-1]].isnan().all() and not out[ends[-1] :].any()


def test_gradients_of_experts_are_quantized_as_those_of_each_alone():
    """The reference beside `quantize` on the rows of each expert, with the scales of W and X folded in."""
    generator, ends = torch.Generator().manual_seed(0), [5, 5, 40]
    g, offsets = torch.randn(43, 24, generator=generator).bfloat16(), torch.tensor(ends).int()
    w_scale, x_scale = torch.rand(3, 24, generator=generator), torch.rand(43, 1, generator=generator)
    by_row, by_expert = quantize_grouped(g, offsets, ROW_SPEC, COLUMN_SPEC, w_scale, x_scale)
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        own = slice(start, end)
        alone = quantize(g[own], ROW_SPEC, w_scale[expert][None, :]), quantize(g[own], COLUMN_SPEC, x_scale[own])
        for one, grouped, scale in zip(
            alone, (by_row, by_expert), (by_row.scale[own], by_expert.scale[expert]), strict=True
        ):
            assert torch.equal(one.data.view(torch.uint8), grouped.data[own].view(torch.uint8))
            assert torch.equal(one.scale.flatten(), scale.flatten())


ROW_SPEC, COLUMN_SPEC = QuantSpec.parse("e4m3/row"), QuantSpec.parse("e4m3/column")


@needs_triton
@pytest.mark.thorough
def test_every_configuration_computes_the_same():
    from octavo.kernels.gemm.triton import CONFIGS
    from octavo.kernels.grouped import triton

    for case in (CASES[0], CASES[2]):
        a, b, offsets, bias = random_operands(case, COUNTS, 136, 80, torch.device(DEVICE))
        arguments = offsets, case[2], torch.bfloat16, bias, case[2] == "nt"
        expected = reference.grouped_mm(a, b, *arguments)
        for config in range(len(CONFIGS)):
            assert sqnr(expected, triton.grouped_mm(a, b, *arguments, config=config)) > 60


@pytest.mark.slow
@needs_triton
@pytest.mark.thorough
def test_it_compiles_for_hopper_without_spills_with_tma_and_wide_stores():
    code = (
        "from benchmarks.sass import describe\nfrom benchmarks.variants import grouped_products\n"
        "for v in {v.case: v for v in grouped_products(90)}.values():\n"
        "    row = describe(v, 90)\n"
        "    print(row.get('error', ''), row['stack'], *sorted(row['accesses']), *row['matrix'])"
    )
    lines = run_python("-c", code).splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith(" 0 ") and "UTMALDG" in line and "STG.16" in line and "QGMMA" in line, line
