"""quantize in plain PyTorch: the definition every other backend is compared with, byte for byte."""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.bands import bands
from octavo.numerics.spec import FULL, SMALLEST_SCALE, QuantSpec, ScaleRule


def quantize(
    x: Tensor,
    spec: QuantSpec,
    fold: Tensor | None,
    amax: Tensor | None = None,
    scale: Tensor | None = None,
    order: str = "rows",
) -> list[Tensor]:
    """Data in the orders asked for (the column-major one as [C,R]), then scales unless given."""
    given = scale is not None or amax is not None
    if scale is not None:
        used = scale.float()
        inverse = _reciprocal(used)
    else:
        used, inverse = scale_of(_amax(x, spec, fold) if amax is None else amax, spec)
    data = x.new_empty(x.shape, dtype=spec.format.dtype)
    for band in _bands(x, spec):
        blocks = _blocks(_values(x, fold, band), spec)
        scaled = blocks * _of_band(inverse, band, spec)[:, None, :, None]
        if given:  # scales of its own maxima cut nothing off
            scaled.clamp_(-spec.format.max, spec.format.max)
            scaled.add_(blocks * 0.0)  # NaN where x is not finite; else a zero of the same sign
        data[band] = scaled.reshape(scaled.shape[0] * scaled.shape[1], -1)[: data[band].shape[0], : x.shape[1]]
    outputs = [data] if order != "columns" else []
    if order != "rows":
        outputs.append(transposed(data))
    return outputs if scale is not None else [*outputs, used.to(spec.scale_dtype)]


def quantize_pair(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec, fold_t: Tensor | None
) -> list[Tensor]:
    """Row-major data and scales of the first form, column-major data (as [C,R]) and scales of the second."""
    return [*quantize(x, spec, fold), *quantize(x, spec_t, fold_t, order="columns")]


def padded(rows: int) -> int:
    """Bytes from one column to the next in column-major data: rows, rounded up to what FP8 matrix units want.

    The bytes in between are zeros.
    """
    return -(-rows // 16) * 16


def transposed(data: Tensor) -> Tensor:
    """The transposed matrix [C,R] with rows that are `padded`."""
    rows = data.shape[0]
    return F.pad(data.t().contiguous().view(torch.uint8), (0, padded(rows) - rows)).view(data.dtype)[:, :rows]


def scale_of(amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Dequantization scales and their inverses, float32 of amax's shape, from the largest magnitudes of the blocks.

    Scales are positive and finite. The inverse is NaN where amax is not finite, which makes the whole block NaN.
    """
    scale = (amax.double() / spec.format.max).float().clamp_min(SMALLEST_SCALE)
    finite = amax.isfinite()
    scale = torch.where(finite, _rounded(scale, spec.scale_rule), 1.0)
    return scale, torch.where(finite, _reciprocal(scale), torch.nan)


def _reciprocal(scale: Tensor) -> Tensor:
    return (1.0 / scale.double()).float()


def _bands(x: Tensor, spec: QuantSpec) -> list[slice]:
    """Bands of whole block rows."""
    return bands((x.shape[0], x.shape[1]), spec.granularity.rows or 1)


def _of_band(of_blocks: Tensor, band: slice, spec: QuantSpec) -> Tensor:
    """What belongs to a band of something that there is one of per block."""
    extent = spec.granularity.rows
    return of_blocks if extent == FULL else of_blocks[band.start // extent : -(-band.stop // extent)]


def _values(x: Tensor, fold: Tensor | None, band: slice) -> Tensor:
    if fold is None:
        return x[band].float()
    return x[band].to(torch.float32, copy=True).mul_(fold if fold.shape[0] == 1 else fold[band])


def _amax(x: Tensor, spec: QuantSpec, fold: Tensor | None) -> Tensor:
    """The largest magnitude of each block, float32 [block rows, block columns]."""
    shape = (x.shape[0], x.shape[1])
    found = []
    bits = x.dtype == torch.bfloat16 and fold is None and spec.granularity.columns in (FULL, 1)
    for band in _bands(x, spec):
        if bits:  # magnitudes are in the order of their bits, NaN above all
            largest = _blocks(x[band].view(torch.int16) & 0x7FFF, spec).amax((1, 3)).view(torch.bfloat16).float()
        else:
            largest = _blocks(_values(x, fold, band).abs(), spec).amax((1, 3))
        found.append(largest)
    if not found:
        return torch.zeros(spec.granularity.scale_shape(shape), device=x.device)
    return torch.stack(found).amax(0) if spec.granularity.rows == FULL else torch.cat(found)


def _blocks(values: Tensor, spec: QuantSpec) -> Tensor:
    """View of values as [block row, row in block, block column, column in block], zero-padded to whole blocks."""
    rows, columns = values.shape
    block_rows, block_columns = spec.granularity.block((rows, columns))
    below, right = -rows % block_rows, -columns % block_columns
    padded = F.pad(values, (0, right, 0, below)) if below or right else values
    grid_rows, grid_columns = spec.granularity.scale_shape((rows, columns))
    return padded.reshape(grid_rows, block_rows if rows else 0, grid_columns, block_columns if columns else 0)


def _rounded(scale: Tensor, rule: ScaleRule) -> Tensor:
    """Round float32 scales up to a power of two, unless the rule is "amax"."""
    if rule == "amax":
        return scale
    mantissa = 0x7FFFFF
    return ((scale.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)
