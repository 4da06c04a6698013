import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import quantize
from octavo.kernels.conformance.mismatches import difference
from octavo.kernels.direct import Plans
from octavo.kernels.quantize import QUANTIZE, quantize_pair, reference
from octavo.numerics import E4M3, ROW, QuantSpec, first_mismatch
from tensors import needs_triton, randn

SPECS = [
    QuantSpec.parse(text)
    for text in (
        "e4m3/tensor", "e5m2/tensor", "e4m3/row", "e4m3/column", "e4m3/1x128", "e4m3/128x128", "e4m3/128x1",
        "e4m3/1x32/e8m0", "e4m3/32x1/e8m0", "e4m3/row/pow2",
    )
]  # fmt: skip
by_spec = pytest.mark.parametrize("spec", SPECS, ids=str)
by_some_specs = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=[pytest.mark.slow] * (spec.text in ("e5m2/tensor", "e4m3/128x1", "e4m3/32x1/e8m0")))
        for spec in SPECS
    ],
    ids=str,
)
"""Leaves out those whose kernels and branches others take as well."""
sizes = st.one_of(st.sampled_from([0, 1, 2, 16, 127, 128, 129, 257]), st.integers(0, 300))


def lognormal(rows, columns, dtype):
    return (randn(rows, columns) * torch.exp(2 * randn(rows, columns, seed=1))).to(dtype)


def factors(kind, rows, columns):
    return {"none": None, "rows": randn(rows, 1, seed=2).abs(), "columns": randn(1, columns, seed=3).abs()}[kind]


def tensors(q):
    return [t for t in (q.data, q.other_order, q.scale) if t is not None]


small_sizes = st.one_of(st.sampled_from([0, 1, 31, 128, 129]), st.integers(0, 140))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.thorough
@needs_triton
@by_some_specs
@settings(max_examples=8)
@given(
    rows=small_sizes, columns=small_sizes, dtype=dtypes, fold=st.sampled_from(["none", "rows", "columns"]),
    order=st.sampled_from(["rows", "columns", "both"]),
)  # fmt: skip
def test_triton_equals_reference(spec, rows, columns, dtype, fold, order):
    x, factor = lognormal(rows, columns, dtype), factors(fold, rows, columns)
    expected = quantize(x, spec, factor, order=order)
    with QUANTIZE.force("triton"):
        actual = quantize(x, spec, factor, order=order)
    assert difference(tensors(expected), tensors(actual)) is None


@pytest.mark.thorough
@needs_triton
@pytest.mark.parametrize(("strip", "rows"), [(1, 33), (4, 130)])
def test_strips_of_tiles_see_every_row(monkeypatch, strip, rows):
    """The largest values are in the last rows, in another tile than the first, and in another strip."""
    from octavo.kernels.quantize import triton as kernels

    monkeypatch.setattr(kernels, "strip_tiles", lambda *_: strip)
    monkeypatch.setattr(kernels, "_PLANS", Plans())
    x = randn(rows, 140) * torch.linspace(1, 9, rows)[:, None]
    fold, fold_t = factors("columns", rows, 140), factors("rows", rows, 140)
    pair = QuantSpec.parse("e4m3/row"), fold, QuantSpec.parse("e4m3/column"), fold_t
    alone = [QuantSpec.parse(text) for text in ("e4m3/column", "e4m3/tensor")]
    expected = [*reference.quantize_pair(x, *pair), *(reference.quantize(x, spec, None)[1] for spec in alone)]
    found = [*kernels.quantize_pair(x, *pair), *(kernels.quantize(x, s, None, None, None, "rows")[1] for s in alone)]
    assert difference(expected, found) is None


