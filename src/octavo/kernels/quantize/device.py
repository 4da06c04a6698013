"""Device code of the quantize kernels; `triton` selects and launches them, docs/kernels.md explains them.

A tile consists of four *quarters*, a tuple: its rows 4w, 4w+1, 4w+2 and 4w+3. All loads precede the first store: a
compiler may not move loads over it.

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
    """Load the four quarters of a tile; `row` are the rows of the first one. EVICT: what caches do with them."""
    return [_load(x, row + i, column, rows, columns, stride_r, stride_c, EVICT) for i in (0, 1, 2, 3)]


@triton.jit
def _factor(fold, index, extent, ABS: tl.constexpr):
    factor = tl.load(fold + index, mask=index < extent, other=0.0)
    return tl.abs(factor) if ABS else factor


@triton.jit
def fold4(quarters, fold, row, column, rows, columns, FOLD: tl.constexpr, ABS: tl.constexpr = False):
    """Multiply quarters by fold factors, or (ABS) by the factors' magnitudes."""
    if FOLD == 1:
        quarters = [quarters[i] * _factor(fold, row + i, rows, ABS)[:, None] for i in (0, 1, 2, 3)]
    elif FOLD == 2:
        factor = _factor(fold, column, columns, ABS)[None, :]
        quarters = [quarter * factor for quarter in quarters]
    return quarters


