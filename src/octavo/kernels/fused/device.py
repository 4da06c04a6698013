"""Device functions of the fused ops, with the operations of `activations` and `reference`, in the same order.

Triton's interpreter truncates to bf16 where a GPU rounds and misreads subnormal bf16 numbers: hence `INTERPRETED`.
"""

import triton
import triton.language as tl

from octavo.kernels.fused import activations
from octavo.kernels.primitives import columns_from, four_codes, magnitude, scale_of, store_scale, to_fp8

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
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


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
    q, qt, quarters, word, column, rows, columns, words,
    E4M3: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store FP8 codes of a tile, row-major and transposed: quarter i has the rows 4 · `word` + i."""
    # A thread holds four vertically adjacent elements, one 32-bit word of the transposed copy. Columns of the copy have
    # `words` words; values past the last row are 0.
    if ROWS:
        for i in tl.static_range(4):
            store_rows(q, quarters[i], 4 * word + i, column, rows, columns, E4M3, INTERPRETED)
    if COLUMNS:
        codes = tl.trans(four_codes(*quarters, E4M3, INTERPRETED))
        at = column.to(tl.int64)[:, None] * words + word[None, :]
        inside = (column < columns)[:, None] & (word < words)[None, :]
        tl.store(qt.to(tl.pointer_type(tl.int32)) + at, codes, mask=inside)


@triton.jit
def divide_by_block_scales(
    y, s, row, first, rows, grid_columns, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    BLOCK: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
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
    quarters, s, row, first, rows, grid_columns, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    BLOCK: tl.constexpr, QUARTER_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Apply `divide_by_block_scales` to the four quarters of a tile."""
    return [
        divide_by_block_scales(
            quarters[i], s, row + i, first, rows, grid_columns,
            FP8_MAX, POWER_OF_TWO, E8M0, BLOCK, QUARTER_R, TILE_C, INTERPRETED,
        )
        for i in (0, 1, 2, 3)
    ]  # fmt: skip


