"""Device code of the quantize kernels; `triton` selects and launches them.

A tile consists of four *quarters* a, b, c and d: its rows 4w, 4w+1, 4w+2 and 4w+3. The FP8 codes of four vertically
adjacent elements, held by one thread, form one 32-bit word of the transposed copy, which is stored in words instead of
bytes: half the instructions, and no vectorized transposed one-byte store, which Triton miscompiles beside some
reductions (triton-lang/triton issue 11111). All loads precede the first store: a compiler may not move loads over it.

The leading dimension of the transposed copy is rounded up to 16 rows and zero-padded: words never straddle columns, and
columns start at addresses that matrix units can read.

The cast walks tiles in reverse order, so it starts with the data that the amax pass left in L2.

With a computed amax there is no clamp: |x| ≤ amax, so x · (1/s) exceeds the largest FP8 value by a rounding error at
most, and the cast rounds that down. With a precomputed amax or scale, the cast instruction saturates larger values, and
non-finite values become NaN.

Compile-time arguments: FOLD 0 none, 1 by row, 2 by column; PRECOMPUTED 0 nothing, 1 amax, 2 scales; AXIS along which
scales vary: 0 none (one scale), 1 rows, 2 columns; ROWS and COLUMNS: memory orders to write.
"""

import triton
import triton.language as tl

from octavo.kernels.primitives import (
    INFINITY_BITS,
    ONE_BITS,
    columns_from,
    four_codes,
    magnitude,
    reciprocal,
    scale_of,
    store_scale,
    to_fp8,
)


@triton.jit
def tile_of(program, columns, TILE_C: tl.constexpr):
    """Row and column of a tile, in row-major order."""
    across = tl.maximum(tl.cdiv(columns, TILE_C), 1)
    return program // across, program % across


@triton.jit
def indices(tile, EXTENT: tl.constexpr):
    """Return the EXTENT indices of a tile."""
    return tile.to(tl.int64) * EXTENT + tl.arange(0, EXTENT)


