"""Device code of the quantize kernel for scales by row; `triton` launches it.

A program reads its block of rows twice: for the row maxima, then for the cast. The second pass is free if the row block
is still in L2, which all resident programs share, 50 MB on H100. A row block of 32 rows × 14336 columns of bf16 is 0.9
MB, and fewer rows than the 32 bytes of a sector would split sectors of the transposed copy. Hence:

    one program per multiprocessor    132 row blocks instead of 528: 16 warps, of which a second program does not fit
    second pass backwards             it starts with what was read last
    evict first                       FP8 codes as they are stored, and X as it is read for the last time, give way to
                                      what will be read again (`.cs`, L2::evict_first)

Simulated (docs/log.md, `l2`), 16384 rows in both memory orders, bytes per element: 6.0 before; 4.0 with 4096 columns,
4.8 with 14336. With fewer than 100 row blocks on H100, they have 16 or 8 rows, which split sectors, but occupy
all multiprocessors. Rejected: fewer programs than multiprocessors, of which 66 without the marks still move 5.3 at
14336; a barrier between programs that share a row block, which no interpreter of one program after the other can run.
"""

import triton
import triton.language as tl

from octavo.kernels.primitives import magnitude, scale_of, store_scale
from octavo.kernels.quantize.device import column_indices, fold4, indices, load4, store4


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
