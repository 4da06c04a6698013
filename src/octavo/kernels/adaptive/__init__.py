"""adaptive_quantize and adaptive_dequantize: 8-bit matrices that lose less than e4m3 in the same bytes.

    [R,C]  ──adaptive_quantize──▶  codes uint8 [R,C], scales float32 [R, ⌈C/128⌉]  ──adaptive_dequantize──▶  [R,C]

A message that its receiver widens, and a stored weight that is widened for its products, need no format that matrix
units multiply. Each group of 128 elements of a row has the format with the most mantissa bits that its values allow.
With amax the largest magnitude of a group, and M mantissa bits,

    number   format   M   SQNR of Gaussian values   fits if at most 1/8 of the non-zero elements are below
    0        e4m3     3   32 dB                     any
    1        e3m4     4   38 dB                     amax / 512
    2        e2m5     5   44 dB                     amax / 64

    s = max(amax / top, 2⁻¹²⁶), its two lowest bits replaced by the number
    |v| / s < 1     rounded to a multiple of 2⁻ᴹ         error s·2⁻ᴹ⁻¹ or less
    |v| / s ≥ 1     rounded to M mantissa bits           error |v|·2⁻ᴹ⁻¹ or less      both to nearest even

top is the largest value of a format in units of its smallest normal one: no code is a NaN or an infinity, and the
exponent has no bias, so subnormal codes count up to the smallest normal value. An e3m4 group holds elements from
amax/512 on with 22 dB or more, an e2m5 group those from amax/64 on; of Gaussian values 3 % are below amax/64. Groups
with a few outliers, or with channels of very different sizes, stay in e4m3. A non-finite value makes the scale of its
group NaN, hence all its values. Zeros stay zeros, with their sign.

Rejected: COAT's power (|v|/amax)ᵏ in e4m3, which the optimizer uses for moments: 38 dB for Gaussian values with k = 2
and 41 dB with k = 3, where all below amax/77 becomes zero. The format with the least squared error: the largest
elements of a group decide about it alone, and small channels beside them become zero. e1m6: 0.1 dB more than e2m5.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.adaptive import reference
from octavo.kernels.library import check_matrix, define
from octavo.kernels.registry import Case, register, same_bytes, triton_backend
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import ADAPTIVE

__all__ = ["ADAPTIVE_DEQUANTIZE", "ADAPTIVE_QUANTIZE", "CASE", "adaptive_dequantize", "adaptive_quantize"]

CASE: Case = (ADAPTIVE.text,)  # The only case of both ops


def adaptive_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous codes uint8 [R,C] and scales float32 [R, ⌈C/128⌉] of a float32, bfloat16 or float16 matrix."""
    check_matrix("adaptive_quantize", "x", x)
    return _QUANTIZE(x)


def adaptive_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [R,C] of contiguous codes and scales, in float32, bfloat16 or float16."""
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"adaptive_dequantize returns float32, bfloat16 or float16; got {dtype}")
    return _DEQUANTIZE(codes, scale, dtype)


def _sample(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 272, generator=generator, device="cpu", dtype=torch.float32)
    x *= torch.logspace(0, 4, 48, device="cpu")[:, None] ** torch.linspace(-1, 1, 272, device="cpu")
    return x.to(device)


def _inputs(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    return [(_sample(device).to(dtype),) for dtype in SUPPORTED_DTYPES]


def _messages(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    return [(*reference.adaptive_quantize(_sample(device)), dtype) for dtype in SUPPORTED_DTYPES]


ADAPTIVE_QUANTIZE = register(
    "adaptive_quantize", {ADAPTIVE.text: CASE}, same_bytes(reference.adaptive_quantize, _inputs, ("codes", "scales")),
    triton_backend("adaptive.triton:adaptive_quantize"), reference=reference.adaptive_quantize,
)  # fmt: skip
ADAPTIVE_DEQUANTIZE = register(
    "adaptive_dequantize", {ADAPTIVE.text: CASE}, same_bytes(reference.adaptive_dequantize, _messages),
    triton_backend("adaptive.triton:adaptive_dequantize"), reference=reference.adaptive_dequantize,
)  # fmt: skip


def _run_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = ADAPTIVE_QUANTIZE.choose(x.device, CASE).run(x)
    return codes, scale


def _run_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = ADAPTIVE_DEQUANTIZE.choose(codes.device, CASE).run(codes, scale, dtype)
    return result


def _fake_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((x.shape[0], reference.groups(x.shape[1])), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.uint8), scale


_QUANTIZE = define("adaptive_quantize", _run_quantize, _fake_quantize)
_DEQUANTIZE = define(
    "adaptive_dequantize", _run_dequantize, lambda codes, scale, dtype: codes.new_empty(codes.shape, dtype=dtype)
)
