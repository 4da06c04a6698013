"""ScaledTensor: an FP8 matrix with its scales; and what is local of DTensors and similar wrappers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.numerics.formats import widen
from octavo.numerics.spec import QuantSpec
from octavo.runtime.torch_compat import local_part

Order = Literal["rows", "columns", "both"]  # Memory order of FP8 data: contiguous rows, columns, or one copy of each


@dataclass(frozen=True)
class ScaledTensor:
    """An FP8 matrix [R,C] and the dequantization scales of its blocks."""

    data: Tensor  # FP8 values, [R,C], of dtype `spec.format.dtype`, row-major or column-major
    # Dequantization scales, `spec.granularity.scale_shape((R,C))`, of `spec.scale_dtype`; None for unit scales.
    scale: Tensor | None
    spec: QuantSpec  # Format, granularity and scale rule
    other_order: Tensor | None = None  # `data` in the other memory order, [R,C], or None

    @property
    def unscaled(self) -> "ScaledTensor":
        """The same data with unit scales, for a product whose other operand contains the folded scales."""
        return ScaledTensor(self.data, None, self.spec, self.other_order)

    def t(self) -> "ScaledTensor":
        """Return the transposed matrix, as views."""
        scale, other_order = (None if t is None else t.t() for t in (self.scale, self.other_order))
        return ScaledTensor(self.data.t(), scale, self.spec.transposed, other_order)

    def along(self, dim: int) -> Tensor | None:
        """Return the data contiguous along a dimension (1: row-major, 0: column-major), or None."""
        for data in (self.data, self.other_order):
            if data is not None and data.stride(dim) == 1:
                return data
        return None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `data · scale` [R,C], multiplied in float32 and rounded once to `dtype`."""
        values = widen(self.data)
        return (values if self.scale is None else values * self.expanded_scale()).to(dtype)

    def expanded_scale(self) -> Tensor:
        """Return float32 scales broadcastable to `data`, expanded along each blocked dimension."""
        if self.scale is None:
            raise ValueError("this ScaledTensor has unit scales, folded into the other operand")
        scale = self.scale.float()
        for dim, extent in enumerate(self.spec.granularity):
            if extent > 1:
                scale = scale.repeat_interleave(extent, dim).narrow(dim, 0, self.data.shape[dim])
        return scale


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape."""
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a `torch.Tensor` that shares its memory."""
    local: Tensor = local_part(tensor)
    result: Tensor = getattr(local, "local", local)
    return result


def placed_like(owner: Any, local: Tensor, shape: Sequence[int] | None = None) -> Any:
    """Return the DTensor that has this rank's part `local` and is placed as `owner`; of `owner`'s shape if None."""
    size, stride = (owner.shape, owner.stride()) if shape is None else (torch.Size(shape), contiguous_strides(shape))
    return owner.from_local(local, owner.device_mesh, owner.placements, run_check=False, shape=size, stride=stride)
