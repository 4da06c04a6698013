"""FP8 moments of AdamW: groups of 128 of a row, each expanded to the format's range before rounding (docs/kernels.md).

    hi = max|m|,  lo = min|m| over non-zeros,  k = ⌊16·L / log2(hi/lo)⌋ / 16
    q  = round( sign(m) · top · (|m| / hi)^k )            m ≈ sign(q) · hi · (|q| / top)^(1/k)

Only hi (float32) and k (one byte, in sixteenths) are stored beside q.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import E4M3, widen
from octavo.runtime.torch_compat import outside_autograd

GROUP = 128  # Elements that share hi and k

TOP_SIGNED, RANGE_SIGNED = E4M3.max, math.log2(E4M3.max**2 / 2)
TOP_UNSIGNED = 2.0**15 * 31 / 16
RANGE_UNSIGNED = math.log2(TOP_UNSIGNED * 16 / 17)
_MAX_K = 255  # Largest k in sixteenths
_STRIDE = 0x9E3779B1  # Difference between the seeds of consecutive elements


def groups(columns: int) -> int:
    return -(-columns // GROUP)


def compress(
    values: Tensor, signed: bool, noise: Tensor | None = None, *, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compress float32 moments to FP8."""
    rows, columns = values.shape
    grouped = _grouped(values)
    size = grouped.abs_() if overwrite and not signed else grouped.abs()
    hi, lo = size.amax(-1, keepdim=True), size.amin(-1, keepdim=True)
    # All ones where a magnitude is zero: a mask of booleans takes ten times as long on a CPU.
    zeros = None if bool((lo > 0).all()) else (size.view(torch.int32) - 1).bitwise_right_shift_(31)
    if zeros is not None:
        lo = _where_zero(size, zeros, torch.inf).amin(-1, keepdim=True)
    empty = hi == 0
    log_hi = hi.masked_fill(empty, 1.0).log2()
    spread = log_hi - lo.masked_fill(empty, 1.0).log2()
    reach = RANGE_SIGNED if signed else RANGE_UNSIGNED
    k = (16 * reach / spread).floor_().clamp_(1, _MAX_K)  # 255 if all are equal: the quotient is infinite
    top = TOP_SIGNED if signed else TOP_UNSIGNED
    if zeros is not None:
        size = _where_zero(size, zeros, 1.0)  # the logarithm of zero is ten times slower on a CPU
    stretched = size.log2_().sub_(log_hi).mul_(k / 16).exp2_().mul_(top)
    if zeros is not None:
        stretched.view(torch.int32).bitwise_and_(zeros.bitwise_not_())
    codes = _signed_codes(stretched, grouped, noise) if signed else _unsigned_codes(stretched, noise, zeros)
    codes = codes.view(rows, groups(columns) * GROUP)[:, :columns].contiguous()
    return codes, hi.squeeze(-1), k.squeeze(-1).to(torch.uint8)


def expand(codes: Tensor, hi: Tensor, k: Tensor, signed: bool) -> Tensor:
    """Expand the result of `compress` to float32 moments [R,C]."""
    rows, columns = codes.shape
    indices = _grouped(codes.view(torch.uint8)).int().add_(k.int().bitwise_left_shift_(8).unsqueeze(-1))
    roots = _shared_half_roots if type(codes) is Tensor else _half_roots  # fake tensors mix with no real ones
    half = roots(signed, codes.device).index_select(0, indices.flatten()).view(indices.shape)
    values = (half * hi.unsqueeze(-1)).mul_(half.abs_() if signed else half)
    return values.view(rows, hi.shape[1] * GROUP)[:, :columns]


