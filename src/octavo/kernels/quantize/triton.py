"""quantize on a GPU: three kernels that compute what `reference` computes, byte for byte.

    whole blocks (1×128, 128×128, 1×32 …)   one pass: a tile holds whole scale blocks
    by row                                  one program per band of rows, two passes over it, the second from L2
    by column, by tensor                    two launches: maxima (atomic, on integers), then the cast

Maxima are taken over the bits of |x| as integers: for non-negative floats integer order is float order, NaN sorts
above infinity, and so a NaN reaches the scale without NaN-propagating min/max, next to which Triton miscompiles
one-byte stores (triton-lang/triton issue 11111). It also makes the atomic maximum exact and independent of order.

The reference divides in float64 and rounds to float32. For float32 operands that is the correctly rounded float32
quotient, which is what `div_rn` gives. There is no clamp: |x| ≤ amax, so x · (1/s) exceeds the largest FP8 value by a
rounding error at most, and the cast rounds that down.

Triton's interpreter drops the carry of an FP8 cast that rounds up to a power of two, and loses NaN, so under it values
are rounded first (`ROUND_FIRST`).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from octavo.numerics.formats import E4M3
from octavo.numerics.spec import FULL, ROW, SMALLEST_SCALE, QuantSpec

_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_MANTISSA = tl.constexpr(0x7FFFFF)


@triton.jit
def _load(x, fold, row, column, rows, columns, stride_r, stride_c, FOLD: tl.constexpr):
    """A tile of x · fold in float32, zero outside the matrix."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * stride_r + column[None, :] * stride_c, mask=inside, other=0.0).to(tl.float32)
    if FOLD == 1:
        values = values * tl.load(fold + row, mask=row < rows, other=0.0)[:, None]
    elif FOLD == 2:
        values = values * tl.load(fold + column, mask=column < columns, other=0.0)[None, :]
    return values


@triton.jit
def _magnitude(values):
    """|values| as integers that sort like the floats, NaN last."""
    return values.to(tl.int32, bitcast=True) & _ABS_MASK


@triton.jit
def _scale_of(amax_bits, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Dequantization scale and its inverse (NaN where amax is not finite), as `reference.scale_of`."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    finite = amax_bits < _INFINITY_BITS
    scale = tl.math.div_rn(tl.where(finite, amax, 1.0), tl.full(amax.shape, FP8_MAX, tl.float32))
    scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + _MANTISSA) & ~_MANTISSA).to(tl.float32, bitcast=True)
    scale = tl.where(finite, scale, 1.0)
    inverse = tl.math.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    return scale, tl.where(finite, inverse, float("nan"))


@triton.jit
def _to_fp8(scaled, dtype: tl.constexpr, E4M3: tl.constexpr, ROUND_FIRST: tl.constexpr):
    if ROUND_FIRST:
        DROPPED: tl.constexpr = 20 if E4M3 else 21
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & _ABS_MASK
        rounded = (size + ((1 << (DROPPED - 1)) - 1) + ((size >> DROPPED) & 1)) & ~((1 << DROPPED) - 1)
        # Below the smallest normal the spacing is fixed: adding and taking away a large number rounds to it.
        MAGIC: tl.constexpr = 1.5 * 2.0**14 if E4M3 else 1.5 * 2.0**7
        SMALLEST_NORMAL: tl.constexpr = 2.0**-6 if E4M3 else 2.0**-14
        small = (size.to(tl.float32, bitcast=True) + MAGIC) - MAGIC
        is_small = size.to(tl.float32, bitcast=True) < SMALLEST_NORMAL
        rounded = tl.where(is_small, small.to(tl.int32, bitcast=True), rounded)
        signed = (rounded | (bits & ~_ABS_MASK)).to(tl.float32, bitcast=True)
        codes = tl.where(scaled == scaled, signed, 0.0).to(dtype).to(tl.uint8, bitcast=True)
        return tl.where(scaled == scaled, codes, 0x7F).to(tl.uint8).to(dtype, bitcast=True)
    return scaled.to(dtype)


