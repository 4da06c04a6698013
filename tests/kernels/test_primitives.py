"""The divisions that kernels do without dividing, replayed in NumPy for every mantissa."""

import numpy as np
import pytest

EXTENDED = np.longdouble
STEPS = [89, pytest.param(1, marks=pytest.mark.slow)]  # Between the mantissas that are tried
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


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("start", [-1, 0, 1])
def test_reciprocal_is_correctly_rounded(start, step):
    fractions = np.append(mantissas(step), np.uint32(0x7FFFFF))
    for exponent in (-126, 0, 120) if step > 1 else (0,):
        scale = (fractions | np.uint32((127 + exponent) << 23)).view(np.float32)
        computed, exact = reciprocal(scale, start)
        assert np.array_equal(computed, exact), (exponent, scale[computed != exact][:3])


def over_fp8_max(amax, largest):
    largest = np.float32(largest)
    inverse = np.float32(1 / np.float64(largest))
    near = amax * inverse
    return fma(fma(near, -largest, amax), inverse, near)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_quotient_by_the_largest_fp8_value_is_correctly_rounded(largest, step):
    for exponent in (-100, 0, 127) if step > 1 else (0,):
        amax = (mantissas(step) | np.uint32((127 + exponent) << 23)).view(np.float32)
        exact = (amax.astype(np.float64) / largest).astype(np.float32)
        assert np.array_equal(over_fp8_max(amax, largest), exact), exponent


@pytest.mark.parametrize(("largest", "n"), [(448.0, 8), (57344.0, 15)])
def test_power_of_two_scales_need_no_division(largest, n):
    """Adding what carries a mantissa above 1.75 into the exponent finds the power of two at or above amax / max."""
    for exponent in (-126, -110, 0, 127):
        bits = mantissas(61).astype(np.int64) | ((127 + exponent) << 23)
        amax = bits.astype(np.uint32).view(np.float32).astype(np.float64)
        exponent = np.maximum(((bits + 0x1FFFFF) >> 23) - n, 1) - 127
        scale = np.maximum((amax / largest).astype(np.float32), np.float32(2.0**-126)).astype(np.float64)
        assert np.array_equal(exponent, np.ceil(np.log2(scale)))
