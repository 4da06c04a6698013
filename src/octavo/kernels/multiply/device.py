"""Device code of multiply; `triton` launches it."""

import triton
import triton.language as tl

from octavo.kernels.fused.device import round_to, to_float32
from octavo.kernels.primitives import magnitude
from octavo.kernels.quantize.device import column_indices, indices, store4
from octavo.kernels.quantize.rows_device import row_inverse


@triton.jit
def _load(x, row, column, rows, columns, stride_r, stride_c, EVICT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Load elements as float32, zero outside the matrix."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = x + row[:, None] * stride_r + column[None, :] * stride_c
    return to_float32(tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT), INTERPRETED)


@triton.jit
def _multiplied(
    a, b, y, row, column, rows, columns, a_r, a_c, b_r, b_c, BY_COLUMN: tl.constexpr, INTERPRETED: tl.constexpr
):  # fmt: skip
    """Compute and store a quarter of y; return it as float32, zero outside."""
    if BY_COLUMN:
        b_values = to_float32(tl.load(b + column * b_c, mask=column < columns, other=0.0), INTERPRETED)[None, :]
    else:
        b_values = _load(b, row, column, rows, columns, b_r, b_c, "evict_first", INTERPRETED)
    product = _load(a, row, column, rows, columns, a_r, a_c, "evict_first", INTERPRETED) * b_values
    out = round_to(product, y.dtype.element_ty, INTERPRETED)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(y + row[:, None] * columns + column[None, :], out, mask=inside)
    return to_float32(out, INTERPRETED)


@triton.jit
def multiply_rows_kernel(
    a, b, y, rows, columns, padded_rows, a_r, a_c, b_r, b_c, q, q_t, s,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    BY_COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Multiply TILE_R whole rows and quantize them: y with its row maxima, then the cast of the stored y, backwards."""
    # Walks and marks the matrix as `rows_kernel` does, with y in the place of X; a and b are read once.
    word = indices(tl.program_id(0), TILE_R // 4)
    row = 4 * word
    ma = tl.zeros((TILE_R // 4, TILE_C), tl.int32)
    mb, mc, md = ma, ma, ma
    for start in range(0, columns, TILE_C):
        column = column_indices(start, TILE_C, a)
        ya = _multiplied(a, b, y, row, column, rows, columns, a_r, a_c, b_r, b_c, BY_COLUMN, INTERPRETED)
        yb = _multiplied(a, b, y, row + 1, column, rows, columns, a_r, a_c, b_r, b_c, BY_COLUMN, INTERPRETED)
        yc = _multiplied(a, b, y, row + 2, column, rows, columns, a_r, a_c, b_r, b_c, BY_COLUMN, INTERPRETED)
        yd = _multiplied(a, b, y, row + 3, column, rows, columns, a_r, a_c, b_r, b_c, BY_COLUMN, INTERPRETED)
        ma, mb = tl.maximum(ma, magnitude(ya)), tl.maximum(mb, magnitude(yb))
        mc, md = tl.maximum(mc, magnitude(yc)), tl.maximum(md, magnitude(yd))
    ia = row_inverse(ma, s, row, rows, FP8_MAX, POWER_OF_TWO, False, INTERPRETED)
    ib = row_inverse(mb, s, row + 1, rows, FP8_MAX, POWER_OF_TWO, False, INTERPRETED)
    ic = row_inverse(mc, s, row + 2, rows, FP8_MAX, POWER_OF_TWO, False, INTERPRETED)
    id = row_inverse(md, s, row + 3, rows, FP8_MAX, POWER_OF_TWO, False, INTERPRETED)
    tl.debug_barrier()  # other threads may read what these stored
    last = (tl.cdiv(columns, TILE_C) - 1) * TILE_C
    for back in range(0, columns, TILE_C):
        column = column_indices(last - back, TILE_C, y)
        ya = _load(y, row, column, rows, columns, columns, 1, "evict_first", INTERPRETED)
        yb = _load(y, row + 1, column, rows, columns, columns, 1, "evict_first", INTERPRETED)
        yc = _load(y, row + 2, column, rows, columns, columns, 1, "evict_first", INTERPRETED)
        yd = _load(y, row + 3, column, rows, columns, columns, 1, "evict_first", INTERPRETED)
        store4(
            q, q_t, ya * ia, yb * ib, yc * ic, yd * id, word, column, rows, columns, padded_rows,
            E4M3, ROWS, COLUMNS, INTERPRETED, ".cs",
        )  # fmt: skip