@triton.jit
def _store_scale(pointer, scale, mask, E8M0: tl.constexpr):
    if E8M0:
        tl.store(pointer, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(pointer, scale, mask=mask)


@triton.jit
def _blocks_kernel(
    x, fold, q, s, rows, columns, grid_columns, stride_r, stride_c,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, FOLD: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """One pass: each tile of TILE_R × TILE_C elements holds whole scale blocks of R × C."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    values = _load(x, fold, row, column, rows, columns, stride_r, stride_c, FOLD)
    blocks = tl.reshape(_magnitude(values), (TILE_R // R, R, TILE_C // C, C))
    scale, inverse = _scale_of(tl.max(tl.max(blocks, axis=3), axis=1), FP8_MAX, POWER_OF_TWO)
    spread = tl.broadcast_to(inverse[:, None, :, None], (TILE_R // R, R, TILE_C // C, C))
    codes = _to_fp8(values * tl.reshape(spread, (TILE_R, TILE_C)), q.dtype.element_ty, E4M3, ROUND_FIRST)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(q + row[:, None] * columns + column[None, :], codes, mask=inside)
    block_row = tl.program_id(0).to(tl.int64) * (TILE_R // R) + tl.arange(0, TILE_R // R)
    block_column = tl.program_id(1).to(tl.int64) * (TILE_C // C) + tl.arange(0, TILE_C // C)
    inside = (block_row * R < rows)[:, None] & (block_column * C < columns)[None, :]
    _store_scale(s + block_row[:, None] * grid_columns + block_column[None, :], scale, inside, E8M0)


@triton.jit
def _rows_kernel(
    x, fold, q, s, rows, columns, stride_r, stride_c,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, FOLD: tl.constexpr,
    TILE_R: tl.constexpr, TILE_C: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """A band of TILE_R rows, twice: maxima, then the cast, which finds the band in L2."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    amax = tl.zeros((TILE_R, TILE_C), tl.int32)
    for start in range(0, columns, TILE_C):
        column = start + tl.arange(0, TILE_C).to(tl.int64)
        values = _load(x, fold, row, column, rows, columns, stride_r, stride_c, FOLD)
        amax = tl.maximum(amax, _magnitude(values))
    scale, inverse = _scale_of(tl.max(amax, axis=1), FP8_MAX, POWER_OF_TWO)
    _store_scale(s + row, scale, row < rows, E8M0)
    for start in range(0, columns, TILE_C):
        column = start + tl.arange(0, TILE_C).to(tl.int64)
        values = _load(x, fold, row, column, rows, columns, stride_r, stride_c, FOLD)
        codes = _to_fp8(values * inverse[:, None], q.dtype.element_ty, E4M3, ROUND_FIRST)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(q + row[:, None] * columns + column[None, :], codes, mask=inside)


@triton.jit
def _amax_kernel(
    x, fold, amax, rows, columns, stride_r, stride_c,
    FOLD: tl.constexpr, BY_COLUMN: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Maxima of a tile, by column or over all of it, into `amax` (int32, zero at the start)."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    bits = _magnitude(_load(x, fold, row, column, rows, columns, stride_r, stride_c, FOLD))
    largest = tl.max(bits, axis=0)
    if BY_COLUMN:
        tl.atomic_max(amax + column, largest, mask=column < columns, sem="relaxed")
    else:
        tl.atomic_max(amax, tl.max(largest, axis=0), sem="relaxed")


@triton.jit
def _cast_kernel(
    x, fold, amax, q, s, rows, columns, stride_r, stride_c,
    FP8_MAX: tl.constexpr, E4M3: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, FOLD: tl.constexpr,
    BY_COLUMN: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """The cast of a tile with the maxima of `_amax_kernel`; the first row of tiles writes the scales."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    where = column if BY_COLUMN else column * 0
    bits = tl.load(amax + where, mask=column < columns, other=0)
    scale, inverse = _scale_of(bits, FP8_MAX, POWER_OF_TWO)
    if tl.program_id(0) == 0:
        _store_scale(s + where, scale, (column < columns) if BY_COLUMN else (column == 0), E8M0)
    values = _load(x, fold, row, column, rows, columns, stride_r, stride_c, FOLD)
    codes = _to_fp8(values * inverse[None, :], q.dtype.element_ty, E4M3, ROUND_FIRST)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(q + row[:, None] * columns + column[None, :], codes, mask=inside)


INTERPRETED = isinstance(_rows_kernel, InterpretedFunction)
"""Whether these kernels run in Triton's CPU interpreter (TRITON_INTERPRET=1 when Triton was imported)."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel with its compile-time constants: what is launched, and what can be compiled without a GPU.

    Attributes:
        kernel: The `@triton.jit` function.
        constants: Its `tl.constexpr` arguments.
        num_warps: Warps per program.
    """

    kernel: Any
    constants: dict[str, Any]
    num_warps: int

    def grid(self, rows: int, columns: int) -> tuple[int, ...]:
        """Programs for a matrix of this size, at least one in each dimension."""
        down = max(triton.cdiv(rows, self.constants["TILE_R"]), 1)
        across = max(triton.cdiv(columns, self.constants["TILE_C"]), 1)
        return (down,) if self.kernel is _rows_kernel else (down, across)


def launches(spec: QuantSpec, fold: Literal["none", "rows", "columns"]) -> list[Launch]:
    """The kernels that quantize by a spec, in order."""
    fold_code = ("none", "rows", "columns").index(fold)
    rule = {
        "FP8_MAX": spec.format.max,
        "E4M3": spec.format is E4M3,
        "POWER_OF_TWO": spec.scale_rule != "amax",
        "E8M0": spec.scale_rule == "e8m0",
        "FOLD": fold_code,
        "ROUND_FIRST": INTERPRETED,
    }
    r, c = spec.granularity
    if spec.granularity == ROW:
        return [Launch(kernel=_rows_kernel, constants={**rule, "TILE_R": 4, "TILE_C": 1024}, num_warps=8)]
    if FULL not in (r, c):
        tile = {"R": r, "C": c, "TILE_R": max(r, 32), "TILE_C": max(c, 128)}
        return [Launch(kernel=_blocks_kernel, constants={**rule, **tile}, num_warps=8 if r == 128 else 4)]
    tile = {"BY_COLUMN": c == 1, "TILE_R": 32, "TILE_C": 128}
    return [
        Launch(kernel=_amax_kernel, constants={"FOLD": fold_code, **tile}, num_warps=4),
        Launch(kernel=_cast_kernel, constants={**rule, **tile}, num_warps=4),
    ]


def quantize(x: Tensor, spec: QuantSpec, fold: Tensor | None) -> tuple[Tensor, Tensor]:
    """FP8 data [R,C] and scales of `x · fold`; see `octavo.kernels.quantize.quantize`."""
    rows, columns = x.shape
    scale_rows, scale_columns = spec.granularity.scale_shape((rows, columns))
    q = torch.empty((rows, columns), dtype=spec.format.dtype, device=x.device)
    scale = torch.empty((scale_rows, scale_columns), dtype=spec.scale_dtype, device=x.device)
    arguments: dict[str, Any] = {
        "x": x,
        "fold": x if fold is None else fold.contiguous(),
        "q": q,
        "s": scale.view(torch.uint8) if spec.scale_rule == "e8m0" else scale,
        "rows": rows,
        "columns": columns,
        "grid_columns": scale_columns,
        "stride_r": x.stride(0),
        "stride_c": x.stride(1),
    }
    steps = launches(spec, "none" if fold is None else "rows" if fold.shape == (rows, 1) else "columns")
    if len(steps) == 2:
        arguments["amax"] = torch.zeros(scale_rows * scale_columns, dtype=torch.int32, device=x.device)
    for step in steps:
        named = {name: arguments[name] for name in step.kernel.arg_names if name in arguments}
        step.kernel[step.grid(rows, columns)](**named, **step.constants, num_warps=step.num_warps)
    return q, scale