@triton.jit
def _largest(a, b, c, d):
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
    q, q_t, quarters, word, column, rows, columns, padded_rows, E4M3: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Store codes row-major in q, column-major in q_t (`padded_rows` bytes a column); `word` = row / 4."""
    if ROWS:
        for i in tl.static_range(4):
            _store(q, quarters[i], 4 * word + i, column, rows, columns, E4M3, INTERPRETED, CACHE)
    if COLUMNS:
        words = tl.trans(four_codes(*quarters, E4M3, INTERPRETED))
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
    quarters, q, q_t, s, precomputed, tile_row, word, column, block_column, rows, columns, padded_rows, grid_columns,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    PRECOMPUTED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, TILE_R: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of whole R × C blocks: store scales and codes."""
    if R == 1:
        inverses = [
            _block_inverse(
                magnitude(quarters[i]), s, precomputed, 4 * word + i, block_column, rows, grid_columns,
                FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, 1, C, INTERPRETED,
            )
            for i in (0, 1, 2, 3)
        ]  # fmt: skip
    else:
        inverse = _block_inverse(
            _largest(*quarters), s, precomputed, indices(tile_row, TILE_R // R), block_column, tl.cdiv(rows, R),
            grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, R // 4, C, INTERPRETED,
        )  # fmt: skip
        inverses = [inverse for _ in (0, 1, 2, 3)]
    quarters = [scaled(quarters[i], inverses[i], FP8_MAX, PRECOMPUTED, INTERPRETED) for i in (0, 1, 2, 3)]
    store4(q, q_t, quarters, word, column, rows, columns, padded_rows, E4M3, ROWS, COLUMNS, INTERPRETED, "")


@triton.jit
def blocks_kernel(
    x, rows, columns, padded_rows, stride_r, stride_c, fold, precomputed, q, q_t, s, grid_columns, fold_t, s_t,
    grid_columns_t, FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    PRECOMPUTED: tl.constexpr, FOLD: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PAIR: tl.constexpr, FOLD_T: tl.constexpr, R_T: tl.constexpr, C_T: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Quantize in one pass: a TILE_R × TILE_C tile contains whole scale blocks, R × C (in a pair also R_T × C_T)."""
    tile_row, tile_column = tile_of(tl.program_id(0), columns, TILE_C)
    word, column = indices(tile_row, TILE_R // 4), column_indices(tile_column * TILE_C, TILE_C, x)
    row = 4 * word
    quarters = load4(x, row, column, rows, columns, stride_r, stride_c, "")
    _quantized_blocks(
        fold4(quarters, fold, row, column, rows, columns, FOLD), q, q_t, s, precomputed, tile_row, word, column,
        indices(tile_column, TILE_C // C), rows, columns, padded_rows, grid_columns,
        FP8_MAX, E4M3, POWER_OF_TWO, E8M0, PRECOMPUTED, R, C, TILE_R, ROWS, COLUMNS, INTERPRETED,
    )  # fmt: skip
    if PAIR:
        _quantized_blocks(
            fold4(quarters, fold_t, row, column, rows, columns, FOLD_T), q, q_t, s_t, precomputed, tile_row, word,
            column, indices(tile_column, TILE_C // C_T), rows, columns, padded_rows, grid_columns_t,
            FP8_MAX, E4M3, POWER_OF_TWO, E8M0, PRECOMPUTED, R_T, C_T, TILE_R, False, True, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _tile_maxima(
    quarters, fold, largest, amax, row, column, rows, columns,
    FOLD: tl.constexpr, AXIS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Reduce the rows of a tile of magnitudes into `amax`, or take them into `largest`, elementwise."""
    # Products of magnitudes are positive, so their bits sort at no cost; but a CPU's NaN may be negative.
    folded = fold4(quarters, fold, row, column, rows, columns, FOLD, True)
    sizes = [magnitude(size) if INTERPRETED else size.to(tl.int32, bitcast=True) for size in folded]
    if AXIS == 1:
        for i in tl.static_range(4):
            tl.atomic_max(amax + (row + i), tl.max(sizes[i], axis=1), mask=row + i < rows, sem="relaxed")
    else:
        a, b, c, d = sizes
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
        quarters = load4(x, row, column, rows, columns, stride_r, stride_c, "")
        sizes = [tl.abs(quarter) for quarter in quarters]
        largest = _tile_maxima(sizes, fold, largest, amax, row, column, rows, columns, FOLD, AXIS, INTERPRETED)
        if PAIR:
            largest_t = _tile_maxima(
                sizes, fold_t, largest_t, amax_t, row, column, rows, columns, FOLD_T, AXIS_T, INTERPRETED
            )
    _strip_maxima(largest, amax, column, columns, AXIS)
    if PAIR:
        _strip_maxima(largest_t, amax_t, column, columns, AXIS_T)


@triton.jit
def inverse_at(
    amax, s, index, extent, writes, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    PRECOMPUTED: tl.constexpr, INTERPRETED: tl.constexpr,
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
    quarters, amax, q, q_t, s, tile_row, tile_column, word, column, rows, columns, padded_rows, FP8_MAX: tl.constexpr,
    E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, PRECOMPUTED: tl.constexpr, AXIS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Cast a tile with precomputed amax or scales."""
    if AXIS == 1:
        writes = tile_column == 0
        inverses = [
            inverse_at(amax, s, 4 * word + i, rows, writes, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, INTERPRETED)
            for i in (0, 1, 2, 3)
        ]
        inverses = [inverse[:, None] for inverse in inverses]
    else:
        if AXIS == 2:
            index, extent, writes = column, columns, tile_row == 0
        else:
            index, extent, writes = tl.arange(0, 1), 1, tile_row + tile_column == 0
        inverse = inverse_at(amax, s, index, extent, writes, FP8_MAX, POWER_OF_TWO, E8M0, PRECOMPUTED, INTERPRETED)
        inverses = [inverse[None, :] for _ in (0, 1, 2, 3)]
    quarters = [scaled(quarters[i], inverses[i], FP8_MAX, PRECOMPUTED, INTERPRETED) for i in (0, 1, 2, 3)]
    store4(q, q_t, quarters, word, column, rows, columns, padded_rows, E4M3, ROWS, COLUMNS, INTERPRETED, "")


@triton.jit
def cast_kernel(
    x, rows, columns, padded_rows, stride_r, stride_c, fold, amax, q, q_t, s, fold_t, amax_t, s_t,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    PRECOMPUTED: tl.constexpr, FOLD: tl.constexpr, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PAIR: tl.constexpr, FOLD_T: tl.constexpr, AXIS_T: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Cast a tile with amax from an earlier pass, or with precomputed amax or scales; last tiles first."""
    last_first = tl.num_programs(0) - 1 - tl.program_id(0)
    tile_row, tile_column = tile_of(last_first, columns, TILE_C)
    word, column = indices(tile_row, TILE_R // 4), column_indices(tile_column * TILE_C, TILE_C, x)
    row = 4 * word
    quarters = load4(x, row, column, rows, columns, stride_r, stride_c, "")
    _cast_tile(
        fold4(quarters, fold, row, column, rows, columns, FOLD), amax, q, q_t, s, tile_row, tile_column, word, column,
        rows, columns, padded_rows, FP8_MAX, E4M3, POWER_OF_TWO, E8M0, PRECOMPUTED, AXIS, ROWS, COLUMNS, INTERPRETED,
    )  # fmt: skip
    if PAIR:
        _cast_tile(
            fold4(quarters, fold_t, row, column, rows, columns, FOLD_T), amax_t, q, q_t, s_t, tile_row, tile_column,
            word, column, rows, columns, padded_rows,
            FP8_MAX, E4M3, POWER_OF_TWO, E8M0, PRECOMPUTED, AXIS_T, False, True, INTERPRETED,
        )  # fmt: skip


@triton.jit
def row_inverse(largest, s, row, rows, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
                 INTERPRETED: tl.constexpr):  # fmt: skip
    """Store the scales of rows and return their inverses."""
    scale, inverse = scale_of(tl.max(largest, axis=1), FP8_MAX, POWER_OF_TWO, INTERPRETED)
    store_scale(s + row, scale, row < rows, E8M0)
    return inverse[:, None]


@triton.jit
def rows_kernel(
    x, rows, columns, padded_rows, stride_r, stride_c, fold, q, q_t, s, FP8_MAX: tl.constexpr, E4M3: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, FOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Quantize TILE_R whole rows, read twice: backwards and evicted first for the cast (docs/kernels.md, "By row")."""
    word = indices(tl.program_id(0), TILE_R // 4)
    row = 4 * word
    zeros = tl.zeros((TILE_R // 4, TILE_C), tl.int32)
    largest = [zeros for _ in (0, 1, 2, 3)]
    for start in range(0, columns, TILE_C):
        column = column_indices(start, TILE_C, x)
        quarters = load4(x, row, column, rows, columns, stride_r, stride_c, "")
        quarters = fold4(quarters, fold, row, column, rows, columns, FOLD)
        largest = [tl.maximum(largest[i], magnitude(quarters[i])) for i in (0, 1, 2, 3)]
    inverses = [
        row_inverse(largest[i], s, row + i, rows, FP8_MAX, POWER_OF_TWO, E8M0, INTERPRETED) for i in (0, 1, 2, 3)
    ]
    last = (tl.cdiv(columns, TILE_C) - 1) * TILE_C
    for back in range(0, columns, TILE_C):
        column = column_indices(last - back, TILE_C, x)
        quarters = load4(x, row, column, rows, columns, stride_r, stride_c, "evict_first")
        quarters = fold4(quarters, fold, row, column, rows, columns, FOLD)
        quarters = [quarters[i] * inverses[i] for i in (0, 1, 2, 3)]
        store4(q, q_t, quarters, word, column, rows, columns, padded_rows, E4M3, ROWS, COLUMNS, INTERPRETED, ".cs")