@triton.jit
def column_indices(first, EXTENT: tl.constexpr, x):
    """Return EXTENT column indices; a thread holds 16 bytes of x."""
    return columns_from(first, EXTENT, 128 // x.dtype.element_ty.primitive_bitwidth).to(tl.int64)


@triton.jit
def _load(x, row, column, rows, columns, stride_r, stride_c, EVICT: tl.constexpr):
    """Load elements as float32, zero outside the matrix."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = x + row[:, None] * stride_r + column[None, :] * stride_c
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def load4(x, row, column, rows, columns, stride_r, stride_c, EVICT: tl.constexpr):
    """Load the four quarters of a tile; `row` are the rows of quarter a. EVICT: what caches do with them."""
    a = _load(x, row, column, rows, columns, stride_r, stride_c, EVICT)
    b = _load(x, row + 1, column, rows, columns, stride_r, stride_c, EVICT)
    c = _load(x, row + 2, column, rows, columns, stride_r, stride_c, EVICT)
    d = _load(x, row + 3, column, rows, columns, stride_r, stride_c, EVICT)
    return a, b, c, d


@triton.jit
def _times_rows(values, fold, row, rows):
    return values * tl.load(fold + row, mask=row < rows, other=0.0)[:, None]


@triton.jit
def fold4(a, b, c, d, fold, row, column, rows, columns, FOLD: tl.constexpr):
    """Multiply quarters by their fold factors."""
    if FOLD == 1:
        a = _times_rows(a, fold, row, rows)
        b = _times_rows(b, fold, row + 1, rows)
        c = _times_rows(c, fold, row + 2, rows)
        d = _times_rows(d, fold, row + 3, rows)
    elif FOLD == 2:
        factor = tl.load(fold + column, mask=column < columns, other=0.0)[None, :]
        a, b, c, d = a * factor, b * factor, c * factor, d * factor
    return a, b, c, d


@triton.jit
def _largest(a, b, c, d):
    """Elementwise amax of four quarters."""
    return tl.maximum(tl.maximum(magnitude(a), magnitude(b)), tl.maximum(magnitude(c), magnitude(d)))


@triton.jit
def scaled(values, inverse, FP8_MAX: tl.constexpr, PRECOMPUTED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Values / scale, ready for the cast."""
    result = values * inverse
    if PRECOMPUTED != 0:
        if INTERPRETED:
            finite = (magnitude(values) < INFINITY_BITS) & (inverse == inverse)
            cut = tl.minimum(tl.maximum(result, -FP8_MAX), FP8_MAX)
            result = tl.where(finite, cut, float("nan"))
        else:
            result = tl.math.fma(values, 0.0, result)  # NaN where values is not finite, else unchanged
    return result


@triton.jit
def _store(
    q, values, row, column, rows, columns, E4M3: tl.constexpr, INTERPRETED: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    codes = to_fp8(values, q.dtype.element_ty, E4M3, INTERPRETED)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(q + row[:, None] * columns + column[None, :], codes, mask=inside, cache_modifier=CACHE)


@triton.jit
def store4(
    q, q_t, a, b, c, d, word, column, rows, columns, padded_rows,
    E4M3: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Store codes row-major in q, column-major in q_t (`padded_rows` bytes a column); `word` = row / 4."""
    row = 4 * word
    if ROWS:
        _store(q, a, row, column, rows, columns, E4M3, INTERPRETED, CACHE)
        _store(q, b, row + 1, column, rows, columns, E4M3, INTERPRETED, CACHE)
        _store(q, c, row + 2, column, rows, columns, E4M3, INTERPRETED, CACHE)
        _store(q, d, row + 3, column, rows, columns, E4M3, INTERPRETED, CACHE)
    if COLUMNS:
        words = tl.trans(four_codes(a, b, c, d, E4M3, INTERPRETED))
        at = q_t.to(tl.pointer_type(tl.int32)) + column[:, None] * (padded_rows // 4) + word[None, :]
        inside = (column < columns)[:, None] & (word < padded_rows // 4)[None, :]
        tl.store(at, words, mask=inside, cache_modifier=CACHE)


@triton.jit
def _scale_and_inverse(
    bits, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, PRECOMPUTED: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Compute the scale and its inverse from float32 bits of an amax, or of a precomputed scale."""
    if PRECOMPUTED == 2:
        scale = bits.to(tl.float32, bitcast=True)
        inverse = reciprocal(scale, INTERPRETED)
    else:
        scale, inverse = scale_of(bits, FP8_MAX, POWER_OF_TWO, INTERPRETED)
    return scale, inverse


@triton.jit
def _block_inverse(
    largest, s, precomputed, block_row, block_column, grid_rows, grid_columns,
    FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, PRECOMPUTED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store the scales of the R × C blocks of `largest` and return their inverses, broadcast over the elements."""
    DOWN: tl.constexpr = largest.shape[0] // R
    ACROSS: tl.constexpr = largest.shape[1] // C
    at = block_row[:, None] * grid_columns + block_column[None, :]
    inside = (block_row < grid_rows)[:, None] & (block_column < grid_columns)[None, :]
    if PRECOMPUTED != 0:
        bits = tl.load(precomputed + at, mask=inside, other=ONE_BITS)
    else:
        bits = tl.max(tl.max(tl.reshape(largest, (DOWN, R, ACROSS, C)), axis=3), axis=1)
    scale, inverse = _scale_and_inverse(bits, FP8_MAX, POWER_OF_TWO, PRECOMPUTED, INTERPRETED)
    if PRECOMPUTED != 2:
        store_scale(s + at, scale, inside, E8M0)
    spread = tl.broadcast_to(inverse[:, None, :, None], (DOWN, R, ACROSS, C))
    return tl.reshape(spread, (DOWN * R, ACROSS * C))


@triton.jit
def _quantized_blocks(
    a, b, c, d, q, q_t, s, precomputed, tile_row, word, column, block_column, rows, columns, padded_rows, grid_columns,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    PRECOMPUTED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, TILE_R: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of whole R × C blocks: store scales and codes."""
    row = 4 * word
    if R == 1:
        ia = _block_inverse(
            magnitude(a), s, precomputed, row, block_column, rows, grid_columns,
            FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, 1, C, INTERPRETED,
        )  # fmt: skip
        ib = _block_inverse(
            magnitude(b), s, precomputed, row + 1, block_column, rows, grid_columns,
            FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, 1, C, INTERPRETED,
        )  # fmt: skip
        ic = _block_inverse(
            magnitude(c), s, precomputed, row + 2, block_column, rows, grid_columns,
            FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, 1, C, INTERPRETED,
        )  # fmt: skip
        id = _block_inverse(
            magnitude(d), s, precomputed, row + 3, block_column, rows, grid_columns,
            FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, 1, C, INTERPRETED,
        )  # fmt: skip
    else:
        ia = _block_inverse(
            _largest(a, b, c, d), s, precomputed, indices(tile_row, TILE_R // R), block_column, tl.cdiv(rows, R),
            grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, R // 4, C, INTERPRETED,
        )  # fmt: skip
        ib, ic, id = ia, ia, ia
    a, b = scaled(a, ia, FP8_MAX, PRECOMPUTED, INTERPRETED), scaled(b, ib, FP8_MAX, PRECOMPUTED, INTERPRETED)
    c, d = scaled(c, ic, FP8_MAX, PRECOMPUTED, INTERPRETED), scaled(d, id, FP8_MAX, PRECOMPUTED, INTERPRETED)
    store4(q, q_t, a, b, c, d, word, column, rows, columns, padded_rows, E4M3, ROWS, COLUMNS, INTERPRETED, "")


@triton.jit
def blocks_kernel(
    x, rows, columns, padded_rows, stride_r, stride_c,
    fold, precomputed, q, q_t, s, grid_columns, fold_t, s_t, grid_columns_t,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    PRECOMPUTED: tl.constexpr,
    FOLD: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PAIR: tl.constexpr, FOLD_T: tl.constexpr, R_T: tl.constexpr, C_T: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Quantize in one pass: a TILE_R × TILE_C tile contains whole scale blocks, R × C (in a pair also R_T × C_T)."""
    tile_row, tile_column = tile_of(tl.program_id(0), columns, TILE_C)
    word, column = indices(tile_row, TILE_R // 4), column_indices(tile_column * TILE_C, TILE_C, x)
    row = 4 * word
    a, b, c, d = load4(x, row, column, rows, columns, stride_r, stride_c, "")
    a1, b1, c1, d1 = fold4(a, b, c, d, fold, row, column, rows, columns, FOLD)
    _quantized_blocks(
        a1, b1, c1, d1, q, q_t, s, precomputed, tile_row, word, column, indices(tile_column, TILE_C // C),
        rows, columns, padded_rows, grid_columns,
        FP8_MAX, E4M3, POWER_OF_TWO, E8M0, PRECOMPUTED, R, C, TILE_R, ROWS, COLUMNS, INTERPRETED,
    )  # fmt: skip
    if PAIR:
        a, b, c, d = fold4(a, b, c, d, fold_t, row, column, rows, columns, FOLD_T)
        _quantized_blocks(
            a, b, c, d, q, q_t, s_t, precomputed, tile_row, word, column, indices(tile_column, TILE_C // C_T),
            rows, columns, padded_rows, grid_columns_t,
            FP8_MAX, E4M3, POWER_OF_TWO, E8M0, PRECOMPUTED, R_T, C_T, TILE_R, False, True, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _magnitude_bits(a, b, c, d, fold, row, column, rows, columns, FOLD: tl.constexpr, INTERPRETED: tl.constexpr):
    """Fold magnitudes and return their integer bits; the multiplication takes absolute values at no cost."""
    if FOLD == 1:
        a = a * tl.abs(tl.load(fold + row, mask=row < rows, other=0.0))[:, None]
        b = b * tl.abs(tl.load(fold + row + 1, mask=row + 1 < rows, other=0.0))[:, None]
        c = c * tl.abs(tl.load(fold + row + 2, mask=row + 2 < rows, other=0.0))[:, None]
        d = d * tl.abs(tl.load(fold + row + 3, mask=row + 3 < rows, other=0.0))[:, None]
    elif FOLD == 2:
        factor = tl.abs(tl.load(fold + column, mask=column < columns, other=0.0))[None, :]
        a, b, c, d = a * factor, b * factor, c * factor, d * factor
    if INTERPRETED:  # a CPU's NaN may be negative
        return magnitude(a), magnitude(b), magnitude(c), magnitude(d)
    return (
        a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True),
        c.to(tl.int32, bitcast=True), d.to(tl.int32, bitcast=True),
    )  # fmt: skip


@triton.jit
def _atomic_max_rows(sizes, amax, row, rows):
    tl.atomic_max(amax + row, tl.max(sizes, axis=1), mask=row < rows, sem="relaxed")


@triton.jit
def _tile_maxima(
    a, b, c, d, fold, largest, amax, row, column, rows, columns,
    FOLD: tl.constexpr, AXIS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Reduce the rows of a tile into `amax`, or take its magnitudes into `largest`, elementwise."""
    a, b, c, d = _magnitude_bits(a, b, c, d, fold, row, column, rows, columns, FOLD, INTERPRETED)
    if AXIS == 1:
        _atomic_max_rows(a, amax, row, rows)
        _atomic_max_rows(b, amax, row + 1, rows)
        _atomic_max_rows(c, amax, row + 2, rows)
        _atomic_max_rows(d, amax, row + 3, rows)
    else:
        largest = tl.maximum(largest, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
    return largest


@triton.jit
def _strip_maxima(largest, amax, column, columns, AXIS: tl.constexpr):
    """Reduce what a strip's tiles left in `largest` into `amax`, by column or by tensor."""
    if AXIS == 2:
        tl.atomic_max(amax + column, tl.max(largest, axis=0), mask=column < columns, sem="relaxed")
    elif AXIS == 0:
        tl.atomic_max(amax, tl.max(tl.max(largest, axis=0), axis=0), sem="relaxed")


@triton.jit
def maxima_kernel(
    x, rows, columns, stride_r, stride_c, fold, amax, fold_t, amax_t,
    FOLD: tl.constexpr, AXIS: tl.constexpr, PAIR: tl.constexpr, FOLD_T: tl.constexpr, AXIS_T: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Reduce amax by row, column or tensor into `amax`, and that of the second output into `amax_t` (int32 bits)."""
    # A program walks down a strip of TILES tiles and keeps its column maxima in registers: the reduction across threads
    # costs a quarter of the pass where each tile has its own (docs/performance.md).
    strip, tile_column = tile_of(tl.program_id(0), columns, TILE_C)
    column = column_indices(tile_column * TILE_C, TILE_C, x)
    largest = tl.zeros((TILE_R // 4, TILE_C), tl.int32)
    largest_t = largest
    for tile in range(TILES):
        row = 4 * indices(strip * TILES + tile, TILE_R // 4)
        a, b, c, d = load4(x, row, column, rows, columns, stride_r, stride_c, "")
        a, b, c, d = tl.abs(a), tl.abs(b), tl.abs(c), tl.abs(d)
        largest = _tile_maxima(
            a, b, c, d, fold, largest, amax, row, column, rows, columns, FOLD, AXIS, INTERPRETED
        )  # fmt: skip
        if PAIR:
            largest_t = _tile_maxima(
                a, b, c, d, fold_t, largest_t, amax_t, row, column, rows, columns, FOLD_T, AXIS_T, INTERPRETED
            )  # fmt: skip
    _strip_maxima(largest, amax, column, columns, AXIS)
    if PAIR:
        _strip_maxima(largest_t, amax_t, column, columns, AXIS_T)


@triton.jit
def inverse_at(
    amax, s, index, extent, writes,
    FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, PRECOMPUTED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return inverse scales from the amax or scales at `index`; only one of the tiles that read them stores scales."""
    bits = tl.load(amax + index, mask=index < extent, other=ONE_BITS)
    scale, inverse = _scale_and_inverse(bits, FP8_MAX, POWER_OF_TWO, PRECOMPUTED, INTERPRETED)
    if PRECOMPUTED != 2:
        if writes:
            store_scale(s + index, scale, index < extent, E8M0)
    return inverse


@triton.jit
def _cast_tile(
    a, b, c, d, amax, q, q_t, s, tile_row, tile_column, word, column, rows, columns, padded_rows,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    PRECOMPUTED: tl.constexpr,
    AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Cast a tile with precomputed amax or scales."""
    row = 4 * word
    if AXIS == 1:
        writes = tile_column == 0
        ia = inverse_at(amax, s, row, rows, writes, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, INTERPRETED)[:, None]
        ib = inverse_at(amax, s, row + 1, rows, writes, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, INTERPRETED)[:, None]
        ic = inverse_at(amax, s, row + 2, rows, writes, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, INTERPRETED)[:, None]
        id = inverse_at(amax, s, row + 3, rows, writes, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, INTERPRETED)[:, None]
    elif AXIS == 2:
        writes = tile_row == 0
        ia = inverse_at(amax, s, column, columns, writes, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, INTERPRETED)[
            None, :
        ]
        ib, ic, id = ia, ia, ia
    else:
        only, writes = tl.arange(0, 1), tile_row + tile_column == 0
        ia = inverse_at(amax, s, only, 1, writes, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, INTERPRETED)[:, None]
        ib, ic, id = ia, ia, ia
    a, b = scaled(a, ia, FP8_MAX, PRECOMPUTED, INTERPRETED), scaled(b, ib, FP8_MAX, PRECOMPUTED, INTERPRETED)
    c, d = scaled(c, ic, FP8_MAX, PRECOMPUTED, INTERPRETED), scaled(d, id, FP8_MAX, PRECOMPUTED, INTERPRETED)
    store4(q, q_t, a, b, c, d, word, column, rows, columns, padded_rows, E4M3, ROWS, COLUMNS, INTERPRETED, "")


@triton.jit
def cast_kernel(
    x, rows, columns, padded_rows, stride_r, stride_c, fold, amax, q, q_t, s, fold_t, amax_t, s_t,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    PRECOMPUTED: tl.constexpr,
    FOLD: tl.constexpr, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PAIR: tl.constexpr, FOLD_T: tl.constexpr, AXIS_T: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Cast a tile with amax from an earlier pass, or with precomputed amax or scales; last tiles first."""
    last_first = tl.num_programs(0) - 1 - tl.program_id(0)
    tile_row, tile_column = tile_of(last_first, columns, TILE_C)
    word, column = indices(tile_row, TILE_R // 4), column_indices(tile_column * TILE_C, TILE_C, x)
    row = 4 * word
    a, b, c, d = load4(x, row, column, rows, columns, stride_r, stride_c, "")
    a1, b1, c1, d1 = fold4(a, b, c, d, fold, row, column, rows, columns, FOLD)
    _cast_tile(
        a1, b1, c1, d1, amax, q, q_t, s, tile_row, tile_column, word, column, rows, columns, padded_rows,
        FP8_MAX, E4M3, POWER_OF_TWO, E8M0, PRECOMPUTED, AXIS, ROWS, COLUMNS, INTERPRETED,
    )  # fmt: skip
    if PAIR:
        a, b, c, d = fold4(a, b, c, d, fold_t, row, column, rows, columns, FOLD_T)
        _cast_tile(
            a, b, c, d, amax_t, q, q_t, s_t, tile_row, tile_column, word, column, rows, columns, padded_rows,
            FP8_MAX, E4M3, POWER_OF_TWO, E8M0, PRECOMPUTED, AXIS_T, False, True, INTERPRETED,
        )  # fmt: skip


# `rows_kernel` reads its block of rows twice: for the row maxima, then for the cast. The second pass is free if the
# block is still in L2, which all resident programs share, 50 MB on H100. A block of 32 rows × 14336 columns of bf16 is
# 0.9 MB, and fewer rows than the 32 bytes of a sector would split sectors of the transposed copy. Hence:
#
#     one program per multiprocessor    132 blocks instead of 528: 16 warps, of which a second program does not fit
#     second pass backwards             it starts with what was read last
#     evict first                       FP8 codes as they are stored, and X as it is read for the last time, give way to
#                                       what will be read again (`.cs`, L2::evict_first)
#
# Simulated (docs/log.md, `l2`), 16384 rows in both memory orders, bytes per element: 6.0 before; 4.0 with 4096 columns,
# 4.8 with 14336. With fewer than 100 blocks on H100, they have 16 or 8 rows, which split sectors, but occupy all
# multiprocessors. Rejected: fewer programs than multiprocessors, of which 66 without the marks still move 5.3 at 14336;
# a barrier between programs that share a block, which no interpreter of one program after the other can run.


@triton.jit
def row_inverse(largest, s, row, rows, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
                 INTERPRETED: tl.constexpr):  # fmt: skip
    """Store the scales of rows and return their inverses."""
    scale, inverse = scale_of(tl.max(largest, axis=1), FP8_MAX, POWER_OF_TWO, INTERPRETED)
    store_scale(s + row, scale, row < rows, E8M0)
    return inverse[:, None]


@triton.jit
def rows_kernel(
    x, rows, columns, padded_rows, stride_r, stride_c, fold, q, q_t, s,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    FOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Quantize TILE_R whole rows."""
    word = indices(tl.program_id(0), TILE_R // 4)
    row = 4 * word
    ma = tl.zeros((TILE_R // 4, TILE_C), tl.int32)
    mb, mc, md = ma, ma, ma
    for start in range(0, columns, TILE_C):
        column = column_indices(start, TILE_C, x)
        a, b, c, d = load4(x, row, column, rows, columns, stride_r, stride_c, "")
        a, b, c, d = fold4(a, b, c, d, fold, row, column, rows, columns, FOLD)
        ma, mb = tl.maximum(ma, magnitude(a)), tl.maximum(mb, magnitude(b))
        mc, md = tl.maximum(mc, magnitude(c)), tl.maximum(md, magnitude(d))
    ia = row_inverse(ma, s, row, rows, FP8_MAX, POWER_OF_TWO, E8M0, INTERPRETED)
    ib = row_inverse(mb, s, row + 1, rows, FP8_MAX, POWER_OF_TWO, E8M0, INTERPRETED)
    ic = row_inverse(mc, s, row + 2, rows, FP8_MAX, POWER_OF_TWO, E8M0, INTERPRETED)
    id = row_inverse(md, s, row + 3, rows, FP8_MAX, POWER_OF_TWO, E8M0, INTERPRETED)
    last = (tl.cdiv(columns, TILE_C) - 1) * TILE_C
    for back in range(0, columns, TILE_C):
        column = column_indices(last - back, TILE_C, x)
        a, b, c, d = load4(x, row, column, rows, columns, stride_r, stride_c, "evict_first")
        a, b, c, d = fold4(a, b, c, d, fold, row, column, rows, columns, FOLD)
        store4(
            q, q_t, a * ia, b * ib, c * ic, d * id, word, column, rows, columns, padded_rows,
            E4M3, ROWS, COLUMNS, INTERPRETED, ".cs",
        )  # fmt: skip
