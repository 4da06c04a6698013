"""ScaledTensor: an FP8 matrix with its scales. A plain container: no dispatch, no subclassing, no arithmetic.

    x ≈ data · scale        scale broadcast over the blocks of spec.granularity

`scale` is None for unit scales: the matrix whose scales were folded into the other operand (see `numerics.recipe`).
`copy` is there where two products contract over different dimensions on hardware that wants both operands contiguous
along the contraction: the same bytes again, in the other memory order.

Tensors that are more than their memory, such as the shards of a parameter, are seen through by `plain`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.numerics.formats import widen
from octavo.numerics.spec import QuantSpec


@dataclass(frozen=True)
class ScaledTensor:
    """An FP8 matrix [R,C] and the dequantization scales of its blocks.

    Attributes:
        data: FP8 values, [R,C], of dtype `spec.format.dtype`, row-major or column-major.
        scale: Dequantization scales, `spec.granularity.scale_shape((R,C))`, of `spec.scale_dtype`; None for unit
            scales.
        spec: How it was quantized.
        copy: `data` once more, [R,C] with the other memory order; None where there is no such copy.
    """

    data: Tensor
    scale: Tensor | None
    spec: QuantSpec
    copy: Tensor | None = None

    @property
    def unscaled(self) -> "ScaledTensor":
        """The same bytes with unit scales, for a product whose other operand carries them folded in."""
        return replace(self, scale=None)

    def t(self) -> "ScaledTensor":
        """The transposed matrix, as views."""
        scale, copy = (None if t is None else t.t() for t in (self.scale, self.copy))
        return ScaledTensor(self.data.t(), scale, self.spec.transposed, copy)

    def along(self, dim: int) -> Tensor | None:
        """The bytes that are contiguous along a dimension (1: row-major, 0: column-major), if there are such."""
        for bytes_ in (self.data, self.copy):
            if bytes_ is not None and bytes_.stride(dim) == 1:
                return bytes_
        return None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values `data · scale`, [R,C], multiplied in float32 and rounded once to `dtype`."""
        values = widen(self.data)
        return (values if self.scale is None else values * self.expanded_scale()).to(dtype)

    def expanded_scale(self) -> Tensor:
        """Scales in float32, broadcastable against `data`: expanded to elements along each blocked dimension."""
        if self.scale is None:
            raise ValueError("this ScaledTensor has unit scales (folded away); there is nothing to expand")
        scale = self.scale.float()
        for dim, extent in enumerate(self.spec.granularity):
            if extent > 1:
                scale = scale.repeat_interleave(extent, dim).narrow(dim, 0, self.data.shape[dim])
        return scale


def plain(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, as a plain tensor that shares its memory.

    Args:
        tensor: Any; of a DTensor the local rows, and of a shard that is gathered in FP8 (`octavo.nn.gathered`), which
            has its rows as `local`, those.
    """
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    found: Tensor = getattr(local, "local", local)
    return found
