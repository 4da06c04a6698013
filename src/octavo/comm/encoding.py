"""Encode a matrix for a message: each row holds its FP8 bytes followed by its scales.

    [M,K] bf16  ──pack──▶  uint8 [M, K + bytes of scales]  ──unpack──▶  [M,K]

Data and scales travel in one message, so they cannot be mixed up and a collective is one call. Rows are whole, so a
message splits between ranks where the tensor does. The dtype is uint8, because Gloo and older NCCL do not support FP8.
Scales are by row, by group of a row, or one for the whole tensor; the last is repeated in each row, because a row may
travel alone.

Error: let s be the scale of a group, that is, its amax over 448 (e4m3) or 57344 (e5m2), or up to twice that for
power-of-two scales. A value v arrives within

    e4m3    |v|/16, or s/2¹⁰ where |v| is below s/2⁶         32 dB for Gaussian values
    e5m2    |v|/8, or s/2¹⁷ where |v| is below s/2¹⁴         26 dB

before rounding to the dtype of the result. A non-finite value makes its whole group NaN.

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
"""The default FP8 format of messages."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parse_spec(spec: str) -> QuantSpec:
    """Parse the FP8 spec of a message.

    Raises:
        ValueError: If several but not all rows share a scale, because rows travel alone.
    """
    parsed = QuantSpec.parse(spec)
    rows, columns = parsed.granularity
    if rows != 1 and (rows, columns) != (FULL, FULL):
        raise ValueError(
            f"octavo.comm: rows of a message travel alone, so their scales are by row, 1xN or tensor; got {spec!r}"
        )
    return parsed


def width(columns: int, spec: QuantSpec) -> int:
    """Return the bytes of a row in a message."""
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
    """Decode the matrix [M, columns] of a message, in `dtype`."""
    data = message[:, :columns].contiguous().view(spec.format.dtype)
    count = (message.shape[1] - columns) // spec.scale_dtype.itemsize
    scale = message.new_empty((message.shape[0], count), dtype=spec.scale_dtype)  # bytes within a row are not aligned
    scale.view(torch.uint8).copy_(message[:, columns:])
    by_row = spec if spec.granularity.rows == 1 else replace(spec, granularity=ROW)
    return dequantize(ScaledTensor(data, scale, by_row), dtype)


def as_rows(x: Tensor, parts: int = 1) -> Tensor:
    """View a tensor as a matrix in which each of `parts` equal pieces of dimension 0 is whole rows: [parts·R, rest], or
    [parts, n/parts] for a vector.
    """
    return x.reshape(parts, -1) if x.ndim < 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))
