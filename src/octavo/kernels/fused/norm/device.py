"""Device code of the norms; `triton` launches it."""

import triton
import triton.language as tl

from octavo.kernels.fused.device import (
    BY_BLOCK,
    BY_ROW,
    PLAIN,
    VECTOR,
    divide_by_block_scales,
    divide_by_row_scales,
    divide_quarters_by_block_scales,
    offsets,
    round_to,
    row_sum,
    split_by_4,
    store_quarters,
    store_rows,
    sums_of_8,
    to_float32,
)  # fmt: skip
from octavo.kernels.primitives import columns_from, magnitude, scale_of, store_scale


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
    ra, rb, rc, rd = split_by_4(r, TILE_R)
    ma, mb, mc, md = split_by_4(m, TILE_R)
    ia, ib, ic, id = split_by_4(inverse, TILE_R)
    word = tl.program_id(0).to(tl.int64) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    row = 4 * word
    for start in range(0, columns, TILE_C):
        column = start + lanes
        a = _out_tile(
            x, weight, bias, ma, ra, row, column, rows, columns, stride_r, stride_c,
            CENTER, OFFSET, BIAS, INTERPRETED,
        )  # fmt: skip
        b = _out_tile(
            x, weight, bias, mb, rb, row + 1, column, rows, columns, stride_r, stride_c,
            CENTER, OFFSET, BIAS, INTERPRETED,
        )  # fmt: skip
        c = _out_tile(
            x, weight, bias, mc, rc, row + 2, column, rows, columns, stride_r, stride_c,
            CENTER, OFFSET, BIAS, INTERPRETED,
        )  # fmt: skip
        d = _out_tile(
            x, weight, bias, md, rd, row + 3, column, rows, columns, stride_r, stride_c,
            CENTER, OFFSET, BIAS, INTERPRETED,
        )  # fmt: skip
        if OUTPUT == BY_ROW:
            a, b, c, d = a * ia[:, None], b * ib[:, None], c * ic[:, None], d * id[:, None]
        else:
            a, b, c, d = divide_quarters_by_block_scales(
                a, b, c, d, s, row, start, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK,
                TILE_R // 4, TILE_C, INTERPRETED,
            )  # fmt: skip
        store_quarters(q, qt, a, b, c, d, word, column, rows, columns, words, E4M3, ROWS, COLUMNS, INTERPRETED)


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
