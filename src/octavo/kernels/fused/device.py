"""Device functions of the fused ops, with the operations of `activations` and `reference`, in the same order.

Triton's interpreter truncates to bf16 where a GPU rounds, misreads subnormal bf16 numbers, and has no PTX; hence the
`INTERPRETED` arguments.
"""

import triton
import triton.language as tl

from octavo.kernels.fused import activations
from octavo.kernels.primitives import four_codes, magnitude, scale_of, store_scale, to_fp8

PLAIN, BY_ROW, BY_BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Values of OUTPUT: the result in its own dtype, FP8 with a scale per row, or per block of a row."""
VECTOR = tl.constexpr(8)
"""Neighbours in a row that a thread of the kernels on whole rows holds: 16 bytes of bf16, and what `sums_of_8` adds.

Kernels on tiles of quarters have no such hint: it takes them up to 60 registers more per thread (GLU 96 → 138), hence
loads under way, and their loads that touch half sectors find the other halves in L1.
"""
SILU, GELU_TANH, GELU = (tl.constexpr(i) for i in range(3))

_LOG2_E = tl.constexpr(activations.LOG2_E)
_ROUNDER = tl.constexpr(activations.ROUNDER)
_LN2_HIGH = tl.constexpr(activations.LN2_HIGH)
_LN2_LOW = tl.constexpr(activations.LN2_LOW)
_E5, _E4, _E3, _E2, _E1, _E0 = (tl.constexpr(c) for c in activations.EXP)
_EXP_LOWEST = tl.constexpr(activations.EXP_LOWEST)
_T7, _T6, _T5, _T4, _T3, _T2, _T1, _T0 = (tl.constexpr(c) for c in activations.TAIL)
_TAIL_SLOPE = tl.constexpr(activations.TAIL_SLOPE)
_TANH_SCALE = tl.constexpr(activations.TANH_SCALE)
_TANH_CUBIC = tl.constexpr(activations.TANH_CUBIC)
_TANH_CUBIC_3 = tl.constexpr(activations.TANH_CUBIC_3)
_GELU_CAP = tl.constexpr(activations.GELU_CAP)
_INVERSE_SQRT_2PI = tl.constexpr(activations.INVERSE_SQRT_2PI)


@triton.jit
def to_float32(values, INTERPRETED: tl.constexpr):
    """Convert loaded values to float32."""
    if INTERPRETED and values.dtype == tl.bfloat16:
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def round_to(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round float32 values to `dtype`, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(values == values, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


@triton.jit
def sums_of_8(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum 8 neighbours along axis 1, held by one thread, pairwise in float32; return float64."""
    even, odd = tl.split(tl.reshape(values, (ROWS, COLUMNS // 8, 2, 2, 2)))
    even, odd = tl.split(even + odd)
    even, odd = tl.split(even + odd)
    return (even + odd).to(tl.float64)


@triton.jit
def row_sum(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum float32 values over axis 1, as `reference` does."""
    return tl.sum(sums_of_8(values, ROWS, COLUMNS), axis=1).to(tl.float32)


@triton.jit
def _exp_of_negative(x):
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    r = tl.math.fma(n, -_LN2_HIGH, x) - n * _LN2_LOW  # the first product is exact, so fusing changes nothing
    p = ((((r * _E5 + _E4) * r + _E3) * r + _E2) * r + _E1) * r + _E0
    bits = p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return tl.where(x < _EXP_LOWEST, 0.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _reciprocal(x, INTERPRETED: tl.constexpr):
    """Return 1/x, correctly rounded, for x from 1 to 2¹²⁵: as rcp.rn, without its range check."""
    if INTERPRETED:
        return tl.math.div_rn(1.0, x)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, $1; fma.rn.f32 e, e, r, 0f3F800000; "
        "fma.rn.f32 $0, r, e, r; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def factor_and_slope(g, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """See `activations`; without SLOPE, the second result is the factor."""
    size = tl.abs(g)
    if ACTIVATION != SILU:
        size = tl.where(size > _GELU_CAP, _GELU_CAP, size)
    if ACTIVATION == GELU:
        z = _exp_of_negative((size * size) * -0.5)
        c = _reciprocal(1.0 + size * _TAIL_SLOPE, INTERPRETED)
        p = ((((((c * _T7 + _T6) * c + _T5) * c + _T4) * c + _T3) * c + _T2) * c + _T1) * c + _T0
        lower = z * (c * p)
        value = tl.where(g < 0, lower, 1.0 - lower)
        slope = value + g * (z * _INVERSE_SQRT_2PI) if SLOPE else value
    else:
        if ACTIVATION == SILU:
            z = _exp_of_negative(-size)
        else:
            square = size * size
            z = _exp_of_negative(-((size + (size * square) * _TANH_CUBIC) * _TANH_SCALE))
        upper = _reciprocal(1.0 + z, INTERPRETED)
        lower = z * upper
        value = tl.where(g < 0, lower, upper)
        slope = value
        if SLOPE:
            bend = g * (lower * upper)
            if ACTIVATION == GELU_TANH:
                bend = bend * ((1.0 + square * _TANH_CUBIC_3) * _TANH_SCALE)
            slope = value + bend
    return value, slope


@triton.jit
def offsets(row, column, stride_r, stride_c):
    """Return 64-bit offsets of a tile in a strided matrix."""
    return row[:, None] * stride_r + column[None, :].to(tl.int64) * stride_c


@triton.jit
def store_rows(q, scaled, row, column, rows, columns, E4M3: tl.constexpr, INTERPRETED: tl.constexpr):
    """FP8 codes of a tile, row-major."""
    codes = to_fp8(scaled, q.dtype.element_ty, E4M3, INTERPRETED)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(q + row[:, None] * columns + column[None, :], codes, mask=inside)


@triton.jit
def split_by_4(values, N: tl.constexpr):
    """Split a vector of N into its elements 4i, 4i+1, 4i+2 and 4i+3."""
    even, odd = tl.split(tl.reshape(values, (N // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def store_quarters(
    q, qt, a, b, c, d, word, column, rows, columns, words,
    E4M3: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store FP8 codes of a tile with rows 4i (a) to 4i+3 (d), row-major and transposed; i is `word`."""
    # A thread holds four vertically adjacent elements, one 32-bit word of the transposed copy. Columns of the copy have
    # `words` words; values past the last row are 0.
    row = 4 * word
    if ROWS:
        store_rows(q, a, row, column, rows, columns, E4M3, INTERPRETED)
        store_rows(q, b, row + 1, column, rows, columns, E4M3, INTERPRETED)
        store_rows(q, c, row + 2, column, rows, columns, E4M3, INTERPRETED)
        store_rows(q, d, row + 3, column, rows, columns, E4M3, INTERPRETED)
    if COLUMNS:
        codes = tl.trans(four_codes(a, b, c, d, E4M3, INTERPRETED))
        at = column.to(tl.int64)[:, None] * words + word[None, :]
        inside = (column < columns)[:, None] & (word < words)[None, :]
        tl.store(qt.to(tl.pointer_type(tl.int32)) + at, codes, mask=inside)


@triton.jit
def divide_by_block_scales(
    y, s, row, first, rows, grid_columns,
    FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Divide a tile of whole 1 × BLOCK blocks, starting at column `first`, by their scales; store the scales."""
    largest = tl.max(tl.reshape(magnitude(y), (TILE_R, TILE_C // BLOCK, BLOCK)), axis=2)
    scale, inverse = scale_of(largest, FP8_MAX, POWER_OF_TWO, INTERPRETED)
    block = first // BLOCK + tl.arange(0, TILE_C // BLOCK)
    inside = (row < rows)[:, None] & (block < grid_columns)[None, :]
    store_scale(s + row[:, None] * grid_columns + block[None, :], scale, inside, E8M0)
    spread = tl.broadcast_to(inverse[:, :, None], (TILE_R, TILE_C // BLOCK, BLOCK))
    return y * tl.reshape(spread, (TILE_R, TILE_C))


@triton.jit
def divide_quarters_by_block_scales(
    a, b, c, d, s, row, first, rows, grid_columns,
    FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr,
    QUARTER_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Apply `divide_by_block_scales` to the four quarters of a tile."""
    a = divide_by_block_scales(
        a, s, row, first, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK, QUARTER_R, TILE_C, INTERPRETED
    )
    b = divide_by_block_scales(
        b, s, row + 1, first, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK, QUARTER_R, TILE_C, INTERPRETED
    )
    c = divide_by_block_scales(
        c, s, row + 2, first, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK, QUARTER_R, TILE_C, INTERPRETED
    )
    d = divide_by_block_scales(
        d, s, row + 3, first, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK, QUARTER_R, TILE_C, INTERPRETED
    )
    return a, b, c, d


@triton.jit
def divide_by_row_scales(
    y, s, row, rows, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Divide a tile of whole rows by their scales; store the scales."""
    scale, inverse = scale_of(tl.max(magnitude(y), axis=1), FP8_MAX, POWER_OF_TWO, INTERPRETED)
    store_scale(s + row, scale, row < rows, E8M0)
    return y * inverse[:, None]


@triton.jit
def _bytes_of(q, row, column, rows, columns):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(q + row[:, None] * columns + column[None, :], mask=inside, other=0).to(tl.int32)


@triton.jit
def transpose_kernel(q, qt, rows, words, columns, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Transpose bytes [R,C] to columns of `words` 32-bit words, zero past the last row."""
    word = tl.program_id(0).to(tl.int64) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    row = 4 * word
    column = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    low = _bytes_of(q, row, column, rows, columns) | (_bytes_of(q, row + 1, column, rows, columns) << 8)
    high = _bytes_of(q, row + 2, column, rows, columns) | (_bytes_of(q, row + 3, column, rows, columns) << 8)
    codes = tl.trans(low | (high << 16))
    at = column.to(tl.int64)[:, None] * words + word[None, :]
    inside = (column < columns)[:, None] & (word < words)[None, :]
    tl.store(qt.to(tl.pointer_type(tl.int32)) + at, codes, mask=inside)
