"""What a matrix looks like in a message: each row its FP8 bytes, and right behind them its scales.

    [M,K] bf16  ──pack──▶  uint8 [M, K + bytes of scales]  ──unpack──▶  [M,K]

One message, so that data and scales cannot be mixed up and a collective is one call; whole rows, so that a message is
cut (for one rank and the next) where the tensor is. uint8, because Gloo and older NCCL know no FP8. Scales by row, by
group of a row, or one for all: that one is then repeated in each row, as a row may travel alone.

Error: with s the scale of a group, its largest magnitude a over 448 (e4m3) or 57344 (e5m2), or up to twice that where
scales are powers of two, a value v arrives within

    e4m3    |v|/16, or s/2¹⁰ where |v| is below s/2⁶         32 dB for Gaussian values
    e5m2    |v|/8, or s/2¹⁷ where |v| is below s/2¹⁴         26 dB

before it is rounded to the dtype of the result. What is not finite makes its whole group NaN.

    e4m3/1x128       1.03 bytes per element, 0.52 of bf16
    e4m3/row         1 byte, and 4 per row
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels import dequantize, quantize
from octavo.numerics.spec import FULL, ROW, QuantSpec
from octavo.tensor import ScaledTensor

WIRE = "e4m3/1x128"
"""The form in which tensors travel unless another is asked for."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parse(spec: str) -> QuantSpec:
    """The spec of a message.

    Raises:
        ValueError: For one whose scales are shared by rows, which travel alone, other than by all of them.
    """
    parsed = QuantSpec.parse(spec)
    rows, columns = parsed.granularity
    if rows != 1 and (rows, columns) != (FULL, FULL):
        raise ValueError(
            f"octavo.comm: rows of a message travel alone, so their scales are by row, 1xN or tensor; got {spec!r}"
        )
    return parsed


def width(columns: int, spec: QuantSpec) -> int:
    """Bytes of a row in a message."""
    scales = 1 if spec.granularity.columns == FULL else -(-columns // spec.granularity.columns)
    return columns + scales * spec.scale_dtype.itemsize


def pack(x_MK: Tensor, spec: QuantSpec) -> Tensor:
    """Quantize a matrix into a message, uint8 [M, width(K, spec)]."""
    with torch.no_grad():
        quantized = quantize(x_MK.detach(), spec)
    assert quantized.scale is not None
    scale = quantized.scale.expand(x_MK.shape[0], -1).clone(memory_format=torch.contiguous_format)
    return torch.cat((quantized.data.view(torch.uint8), scale.view(torch.uint8)), dim=1)


def unpack(message: Tensor, columns: int, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """The matrix [M, columns] that a message carries, in `dtype`."""
    data = message[:, :columns].contiguous().view(spec.format.dtype)
    count = (message.shape[1] - columns) // spec.scale_dtype.itemsize
    scale = message.new_empty((message.shape[0], count), dtype=spec.scale_dtype)  # aligned, as bytes in a row are not
    scale.view(torch.uint8).copy_(message[:, columns:])
    by_row = spec if spec.granularity.rows == 1 else replace(spec, granularity=ROW)
    return dequantize(ScaledTensor(data, scale, by_row), dtype)


def as_rows(x: Tensor, parts: int = 1) -> Tensor:
    """A tensor as a matrix of which each of `parts` equal pieces of dimension 0 is whole rows: [parts·R, rest], or
    [parts, n/parts] of a vector.
    """
    return x.reshape(parts, -1) if x.ndim < 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))
