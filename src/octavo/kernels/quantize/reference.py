"""quantize in PyTorch operations: the reference that other backends match byte for byte."""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import row_chunks, visible
from octavo.numerics.spec import FULL, SMALLEST_SCALE, QuantSpec
from octavo.tensor import ScaledTensor


def quantize(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, amax: Tensor | None = None, scale: Tensor | None = None,
    order: str = "rows",
) -> list[Tensor]:  # fmt: skip
    """Return data in the requested orders (column-major as [C,R]), then scales unless `scale` is passed."""
    chunks = row_chunks((x.shape[0], x.shape[1]), spec.granularity.rows or 1)  # of whole scale blocks
    scale_f32 = inverse = None
    if scale is not None:
        scale_f32 = scale.float()
        inverse = reciprocal(scale_f32)
    elif amax is not None:
        scale_f32, inverse = scale_of(amax, spec)
    elif not chunks or (spec.granularity.rows == FULL and len(chunks) > 1):  # blocks that no chunk has whole
        scale_f32, inverse = scale_of(_amax(x, spec, fold, chunks), spec)
    precomputed = scale is not None or amax is not None
    data = x.new_empty(x.shape, dtype=spec.format.dtype)
    scales = []
    for chunk in chunks:
        blocks = _blocks(_values(x, fold, chunk), spec)
        if inverse is None:
            chunk_scale, factor = scale_of(_chunk_amax(x, spec, fold, chunk, blocks), spec)
            scales.append(chunk_scale)
        else:
            extent = spec.granularity.rows
            factor = inverse if extent == FULL else inverse[chunk.start // extent : -(-chunk.stop // extent)]
        factor = factor[:, None, :, None]
        own = x.dtype != torch.float32 or fold is not None
        scaled = blocks.mul_(factor) if own else blocks * factor
        if precomputed and not _in_range(scaled, spec):  # scales of x's own amax never saturate
            scaled.clamp_(-spec.format.max, spec.format.max)
            # NaN where x is not finite; else a zero of the same sign
            scaled.add_(_blocks(_values(x, fold, chunk), spec) * 0.0)
        out = data[chunk]
        values = scaled.reshape(scaled.shape[0] * scaled.shape[1], -1)
        out.copy_(values if values.shape == out.shape else values[: out.shape[0], : out.shape[1]])
    if scale_f32 is None:
        scale_f32 = scales[0] if len(scales) == 1 else torch.cat(scales)
    outputs = [data] if order != "columns" else []
    if order != "rows":
        outputs.append(transposed(data))
    return outputs if scale is not None else [*outputs, scale_f32.to(spec.scale_dtype)]


def quantize_pair(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec, fold_t: Tensor | None
) -> list[Tensor]:
    """Return row-major data and scales for `spec`, then column-major data (as [C,R]) and scales for `spec_t`."""
    return [*quantize(x, spec, fold), *quantize(x, spec_t, fold_t, order="columns")]


def empty_outputs(x: Tensor, spec: QuantSpec, order: str) -> list[Tensor]:
    """Allocate data in the requested orders (column-major as [C,R]) and scales for a matrix like x."""
    rows, columns = x.shape
    outputs = [x.new_empty((rows, columns), dtype=spec.format.dtype)] if order != "columns" else []
    if order != "rows":
        outputs.append(x.new_empty((columns, padded(rows)), dtype=spec.format.dtype)[:, :rows])
    return [*outputs, x.new_empty(spec.granularity.scale_shape((rows, columns)), dtype=spec.scale_dtype)]


def unpack_outputs(outputs: list[Tensor], spec: QuantSpec, order: str) -> ScaledTensor:
    *data, scale = outputs
    views = [data[0] if order != "columns" else data[0].t(), *(d.t() for d in data[1:])]
    return ScaledTensor(views[0], scale, spec, views[1] if len(views) == 2 else None)


def padded(rows: int) -> int:
    """Return the column stride of column-major data in bytes: rows rounded up to 16, for FP8 matrix units."""
    # The padding is zeros.
    return -(-rows // 16) * 16


def transposed(data: Tensor) -> Tensor:
    """Return the transposed matrix [C,R] with `padded` rows."""
    rows = data.shape[0]
    return F.pad(data.t().contiguous().view(torch.uint8), (0, padded(rows) - rows)).view(data.dtype)[:, :rows]


def scale_of(amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Compute dequantization scales and their inverses from the amax of each block, float32 of amax's shape."""
    # Scales are positive and finite. For a non-finite amax the inverse is NaN, which makes the whole block NaN.
    scale = amax.double().div_(spec.format.max).float().clamp_min_(SMALLEST_SCALE)
    if visible(scale) and (not scale.numel() or float(scale.amax()) < torch.inf):  # all finite
        scale = scale if spec.scale_rule == "amax" else power_of_two(scale)
        return scale, reciprocal(scale)
    finite = amax.abs() < torch.inf  # false for NaN
    scale = torch.where(finite, scale if spec.scale_rule == "amax" else power_of_two(scale), 1.0)
    return scale, torch.where(finite, reciprocal(scale), torch.nan)


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1/scale, divided in float64, in float32."""
    return scale.double().reciprocal_().float()


def _values(x: Tensor, fold: Tensor | None, chunk: slice) -> Tensor:
    if fold is None:
        return x[chunk].float()
    return x[chunk].to(torch.float32, copy=True).mul_(fold if fold.shape[0] == 1 else fold[chunk])


def _amax(x: Tensor, spec: QuantSpec, fold: Tensor | None, chunks: list[slice]) -> Tensor:
    """Return the amax of each block, float32 [block rows, block columns]."""
    if not chunks:
        shape = spec.granularity.scale_shape((x.shape[0], x.shape[1]))
        return torch.zeros(shape, device=x.device, dtype=torch.float32)
    amaxes = [_chunk_amax(x, spec, fold, chunk) for chunk in chunks]
    return torch.stack(amaxes).amax(0) if spec.granularity.rows == FULL else torch.cat(amaxes)


def _chunk_amax(x: Tensor, spec: QuantSpec, fold: Tensor | None, chunk: slice, blocks: Tensor | None = None) -> Tensor:
    """Return the amax of each block of a row chunk; `blocks`: its values, if they are computed already."""
    if x.dtype == torch.bfloat16 and fold is None and spec.granularity.columns in (FULL, 1):
        # Magnitudes sort like their bits, NaN last.
        return _largest(_blocks(x[chunk].view(torch.int16) & 0x7FFF, spec)).view(torch.bfloat16).float()
    if blocks is None:
        blocks = _blocks(_values(x, fold, chunk), spec)
    return _largest(blocks.abs())


def _largest(blocks: Tensor) -> Tensor:
    rows, block_rows, columns, block_columns = blocks.shape
    if block_rows == 1:  # reductions over one dimension are faster
        return blocks.view(rows, columns, block_columns).amax(2)
    if block_columns == 1:
        return blocks.view(rows, block_rows, columns).amax(1)
    return blocks.amax((1, 3))


def _in_range(scaled: Tensor, spec: QuantSpec) -> bool:
    """Whether all values are finite and round to finite FP8 values without clamping."""
    if not visible(scaled):
        return False
    limit = spec.format.max * (1 + 2.0**-5)  # the largest value plus less than half of the step to the next
    return not scaled.numel() or (-limit < float(scaled.amin()) and float(scaled.amax()) < limit)


def _blocks(values: Tensor, spec: QuantSpec) -> Tensor:
    """View of values as [block row, row in block, block column, column in block], zero-padded to whole blocks."""
    rows, columns = values.shape
    block_rows, block_columns = spec.granularity.block((rows, columns))
    below, right = -rows % block_rows, -columns % block_columns
    padded = F.pad(values, (0, right, 0, below)) if below or right else values
    grid_rows, grid_columns = spec.granularity.scale_shape((rows, columns))
    return padded.reshape(grid_rows, block_rows if rows else 0, grid_columns, block_columns if columns else 0)


def power_of_two(scale: Tensor) -> Tensor:
    """Round float32 scales up to a power of two."""
    mantissa = 0x7FFFFF
    return ((scale.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)
