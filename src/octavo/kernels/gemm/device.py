"""Device code of the persistent FP8 product; `octavo.kernels.gemm.triton` launches it and explains the design."""

import triton
import triton.language as tl

from octavo.kernels.fused.device import round_to


@triton.jit
def load_tile(base, first, at, rows, stride, ROWS: tl.constexpr, TILE_K: tl.constexpr, TMA: tl.constexpr):
    """Load ROWS rows of an operand from `first`, TILE_K columns from `at`, a multiple of 16."""
    # Rows past the last one wrap around. Columns past the last one hold anything, but lie in the operand's memory.
    if TMA:
        return base.load([first, at])
    else:
        row = (first + tl.arange(0, ROWS)) % rows
        column = at + tl.arange(0, TILE_K)
        where = base + row.to(tl.int64)[:, None] * stride + column[None, :]
        return tl.load(where, mask=(column < stride)[None, :], other=0.0)


@triton.jit
def tile_at(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile in launch order: down a group of GROUP tile rows, then right."""
    group = index // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside = index % (GROUP * tiles_n)
    return group * GROUP + inside % height, inside // height


@triton.jit
def _scales_at(
    scale, first, step, rows, stride_r, stride_k, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Load scales of a tile's rows at one step: a vector, or a scalar if one 128-row block contains the tile."""
    step_scale = scale + step * (TILE_K // 128) * stride_k
    if BLOCK_ROWS == 1:
        row = first + tl.arange(0, ROWS)
        return tl.load(step_scale + row * stride_r, mask=row < rows, other=0.0)
    else:
        return tl.load(step_scale + (first // BLOCK_ROWS) * stride_r)


@triton.jit
def _halves(scale):
    """Split a scale exactly into m · p with p = 2^⌊exponent / 2⌋."""
    half = (((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127) >> 1
    inverse = ((127 - half) << 23).to(tl.float32, bitcast=True)
    return scale * inverse, ((half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _epilogue_scale(scale, index, extent, stride, BLOCK_ROWS: tl.constexpr):
    """Load scales of a tile's rows or columns, [TILE], or a scalar."""
    if BLOCK_ROWS == 0:
        return tl.load(scale)
    else:
        return tl.load(scale + index * stride, mask=index < extent, other=0.0)


@triton.jit
def scaled(
    sums, a_scale, b_scale, row, column, m, n, a_stride_r, b_stride_r, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr
):
    """Multiply sums by the scales of A and B, as `operands.scale_sums`."""
    if A_ROWS >= 0:
        s = _epilogue_scale(a_scale, row, m, a_stride_r, A_ROWS)
        s = s[:, None] if A_ROWS == 1 else s
    if B_ROWS >= 0:
        t = _epilogue_scale(b_scale, column, n, b_stride_r, B_ROWS)
        t = t[None, :] if B_ROWS == 1 else t
    if A_ROWS >= 0 and B_ROWS >= 0:
        s, p = _halves(s)
        t, q = _halves(t)
        sums = sums * s * t * (p * q)
    elif A_ROWS >= 0:
        sums = sums * s
    elif B_ROWS >= 0:
        sums = sums * t
    return sums


@triton.jit
def product_kernel(
    a, b, out, a_scale, b_scale, bias, m, n, k, a_stride_r, a_stride_k, b_stride_r, b_stride_k,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, BLOCKED: tl.constexpr, BIAS: tl.constexpr, FAST: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    TMA: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute tiles of out [m,n] = (A [m,k] · B [n,k]ᵀ) · scales + bias."""
    # A_ROWS, B_ROWS: rows that share a scale; 0 for all, −1 without scales. BLOCKED: scales change every 128 of k.
    tiles_m = tl.cdiv(m, TILE_M)
    tiles_n = tl.cdiv(n, TILE_N)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_at(index, tiles_m, tiles_n, GROUP)
        first_m = tile_m * TILE_M
        first_n = tile_n * TILE_N
        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for step in range(tl.cdiv(k, TILE_K)):
            left = load_tile(a, first_m, step * TILE_K, m, k, TILE_M, TILE_K, TMA)
            right = load_tile(b, first_n, step * TILE_K, n, k, TILE_N, TILE_K, TMA)
            if BLOCKED:
                s = _scales_at(a_scale, first_m, step, m, a_stride_r, a_stride_k, TILE_M, A_ROWS, TILE_K)
                t = _scales_at(b_scale, first_n, step, n, b_stride_r, b_stride_k, TILE_N, B_ROWS, TILE_K)
                part = tl.dot(left, right.T)
                if A_ROWS == 1 and B_ROWS == 1:
                    sums = tl.fma(part, s[:, None] * t[None, :], sums)
                elif A_ROWS == 1:
                    sums = tl.fma(part, tl.broadcast_to((s * t)[:, None], (TILE_M, TILE_N)), sums)
                else:
                    sums = tl.fma(part, tl.broadcast_to((s * t)[None, :], (TILE_M, TILE_N)), sums)
            elif FAST:
                sums = tl.dot(left, right.T, sums)
            else:
                sums = tl.dot(left, right.T, sums, max_num_imprecise_acc=TILE_K)
        row = first_m + tl.arange(0, TILE_M)
        column = first_n + tl.arange(0, TILE_N)
        if not BLOCKED:
            sums = scaled(sums, a_scale, b_scale, row, column, m, n, a_stride_r, b_stride_r, A_ROWS, B_ROWS)
        if BIAS:
            sums = sums + tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        inside = (row < m)[:, None] & (column < n)[None, :]
        result = round_to(sums, out.dtype.element_ty, INTERPRETED)
        tl.store(out + row.to(tl.int64)[:, None] * n + column[None, :], result, mask=inside)
