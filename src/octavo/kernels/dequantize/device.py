"""Device code of the dequantize kernel; `triton` launches it."""

import triton
import triton.language as tl

from octavo.kernels.fused.device import offsets, round_to


@triton.jit
def dequantize_kernel(
    q, s, out, rows, columns, grid_columns, q_r, q_c, BLOCK: tl.constexpr, E8M0: tl.constexpr, E4M3: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantize one tile. BLOCK: columns that share a scale, 0 for a whole row. E8M0: scales are exponent bytes."""
    across = tl.cdiv(columns, TILE_C)  # one grid dimension: the second ends at 65535 programs
    row = (tl.program_id(0) // across).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(0) % across * TILE_C + tl.arange(0, TILE_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(q + offsets(row, column, q_r, q_c), mask=inside, other=0.0)
    if INTERPRETED:  # the interpreter's own cast loses NaN
        size = values.to(tl.uint8, bitcast=True) & 0x7F
        nan = size == 0x7F if E4M3 else size > 0x7C
        values = tl.where(nan, float("nan"), values.to(tl.float32))
    else:
        values = values.to(tl.float32)
    if BLOCK:
        scale = tl.load(s + row[:, None] * grid_columns + (column // BLOCK)[None, :], mask=inside, other=0)
    else:
        scale = tl.load(s + row * grid_columns, mask=row < rows, other=0)[:, None]
    if E8M0:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    result = round_to(values * scale, out.dtype.element_ty, INTERPRETED)
    tl.store(out + row[:, None] * columns + column[None, :], result, mask=inside)
