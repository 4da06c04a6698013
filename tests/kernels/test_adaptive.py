"""Adaptive FP8: the choice of a format per group, its error, and the kernels against the reference."""

import pytest
import torch
from fused_inputs import assert_same, randn, spread
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.adaptive import adaptive_dequantize, adaptive_quantize, reference
from octavo.numerics import sqnr
from tensors import needs_triton

E4M3, E3M4, E2M5 = range(3)


def round_trip(x):
    codes, scale = adaptive_quantize(x)
    assert codes.shape == x.shape and codes.is_contiguous() and scale.shape == (x.shape[0], -(-x.shape[1] // 128))
    return adaptive_dequantize(codes, scale, x.dtype), scale.view(torch.int32) & 3


def values_of(mantissa):
    """All values of a format with so many mantissa bits, in units of its smallest normal one, from its definition."""
    exponents = 2 ** (7 - mantissa)
    fractions = torch.arange(2**mantissa, dtype=torch.float64) / 2**mantissa
    normal = [(1 + fractions) * 2.0 ** (e - 1) for e in range(1, exponents)]
    return torch.cat([fractions, *normal])


@pytest.mark.parametrize("number", [E4M3, E3M4, E2M5])
def test_every_code_is_a_value_of_its_format(number):
    """Ascending, symmetric, each returned by its own code, and the nearest one to any value, ties to the even code."""
    values = values_of(reference.MANTISSAS[number])
    assert values.shape == (128,) and values[-1] == reference.TOPS[number]
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scale = torch.tensor([[1.0], [1.0]]).view(torch.int32).bitwise_or(number).view(torch.float32)
    decoded = adaptive_dequantize(codes, scale, torch.float32)
    assert torch.equal(decoded[0].double(), values) and torch.equal(decoded[1], -decoded[0])
    x = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.rand(4000, dtype=torch.float64) * values[-1]]).float()
    numbers = torch.full((x.numel(), 1), reference.MANTISSAS[number], dtype=torch.int32)
    distance = (x.double()[:, None] - values).abs()
    nearest = distance.min(1).values
    ours = reference._codes(x[:, None].contiguous(), numbers)[:, 0]
    assert torch.equal(distance.gather(1, ours[:, None].long())[:, 0], nearest)
    ties = (distance == nearest[:, None]).sum(1) == 2
    assert ties.sum() == 127 and (ours[ties] % 2 == 0).all()


@pytest.mark.parametrize(
    ("number", "limit", "coarse"), [(E2M5, 64, 16), (E3M4, 64, 17), (E3M4, 512, 16), (E4M3, 512, 17)]
)
def test_a_format_fits_a_group_if_few_elements_are_small(number, limit, coarse):
    """One non-zero element in eight may be below the limit; an element at the limit is not, nor is a zero."""
    x = torch.ones(1, 128)
    x[0, :coarse] = 0.999 / limit
    x[0, coarse] = 1 / limit
    assert round_trip(x)[1].item() == number
    half = torch.cat([x[:, : coarse + 1], torch.ones(1, 64 - coarse - 1), torch.zeros(1, 64)], 1)
    assert round_trip(half)[1].item() == (number if coarse == 17 else number - 1)  # 16 of 64


def test_decibels_are_those_of_the_documentation():
    x = randn(256, 1024)
    y, number = round_trip(x)
    assert sqnr(x, y) == pytest.approx(43.7, abs=0.2) and (number == E2M5).float().mean() > 0.99
    by_channel = x * torch.logspace(0, -1.5, 128).repeat(8)
    y, number = round_trip(by_channel)
    assert sqnr(by_channel, y) > 37 and (number == E3M4).float().mean() > 0.8
    outlier = x * torch.where(torch.arange(1024) % 128 == 5, 1e4, 1.0)
    y, number = round_trip(outlier)
    others = torch.arange(1024) % 128 != 5
    assert (number == E4M3).float().mean() > 0.9 and sqnr(outlier[:, others], y[:, others]) > 30


@settings(max_examples=100)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=140))
def test_all_but_one_in_eight_of_any_values_arrive_within_a_seventh(numbers):
    x = torch.tensor(numbers).view(1, -1)
    y, _ = round_trip(x)
    for group, result in zip(x.double().split(128, 1), y.double().split(128, 1), strict=True):
        far = (result - group).abs() > group.abs() / 7 + group.abs().max() / 491_520 * (1 + 2**-20) + 2.0**-130
        assert 8 * far.sum() <= (group != 0).sum()
        assert ((result == 0) | (result.sign() == group.sign())).all() and result.isfinite().all()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1.0, 1e30, 3.4028234e38])
def test_magnitudes_from_one_end_of_float32_to_the_other(size):
    x = (randn(4, 256) / 5).clamp(-1, 1)
    x[:, ::128] = 1.0
    y, _ = round_trip(x * size)
    assert y.isfinite().all()
    if size >= 1e-30:
        assert sqnr(x, y / size) > 37
    assert round_trip(torch.zeros(2, 200))[0].eq(0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_own_group_nan(bad):
    x = torch.ones(3, 300)
    x[1, 130] = bad
    y, _ = round_trip(x)
    assert y[1, 128:256].isnan().all() and y.isnan().sum() == 128


@pytest.mark.slow
@needs_triton
def test_every_configuration_and_memory_order_equals_reference():
    from octavo.kernels.adaptive import triton as backend

    x = spread(300, 33) * torch.logspace(-4, 4, 300)[:, None]
    for operand in (x, x.t(), x.t().contiguous(), x[:, ::2]):
        expected = reference.adaptive_quantize(operand)
        for config in range(len(backend.CONFIGS)):
            codes, scale = backend.adaptive_quantize(operand, config)
            assert_same({"codes": expected[0], "scale": expected[1]}, {"codes": codes, "scale": scale})
            y = backend.adaptive_dequantize(codes, scale, torch.bfloat16, config)
            assert_same({"y": reference.adaptive_dequantize(*expected, torch.bfloat16)}, {"y": y})


def test_errors_are_within_the_documented_bounds():
    spread_out = torch.logspace(0, -5, 128)
    at_limits = torch.cat([torch.ones(2), torch.full((110,), 1 / 64), torch.rand(16) / 64])
    for values in (spread_out, at_limits, at_limits.square(), torch.rand(128), torch.rand(128) * spread_out):
        for size in (1e-43, 1e-38, 2.0**-111, 1.0, 3.4e38):
            x = (values / values.max() * size).view(1, -1)
            codes, scale = adaptive_quantize(x)
            number = int(scale.view(torch.int32)) & 3
            error = (adaptive_dequantize(codes, scale, torch.float32).double() - x.double()).abs()
            part, least = ((16, 491_520), (32, 3968), (64, 504))[number]
            bound = torch.maximum(x.double() / part, x.double().max() / least) * (1 + 1e-5)
            assert (error <= bound + (2.0**-130 if size < 2.0**-111 else 0)).all(), (number, size)
            fine = x.double() > x.double().max() / 70_000
            if size >= 2.0**-111:
                assert 8 * (fine & (error > x.double() / 7)).sum() <= 128


@pytest.mark.parametrize(
    "x", [torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.int8), torch.ones(3)]
)
def test_other_dtypes_and_shapes_raise(x):
    with pytest.raises(ValueError, match=r"x must be a float32, bfloat16 or float16 matrix \[R,C\]; got torch"):
        adaptive_quantize(x)
    message = adaptive_quantize(torch.ones(2, 3))
    with pytest.raises(ValueError, match="returns float32, bfloat16 or float16; got torch.float64"):
        adaptive_dequantize(*message, torch.float64)
