"""dequantize in PyTorch operations: the reference that other backends match bit for bit."""

import torch
from torch import Tensor

from octavo.numerics.formats import widen
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor


def dequantize(data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Return `data · scale` [R,C]."""
    rows, columns = data.shape
    extent = spec.granularity.columns
    if spec.granularity.rows == 1 and extent and columns % extent == 0:  # whole blocks: scales broadcast
        blocks = widen(data.reshape(rows, columns // extent, extent))
        return blocks.mul_(scale.float()[:, :, None]).reshape(rows, columns).to(dtype)
    return ScaledTensor(data, scale, spec).dequantize(dtype).contiguous()
