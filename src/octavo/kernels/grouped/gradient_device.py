"""Device code that quantizes G of a grouped linear, in tiles over all rows: an expert may begin within one.

Maxima by expert and column are reduced in registers over a strip of tiles where the strip has the rows of one expert,
which all but E − 1 strips have; else each element goes to its maximum by itself.
"""

import triton
import triton.language as tl

from octavo.kernels.primitives import ONE_BITS, magnitude, scale_of
from octavo.kernels.quantize.device import column_indices, indices, inverse_at, load4, scaled, store4, tile_of


@triton.jit
def _experts_of(group, top, rows, EXTENT: tl.constexpr):
    """Return the expert of row `top`, and whether all of EXTENT rows from there on are of the same one."""
    first = tl.load(group + tl.minimum(top, rows - 1)).to(tl.int64)
    return first, tl.load(group + tl.minimum(top + EXTENT, rows) - 1).to(tl.int64) == first


@triton.jit
def _of_expert(values, group, first, alike, row, column, rows, columns, experts):
    """Load an element of [E,N] for each element of a tile: that of the row's expert; of no expert, of the last one."""
    # The cast takes no look at whether its rows are alike: the branch costs a program on each multiprocessor.
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if alike:
        of_one = values + tl.minimum(first, experts - 1) * columns + column
        loaded = tl.broadcast_to(tl.load(of_one, mask=column < columns, other=0.0)[None, :], inside.shape)
    else:
        expert = tl.load(group + row, mask=row < rows, other=0).to(tl.int64)
        at = values + tl.minimum(expert, experts - 1)[:, None] * columns + column[None, :]
        loaded = tl.load(at, mask=inside, other=0.0)
    return tl.where(inside, loaded, 0.0)


@triton.jit
def grouped_maxima_kernel(
    g, group, w_scale, x_scale, amax, amax_t, rows, columns, stride_r, stride_c, experts,
    BY_ROW: tl.constexpr, BY_EXPERT: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Reduce max |G · W's scales| by row into `amax`, and max |G · X's scales| by expert and column into `amax_t`."""
    strip, tile_column = tile_of(tl.program_id(0), columns, TILE_C)
    column = column_indices(tile_column * TILE_C, TILE_C, g)
    top = strip.to(tl.int64) * (TILES * TILE_R)
    first, alike = _experts_of(group, top, rows, TILES * TILE_R)
    largest = tl.zeros((TILE_R, TILE_C), tl.int32)
    for tile in range(TILES):
        row = top + tile * TILE_R + tl.arange(0, TILE_R)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(g + row[:, None] * stride_r + column[None, :] * stride_c, mask=inside, other=0.0)
        values = values.to(tl.float32)
        if BY_ROW:
            sizes = magnitude(values * _of_expert(w_scale, group, first, alike, row, column, rows, columns, experts))
            tl.atomic_max(amax + row, tl.max(sizes, axis=1), mask=row < rows, sem="relaxed")
        if BY_EXPERT:
            sizes = magnitude(values * tl.load(x_scale + row, mask=row < rows, other=0.0)[:, None])
            if alike:
                largest = tl.maximum(largest, sizes)
            else:
                expert = tl.load(group + row, mask=row < rows, other=0)
                at = amax_t + expert.to(tl.int64)[:, None] * columns + column[None, :]
                tl.atomic_max(at, sizes, mask=inside, sem="relaxed")
    if BY_EXPERT:
        if alike:
            at = amax_t + first * columns + column
            tl.atomic_max(at, tl.max(largest, axis=0), mask=column < columns, sem="relaxed")


@triton.jit
def expert_scales_kernel(
    amax_t, s_t, inverse_t, size, stored, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store the scales of the first `stored` of `size` maxima, and the inverses of all."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(amax_t + at, mask=at < size, other=ONE_BITS)
    scale, inverse = scale_of(bits, FP8_MAX, POWER_OF_TWO, INTERPRETED)
    tl.store(s_t + at, scale, mask=at < stored)
    tl.store(inverse_t + at, inverse, mask=at < size)


@triton.jit
def grouped_cast_kernel(
    g, group, w_scale, x_scale, amax, inverse_t, q, s, q_t, rows, columns, padded_rows, stride_r, stride_c, experts,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BY_ROW: tl.constexpr, BY_EXPERT: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Cast a tile by row (row-major) and by expert and column (column-major if TRANSPOSED); last tiles first."""
    tile_row, tile_column = tile_of(tl.num_programs(0) - 1 - tl.program_id(0), columns, TILE_C)
    word, column = indices(tile_row, TILE_R // 4), column_indices(tile_column * TILE_C, TILE_C, g)
    row = 4 * word
    quarters = load4(g, row, column, rows, columns, stride_r, stride_c, "")
    if BY_ROW:
        by_row = [
            scaled(
                quarters[i] * _of_expert(w_scale, group, 0, False, row + i, column, rows, columns, experts),
                inverse_at(
                    amax, s, row + i, rows, tile_column == 0, FP8_MAX, POWER_OF_TWO, False, 0, INTERPRETED
                )[:, None],
                FP8_MAX, 0, INTERPRETED,
            )
            for i in (0, 1, 2, 3)
        ]  # fmt: skip
        store4(q, q, by_row, word, column, rows, columns, padded_rows, E4M3, True, False, INTERPRETED, "")
    if BY_EXPERT:
        groups = experts + 1  # rows of no expert have inverses of their own
        quarters = [
            quarters[i] * tl.load(x_scale + (row + i), mask=row + i < rows, other=0.0)[:, None]
            * _of_expert(inverse_t, group, 0, False, row + i, column, rows, columns, groups)
            for i in (0, 1, 2, 3)
        ]  # fmt: skip
        store4(
            q_t, q_t, quarters, word, column, rows, columns, padded_rows, E4M3, not TRANSPOSED, TRANSPOSED, INTERPRETED,
            "",
        )  # fmt: skip


@triton.jit
def zero_tail_kernel(out, offsets, rows, columns, experts, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Store zeros in the rows of a contiguous matrix that belong to no expert."""
    end = tl.load(offsets + experts - 1)
    top = tl.program_id(0) * TILE_R
    if top + TILE_R > end:
        row = (top + tl.arange(0, TILE_R)).to(tl.int64)
        for first in range(0, columns, TILE_C):
            column = first + tl.arange(0, TILE_C)
            outside = ((row >= end) & (row < rows))[:, None] & (column < columns)[None, :]
            tl.store(out + row[:, None] * columns + column[None, :], 0.0, mask=outside)
