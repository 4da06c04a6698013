"""Device functions that all Triton kernels share: magnitudes, scales, FP8 codes, byte for byte as the reference.

Maxima are taken over the bits of |x| as integers: for non-negative floats integer order is float order, NaN sorts
above infinity, and so a NaN reaches the scale without NaN-propagating min/max, next to which Triton miscompiles
one-byte stores (triton-lang/triton issue 11111). It also makes the atomic maximum exact and independent of order.

The reference divides in float64 and rounds to float32. For float32 operands that is the correctly rounded float32
quotient, which is what `div_rn` gives.

Triton's interpreter drops the carry of an FP8 cast that rounds up to a power of two, and loses NaN, so under it values
are rounded first (`ROUND_FIRST`).
"""

import triton
import triton.language as tl

from octavo.numerics.spec import SMALLEST_SCALE as _SMALLEST

SMALLEST_SCALE = tl.constexpr(_SMALLEST)
INFINITY_BITS = tl.constexpr(0x7F800000)
ABS_MASK = tl.constexpr(0x7FFFFFFF)
MANTISSA = tl.constexpr(0x7FFFFF)


@triton.jit
def magnitude(values):
    """|values| as integers that sort like the floats, NaN last."""
    return values.to(tl.int32, bitcast=True) & ABS_MASK


@triton.jit
def scale_of(amax_bits, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Dequantization scale and its inverse (NaN where amax is not finite), as `reference.scale_of`."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    finite = amax_bits < INFINITY_BITS
    scale = tl.math.div_rn(tl.where(finite, amax, 1.0), tl.full(amax.shape, FP8_MAX, tl.float32))
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + MANTISSA) & ~MANTISSA).to(tl.float32, bitcast=True)
    scale = tl.where(finite, scale, 1.0)
    inverse = tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    return scale, tl.where(finite, inverse, float("nan"))


@triton.jit
def to_fp8(scaled, dtype: tl.constexpr, E4M3: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Float32 values within the format's range, rounded to nearest even; what exceeds it by rounding is cut to it."""
    if ROUND_FIRST:
        DROPPED: tl.constexpr = 20 if E4M3 else 21
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & ABS_MASK
        rounded = (size + ((1 << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)) & ~((1 << DROPPED) - 1)
        # Below the smallest normal the spacing is fixed: adding and taking away a large number rounds to it.
        MAGIC: tl.constexpr = 1.5 * 2.0**14 if E4M3 else 1.5 * 2.0**7
        SMALLEST_NORMAL: tl.constexpr = 2.0**-6 if E4M3 else 2.0**-14
        small = (size.to(tl.float32, bitcast=True) + MAGIC) - MAGIC
        is_small = size.to(tl.float32, bitcast=True) < SMALLEST_NORMAL
        rounded = tl.where(is_small, small.to(tl.int32, bitcast=True), rounded)
        signed = (rounded | (bits & ~ABS_MASK)).to(tl.float32, bitcast=True)
        codes = tl.where(scaled == scaled, signed, 0.0).to(dtype).to(tl.uint8, bitcast=True)
        return tl.where(scaled == scaled, codes, 0x7F).to(tl.uint8).to(dtype, bitcast=True)
    return scaled.to(dtype)


@triton.jit
def store_scale(pointer, scale, mask, E8M0: tl.constexpr):
    """Scales as float32, or as the exponent byte of a power of two."""
    if E8M0:
        tl.store(pointer, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(pointer, scale, mask=mask)
