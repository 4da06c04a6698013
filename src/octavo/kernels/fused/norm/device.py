"""Kernels of the norms; see `triton` for which runs when and what it costs."""

import triton
import triton.language as tl

from octavo.kernels.fused.device import (
    AMAX,
    BY_BLOCK,
    BY_ROW,
    over_block_scales,
    over_row_scales,
    place,
    raise_amax,
    rounded,
    row_sum,
    store_rows,
    store_strands,
    strands_of,
    strands_over_block_scales,
    sums_of_8,
    widened,
)  # fmt: skip
from octavo.kernels.primitives import magnitude, scale_of, store_scale


@triton.jit
def _total(
    x, residual, total, row, column, columns, inside, stride_r, stride_c, residual_r, residual_c,
    RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of x, or of x + residual rounded to x's dtype and written to `total`; float32."""
    values = widened(tl.load(x + place(row, column, stride_r, stride_c), mask=inside, other=0.0), INTERPRETED)
    if RESIDUAL:
        added = tl.load(residual + place(row, column, residual_r, residual_c), mask=inside, other=0.0)
        sums = rounded(values + widened(added, INTERPRETED), x.dtype.element_ty, INTERPRETED)
        tl.store(total + row[:, None] * columns + column[None, :], sums, mask=inside)
        values = widened(sums, INTERPRETED)
    return values


@triton.jit
def _scaled(
    values, r, weight, bias, column, columns, dtype: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The product values · rstd · weight, plus bias, in `dtype`."""
    w = widened(tl.load(weight + column, mask=column < columns, other=0.0), INTERPRETED)
    if OFFSET:
        w = 1.0 + w
    y = (values * r[:, None]) * w[None, :]
    if BIAS:
        y = y + widened(tl.load(bias + column, mask=column < columns, other=0.0), INTERPRETED)[None, :]
    return rounded(y, dtype, INTERPRETED)


@triton.jit
def _divided(sums, count):
    return tl.math.div_rn(sums, tl.zeros_like(sums) + count)


@triton.jit
def _rstd_of(squares, count, eps):
    root = tl.sqrt_rn(_divided(squares, count) + eps)
    return tl.math.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def norm_rows_kernel(
    x, residual, weight, bias, total, y, q, s, amax, mean, rstd, rows, columns, grid_columns,
    stride_r, stride_c, residual_r, residual_c, eps, count,
    CENTER: tl.constexpr, OFFSET: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr,
    FORM: tl.constexpr, FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    BLOCK: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """TILE_R whole rows in registers; row-major output only."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.arange(0, TILE_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = _total(
        x, residual, total, row, column, columns, inside, stride_r, stride_c, residual_r, residual_c, RESIDUAL,
        INTERPRETED,
    )  # fmt: skip
    if CENTER:
        m = _divided(row_sum(values, TILE_R, TILE_C), count)
        tl.store(mean + row, m, mask=row < rows)
        values = tl.where(inside, values - m[:, None], 0.0)
    r = _rstd_of(row_sum(values * values, TILE_R, TILE_C), count, eps)
    tl.store(rstd + row, r, mask=row < rows)
    r = tl.where(row < rows, r, 0.0)  # so that nothing beyond the last row is NaN
    out = _scaled(values, r, weight, bias, column, columns, x.dtype.element_ty, OFFSET, BIAS, INTERPRETED)
    if KEEP:
        tl.store(y + row[:, None] * columns + column[None, :], out, mask=inside)
    out = widened(out, INTERPRETED)
    if BIAS:
        out = tl.where(inside, out, 0.0)
    if FORM == AMAX:
        raise_amax(amax, out)
    elif FORM == BY_ROW:
        scaled = over_row_scales(out, s, row, rows, FP8_MAX, POWER_OF_TWO, E8M0, INTERPRETED)
        store_rows(q, scaled, row, column, rows, columns, E4M3, INTERPRETED)
    elif FORM == BY_BLOCK:
        scaled = over_block_scales(
            out, s, row, 0, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK, TILE_R, TILE_C, INTERPRETED
        )
        store_rows(q, scaled, row, column, rows, columns, E4M3, INTERPRETED)


@triton.jit
def _out_tile(
    x, y, weight, bias, m, r, row, column, rows, columns, stride_r, stride_c,
    CENTER: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile of y from the statistics of its rows, rounded, in float32, 0 outside the matrix; written where kept."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = widened(tl.load(x + place(row, column, stride_r, stride_c), mask=inside, other=0.0), INTERPRETED)
    if CENTER:
        values = values - m[:, None]
    out = _scaled(values, r, weight, bias, column, columns, x.dtype.element_ty, OFFSET, BIAS, INTERPRETED)
    if KEEP:
        tl.store(y + row[:, None] * columns + column[None, :], out, mask=inside)
    out = widened(out, INTERPRETED)
    return tl.where(inside, out, 0.0) if BIAS else out


@triton.jit
def norm_band_kernel(
    x, residual, weight, bias, total, y, q, qt, s, mean, rstd, rows, words, columns, grid_columns,
    stride_r, stride_c, residual_r, residual_c, eps, count,
    CENTER: tl.constexpr, OFFSET: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr,
    FORM: tl.constexpr, FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A band of TILE_R rows of any length in several passes; row-major output, transposed, or both."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    lanes = tl.arange(0, TILE_C)
    sums = tl.zeros((TILE_R, TILE_C // 8), tl.float64)
    for start in range(0, columns, TILE_C):
        column = start + lanes
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        values = _total(
            x, residual, total, row, column, columns, inside, stride_r, stride_c, residual_r, residual_c, RESIDUAL,
            INTERPRETED,
        )  # fmt: skip
        sums += sums_of_8(values if CENTER else values * values, TILE_R, TILE_C)
    r = tl.sum(sums, axis=1).to(tl.float32)
    if RESIDUAL:
        tl.debug_barrier()  # what one thread wrote of the sum, another reads below
        x, stride_r, stride_c = total, columns, 1
    m = _divided(r, count) if CENTER else r
    if CENTER:
        tl.store(mean + row, m, mask=row < rows)
        sums = tl.zeros((TILE_R, TILE_C // 8), tl.float64)
        for start in range(0, columns, TILE_C):
            column = start + lanes
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            values = tl.load(x + place(row, column, stride_r, stride_c), mask=inside, other=0.0)
            values = tl.where(inside, widened(values, INTERPRETED) - m[:, None], 0.0)
            sums += sums_of_8(values * values, TILE_R, TILE_C)
        r = tl.sum(sums, axis=1).to(tl.float32)
    r = _rstd_of(r, count, eps)
    tl.store(rstd + row, r, mask=row < rows)
    r = tl.where(row < rows, r, 0.0)  # so that nothing beyond the last row is NaN
    inverse = r
    if FORM == BY_ROW:
        largest = tl.zeros((TILE_R, TILE_C), tl.int32)
        for start in range(0, columns, TILE_C):
            out = _out_tile(
                x, y, weight, bias, m, r, row, start + lanes, rows, columns, stride_r, stride_c,
                CENTER, OFFSET, BIAS, False, INTERPRETED,
            )  # fmt: skip
            largest = tl.maximum(largest, magnitude(out))
        scale, inverse = scale_of(tl.max(largest, axis=1), FP8_MAX, POWER_OF_TWO, INTERPRETED)
        store_scale(s + row, scale, row < rows, E8M0)
    ra, rb, rc, rd = strands_of(r, TILE_R)
    ma, mb, mc, md = strands_of(m, TILE_R)
    ia, ib, ic, id = strands_of(inverse, TILE_R)
    word = tl.program_id(0).to(tl.int64) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    row = 4 * word
    for start in range(0, columns, TILE_C):
        column = start + lanes
        a = _out_tile(
            x, y, weight, bias, ma, ra, row, column, rows, columns, stride_r, stride_c,
            CENTER, OFFSET, BIAS, KEEP, INTERPRETED,
        )  # fmt: skip
        b = _out_tile(
            x, y, weight, bias, mb, rb, row + 1, column, rows, columns, stride_r, stride_c,
            CENTER, OFFSET, BIAS, KEEP, INTERPRETED,
        )  # fmt: skip
        c = _out_tile(
            x, y, weight, bias, mc, rc, row + 2, column, rows, columns, stride_r, stride_c,
            CENTER, OFFSET, BIAS, KEEP, INTERPRETED,
        )  # fmt: skip
        d = _out_tile(
            x, y, weight, bias, md, rd, row + 3, column, rows, columns, stride_r, stride_c,
            CENTER, OFFSET, BIAS, KEEP, INTERPRETED,
        )  # fmt: skip
        if FORM == BY_ROW:
            a, b, c, d = a * ia[:, None], b * ib[:, None], c * ic[:, None], d * id[:, None]
        else:
            a, b, c, d = strands_over_block_scales(
                a, b, c, d, s, row, start, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK,
                TILE_R // 4, TILE_C, INTERPRETED,
            )  # fmt: skip
        store_strands(q, qt, a, b, c, d, word, column, rows, columns, words, E4M3, ROWS, COLUMNS, INTERPRETED)


@triton.jit
def _mean_of(values, count, COLUMNS: tl.constexpr):
    return _divided(tl.sum(row_sum(tl.reshape(values, (1, COLUMNS)), 1, COLUMNS), axis=0), count)


@triton.jit
def norm_backward_kernel(
    grad, x, weight, rstd, mean, grad_total, dx, partial_weight, partial_bias, rows, columns,
    grad_r, grad_c, stride_r, stride_c, total_r, total_c, count,
    CENTER: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, TOTAL: tl.constexpr, DX: tl.constexpr,
    SUMS: tl.constexpr, BAND: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """BAND rows, one after the other, the next one loaded ahead: dx (of whole rows), and their part of the sums."""
    first = tl.program_id(0).to(tl.int64) * BAND
    column = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    here = column < columns
    w = widened(tl.load(weight + column, mask=here, other=0.0), INTERPRETED)
    if OFFSET:
        w = 1.0 + w
    dweight = tl.zeros((TILE_C,), tl.float32)
    dbias = tl.zeros((TILE_C,), tl.float32)
    last = tl.minimum(first + BAND, rows)
    end = tl.where(first < last, columns, 0)
    next_g = tl.load(grad + first * grad_r + column * grad_c, mask=column < end, other=0.0)
    next_x = tl.load(x + first * stride_r + column * stride_c, mask=column < end, other=0.0)
    for i in range(BAND):
        row = first + i
        g = widened(next_g, INTERPRETED)
        values = widened(next_x, INTERPRETED)
        inside = column < end
        end = tl.where(row + 1 < last, columns, 0)
        next_g = tl.load(grad + (row + 1) * grad_r + column * grad_c, mask=column < end, other=0.0)
        next_x = tl.load(x + (row + 1) * stride_r + column * stride_c, mask=column < end, other=0.0)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        if CENTER:
            values = tl.where(here, values - tl.load(mean + row, mask=row < rows, other=0.0), 0.0)
        normalized = values * r
        if DX:
            weighted = g * w
            along = _mean_of(weighted * normalized, count, TILE_C)
            if CENTER:
                weighted = weighted - _mean_of(weighted, count, TILE_C)
            out = (weighted - normalized * along) * r
            if TOTAL:
                passed = tl.load(grad_total + row * total_r + column * total_c, mask=inside, other=0.0)
                out = out + widened(passed, INTERPRETED)
            tl.store(dx + row * columns + column, rounded(out, dx.dtype.element_ty, INTERPRETED), mask=inside)
        if SUMS:
            dweight += g * normalized
            if BIAS:
                dbias += g
    if SUMS:
        part = tl.program_id(0).to(tl.int64) * columns + column
        tl.store(partial_weight + part, dweight, mask=here)
        if BIAS:
            tl.store(partial_bias + part, dbias, mask=here)


@triton.jit
def column_sums_kernel(
    partial, sums, parts, columns, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Sums of all bands, in float64, rounded to the weight's dtype."""
    column = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)
    total = tl.zeros((TILE_C,), tl.float64)
    for start in range(0, parts, TILE_R):
        part = start + tl.arange(0, TILE_R).to(tl.int64)
        inside = (part < parts)[:, None] & (column < columns)[None, :]
        values = tl.load(partial + part[:, None] * columns + column[None, :], mask=inside, other=0.0)
        total += tl.sum(values.to(tl.float64), axis=0)
    out = rounded(total.to(tl.float32), sums.dtype.element_ty, INTERPRETED)
    tl.store(sums + column, out, mask=column < columns)
