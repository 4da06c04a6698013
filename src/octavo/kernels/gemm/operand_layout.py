"""Operands of scaled_mm as backends read them: oriented as [outside, contraction], aligned bytes, scale blocks."""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import row_chunks
from octavo.numerics.spec import TENSOR, Granularity, QuantSpec
from octavo.tensor import ScaledTensor

ALIGNMENT = 16  # Alignment of rows and of contractions of FP8 operands, in bytes
UNIT_SCALE = "unit"  # Name in a case for an operand with unit scales (folded into the other operand)
CONTRACTED = {"nt": (1, 1), "nn": (1, 0), "tn": (0, 0)}  # Contracted dimensions of A and B, by layout


class Operand(NamedTuple):
    """An operand of a product, oriented as [outside, contraction]."""

    data: Tensor  # FP8 values [R,K], any strides
    scale: Tensor | None  # Scales, one per block; None for unit scales
    blocks: Granularity  # Extent of the scale blocks


@lru_cache(maxsize=256)
def blocks(text: str, transposed: bool) -> Granularity:
    """Return the scale blocks of a spec (or `UNIT_SCALE`), oriented as [outside, contraction]."""
    if text == UNIT_SCALE:
        return TENSOR
    rows, columns = QuantSpec.parse(text).granularity
    return Granularity(columns, rows) if transposed else Granularity(rows, columns)


def blocks_of(case: tuple[str, ...]) -> tuple[Granularity, Granularity]:
    """Return the scale blocks of both operands of a registry case, oriented as [outside, contraction]."""
    a_text, b_text, layout = case
    return blocks(a_text, layout[0] == "t"), blocks(b_text, layout[1] == "n")


def oriented(a: ScaledTensor, b: ScaledTensor, layout: str) -> tuple[Operand, Operand]:
    return _oriented(a, layout[0] == "t"), _oriented(b, layout[1] == "n")


def _oriented(operand: ScaledTensor, transposed: bool) -> Operand:
    data, scale = operand.data, operand.scale
    extents = blocks(UNIT_SCALE if scale is None else operand.spec.text, transposed)
    if not transposed:
        return Operand(data, scale, extents)
    return Operand(data.t(), None if scale is None else scale.t(), extents)


def data_along(operand: ScaledTensor, along: int) -> Tensor:
    """Return the data contiguous along a dimension if it exists, else `data`, which a backend copies if needed."""
    data = operand.along(along) if operand.other_order is not None else None
    return operand.data if data is None else data


def packed(data: Tensor, rows: int, columns: int) -> Tensor:
    """Return [R,C] data row-major, aligned, zero-padded to multiples of `rows` and `columns`; copy only if needed."""
    below, right = -data.shape[0] % rows, -data.shape[1] % columns
    if below or right:
        # A zero byte is 0.0 in every FP8 format.
        return F.pad(data.view(torch.uint8), (0, right, 0, below)).view(data.dtype)
    if not data.is_contiguous():
        return data.contiguous()
    if data.data_ptr() % ALIGNMENT:
        return data.clone(memory_format=torch.contiguous_format)
    # A single row counts as contiguous with any stride, but readers check the stride.
    return data if data.stride(0) == data.shape[1] else data.as_strided(data.shape, (data.shape[1], 1))


def scale_sums(sums: Tensor, left: Tensor | None, right: Tensor | None) -> None:
    """Multiply float32 sums [M,N] by scales [M or 1, 1] and [1, N or 1] in place, without intermediate overflow."""
    # Scales range from 2⁻¹²⁶ to 2¹²⁰: sums · left may overflow although sums · left · right does not, and left · right
    # may underflow. With each scale split into m · p, p a power of two near its square root,
    # ((sums · m_left) · m_right) · (p_left · p_right)
    # keeps all intermediates between the sums and the result. The powers of two are exact, so normal results equal
    # (sums · left) · right bit for bit. On a CPU, where a look at the scales costs little, scales of ordinary size take
    # that shorter way: sums of FP8 products are 0 or between 2⁻³² and 2⁶⁰.
    if left is None or right is None:
        for scale in (left, right):
            if scale is not None:
                sums.mul_(scale)
        return
    if sums.device.type == "cpu" and _is_ordinary(left) and _is_ordinary(right):
        for chunk in row_chunks((sums.shape[0], sums.shape[1]), 1):
            sums[chunk].mul_(left[chunk] if left.shape[0] > 1 else left).mul_(right)
        return
    m_left, p_left = _halves(left)
    m_right, p_right = _halves(right)
    for chunk in row_chunks((sums.shape[0], sums.shape[1]), 1):
        rows = chunk if left.shape[0] > 1 else slice(None)
        sums[chunk].mul_(m_left[rows]).mul_(m_right).mul_(p_left[rows] * p_right)


def _is_ordinary(scale: Tensor) -> bool:
    """Whether all scales are between 2⁻³⁰ and 2³⁰."""
    return not scale.numel() or (2.0**-30 <= float(scale.min()) and float(scale.max()) <= 2.0**30)


def _halves(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 scale exactly into m · p with p = 2^⌊exponent / 2⌋."""
    half = ((scale.view(torch.int32) >> 23) & 0xFF).sub_(127).bitwise_right_shift_(1)
    inverse = ((127 - half) << 23).view(torch.float32)
    return scale * inverse, ((half + 127) << 23).view(torch.float32)


def empty_product(left: Operand, right: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Return the product of empty operands: zeros plus the bias."""
    zeros = left.data.new_zeros((left.data.shape[0], right.data.shape[0]), dtype=out_dtype)
    return zeros if bias is None else zeros + bias.to(out_dtype)
