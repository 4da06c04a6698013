"""ScaledTensor: an FP8 matrix with its scales. A plain container: no dispatch, no subclassing, no arithmetic.

    x ≈ data · scale        scale broadcast over the blocks of spec.granularity

`scale` is None for unit scales: the matrix whose scales were folded into the other operand (see `numerics.recipe`).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.numerics.spec import QuantSpec


@dataclass(frozen=True)
class ScaledTensor:
    """An FP8 matrix [R,C] and the dequantization scales of its blocks.

    Attributes:
        data: FP8 values, [R,C], of dtype `spec.format.dtype`.
        scale: Dequantization scales, `spec.granularity.scale_shape((R,C))`, of `spec.scale_dtype`; None for unit
            scales.
        spec: How it was quantized.
    """

    data: Tensor
    scale: Tensor | None
    spec: QuantSpec

    @property
    def unscaled(self) -> "ScaledTensor":
        """The same bytes with unit scales, for a product whose other operand carries them folded in."""
        return replace(self, scale=None)

    def t(self) -> "ScaledTensor":
        """The transposed matrix, as views."""
        return ScaledTensor(self.data.t(), None if self.scale is None else self.scale.t(), self.spec.transposed)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values `data · scale`, [R,C], multiplied in float32 and rounded once to `dtype`."""
        values = self.data.float()
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