@triton.jit
def divide_by_row_scales(
    y, s, row, rows, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Divide a tile of whole rows by their scales; store the scales."""
    scale, inverse = scale_of(tl.max(magnitude(y), axis=1), FP8_MAX, POWER_OF_TWO, INTERPRETED)
    store_scale(s + row, scale, row < rows, E8M0)
    return y * inverse[:, None]


@triton.jit
def _stored(x, row, column, rows, columns):
    """Load elements of a row-major matrix, 0 outside of it."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0)


@triton.jit
def transpose_kernel(q, qt, rows, words, columns, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Transpose bytes [R,C] to columns of `words` 32-bit words, zero past the last row."""
    word = tl.program_id(0).to(tl.int64) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    row = 4 * word
    column = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    low = _stored(q, row, column, rows, columns).to(tl.int32)
    low |= _stored(q, row + 1, column, rows, columns).to(tl.int32) << 8
    high = _stored(q, row + 2, column, rows, columns).to(tl.int32)
    high |= _stored(q, row + 3, column, rows, columns).to(tl.int32) << 8
    codes = tl.trans(low | (high << 16))
    at = column.to(tl.int64)[:, None] * words + word[None, :]
    inside = (column < columns)[:, None] & (word < words)[None, :]
    tl.store(qt.to(tl.pointer_type(tl.int32)) + at, codes, mask=inside)


@triton.jit
def _glu_tile(
    gate, up, row, column, rows, columns, gate_r, gate_c, up_r, up_c,
    ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of activation(gate) · up, rounded to gate's dtype, 0 outside."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    g = to_float32(tl.load(gate + offsets(row, column, gate_r, gate_c), mask=inside, other=0.0), INTERPRETED)
    u = to_float32(tl.load(up + offsets(row, column, up_r, up_c), mask=inside, other=0.0), INTERPRETED)
    value, _ = factor_and_slope(g, ACTIVATION, False, INTERPRETED)
    return round_to((g * value) * u, gate.dtype.element_ty, INTERPRETED)


@triton.jit
def glu_flat_kernel(
    gate, up, h, rows, columns, gate_r, gate_c, up_r, up_c,
    ACTIVATION: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    out = _glu_tile(gate, up, row, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(h + row[:, None] * columns + column[None, :], out, mask=inside)


@triton.jit
def glu_blocks_kernel(
    gate, up, q, qt, s, rows, words, columns, grid_columns, gate_r, gate_c, up_r, up_c, ACTIVATION: tl.constexpr,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of whole scale blocks, as four quarters."""
    word = tl.program_id(0).to(tl.int64) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    row = 4 * word
    first = tl.program_id(1) * TILE_C
    column = first + tl.arange(0, TILE_C)
    quarters = [
        to_float32(
            _glu_tile(gate, up, row + i, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED),
            INTERPRETED,
        )
        for i in (0, 1, 2, 3)
    ]
    quarters = divide_quarters_by_block_scales(
        quarters, s, row, first, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK, TILE_R // 4, TILE_C,
        INTERPRETED,
    )  # fmt: skip
    store_quarters(q, qt, quarters, word, column, rows, columns, words, E4M3, ROWS, COLUMNS, INTERPRETED)


@triton.jit
def glu_rows_kernel(
    gate, up, q, s, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION: tl.constexpr, FP8_MAX: tl.constexpr,
    E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute TILE_R whole rows in registers; row-major output only."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = columns_from(0, TILE_C, VECTOR)
    out = _glu_tile(gate, up, row, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
    scaled = divide_by_row_scales(to_float32(out, INTERPRETED), s, row, rows, FP8_MAX, POWER_OF_TWO, E8M0, INTERPRETED)
    store_rows(q, scaled, row, column, rows, columns, E4M3, INTERPRETED)


@triton.jit
def glu_row_block_kernel(
    gate, up, h, q, qt, s, rows, words, columns, gate_r, gate_c, up_r, up_c, ACTIVATION: tl.constexpr,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute TILE_R rows of any length: h with its row maxima, then the cast of the stored h."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    lanes = tl.arange(0, TILE_C)
    largest = tl.zeros((TILE_R, TILE_C // 8), tl.int32)  # per eight columns; one per column needs too many registers
    for start in range(0, columns, TILE_C):
        column = start + lanes
        out = _glu_tile(gate, up, row, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(h + row[:, None] * columns + column[None, :], out, mask=inside)
        size = tl.reshape(magnitude(to_float32(out, INTERPRETED)), (TILE_R, TILE_C // 8, 8))
        largest = tl.maximum(largest, tl.max(size, axis=2))
    scale, inverse = scale_of(tl.max(largest, axis=1), FP8_MAX, POWER_OF_TWO, INTERPRETED)
    store_scale(s + row, scale, row < rows, E8M0)
    inverses = split_by_4(inverse, TILE_R)
    word = tl.program_id(0).to(tl.int64) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    row = 4 * word
    tl.debug_barrier()  # other threads read the stored h below
    for start in range(0, columns, TILE_C):
        column = start + lanes
        quarters = [
            to_float32(_stored(h, row + i, column, rows, columns), INTERPRETED) * inverses[i][:, None]
            for i in (0, 1, 2, 3)
        ]
        store_quarters(q, qt, quarters, word, column, rows, columns, words, E4M3, ROWS, COLUMNS, INTERPRETED)


@triton.jit
def glu_backward_kernel(
    grad, gate, up, dgate, dup, rows, columns, grad_r, grad_c, gate_r, gate_c, up_r, up_c, out_r,
    ACTIVATION: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    upstream = to_float32(tl.load(grad + offsets(row, column, grad_r, grad_c), mask=inside, other=0.0), INTERPRETED)
    g = to_float32(tl.load(gate + offsets(row, column, gate_r, gate_c), mask=inside, other=0.0), INTERPRETED)
    u = to_float32(tl.load(up + offsets(row, column, up_r, up_c), mask=inside, other=0.0), INTERPRETED)
    value, slope = factor_and_slope(g, ACTIVATION, True, INTERPRETED)
    where = row[:, None] * out_r + column[None, :]
    tl.store(dgate + where, round_to((upstream * u) * slope, dgate.dtype.element_ty, INTERPRETED), mask=inside)
    tl.store(dup + where, round_to(upstream * (g * value), dup.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def _load(x, row, column, inside, stride_r, stride_c, INTERPRETED: tl.constexpr):
    return to_float32(tl.load(x + offsets(row, column, stride_r, stride_c), mask=inside, other=0.0), INTERPRETED)


@triton.jit
def _scaled(
    values, r, weight, bias, column, columns, dtype: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return values · rstd · weight + bias, rounded to `dtype`."""
    w = to_float32(tl.load(weight + column, mask=column < columns, other=0.0), INTERPRETED)
    if OFFSET:
        w = 1.0 + w
    y = (values * r[:, None]) * w[None, :]
    if BIAS:
        y = y + to_float32(tl.load(bias + column, mask=column < columns, other=0.0), INTERPRETED)[None, :]
    return round_to(y, dtype, INTERPRETED)


@triton.jit
def _divided(sums, count):
    return tl.math.div_rn(sums, tl.zeros_like(sums) + count)


@triton.jit
def _rstd_of(squares, count, eps):
    root = tl.sqrt_rn(_divided(squares, count) + eps)
    return tl.math.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def norm_rows_kernel(
    x, weight, bias, y, q, s, mean, rstd, rows, columns, grid_columns, stride_r, stride_c, eps, count,
    CENTER: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, OUTPUT: tl.constexpr, FP8_MAX: tl.constexpr,
    E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr, TILE_R: tl.constexpr,
    TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Normalize TILE_R whole rows in registers; row-major output only."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = columns_from(0, TILE_C, VECTOR)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = _load(x, row, column, inside, stride_r, stride_c, INTERPRETED)
    if CENTER:
        m = _divided(row_sum(values, TILE_R, TILE_C), count)
        tl.store(mean + row, m, mask=row < rows)
        values = tl.where(inside, values - m[:, None], 0.0)
    r = _rstd_of(row_sum(values * values, TILE_R, TILE_C), count, eps)
    tl.store(rstd + row, r, mask=row < rows)
    r = tl.where(row < rows, r, 0.0)  # avoids NaN beyond the last row
    out = _scaled(values, r, weight, bias, column, columns, x.dtype.element_ty, OFFSET, BIAS, INTERPRETED)
    if OUTPUT == PLAIN:
        tl.store(y + row[:, None] * columns + column[None, :], out, mask=inside)
    out = to_float32(out, INTERPRETED)
    if BIAS:
        out = tl.where(inside, out, 0.0)
    if OUTPUT == BY_ROW:
        scaled = divide_by_row_scales(out, s, row, rows, FP8_MAX, POWER_OF_TWO, E8M0, INTERPRETED)
        store_rows(q, scaled, row, column, rows, columns, E4M3, INTERPRETED)
    elif OUTPUT == BY_BLOCK:
        scaled = divide_by_block_scales(
            out, s, row, 0, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK, TILE_R, TILE_C, INTERPRETED
        )
        store_rows(q, scaled, row, column, rows, columns, E4M3, INTERPRETED)


@triton.jit
def _out_tile(
    x, weight, bias, m, r, row, column, rows, columns, stride_r, stride_c,
    CENTER: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of rounded y from row statistics, as float32, 0 outside the matrix."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = _load(x, row, column, inside, stride_r, stride_c, INTERPRETED)
    if CENTER:
        values = values - m[:, None]
    out = _scaled(values, r, weight, bias, column, columns, x.dtype.element_ty, OFFSET, BIAS, INTERPRETED)
    out = to_float32(out, INTERPRETED)
    return tl.where(inside, out, 0.0) if BIAS else out


@triton.jit
def norm_row_block_kernel(
    x, weight, bias, q, qt, s, mean, rstd, rows, words, columns, grid_columns, stride_r, stride_c, eps, count,
    CENTER: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, OUTPUT: tl.constexpr, FP8_MAX: tl.constexpr,
    E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Normalize TILE_R rows of any length in several passes; row-major output, transposed, or both."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    lanes = tl.arange(0, TILE_C)
    sums = tl.zeros((TILE_R, TILE_C // 8), tl.float64)
    for start in range(0, columns, TILE_C):
        column = start + lanes
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        values = _load(x, row, column, inside, stride_r, stride_c, INTERPRETED)
        sums += sums_of_8(values if CENTER else values * values, TILE_R, TILE_C)
    r = tl.sum(sums, axis=1).to(tl.float32)
    m = _divided(r, count) if CENTER else r
    if CENTER:
        tl.store(mean + row, m, mask=row < rows)
        sums = tl.zeros((TILE_R, TILE_C // 8), tl.float64)
        for start in range(0, columns, TILE_C):
            column = start + lanes
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            values = tl.where(inside, _load(x, row, column, inside, stride_r, stride_c, INTERPRETED) - m[:, None], 0.0)
            sums += sums_of_8(values * values, TILE_R, TILE_C)
        r = tl.sum(sums, axis=1).to(tl.float32)
    r = _rstd_of(r, count, eps)
    tl.store(rstd + row, r, mask=row < rows)
    r = tl.where(row < rows, r, 0.0)  # avoids NaN beyond the last row
    inverse = r
    if OUTPUT == BY_ROW:
        largest = tl.zeros((TILE_R, TILE_C), tl.int32)
        for start in range(0, columns, TILE_C):
            out = _out_tile(
                x, weight, bias, m, r, row, start + lanes, rows, columns, stride_r, stride_c,
                CENTER, OFFSET, BIAS, INTERPRETED,
            )  # fmt: skip
            largest = tl.maximum(largest, magnitude(out))
        scale, inverse = scale_of(tl.max(largest, axis=1), FP8_MAX, POWER_OF_TWO, INTERPRETED)
        store_scale(s + row, scale, row < rows, E8M0)
    rs, means, inverses = split_by_4(r, TILE_R), split_by_4(m, TILE_R), split_by_4(inverse, TILE_R)
    word = tl.program_id(0).to(tl.int64) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    row = 4 * word
    for start in range(0, columns, TILE_C):
        column = start + lanes
        quarters = [
            _out_tile(
                x, weight, bias, means[i], rs[i], row + i, column, rows, columns, stride_r, stride_c,
                CENTER, OFFSET, BIAS, INTERPRETED,
            )
            for i in (0, 1, 2, 3)
        ]  # fmt: skip
        if OUTPUT == BY_ROW:
            quarters = [quarters[i] * inverses[i][:, None] for i in (0, 1, 2, 3)]
        else:
            quarters = divide_quarters_by_block_scales(
                quarters, s, row, start, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK,
                TILE_R // 4, TILE_C, INTERPRETED,
            )  # fmt: skip
        store_quarters(q, qt, quarters, word, column, rows, columns, words, E4M3, ROWS, COLUMNS, INTERPRETED)


@triton.jit
def _mean_of(values, count, COLUMNS: tl.constexpr):
    return _divided(tl.sum(row_sum(tl.reshape(values, (1, COLUMNS)), 1, COLUMNS), axis=0), count)


@triton.jit
def norm_backward_kernel(
    grad, x, weight, rstd, mean, dx, partial_weight, partial_bias, rows, columns, grad_r, grad_c, stride_r, stride_c,
    count, CENTER: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, DX: tl.constexpr, SUMS: tl.constexpr,
    ROW_BLOCK: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Process ROW_BLOCK rows in order, with the next one prefetched: dx (of whole rows) and partial column sums."""
    first = tl.program_id(0).to(tl.int64) * ROW_BLOCK
    column = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    in_row = column < columns
    w = to_float32(tl.load(weight + column, mask=in_row, other=0.0), INTERPRETED)
    if OFFSET:
        w = 1.0 + w
    dweight = tl.zeros((TILE_C,), tl.float32)
    dbias = tl.zeros((TILE_C,), tl.float32)
    last = tl.minimum(first + ROW_BLOCK, rows)
    end = tl.where(first < last, columns, 0)
    next_g = tl.load(grad + first * grad_r + column * grad_c, mask=column < end, other=0.0)
    next_x = tl.load(x + first * stride_r + column * stride_c, mask=column < end, other=0.0)
    for i in range(ROW_BLOCK):
        row = first + i
        g = to_float32(next_g, INTERPRETED)
        values = to_float32(next_x, INTERPRETED)
        inside = column < end
        end = tl.where(row + 1 < last, columns, 0)
        next_g = tl.load(grad + (row + 1) * grad_r + column * grad_c, mask=column < end, other=0.0)
        next_x = tl.load(x + (row + 1) * stride_r + column * stride_c, mask=column < end, other=0.0)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        if CENTER:
            values = tl.where(in_row, values - tl.load(mean + row, mask=row < rows, other=0.0), 0.0)
        normalized = values * r
        if DX:
            weighted = g * w
            along = _mean_of(weighted * normalized, count, TILE_C)
            if CENTER:
                weighted = weighted - _mean_of(weighted, count, TILE_C)
            out = (weighted - normalized * along) * r
            tl.store(dx + row * columns + column, round_to(out, dx.dtype.element_ty, INTERPRETED), mask=inside)
        if SUMS:
            dweight += g * normalized
            if BIAS:
                dbias += g
    if SUMS:
        part = tl.program_id(0).to(tl.int64) * columns + column
        tl.store(partial_weight + part, dweight, mask=in_row)
        if BIAS:
            tl.store(partial_bias + part, dbias, mask=in_row)


@triton.jit
def column_sums_kernel(
    partial, sums, parts, columns, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Sum all row blocks in float64 and round to the weight's dtype."""
    column = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    total = tl.zeros((TILE_C,), tl.float64)
    for start in range(0, parts, TILE_R):
        part = start + tl.arange(0, TILE_R).to(tl.int64)
        inside = (part < parts)[:, None] & (column < columns)[None, :]
        values = tl.load(partial + part[:, None] * columns + column[None, :], mask=inside, other=0.0)
        total += tl.sum(values.to(tl.float64), axis=0)
    out = round_to(total.to(tl.float32), sums.dtype.element_ty, INTERPRETED)
    tl.store(sums + column, out, mask=column < columns)
