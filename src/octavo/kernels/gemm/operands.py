"""What the backends of scaled_mm need of an operand: where its scales lie, and bytes as the hardware reads them.

Both operands are looked at the same way round, as [outside, contraction]: A as [M,K], B as [N,K]. FP8 matrix units read
both contiguous along the contraction, from addresses and with row strides in multiples of 16 bytes. Where an operand is
not kept that way it is copied here, bytes only, transposed and zero-padded in one pass; the caller never sees it.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.bands import bands
from octavo.numerics.spec import FULL, Granularity, QuantSpec
from octavo.tensor import ScaledTensor

ALIGNMENT = 16
"""Rows of FP8 operands start at, and contractions come in, multiples of this many bytes."""

UNIT = "unit"
"""In a case: an operand whose scales were folded away."""


class Operand(NamedTuple):
    """An operand of a product, as [outside, contraction].

    Attributes:
        data: FP8 values [R,K], any strides.
        scale: Its scales, one per block of `blocks`; None where all are 1.
        blocks: Elements that share a scale.
    """

    data: Tensor
    scale: Tensor | None
    blocks: Granularity


@lru_cache(maxsize=256)
def blocks(text: str, transposed: bool) -> Granularity:
    """Extent of the scale blocks of a spec (or `UNIT`), as [outside, contraction]."""
    if text == UNIT:
        return Granularity(FULL, FULL)
    rows, columns = QuantSpec.parse(text).granularity
    return Granularity(columns, rows) if transposed else Granularity(rows, columns)


def blocks_of(case: tuple[str, ...]) -> tuple[Granularity, Granularity]:
    """Scale blocks of both operands of a case of the registry, each as [outside, contraction]."""
    a_text, b_text, layout = case
    return blocks(a_text, layout[0] == "t"), blocks(b_text, layout[1] == "n")


def oriented(a: ScaledTensor, b: ScaledTensor, layout: str) -> tuple[Operand, Operand]:
    """Both operands as [outside, contraction], whatever the layout."""
    return _oriented(a, layout[0] == "t"), _oriented(b, layout[1] == "n")


def _oriented(operand: ScaledTensor, transposed: bool) -> Operand:
    data, scale = operand.data, operand.scale
    extents = blocks(UNIT if scale is None else operand.spec.text, transposed)
    if not transposed:
        return Operand(data, scale, extents)
    return Operand(data.t(), None if scale is None else scale.t(), extents)


def packed(data: Tensor, rows: int, columns: int) -> Tensor:
    """[R,C] bytes row-major and aligned, zero-padded to multiples of `rows` and `columns`; a copy only if needed."""
    below, right = -data.shape[0] % rows, -data.shape[1] % columns
    if below or right:
        # A zero byte is 0.0 in every FP8 format.
        return F.pad(data.view(torch.uint8), (0, right, 0, below)).view(data.dtype)
    if not data.is_contiguous():
        return data.contiguous()
    if data.data_ptr() % ALIGNMENT:
        return data.clone(memory_format=torch.contiguous_format)
    # One row may have any stride and be contiguous; what reads it looks at the stride all the same.
    return data if data.stride(0) == data.shape[1] else data.as_strided(data.shape, (data.shape[1], 1))


def scale_sums(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Multiply float32 sums [M,N] by scales [M or 1, 1] and [1, N or 1] in place, safe over the range of float32.

    Scales reach from 2⁻¹²⁶ to 2¹²⁰, so sums · left may overflow where sums · left · right does not, and left · right
    may underflow. With each scale as m · p, p a power of two near its square root,

        ((sums · m_left) · m_right) · (p_left · p_right)

    has no intermediate outside the range between sums and the result; the powers of two are exact, so every result in
    the normal range has the bits of (sums · left) · right.
    """
    m_left, p_left = _halves(left)
    m_right, p_right = _halves(right)
    for band in bands((sums.shape[0], sums.shape[1]), 1):
        rows = band if left.shape[0] > 1 else slice(None)
        sums[band].mul_(m_left[rows]).mul_(m_right).mul_(p_left[rows] * p_right)


def _halves(scale: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 scale as m · p with p = 2^⌊exponent / 2⌋, exactly."""
    half = ((scale.view(torch.int32) >> 23) & 0xFF).sub_(127).bitwise_right_shift_(1)
    inverse = ((127 - half) << 23).view(torch.float32)
    return scale * inverse, ((half + 127) << 23).view(torch.float32)


def nothing_to_multiply(left: Operand, right: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The product where some size is 0: zeros and the bias."""
    zeros = left.data.new_zeros((left.data.shape[0], right.data.shape[0]), dtype=out_dtype)
    return zeros if bias is None else zeros + bias.to(out_dtype)