def _half_roots(signed: bool, device: torch.device) -> Tensor:
    """Return (|q| / top)^(1/2k) with the sign of q, for each k in sixteenths and code of q, float32 [256 · 256]."""
    # The whole root may underflow. A table takes a fifth of the time of logarithms and powers of each element.
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    values = widen(codes.view(E4M3.dtype)) if signed else _unsigned_values(codes)
    root = 16.0 / torch.arange(256, dtype=torch.float32, device="cpu").unsqueeze(-1)
    ratio = values.abs().div_(TOP_SIGNED if signed else TOP_UNSIGNED).clamp_(min=2.0**-20)  # below every code
    half = ratio.log2_().mul(root / 2).exp2_().mul_(values != 0).copysign_(values)
    return half.flatten().to(device)


# One table for the process, whatever modes the first caller is in.
_shared_half_roots = lru_cache(maxsize=8)(outside_autograd()(_half_roots))


def _grouped(values: Tensor) -> Tensor:
    rows, columns = values.shape
    padded = F.pad(values, (0, -columns % GROUP)) if columns % GROUP else values
    return padded.reshape(rows, groups(columns), GROUP)


def group_seeds(rows: int, columns: int, first: int, seed: int, device: torch.device) -> Tensor:
    """Return what `hashed` makes random bits of, int32 [rows · groups], for rows from `first` on of a matrix."""
    # Bits are a hash of element index and seed (MurmurHash3's finalizer): independent of order, chunking and device.
    start = seed_after(seed, first * groups(columns) * GROUP)
    indices = torch.arange(rows * groups(columns), dtype=torch.int32, device=device)
    return indices.mul_(_signed(GROUP * _STRIDE)).add_(_signed(start))


def hashed(seeds: Tensor) -> Tensor:
    """Return the random bits of groups, int32 [n, 128], of `group_seeds` [n]."""
    lanes = torch.arange(GROUP, dtype=torch.int32, device=seeds.device).mul_(_signed(_STRIDE))
    bits = seeds.unsqueeze(-1) + lanes
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x85EBCA6B))
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(_signed(0xC2B2AE35))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def seed_after(seed: int, elements: int) -> int:
    """Return the seed that gives the tail of a matrix the random bits that it has in the whole matrix."""
    return (seed + elements * _STRIDE) % 2**32


def _signed(number: int) -> int:
    """Return the low 32 bits as a signed integer."""
    return ((number + 2**31) % 2**32) - 2**31


def _where_zero(size: Tensor, zeros: Tensor, value: float) -> Tensor:
    """Replace zeros, of which `zeros` is the mask, by a positive value."""
    bits = int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))
    return (zeros & bits).bitwise_or_(size.view(torch.int32)).view(torch.float32)


def _signed_codes(size: Tensor, values: Tensor, noise: Tensor | None) -> Tensor:
    if noise is not None:
        bits = size.view(torch.int32).add_(_low_bits(noise, 20)).bitwise_and_(-(1 << 20))
        size = bits.view(torch.float32).clamp_(max=TOP_SIGNED)
    return size.copysign_(values).to(E4M3.dtype)


def _unsigned_codes(size: Tensor, noise: Tensor | None, nonzeros: Tensor | None) -> Tensor:
    """Encode numbers from 1 to 2¹⁵·31/16, overwritten, with four exponent and mantissa bits, zero as code 0."""
    # `nonzeros`: a mask of all ones where numbers are not zero; None if none is.
    bits = size.view(torch.int32).add_(1 << 18 if noise is None else _low_bits(noise, 19))
    codes = bits.bitwise_right_shift_(19).sub_(127 << 4).clamp_(1, 255)
    return (codes if nonzeros is None else codes.bitwise_and_(nonzeros)).to(torch.uint8)


def _unsigned_values(codes: Tensor) -> Tensor:
    bits = codes.to(torch.int32).add_(127 << 4).__ilshift__(19)
    return bits.view(torch.float32).mul_(codes != 0)


def _low_bits(noise: Tensor, dropped: int) -> Tensor:
    """Return 16 random bits as the upper ones of `dropped`: added to a number, they round it at random."""
    return (noise & 0xFFFF).bitwise_left_shift_(dropped - 16)
