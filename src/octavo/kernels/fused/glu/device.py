"""Device code of the gated activations; `triton` launches it."""

import triton
import triton.language as tl

from octavo.kernels.fused.device import (
    VECTOR,
    divide_by_row_scales,
    divide_quarters_by_block_scales,
    factor_and_slope,
    offsets,
    round_to,
    split_by_4,
    store_quarters,
    store_rows,
    to_float32,
)  # fmt: skip
from octavo.kernels.primitives import columns_from, magnitude, scale_of, store_scale


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
def _glu_wide(
    gate, up, row, column, rows, columns, gate_r, gate_c, up_r, up_c,
    ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute `_glu_tile` as float32."""
    out = _glu_tile(gate, up, row, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
    return to_float32(out, INTERPRETED)


@triton.jit
def glu_flat_kernel(
    gate, up, h, rows, columns, gate_r, gate_c, up_r, up_c,
    ACTIVATION: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute one tile in gate's dtype."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    out = _glu_tile(gate, up, row, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(h + row[:, None] * columns + column[None, :], out, mask=inside)


@triton.jit
def glu_blocks_kernel(
    gate, up, q, qt, s, rows, words, columns, grid_columns, gate_r, gate_c, up_r, up_c,
    ACTIVATION: tl.constexpr, FP8_MAX: tl.constexpr, E4M3: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of whole scale blocks, as four quarters."""
    word = tl.program_id(0).to(tl.int64) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    row = 4 * word
    first = tl.program_id(1) * TILE_C
    column = first + tl.arange(0, TILE_C)
    a = _glu_wide(gate, up, row, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
    b = _glu_wide(gate, up, row + 1, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
    c = _glu_wide(gate, up, row + 2, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
    d = _glu_wide(gate, up, row + 3, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
    a, b, c, d = divide_quarters_by_block_scales(
        a, b, c, d, s, row, first, rows, grid_columns, FP8_MAX, POWER_OF_TWO, E8M0, BLOCK, TILE_R // 4, TILE_C,
        INTERPRETED,
    )  # fmt: skip
    store_quarters(q, qt, a, b, c, d, word, column, rows, columns, words, E4M3, ROWS, COLUMNS, INTERPRETED)


@triton.jit
def glu_rows_kernel(
    gate, up, q, s, rows, columns, gate_r, gate_c, up_r, up_c,
    ACTIVATION: tl.constexpr, FP8_MAX: tl.constexpr, E4M3: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute TILE_R whole rows in registers; row-major output only."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = columns_from(0, TILE_C, VECTOR)
    out = _glu_wide(gate, up, row, column, rows, columns, gate_r, gate_c, up_r, up_c, ACTIVATION, INTERPRETED)
    scaled = divide_by_row_scales(out, s, row, rows, FP8_MAX, POWER_OF_TWO, E8M0, INTERPRETED)
    store_rows(q, scaled, row, column, rows, columns, E4M3, INTERPRETED)


@triton.jit
def _load_h(h, row, column, rows, columns, INTERPRETED: tl.constexpr):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return to_float32(tl.load(h + row[:, None] * columns + column[None, :], mask=inside, other=0.0), INTERPRETED)


@triton.jit
def glu_row_block_kernel(
    gate, up, h, q, qt, s, rows, words, columns, gate_r, gate_c, up_r, up_c,
    ACTIVATION: tl.constexpr, FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    E8M0: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
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
    ia, ib, ic, id = split_by_4(inverse, TILE_R)
    word = tl.program_id(0).to(tl.int64) * (TILE_R // 4) + tl.arange(0, TILE_R // 4)
    row = 4 * word
    tl.debug_barrier()  # other threads read the stored h below
    for start in range(0, columns, TILE_C):
        column = start + lanes
        a = _load_h(h, row, column, rows, columns, INTERPRETED) * ia[:, None]
        b = _load_h(h, row + 1, column, rows, columns, INTERPRETED) * ib[:, None]
        c = _load_h(h, row + 2, column, rows, columns, INTERPRETED) * ic[:, None]
        d = _load_h(h, row + 3, column, rows, columns, INTERPRETED) * id[:, None]
        store_quarters(q, qt, a, b, c, d, word, column, rows, columns, words, E4M3, ROWS, COLUMNS, INTERPRETED)


@triton.jit
def glu_backward_kernel(
    grad, gate, up, dgate, dup, rows, columns, grad_r, grad_c, gate_r, gate_c, up_r, up_c, out_r,
    ACTIVATION: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute one tile of both gradients."""
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
