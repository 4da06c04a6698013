"""Adaptive FP8 in PyTorch operations: the reference that other backends match byte for byte."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import row_chunks
from octavo.numerics.spec import ADAPTIVE, SMALLEST_SCALE
from octavo.runtime.torch_compat import outside_autograd

GROUP = ADAPTIVE.granularity.columns  # Elements that share a scale and a format
MANTISSAS = (3, 4, 5)  # Mantissa bits of the formats, by number: e4m3, e3m4, e2m5
TOPS = tuple((2 - 2.0**-mantissa) * 2.0 ** (2 ** (7 - mantissa) - 2) for mantissa in MANTISSAS)
"""Largest value of each format, in units of its smallest normal one: 30720, 124, 7.875."""
FINE = (0.0, 2.0**-9, 2.0**-6)
"""The part of the largest value below which a format is coarse; the first one is always fine enough."""
FEW = 8  # A format fits a group if at most one non-zero element in so many lies in its coarse part
NAN_BITS, INFINITY_BITS, ONE_BITS = 0x7FC00000, 0x7F800000, 0x3F800000


def groups(columns: int) -> int:
    return -(-columns // GROUP)


def adaptive_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes uint8 [R,C] and scales float32 [R, groups] of a matrix."""
    rows, columns = x.shape
    codes = x.new_empty((rows, columns), dtype=torch.uint8)
    scale = x.new_empty((rows, groups(columns)), dtype=torch.float32)
    for part in row_chunks((rows, columns)):
        codes[part], scale[part] = _quantized(x[part])
    return codes, scale


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    values = F.pad(x.float(), (0, -columns % GROUP)).reshape(rows, groups(columns), GROUP)
    size = values.abs()
    amax = size.amax(-1, keepdim=True)
    finite = amax.isfinite()
    zeros = _count(size == 0)
    number = torch.zeros_like(zeros)
    for index in range(1, len(MANTISSAS)):
        coarse = _count(size < amax * FINE[index]) - zeros
        number.masked_fill_(FEW * coarse + zeros <= GROUP, index)
    top = torch.tensor([1 / top for top in TOPS], device=x.device)[number]
    scale_bits = (amax * top).clamp_(min=SMALLEST_SCALE).masked_fill_(~finite, 1.0).view(torch.int32) & -4
    sizes = size.mul_(1.0 / scale_bits.view(torch.float32))
    mantissa = number + MANTISSAS[0]
    codes = _codes(sizes, mantissa)
    codes |= values.view(torch.int32).bitwise_right_shift(24).bitwise_and_(0x80)
    codes.masked_fill_(~finite, 0)
    scale_bits.bitwise_or_(number).masked_fill_(~finite, NAN_BITS)
    return codes.to(torch.uint8).view(rows, -1)[:, :columns], scale_bits.view(torch.float32).squeeze(-1)


def _count(mask: Tensor) -> Tensor:
    return mask.sum(-1, keepdim=True, dtype=torch.int32)


def _codes(sizes: Tensor, mantissa: Tensor) -> Tensor:
    """Return codes without sign, int32."""
    # With 2ᵉ the power of two at or below a value, 1 at least: the integer nearest to value · 2ᴹ⁻ᵉ, plus e · 2ᴹ. Adding
    # 2ᵉ⁺²³⁻ᴹ rounds to that integer, to nearest even, in the last bits of the sum.
    power = (sizes.view(torch.int32) & INFINITY_BITS).clamp_(min=ONE_BITS)
    magic = power + (23 - mantissa).bitwise_left_shift_(23)
    integer = (sizes + magic.view(torch.float32)).view(torch.int32).sub_(magic)
    exponent = power.sub_(ONE_BITS).bitwise_right_shift_(23)
    return integer.add_(exponent.mul_(torch.ones_like(mantissa).bitwise_left_shift_(mantissa)))


def adaptive_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = codes.shape
    out = codes.new_empty((rows, columns), dtype=dtype)
    values = (_shared_values if type(codes) is Tensor else _values)(codes.device)
    for part in row_chunks((rows, columns)):
        padded = F.pad(codes[part], (0, -columns % GROUP)).unflatten(1, (groups(columns), GROUP))
        bits = scale[part].contiguous().view(torch.int32).unsqueeze(-1)
        indices = padded.int() + bits.bitwise_and(3).bitwise_left_shift_(8)
        units = values.index_select(0, indices.flatten()).view(indices.shape)
        out[part] = units.mul_((bits & -4).view(torch.float32)).flatten(1)[:, :columns]
    return out


def _values(device: torch.device) -> Tensor:
    """Return the value of each code in each format, float32 [4 · 256]; no group has the fourth format, e1m6."""
    size = torch.arange(128, dtype=torch.int32, device="cpu")
    tables = []
    for mantissa in (*MANTISSAS, 6):
        normal = (size << (23 - mantissa)).add_(126 << 23).view(torch.float32)
        value = torch.where(size < 1 << mantissa, size * 2.0**-mantissa, normal)
        tables += [value, -value]
    return torch.cat(tables).to(device)


# One table for the process, whatever modes the first caller is in.
_shared_values = lru_cache(maxsize=8)(outside_autograd()(_values))
