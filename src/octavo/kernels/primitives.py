"""Device functions shared by all Triton kernels: magnitudes, scales and FP8 codes, byte for byte as the reference.

Triton's interpreter has no fused multiply-add and no inline assembly, drops the carry of an FP8 cast that rounds up to
a power of two, and loses NaN. So under INTERPRETED, kernels use plain divisions and round values before the cast.
"""

import triton
import triton.language as tl

from octavo.numerics.spec import SMALLEST_SCALE as _SMALLEST

SMALLEST_SCALE = tl.constexpr(_SMALLEST)
INFINITY_BITS = tl.constexpr(0x7F800000)
ONE_BITS = tl.constexpr(0x3F800000)
ABS_MASK = tl.constexpr(0x7FFFFFFF)
MANTISSA = tl.constexpr(0x7FFFFF)
ALL_EXPONENTS = tl.constexpr(0x7F000000)


@triton.jit
def columns_from(first, EXTENT: tl.constexpr, VECTOR: tl.constexpr):
    """Return EXTENT column indices from `first`, at most VECTOR neighbours of them in one thread."""
    # A warp should access a contiguous piece of memory: VECTOR elements of 16 bytes per thread. Without the hint,
    # Triton gives each thread the 16 neighbours that fill a 16-byte store of FP8, and two loads of bf16, 32 bytes apart
    # from those of the next thread: each touches every sector and takes half of it.
    return first + tl.max_contiguous(tl.arange(0, EXTENT), VECTOR)  # a hint on the sum is lost if `first` is 0


@triton.jit
def magnitude(values):
    """Return |values| as integers that sort like the floats, NaN last."""
    return values.to(tl.int32, bitcast=True) & ABS_MASK


@triton.jit
def reciprocal(scale, INTERPRETED: tl.constexpr):
    """Return 1 / scale, correctly rounded, for scales in [2⁻¹²⁶, 2¹²⁶]."""
    # Two Newton steps from the hardware's approximation, which is within one unit in the last place. They are correct
    # for all mantissas except all ones, where the exact quotient lies next to a tie (`tests/kernels/test_primitives.py`
    # checks all 2²³ mantissas and all three starts). `div_rn` is slower: its range check costs a branch and a call for
    # every element that a scale broadcasts to.
    if INTERPRETED:
        return tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    near = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
    )
    near = tl.math.fma(tl.math.fma(-scale, near, 1.0), near, near)
    near = tl.math.fma(tl.math.fma(-scale, near, 1.0), near, near)
    bits = scale.to(tl.int32, bitcast=True)
    above_tie = (ALL_EXPONENTS - bits).to(tl.float32, bitcast=True)  # 1 + 2⁻²³ times a power of two
    return tl.where((bits & MANTISSA) == MANTISSA, above_tie, near)


@triton.jit
def _over_fp8_max(amax, FP8_MAX: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return amax / FP8_MAX, correctly rounded (Markstein's correction of a product with the rounded inverse)."""
    if INTERPRETED:
        return tl.math.div_rn(amax, tl.full(amax.shape, FP8_MAX, tl.float32))
    INVERSE: tl.constexpr = 1.0 / FP8_MAX
    near = amax * INVERSE
    return tl.math.fma(tl.math.fma(near, -FP8_MAX, amax), INVERSE, near)


@triton.jit
def scale_of(amax_bits, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the dequantization scale and its inverse (NaN for a non-finite amax), as `reference.scale_of`."""
    # The largest value of both FP8 formats is 1.75 · 2ⁿ. So adding a constant that carries mantissas above 1.75 into
    # the exponent gives the power of two at or above amax / max.
    finite = amax_bits < INFINITY_BITS
    if POWER_OF_TWO:
        N: tl.constexpr = 8 if FP8_MAX == 448.0 else 15
        exponent = tl.maximum(((amax_bits + 0x1FFFFF) >> 23) - N, 1)
        exponent = tl.where(finite, exponent, 127)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        amax = tl.where(finite, amax_bits, ONE_BITS).to(tl.float32, bitcast=True)
        scale = _over_fp8_max(amax, FP8_MAX, INTERPRETED)
        scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
        scale = tl.where(finite, scale, 1.0)
        inverse = reciprocal(scale, INTERPRETED)
    return scale, tl.where(finite, inverse, float("nan"))


@triton.jit
def four_codes(a, b, c, d, E4M3: tl.constexpr, INTERPRETED: tl.constexpr):
    """Pack the FP8 codes of four elements into a 32-bit word, a in the lowest byte."""
    if INTERPRETED:
        return _byte(a, E4M3) | (_byte(b, E4M3) << 8) | (_byte(c, E4M3) << 16) | (_byte(d, E4M3) << 24)
    CONVERT: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32" if E4M3 else "cvt.rn.satfinite.e5m2x2.f32"
    ASM: tl.constexpr = (
        "{ .reg .b16 low, high; " + CONVERT + " low, $2, $1; " + CONVERT + " high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    return tl.inline_asm_elementwise(ASM, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _byte(values, E4M3: tl.constexpr):
    codes = to_fp8(values, tl.float8e4nv if E4M3 else tl.float8e5, E4M3, True)
    return codes.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def to_fp8(scaled, dtype: tl.constexpr, E4M3: tl.constexpr, INTERPRETED: tl.constexpr):
    """Cast float32 to FP8, rounded to nearest even; values beyond the range by a rounding error saturate."""
    if INTERPRETED:
        DROPPED: tl.constexpr = 20 if E4M3 else 21
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & ABS_MASK
        rounded = (size + ((1 << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)) & ~((1 << DROPPED) - 1)
        # Below the smallest normal the spacing is fixed: adding and subtracting a large number rounds to it.
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
    """Store scales as float32, or (E8M0) as the exponent byte of a power of two."""
    if E8M0:
        tl.store(pointer, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(pointer, scale, mask=mask)
