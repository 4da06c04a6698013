import pytest
import torch
from cases import DTYPES, SHAPES, SPECS, arrived, assert_within, bound, values
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.comm import encoding
from octavo.comm.encoding import pack, parse_spec, unpack, width
from octavo.numerics.error import sqnr


@pytest.mark.parametrize("spec", SPECS)
def test_what_arrives_is_within_the_bound(spec):
    for number, shape in enumerate((*SHAPES, (), (64, 300))):
        dtype = DTYPES[number % 3]
        x = values(shape, rank=0, dtype=dtype)
        assert_within(arrived(x, spec), x, bound(x, spec), f"{spec} {shape}")


@pytest.mark.parametrize("spec", ["e4m3/row", "e5m2/row"])
def test_the_bound_is_reached_to_a_few_percent(spec):
    """Both halves of it: one that holds for everything says nothing."""
    x = torch.cat((torch.tensor([1.0]), torch.logspace(-12, 0, 100_000))).view(1, -1)
    used = (arrived(x, spec) - x).abs() / bound(x, spec)
    scale, smallest = {"e4m3": (1 / 448, 2**-6), "e5m2": (1 / 57344, 2**-14)}[spec[:4]]
    below = x < scale * smallest
    assert 0.9 < used[below].max() <= 1 and 0.85 < used[~below].max() <= 1


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_any_finite_values_arrive_within_the_bound(numbers):
    x = torch.tensor(numbers).clamp(-3e38, 3e38).view(1, -1)
    for spec in SPECS:
        assert_within(arrived(x, spec), x, bound(x, spec), spec)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@st.composite
def messages(draw):
    """Matrices of odd widths, whose groups lie anywhere in the range of their dtype, with some that are not finite."""
    rows, columns = draw(st.integers(0, 5)), draw(st.sampled_from((0, 1, 2, 31, 127, 128, 129, 131, 256, 300)))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sizes = draw(st.sampled_from((-44.0, -37.0, -20.0, 0.0, 37.0))), draw(st.sampled_from((0.0, 1.0, 4.0, 40.0)))
    exponents = sizes[0] + sizes[1] * torch.rand(rows, columns, generator=generator)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 10.0**exponents
    x *= torch.rand(rows, columns, generator=generator) >= draw(st.sampled_from((0.0, 0.1, 0.99, 1.0)))
    largest = torch.finfo(dtype).max / 1.2
    x = x.clamp(-largest, largest).to(dtype)
    if x.numel():
        for bad in draw(st.lists(st.sampled_from((torch.nan, torch.inf, -torch.inf)), max_size=2)):
            x[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = bad
    return LAYOUTS[draw(st.sampled_from(tuple(LAYOUTS)))](x)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=50)
@given(x=messages())
def test_any_message_arrives_within_the_bound_or_as_nan(spec, x):
    """Within the bound in groups that are finite, NaN in all others, whatever the shape and the order in memory."""
    result, granularity = arrived(x, spec), parse_spec(spec).granularity
    bad = ~x.isfinite()
    if granularity.rows != 1:
        spoilt = bad.any().expand_as(bad)
    else:
        groups = bad.split(granularity.columns or max(x.shape[1], 1), 1)
        spoilt = torch.cat([group.any(1, keepdim=True).expand_as(group) for group in groups], 1)
    assert torch.equal(result.isnan(), spoilt)
    clean = x.masked_fill(spoilt, 0)
    assert_within(result.masked_fill(spoilt, 0), clean, bound(clean, spec), f"{spec} {x.dtype} {list(x.shape)}")


def test_decibels_and_bytes_are_those_of_the_documentation():
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    assert sqnr(x, arrived(x, "e4m3/1x128")) == pytest.approx(32, abs=0.7)
    assert sqnr(x, arrived(x, "e5m2/1x128")) == pytest.approx(26, abs=0.7)
    assert width(1024, parse_spec("e4m3/1x128")) == 1024 + 8 * 4
    assert width(1024, parse_spec("e4m3/1x32/e8m0")) == 1024 + 32
    assert width(1024, parse_spec("e4m3/row")) == width(1024, parse_spec("e4m3/tensor")) == 1024 + 16


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_and_scales_begin_aligned_and_padding_is_zero(spec):
    parsed = parse_spec(spec)
    for columns in (0, 1, 15, 16, 100, 128, 300, 1000):
        message = pack(values((3, columns), rank=0), parsed)
        extent, size = parsed.granularity.columns or max(columns, 1), parsed.scale_dtype.itemsize
        scales = size * max(-(-columns // extent), 1 if parsed.granularity.columns == 0 else 0)
        begin = -(-columns // 16) * 16
        assert message.shape == (3, begin + -(-scales // 16) * 16)
        assert message[:, columns:begin].eq(0).all() and message[:, begin + scales :].eq(0).all()
        assert message.is_contiguous()


@pytest.mark.parametrize("shape", [(1, 65_536), (2, 8192), (8, 4096), (1, 1000), (3, 131)])
@pytest.mark.parametrize("spec", ["e4m3/1x128", "e5m2/1x64/pow2", "e4m3/1x32/e8m0"])
def test_few_long_rows_reach_the_kernels_as_many_rows_of_whole_groups(monkeypatch, spec, shape):
    """A tile of 128 rows would otherwise be empty but for one row per rank; the message is that of the rows."""
    parsed, x = parse_spec(spec), values(shape, rank=0)
    sizes = {}
    real = encoding.quantize, encoding.dequantize
    monkeypatch.setattr(encoding, "quantize", lambda x, spec: sizes.update(quantize=tuple(x.shape)) or real[0](x, spec))
    monkeypatch.setattr(
        encoding, "dequantize", lambda q, dtype: sizes.update(dequantize=tuple(q.data.shape)) or real[1](q, dtype)
    )
    message = pack(x, parsed)
    decoded = unpack(message, shape[1], parsed, x.dtype)
    extent = parsed.granularity.columns
    groups = shape[0] * -(-shape[1] // extent)
    assert sizes["quantize"] == (groups, extent)
    rows, columns = sizes["dequantize"]
    assert rows * columns == groups * extent and columns == (512 if groups * extent % 512 == 0 else columns)
    assert columns % extent == 0

    direct = real[0](x, parsed)
    assert torch.equal(message[:, : shape[1]], direct.data.view(torch.uint8))
    begin = -(-shape[1] // 16) * 16
    scales = direct.scale.view(torch.uint8)
    assert torch.equal(message[:, begin : begin + scales.shape[1]], scales)
    assert torch.equal(decoded, real[1](direct, x.dtype))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        *((spec, "by row, 1xN or tensor; got") for spec in ("e4m3/128x128", "e4m3/column", "e4m3/2x0")),
        ("fp8/1x64", "adaptive format is 'fp8/1x128'; got 'fp8/1x64'"),
        ("e4m4/row", "did you mean 'e4m3'"),
    ],
)
def test_specs_that_no_message_has_are_refused(spec, message):
    """Scales that rows share which travel alone, and misspelt ones."""
    with pytest.raises(ValueError, match=message):
        parse_spec(spec)
