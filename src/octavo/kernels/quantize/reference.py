"""quantize in plain PyTorch: the definition every other backend is compared with, byte for byte."""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.spec import SMALLEST_SCALE, QuantSpec, ScaleRule


def quantize(x: Tensor, spec: QuantSpec, fold: Tensor | None) -> tuple[Tensor, Tensor]:
    """FP8 data [R,C] and scales of `x · fold`; see `octavo.kernels.quantize.quantize`."""
    values = x.float() if fold is None else x.float() * fold
    rows, columns = values.shape
    blocks = _blocks(values, spec)
    amax = blocks.abs().amax((1, 3)) if blocks.numel() else blocks.new_zeros((blocks.shape[0], blocks.shape[2]))
    scale, inverse = scale_of(amax, spec)
    scaled = (blocks * inverse[:, None, :, None]).clamp_(-spec.format.max, spec.format.max)
    data = scaled.reshape(scaled.shape[0] * scaled.shape[1], -1)[:rows, :columns] if scaled.numel() else values
    return data.to(spec.format.dtype).contiguous(), scale.to(spec.scale_dtype)


def scale_of(amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Dequantization scales and their inverses, float32 of amax's shape, from the largest magnitudes of the blocks.

    Scales are positive and finite. The inverse is NaN where amax is not finite, which makes the whole block NaN.
    """
    scale = (amax.double() / spec.format.max).float().clamp_min(SMALLEST_SCALE)
    finite = amax.isfinite()
    scale = torch.where(finite, _rounded(scale, spec.scale_rule), 1.0)
    return scale, torch.where(finite, (1.0 / scale.double()).float(), torch.nan)


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
