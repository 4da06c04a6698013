"""Number formats: FP8 E4M3 and E5M2 for values (OFP8 1.0), E8M0 for scales (OCP MX)."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Row chunks: parts of a matrix whose intermediate results fit into a core's cache.


CHUNK_ELEMENTS = 262144  # Elements per chunk: a megabyte in float32


def row_chunks(shape: tuple[int, int], multiple: int = 1) -> list[slice]:
    """Return slices over the rows of a matrix [R,C]; all but the last have a multiple of `multiple` rows."""
    # The list is empty for an empty matrix.
    rows, columns = shape
    step = max(CHUNK_ELEMENTS // max(columns * multiple, 1), 1) * multiple
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)] if columns else []


def visible(tensor: Tensor) -> bool:
    """Whether Python may look at a tensor's values at little cost: real ones, on a CPU, outside a graph."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()


@dataclass(frozen=True, kw_only=True)
class Format:
    """An 8-bit floating point format.

    Attributes:
        name: Lower-case name, as it appears in a spec (`"e4m3"`).
        dtype: Torch dtype, one byte per element.
        max: Largest finite value.
        smallest_normal: Smallest positive normal value.
        smallest: Smallest positive value (subnormal where the format has subnormals).
        tolerance_db: Minimum SQNR in dB of a product of normally distributed operands.
    """

    name: str
    dtype: torch.dtype
    max: float
    smallest_normal: float
    smallest: float
    tolerance_db: float

    def __str__(self) -> str:
        return self.name


SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # Dtypes of tensors to quantize, and of results

E4M3 = Format(
    name="e4m3", dtype=torch.float8_e4m3fn, max=448.0, smallest_normal=2.0**-6, smallest=2.0**-9, tolerance_db=28.0,
)  # fmt: skip
E5M2 = Format(
    name="e5m2", dtype=torch.float8_e5m2, max=57344.0, smallest_normal=2.0**-14, smallest=2.0**-16, tolerance_db=24.0,
)  # fmt: skip
E8M0 = Format(
    name="e8m0", dtype=torch.float8_e8m0fnu, max=2.0**127, smallest_normal=2.0**-127, smallest=2.0**-127,
    tolerance_db=0.0,
)  # fmt: skip

VALUE_FORMATS = {f.name: f for f in (E4M3, E5M2)}


def widen(q: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert FP8 values exactly to float32 or bfloat16."""
    # PyTorch's conversion of E4M3 on a CPU takes 3 ns per element, longer than the product that follows, and that of
    # E5M2 0.6. So this moves sign, exponent and mantissa to float16's positions, whose conversion is fast, and for E4M3
    # multiplies by 2⁸ to correct the bias, subnormals included. Its NaN code, the largest, becomes float16's NaN.
    if q.dtype not in (E4M3.dtype, E5M2.dtype) or q.device.type != "cpu":
        return q.to(dtype)
    if q.numel() <= CHUNK_ELEMENTS:
        return _widened(q, dtype)
    values = torch.empty_like(q, dtype=dtype)
    dim = 0 if q.ndim < 2 or q.stride(0) >= q.stride(-1) else q.ndim - 1
    step = max(CHUNK_ELEMENTS * q.shape[dim] // q.numel(), 1)
    for codes, out in zip(q.split(step, dim), values.split(step, dim), strict=True):
        _widened(codes, dtype, out)
    return values


def _widened(codes: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return, or write to `out`, the values of E4M3 or E5M2 codes on a CPU."""
    bits = codes.view(torch.int8).to(torch.int16)
    is_e4m3 = codes.dtype == E4M3.dtype
    half = _e4m3_as_half(codes, bits) if is_e4m3 else bits.bitwise_left_shift_(8).view(torch.float16)
    # PyTorch converts float16 to bfloat16 slowly.
    values = half.float() if out is None or dtype != torch.float32 else out.copy_(half)
    if is_e4m3:
        values.mul_(2.0**8)
    if dtype == torch.float32:
        return values
    return values.to(dtype) if out is None else out.copy_(values)


def _e4m3_as_half(codes: Tensor, bits: Tensor) -> Tensor:
    """Return E4M3 values times 2⁻⁸ in float16; `bits`: their sign-extended codes s…s s eeee mmm, overwritten."""
    bits <<= 7
    bits &= -0x4080  # keep s at 15 and eeee mmm at 13…7
    if not visible(codes) or not codes.numel() or int((codes.view(torch.int8) & 0x7F).amax()) == 0x7F:
        # Adding 1 to the mantissa carries into float16's upper exponent bit for NaN only: its exponent is all ones.
        bits |= (bits + 0x80).bitwise_and_(0x4000)
    return bits.view(torch.float16)
