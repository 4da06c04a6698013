"""Encode a matrix for a message: each row holds its FP8 bytes followed by its scales, each padded to 16 bytes.

    [M,K] bf16  ──pack──▶  uint8 [M, width(K)]  ──unpack──▶  [M,K]
    [M,K] bf16  ──pack_parts──▶  uint8 [Σ part_size]  ──unpack_parts──▶  [M',K]      parts: rows for one rank

The dtype is uint8, because Gloo and older NCCL do not support FP8. docs/numerics.md has the errors of the formats.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels import dequantize, quantize
from octavo.kernels.adaptive import adaptive_dequantize, adaptive_quantize
from octavo.numerics.spec import ADAPTIVE, FULL, ROW, AdaptiveSpec, MessageSpec, QuantSpec
from octavo.tensor import ScaledTensor

DEFAULT_SPEC = "e4m3/1x128"  # The default FP8 format of collectives
ADAPTIVE_SPEC = ADAPTIVE.text  # FP8 format of activations and their gradients that the receiver widens, `"fp8/1x128"`
ALIGNMENT = 16  # Bytes and scales of a row begin at multiples of this
_TILE_ROWS = 128  # Matrices with fewer rows leave parts of a quantizer's tile idle
_TILE_COLUMNS = 512  # Columns of a tile of the kernel that dequantizes


def parse_spec(spec: str) -> MessageSpec:
    if spec == ADAPTIVE.text:
        return ADAPTIVE
    if spec.startswith("fp8/"):
        raise ValueError(f"octavo.comm: the adaptive format is {ADAPTIVE.text!r}; got {spec!r}")
    parsed = QuantSpec.parse(spec)
    rows, columns = parsed.granularity
    if rows != 1 and (rows, columns) != (FULL, FULL):
        raise ValueError(f"octavo.comm: scales of a message are by row, 1xN or tensor; got {spec!r}")
    return parsed


def width(columns: int, spec: MessageSpec) -> int:
    """Return the bytes of a row in a message."""
    return _aligned(columns) + _aligned(_scale_bytes(columns, spec))


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _scales(columns: int, spec: MessageSpec) -> int:
    return 1 if spec.granularity.columns == FULL else -(-columns // spec.granularity.columns)


def pack(x_MK: Tensor, spec: MessageSpec) -> Tensor:
    """Quantize a matrix into a message, uint8 [M, width(K, spec)]."""
    return torch.cat([_padded(part, ALIGNMENT) for part in _encode(x_MK, spec)], dim=1)


def unpack(message: Tensor, columns: int, spec: MessageSpec, dtype: torch.dtype) -> Tensor:
    """Decode the matrix [M, columns] of a message, in `dtype`."""
    scales = message[:, _aligned(columns) :][:, : _scale_bytes(columns, spec)]
    return _decode(message[:, :columns], scales, spec, dtype)


def part_size(rows: int, columns: int, spec: MessageSpec) -> int:
    """Return the bytes of a part of a message."""
    return _aligned(rows * columns) + _aligned(rows * _scale_bytes(columns, spec))


def pack_parts(x_MK: Tensor, sizes: Sequence[int], spec: MessageSpec) -> Tensor:
    """Quantize a matrix into a message of parts of so many rows each, uint8 [Σ part_size(rows, K, spec)]."""
    data, scales = (encoded.split(list(sizes)) for encoded in _encode(x_MK, spec))
    pieces = chain.from_iterable(zip(data, scales, strict=True))
    return torch.cat([_padded(piece.reshape(1, -1), ALIGNMENT)[0] for piece in pieces])


def unpack_parts(
    message: Tensor, sizes: Sequence[int], columns: int, spec: MessageSpec, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Decode the matrix [Σ sizes, columns] of a message of parts, in `dtype`."""
    data, scales, scale_bytes = [], [], _scale_bytes(columns, spec)
    parts = message.split([part_size(rows, columns, spec) for rows in sizes])
    for rows, part in zip(sizes, parts, strict=True):
        data.append(part[: rows * columns].view(rows, columns))
        scales.append(part[_aligned(rows * columns) :][: rows * scale_bytes].view(rows, scale_bytes))
    return _decode(torch.cat(data), torch.cat(scales), spec, dtype)


def _scale_bytes(columns: int, spec: MessageSpec) -> int:
    return _scales(columns, spec) * spec.scale_dtype.itemsize


def _encode(x_MK: Tensor, spec: MessageSpec) -> tuple[Tensor, Tensor]:
    """Return the FP8 bytes [M,K] of a matrix and those of its scales [M, scale bytes], uint8."""
    rows, columns = x_MK.shape
    x = x_MK.detach()
    if isinstance(spec, AdaptiveSpec):
        codes, scale = adaptive_quantize(x)
        return codes, scale.view(torch.uint8)
    with torch.no_grad():
        if _has_few_long_rows(rows, columns, spec):
            x = _padded(x, spec.granularity.columns)
            quantized = quantize(x.reshape(-1, spec.granularity.columns), spec)
        else:
            quantized = quantize(x, spec)
    assert quantized.scale is not None
    data = quantized.data.view(x.shape)[:, :columns]
    by_tensor = spec.granularity.rows == FULL
    scale = quantized.scale.expand(rows, 1) if by_tensor else quantized.scale.view(rows, _scales(columns, spec))
    return data.view(torch.uint8), scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _decode(data: Tensor, scales: Tensor, spec: MessageSpec, dtype: torch.dtype) -> Tensor:
    (rows, columns), extent = data.shape, spec.granularity.columns
    scale = scales.new_empty((rows, _scales(columns, spec)), dtype=spec.scale_dtype)
    scale.view(torch.uint8).copy_(scales)
    if isinstance(spec, AdaptiveSpec):
        return adaptive_dequantize(data.contiguous(), scale, dtype)
    if not _has_few_long_rows(rows, columns, spec):
        by_row = spec if spec.granularity.rows == 1 else replace(spec, granularity=ROW)
        return dequantize(ScaledTensor(data.contiguous().view(spec.format.dtype), scale, by_row), dtype)
    data = _padded(data, extent).contiguous().view(spec.format.dtype)
    wide = math.gcd(data.numel(), _TILE_COLUMNS)
    wide = wide if wide % extent == 0 else extent
    values = dequantize(ScaledTensor(data.view(-1, wide), scale.view(-1, wide // extent), spec), dtype)
    return values.view(data.shape)[:, :columns].contiguous()


def _has_few_long_rows(rows: int, columns: int, spec: QuantSpec) -> bool:
    """Whether a matrix is quantized as one of more rows, each with one group."""
    return 0 < rows < _TILE_ROWS and columns > spec.granularity.columns > 0


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[1] % multiple
    return F.pad(x, (0, missing)) if missing else x


def as_rows(x: Tensor, parts: int = 1) -> Tensor:
    """View a tensor as a matrix of whole rows for each of `parts`: [parts·R, rest], or [parts, n/parts] of a vector."""
    return x.reshape(parts, -1) if x.ndim < 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))
