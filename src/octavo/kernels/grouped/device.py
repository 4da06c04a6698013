"""Device code of the grouped FP8 product; `octavo.kernels.grouped.triton` launches it and explains the design."""

import triton
import triton.language as tl

from octavo.kernels.fused.device import round_to
from octavo.kernels.gemm.device import load_tile, scaled, tile_at


@triton.jit
def _cut(tile, begin, end, TILE_K: tl.constexpr):
    """Zero the columns of a tile before `begin` and from `end` on, whatever they hold."""
    codes = tile.to(tl.uint8, bitcast=True)
    column = tl.arange(0, TILE_K)
    inside = ((column >= begin) & (column < end))[None, :]
    return tl.where(inside, codes, 0).to(tl.uint8).to(tile.dtype, bitcast=True)


@triton.jit
def _step(
    sums, a, b, first_a, first_b, a_at, b_at, a_rows, a_stride, b_rows, b_stride, begin, end, CUT: tl.constexpr,
    FAST: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the products of one step of the contraction; with CUT, of its columns from `begin` to `end` only."""
    left = load_tile(a, first_a, a_at, a_rows, a_stride, TILE_M, TILE_K, TMA)
    right = load_tile(b, first_b, b_at, b_rows, b_stride, TILE_N, TILE_K, TMA)
    if CUT:
        left, right = _cut(left, begin, end, TILE_K), _cut(right, begin, end, TILE_K)
    if FAST:
        return tl.dot(left, right.T, sums)
    else:
        return tl.dot(left, right.T, sums, max_num_imprecise_acc=TILE_K)


@triton.jit
def _at(values, index, i):
    return tl.sum(tl.where(index == i, values, 0))


@triton.jit
def _bounds(offsets, index_e, tokens, experts):
    """Where the tokens of each expert begin and end. Those of no expert count as one more."""
    ends = tl.load(offsets + index_e, mask=index_e < experts, other=0)
    starts = tl.load(offsets + index_e - 1, mask=(index_e > 0) & (index_e <= experts), other=0)
    return starts, tl.where(index_e == experts, tokens, ends)


@triton.jit
def grouped_kernel(
    a, b, out, offsets, a_scale, b_scale, bias, rows, columns, contraction, weight_step, tokens, experts, a_rows,
    a_stride, b_rows, b_stride, LAYOUT: tl.constexpr, EXPERTS: tl.constexpr, BIAS: tl.constexpr, FAST: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute tiles of all experts' products, each [rows, columns], from operands contiguous along the contraction."""
    # LAYOUT "nt", "nn": rows are tokens, and those of no expert become zero; "tn": the contraction is over tokens.
    # EXPERTS: a power of two above the number of experts. In nn, expert e's part of B's contraction begins at e ·
    # weight_step. TMA reads from multiples of 16 bytes: `head` columns before a part are cut off.
    index_e = tl.arange(0, EXPERTS)
    starts, ends = _bounds(offsets, index_e, tokens, experts)
    rows_tiles = tl.cdiv(rows, TILE_M)
    tiles_of = tl.where(index_e <= experts, (ends - starts + TILE_M - 1) // TILE_M, 0)
    tile_ends = tl.cumsum(tiles_of, 0)
    tiles_m = experts * rows_tiles if LAYOUT == "tn" else tl.sum(tiles_of)
    tiles_n = tl.cdiv(columns, TILE_N)
    for index in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = tile_at(index, tiles_m, tiles_n, GROUP)
        first_n = tile_n * TILE_N
        first_b = 0
        head = 0
        if LAYOUT == "tn":
            expert = tile_m // rows_tiles
            start = _at(starts, index_e, expert)
            end = _at(ends, index_e, expert)
            a_at = start // 16 * 16
            b_at = a_at
            head = tl.where(end > start, start - a_at, 0)
            extent = tl.where(end > start, end - a_at, 0)
            first_m = (tile_m % rows_tiles) * TILE_M
            first_out = expert * rows
            limit = first_out + rows
        else:
            expert = tl.sum((tile_ends <= tile_m).to(tl.int32))
            before = _at(tile_ends - tiles_of, index_e, expert)
            first_m = _at(starts, index_e, expert) + (tile_m - before) * TILE_M
            limit = _at(ends, index_e, expert)
            extent = tl.where(expert < experts, contraction, 0)
            a_at = 0
            b_at = 0
            first_out = 0
            weight = tl.minimum(expert, experts - 1)
            if LAYOUT == "nt":
                first_b = weight * columns
            else:
                b_at = weight * weight_step
        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        whole = extent // TILE_K
        leads = tl.where(head > 0, 1, 0) if LAYOUT == "tn" else 0
        for step in range(leads, whole):
            at = step * TILE_K
            sums = _step(
                sums, a, b, first_m, first_b + first_n, a_at + at, b_at + at, a_rows, a_stride, b_rows, b_stride, 0, 0,
                False, FAST, TILE_M, TILE_N, TILE_K, TMA,
            )  # fmt: skip
        # The first and the last step, if other experts own a part of them.
        trails = tl.where((extent % TILE_K > 0) & (whole >= leads), 1, 0)
        for edge in range(leads + trails):
            at = tl.where(edge < leads, 0, whole) * TILE_K
            sums = _step(
                sums, a, b, first_m, first_b + first_n, a_at + at, b_at + at, a_rows, a_stride, b_rows, b_stride,
                head - at, extent - at, True, FAST, TILE_M, TILE_N, TILE_K, TMA,
            )  # fmt: skip
        row = first_out + first_m + tl.arange(0, TILE_M)
        column = first_n + tl.arange(0, TILE_N)
        at_b = first_b + column
        B_ROWS: tl.constexpr = 1 if LAYOUT == "nt" else -1
        sums = scaled(sums, a_scale, b_scale, row, at_b, limit, first_b + columns, 1, 1, 1, B_ROWS)
        if BIAS:
            biased = tl.where(expert < experts, columns, 0)
            sums = sums + tl.load(bias + at_b, mask=column < biased, other=0.0).to(tl.float32)[None, :]
        inside = (row < limit)[:, None] & (column < columns)[None, :]
        result = round_to(sums, out.dtype.element_ty, INTERPRETED)
        tl.store(out + row.to(tl.int64)[:, None] * columns + column[None, :], result, mask=inside)
