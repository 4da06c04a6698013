"""quantize for torch.compile: the reference's bytes by PyTorch operations that Inductor fuses with what is around them.

No addition follows a multiplication except of zero or NaN, so contraction to FMA changes nothing (docs/compile.md).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.quantize.reference import padded, power_of_two
from octavo.numerics.spec import COLUMN, FULL, ROW, SMALLEST_SCALE, TENSOR, QuantSpec


def can_decompose(x: Tensor, spec: QuantSpec, transposed: bool) -> bool:
    """Whether `quantize` below supports a cast of x, in one graph for all values of symbolic sizes."""
    if x.numel() == 0 or (transposed and not isinstance(x.shape[0], int)):
        return False  # whether rows are padded to 16 bytes depends on their number
    return spec.granularity in (ROW, COLUMN, TENSOR) and spec.scale_rule != "e8m0"


def quantize(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, amax: Tensor | None, scale: Tensor | None, order: str,
    fuse_with: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """See `reference.quantize`; casts with the same `fuse_with` are for one kernel (`octavo.kernels.quantize`)."""
    values, outputs = _values(x, fold), []
    if scale is None:
        marked = _marked_scale(_amax(x, values, fold, spec) if amax is None else amax, spec)
        scale = _stored_scales(_read_with(marked, fuse_with))
        outputs = [torch.where(scale == scale, scale, 1.0)]
    else:
        scale = _read_with(scale, fuse_with)
    scaled = values * _reciprocal(scale)
    if amax is not None or not outputs:
        scaled = scaled.clamp(-spec.format.max, spec.format.max) + values * 0.0  # NaN where x is not finite
    data = scaled.to(spec.format.dtype).contiguous()
    columns = [] if order == "rows" else [_transposed(data)]  # its padding may guard on a size
    return [_stored(data)] * (order != "columns") + columns + outputs


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast x [..., K] as `e4m3/1x32/e8m0` does, K a multiple of 32."""
    groups = x.unflatten(-1, (-1, 32))
    values = _values(groups, None).float()
    amax = (values.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True).view(torch.float32)
    marked = _marked_scale(amax, _GROUPS)
    exponents = (torch.where(marked == marked, marked, 1.0).view(torch.int32) >> 23).to(torch.uint8)
    return (values * _reciprocal(marked)).to(_GROUPS.format.dtype), exponents


def dequantize_groups(data: Tensor, exponents: Tensor) -> Tensor:
    """Return what `quantize_groups` cast, float32 [..., K]."""
    scale = (exponents.to(torch.int32) << 23).view(torch.float32)
    return (data.float() * scale).flatten(-2)


_GROUPS = QuantSpec.parse("e4m3/1x32/e8m0")


def _values(x: Tensor, fold: Tensor | None) -> Tensor:
    """Return x, rounded to its own dtype, times fold in float32."""
    # `& -1` changes nothing, but two views without anything in between are removed.
    rounded = x if x.dtype == torch.float32 else (x.view(torch.int16) & -1).view(x.dtype)
    return rounded if fold is None else rounded * fold


def _amax(x: Tensor, values: Tensor, fold: Tensor | None, spec: QuantSpec) -> Tensor:
    """Return the amax of each row, each column or the matrix, float32 of the scales' shape."""
    dims = [dim for dim, extent in enumerate(spec.granularity) if extent == FULL]
    if x.dtype != torch.float32 and fold is None:
        return (x.view(torch.int16) & 0x7FFF).amax(dims, keepdim=True).view(x.dtype).float()
    return (values.view(torch.int32) & 0x7FFFFFFF).amax(dims, keepdim=True).view(torch.float32)


def _marked_scale(amax: Tensor, spec: QuantSpec) -> Tensor:
    """Return the scales of `reference.scale_of`, but NaN where amax is not finite, as its inverses are."""
    # Inductor multiplies by the reciprocal, which rounds alike: max is 7 · 2ⁿ.
    scale = (amax.double() / spec.format.max).float().clamp_min(SMALLEST_SCALE)
    if spec.scale_rule != "amax":
        scale = power_of_two(scale)
    return scale + (amax * 0.0).abs()  # plus zero, or NaN


def _read_with(scale: Tensor, fuse_with: Tensor | None) -> Tensor:
    """Return scales unchanged, by an operation that reads `fuse_with` (docs/compile.md)."""
    # `fuse_with` is finite, or the factor of a matrix's rows, which makes the scales of all its columns NaN anyway.
    if fuse_with is None or not all(isinstance(size, int) for size in (*scale.shape, *fuse_with.shape)):
        return scale
    common = math.gcd(scale.numel(), fuse_with.numel())
    if common * fuse_with.element_size() < _FUSING_BYTES:
        return scale
    zeros = fuse_with.reshape(-1)[:common] * 0.0
    return scale + zeros.expand(scale.numel() // common, common).reshape(scale.shape)


_FUSING_BYTES = 10  # `torch._inductor.config.score_fusion_memory_threshold`


def _reciprocal(scale: Tensor) -> Tensor:
    return scale.double().reciprocal().float()


def _transposed(data: Tensor) -> Tensor:
    """Return the transposed matrix [C,R], its rows padded to 16 bytes with zeros."""
    rows = data.shape[0]
    columns = data.t().contiguous()
    if padded(rows) != rows:
        columns = F.pad(columns.view(torch.uint8), (0, padded(rows) - rows)).view(data.dtype)
    return _stored(columns)[:, :rows]


def _stored_scales(scale: Tensor) -> Tensor:
    """Return scales so that their kernel stores them and backward reads them, instead of computing them again."""
    # The partitioner recomputes no `amin`, and Inductor compiles none over one element; it stores what has strides.
    least = scale.unsqueeze(-1).amin(-1)
    return least.as_strided(least.shape, least.stride())


def _stored(data: Tensor) -> Tensor:
    """Return a contiguous matrix as a view that makes Inductor store it once, not once per product that reads it."""
    return data.as_strided(data.shape, (data.shape[1], 1))
