"""Device code of the kernels of adaptive FP8; `triton` launches it. A program handles PER groups of 128 elements."""

import triton
import triton.language as tl

from octavo.kernels.adaptive import reference
from octavo.kernels.fused.device import round_to, to_float32
from octavo.kernels.primitives import INFINITY_BITS, ONE_BITS, SMALLEST_SCALE, columns_from, magnitude, reciprocal

GROUP = tl.constexpr(reference.GROUP)
FIRST_MANTISSA = tl.constexpr(reference.MANTISSAS[0])
INVERSE_0, INVERSE_1, INVERSE_2 = (tl.constexpr(1 / top) for top in reference.TOPS)
FINE_1, FINE_2 = (tl.constexpr(part) for part in reference.FINE[1:])
FEW = tl.constexpr(reference.FEW)
NAN_BITS = tl.constexpr(reference.NAN_BITS)


@triton.jit
def _groups_of_program(rows, columns, PER: tl.constexpr, VECTOR: tl.constexpr):
    """Return groups, which of them there are, rows and columns of elements, and which of those there are."""
    # A thread holds at most VECTOR neighbours (`primitives.columns_from`).
    across = tl.cdiv(columns, GROUP)
    group = tl.program_id(0).to(tl.int64) * PER + tl.arange(0, PER)
    row = group // across
    column = (group % across)[:, None] * GROUP + columns_from(0, GROUP, VECTOR)[None, :]
    real = row < rows
    return group, real, row, column, real[:, None] & (column < columns)


@triton.jit
def adaptive_quantize_kernel(
    x, codes, scales, rows, columns, x_r, x_c, PER: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """Quantize PER groups: choose the format of each, then round its elements."""
    group, real, row, column, inside = _groups_of_program(rows, columns, PER, 8)
    at = row.to(tl.int64)[:, None] * x_r + column.to(tl.int64) * x_c
    values = to_float32(tl.load(x + at, mask=inside, other=0.0), INTERPRETED)
    size_bits = magnitude(values)
    size = size_bits.to(tl.float32, bitcast=True)
    amax_bits = tl.max(size_bits, 1)
    finite = amax_bits < INFINITY_BITS
    amax = tl.where(finite, amax_bits, ONE_BITS).to(tl.float32, bitcast=True)
    zeros = tl.sum((size_bits == 0).to(tl.int32), 1)
    coarse_1 = tl.sum((size < (amax * FINE_1)[:, None]).to(tl.int32), 1) - zeros
    coarse_2 = tl.sum((size < (amax * FINE_2)[:, None]).to(tl.int32), 1) - zeros
    number = tl.where(coarse_1 * FEW + zeros <= GROUP, 1, 0)
    number = tl.where(coarse_2 * FEW + zeros <= GROUP, 2, number)
    top = tl.where(number == 2, INVERSE_2, tl.where(number == 1, INVERSE_1, INVERSE_0))
    scale = amax * top
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    scale_bits = scale.to(tl.int32, bitcast=True) & -4
    inverse = reciprocal(scale_bits.to(tl.float32, bitcast=True), INTERPRETED)
    units = size * inverse[:, None]
    mantissa = (number + FIRST_MANTISSA)[:, None]
    power = tl.maximum(units.to(tl.int32, bitcast=True) & INFINITY_BITS, ONE_BITS)
    magic = power + ((23 - mantissa) << 23)
    code = (units + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    code += ((power - ONE_BITS) >> 23) << mantissa
    code |= (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(finite[:, None], code, 0)
    tl.store(codes + row[:, None] * columns + column, code.to(tl.uint8), mask=inside)
    scale_bits = tl.where(finite, scale_bits | number, NAN_BITS)
    tl.store(scales + group, scale_bits.to(tl.float32, bitcast=True), mask=real)


@triton.jit
def adaptive_dequantize_kernel(
    codes, scales, out, rows, columns, PER: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    group, real, row, column, inside = _groups_of_program(rows, columns, PER, 16)
    at = row[:, None] * columns + column
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    bits = tl.load(scales + group, mask=real, other=0.0).to(tl.int32, bitcast=True)
    mantissa = ((bits & 3) + FIRST_MANTISSA)[:, None]
    scale = (bits & -4).to(tl.float32, bitcast=True)[:, None]
    size = code & 0x7F
    unit = ((127 - mantissa) << 23).to(tl.float32, bitcast=True)
    normal = ((size << (23 - mantissa)) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < (1 << mantissa), size.to(tl.float32) * unit, normal)
    value = (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    tl.store(out + at, round_to(value * scale, out.dtype.element_ty, INTERPRETED), mask=inside)