def quantize_block_by_block(x, spec):
    """The definition of numerics.spec again, one block at a time: the nearest code, of two the even one."""
    block_rows, block_columns = spec.granularity.block(tuple(x.shape))
    values = torch.arange(256, dtype=torch.uint8).view(spec.format.dtype).double()
    grid = torch.cat([values[::2], values[1::2]])  # the first of two nearest is the even one
    grid = grid[grid.isfinite()]
    data, scales = torch.zeros(x.shape, dtype=torch.float64), {}
    for top in range(0, x.shape[0], block_rows):
        for left in range(0, x.shape[1], block_columns):
            place = slice(top, top + block_rows), slice(left, left + block_columns)
            scale = torch.tensor(max(x[place].abs().max().item() / spec.format.max, 2.0**-126)).float().item()
            if spec.scale_rule != "amax":
                scale = 2.0 ** math.ceil(math.log2(scale))
            scaled = (x[place] * torch.tensor(1.0 / scale).float()).double().clamp(-spec.format.max, spec.format.max)
            data[place] = grid[(scaled[..., None] - grid).abs().argmin(-1)]
            scales[top // block_rows, left // block_columns] = scale
    return data, scales


@by_spec
def test_equals_the_definition_block_by_block(spec):
    for shape in ((130, 3), (2, 140)):
        x = randn(*shape) * torch.exp(2 * randn(*shape, seed=1))
        q = quantize(x, spec)
        data, scales = quantize_block_by_block(x, spec)
        assert torch.equal(q.data.double(), data)
        assert {tuple(i): q.scale[tuple(i)].double().item() for i in (q.scale.float() > 0).nonzero().tolist()} == scales


@by_spec
@settings(max_examples=10, deadline=None)
@given(rows=sizes, columns=sizes, dtype=dtypes)
def test_any_shape_and_dtype(spec, rows, columns, dtype):
    x = randn(rows, columns, dtype=dtype)
    q = quantize(x, spec)
    assert (q.data.shape, q.data.dtype) == (x.shape, spec.format.dtype)
    assert (q.scale.shape, q.scale.dtype) == (spec.granularity.scale_shape((rows, columns)), spec.scale_dtype)
    assert q.data.is_contiguous()
    scale = q.scale.float()
    assert scale.isfinite().all() and (scale > 0).all()
    # Half a unit in the last place of the largest magnitude of the block bounds every element's error.
    ulp = 2.0**5 if spec.format is E4M3 else 2.0**13
    assert ((q.dequantize() - x.float()).abs() <= q.expanded_scale() * ulp / 2 * 1.0001).all()


@by_spec
def test_strides_do_not_matter(spec):
    x = randn(96, 160)
    for view in (x.t(), x[1:, 3:], x[::2, ::3], x.flip(0)):
        expected = quantize(view.clone(memory_format=torch.contiguous_format), spec)
        actual = quantize(view, spec)
        assert first_mismatch(expected.data, actual.data) is None
        assert first_mismatch(expected.scale, actual.scale) is None


@by_spec
def test_fold_is_a_product_in_float32_first(spec):
    x, row, column = randn(64, 48, dtype=torch.bfloat16), randn(64, 1, seed=1), randn(1, 48, seed=2)
    for fold in (row, column):
        expected, actual = quantize(x.float() * fold, spec), quantize(x, spec, fold)
        assert first_mismatch(expected.data, actual.data) is None
        assert first_mismatch(expected.scale, actual.scale) is None


@by_spec
def test_memory_orders_hold_the_same_bytes(spec):
    x = randn(100, 70)
    rows, columns, both = (quantize(x, spec, order=order) for order in ("rows", "columns", "both"))
    assert rows.other_order is None and columns.other_order is None
    assert rows.data.is_contiguous() and columns.data.stride() == both.other_order.stride() == (1, 112)
    for data in (columns.data, both.data, both.other_order):
        assert first_mismatch(rows.data, data.contiguous()) is None
    assert both.along(1) is both.data and both.along(0) is both.other_order and rows.along(0) is None


@by_spec
def test_precomputed_scales_save_a_pass(spec):
    """With its own maxima or scales the bytes are the same; with smaller ones, larger values are cut."""
    x = randn(100, 140)
    q = quantize(x, spec)
    again = quantize(x, spec, scale=q.scale)
    assert again.scale is q.scale and first_mismatch(q.data, again.data) is None
    amax = torch.zeros_like(q.scale, dtype=torch.float32) + x.abs().max()
    from_amax = quantize(x, spec, amax=amax)
    assert (from_amax.dequantize() - x).abs().max() <= x.abs().max() * 2**-3
    cut = quantize(x, spec, amax=amax / 100)
    assert cut.data.float().abs().max() == spec.format.max and not cut.data.float().isnan().any()


@by_spec
def test_constant_matrices_survive_at_every_magnitude(spec):
    for value in (0.0, 1e-45, 1e-38, 1e-12, 1e-10, 1.0, 3.0e38, -3.2e38):
        x = torch.full((40, 50), value)
        q = quantize(x, spec)
        assert q.scale.float().isfinite().all() and not q.data.float().isnan().any(), value
        if abs(value) >= 1e-38:
            assert torch.allclose(q.dequantize(torch.float64), x.double(), rtol=2**-4, atol=0), value


@by_spec
def test_bad_values_never_become_finite_and_leave_other_rows_alone(spec):
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = randn(200, 200)
        x[131, 7] = bad
        q = quantize(x, spec)
        assert q.dequantize()[131, 7].isnan() and q.scale.float().isfinite().all()
        for of in (randn(200, 200), x):
            assert quantize(x, spec, scale=quantize(of, spec).scale).dequantize()[131, 7].isnan()
        if spec.granularity == ROW:
            others = torch.arange(200) != 131
            assert q.dequantize()[131].isnan().all()
            assert torch.equal(q.dequantize()[others], quantize(x[others], spec).dequantize())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: quantize(torch.zeros(2, 3, 4), s), r"matrix \[R,C\]; got torch.float32 of shape \(2, 3, 4\)"),
        (lambda s: quantize(torch.zeros(2, 3, dtype=torch.int32), s), "got torch.int32"),
        (lambda s: quantize(torch.zeros(2, 3, dtype=torch.float64), s), "got torch.float64"),
        (lambda s: quantize(torch.zeros(2, 3), s, torch.ones(3)), r"fold must be float32 \[2,1\] or \[1,3\]"),
        (lambda s: quantize(torch.zeros(2, 3), s, torch.ones(2, 1).double()), "got torch.float64"),
        (lambda s: quantize(torch.zeros(2, 3), s, torch.ones(2, 1, device="meta")), "on cpu; got .* on meta"),
        (
            lambda s: quantize(torch.zeros(2, 3), s, amax=torch.ones(2)),
            r"amax for e4m3/row .* \[2, 1\].*; got .* \[2\]",
        ),
        (lambda s: quantize(torch.zeros(2, 3), s, scale=torch.ones(2, 1).double()), "scale .* got torch.float64"),
        (lambda s: quantize(torch.zeros(2, 3), s, amax=torch.ones(2, 1), scale=torch.ones(2, 1)), "not both"),
        (lambda s: quantize(torch.zeros(2, 3), s, order="column"), "order is .*; got 'column'"),
        (
            lambda s: quantize_pair(torch.zeros(2, 3), s, None, QuantSpec.parse("e5m2/column"), None),
            "call quantize twice",
        ),
        (lambda s: quantize_pair(torch.zeros(2, 3), s, None, s.transposed, torch.ones(3)), "fold_t must be float32"),
    ],
)
def test_wrong_operands_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(QuantSpec(granularity=ROW))


def test_ops_trace():
    x, ones = randn(40, 50, dtype=torch.bfloat16), torch.ones(40, 1)
    for amax, scale, order in ((ones, None, "rows"), (None, ones, "columns"), (None, None, "both")):
        torch.library.opcheck(torch.ops.octavo.quantize.default, (x, "e4m3/row", None, amax, scale, order))
    torch.library.opcheck(torch.ops.octavo.quantize_pair.default, (x, "e4m3/row", None, "e4m3/column", None))
