"""The divisions that kernels do without dividing, replayed in NumPy for every mantissa."""

import numpy as np
import pytest

EXTENDED = np.longdouble
pytestmark = pytest.mark.skipif(np.finfo(EXTENDED).nmant < 63, reason="needs an extended long double to replay fma")


def fma(a, b, c):
    """Rounded once; operands are float32, so product and sum fit an extended double but for ties 2⁻⁴⁰ away."""
    return (EXTENDED(a) * EXTENDED(b) + EXTENDED(c)).astype(np.float32)


def mantissas(step):
    return np.arange(0, 1 << 23, step, dtype=np.uint32)


def reciprocal(scale, start):
    """As `primitives.reciprocal`, from an approximation `start` units in the last place off."""
    exact = (EXTENDED(1) / scale.astype(EXTENDED)).astype(np.float32)
    near = (exact.view(np.int32) + start).view(np.float32)
    for _ in range(2):
        near = fma(fma(-scale, near, np.float32(1)), near, near)
    bits = scale.view(np.int32)
    above_tie = (np.int32(0x7F000000) - bits).view(np.float32)
    return np.where(bits & 0x7FFFFF == 0x7FFFFF, above_tie, near), exact


def check_reciprocal(fractions, start, exponent):
    scale = (fractions | np.uint32((127 + exponent) << 23)).view(np.float32)
    computed, exact = reciprocal(scale, start)
    assert np.array_equal(computed, exact), scale[computed != exact][:3]


@pytest.mark.parametrize("start", [-1, 0, 1])
@pytest.mark.parametrize("exponent", [-126, 0, 120])
def test_reciprocal_is_correctly_rounded(start, exponent):
    check_reciprocal(np.append(mantissas(97), np.uint32(0x7FFFFF)), start, exponent)


@pytest.mark.slow
@pytest.mark.parametrize("start", [-1, 0, 1])
def test_reciprocal_is_correctly_rounded_for_every_mantissa(start):
    check_reciprocal(mantissas(1), start, 0)


def over_fp8_max(amax, largest):
    """As `primitives._over_fp8_max`."""
    largest = np.float32(largest)
    inverse = np.float32(1 / np.float64(largest))
    near = amax * inverse
    return fma(fma(near, -largest, amax), inverse, near)


def check_quotient(fractions, largest, exponent):
    amax = (fractions | np.uint32((127 + exponent) << 23)).view(np.float32)
    exact = (amax.astype(np.float64) / largest).astype(np.float32)
    assert np.array_equal(over_fp8_max(amax, largest), exact)


@pytest.mark.parametrize("largest", [448.0, 57344.0])
@pytest.mark.parametrize("exponent", [-100, 0, 127])
def test_quotient_by_the_largest_fp8_value_is_correctly_rounded(largest, exponent):
    check_quotient(mantissas(89), largest, exponent)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_quotient_is_correctly_rounded_for_every_mantissa(largest):
    check_quotient(mantissas(1), largest, 0)


@pytest.mark.parametrize(("largest", "n"), [(448.0, 8), (57344.0, 15)])
def test_power_of_two_scales_need_no_division(largest, n):
    """Adding what carries a mantissa above 1.75 into the exponent finds the power of two at or above amax / max."""
    for exponent in (-126, -110, 0, 127):
        bits = mantissas(61).astype(np.int64) | ((127 + exponent) << 23)
        amax = bits.astype(np.uint32).view(np.float32).astype(np.float64)
        exponent = np.maximum(((bits + 0x1FFFFF) >> 23) - n, 1) - 127
        scale = np.maximum((amax / largest).astype(np.float32), np.float32(2.0**-126)).astype(np.float64)
        assert np.array_equal(exponent, np.ceil(np.log2(scale)))
