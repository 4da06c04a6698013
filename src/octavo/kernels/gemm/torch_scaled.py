"""scaled_mm through `torch._scaled_mm` (cuBLASLt and CUTLASS inside PyTorch), with scales by tensor or by row.

Hopper's FP8 matrix units want both operands contiguous along the contraction, sizes in multiples of 16, and at most
one E5M2 operand. So operands are transposed (bytes, not bf16) and zero-padded here as needed, and the caller never
sees it.

PyTorch's row-wise product returns bf16 only; other output dtypes, and a bias, go through unit scales with a float32
result that is scaled afterwards. An operand with unit scales, or one scale, beside a row-scaled one gets a vector of
them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.registry import Case
from octavo.numerics.spec import FULL, QuantSpec
from octavo.tensor import ScaledTensor

ALIGNMENT = 16
"""Rows and columns of FP8 operands come in multiples of this many bytes."""


def refuses(device: torch.device, case: Case) -> str | None:
    """Why this backend leaves a case to another one, or None."""
    if device.type == "cpu":
        return "on a CPU torch._scaled_mm is a slow loop; reference is exact and faster"
    if device.type != "cuda":
        return f"torch._scaled_mm has no FP8 kernel for device type {device.type!r}"
    a_spec, b_spec, layout = case
    for text, transposed, contraction in ((a_spec, layout[0] == "t", 1), (b_spec, layout[1] == "t", 0)):
        if text == "unit":
            continue
        granularity = (QuantSpec.parse(text).transposed if transposed else QuantSpec.parse(text)).granularity
        if granularity[contraction] != FULL:
            return f"scales of {text} vary along the contraction; this backend takes scales by tensor or by row"
    return None


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """See `octavo.kernels.gemm.scaled_mm`."""
    left = a.t() if layout[0] == "t" else a
    right = b.t() if layout[1] == "t" else b
    m, k = left.data.shape
    n = right.data.shape[1]
    if m == 0 or n == 0 or k == 0:
        zeros = left.data.new_zeros((m, n), dtype=out_dtype)
        return zeros if bias is None else zeros + bias.to(out_dtype)
    a_data = _padded(left.data, rows=False).contiguous()
    b_data = _padded(right.data.t(), rows=True).contiguous().t()
    by_row = any(scale is not None and scale.numel() > 1 for scale in (left.scale, right.scale))
    if by_row and out_dtype == torch.bfloat16 and bias is None:
        rows = _scale_vector(left.scale, m, a_data.shape[0], a_data.device)[:, None]
        columns = _scale_vector(right.scale, n, b_data.shape[1], a_data.device)[None, :]
        return _multiply(a_data, b_data, rows, columns, torch.bfloat16, fast_accum)[:m, :n].contiguous()
    one = torch.ones((), device=a_data.device, dtype=torch.float32)
    scales = [scale for scale in (left.scale, right.scale) if scale is not None]
    outside = [scale for scale in scales if scale.numel() > 1]
    a_scale, b_scale = (
        scale.reshape(()) if scale is not None and scale.numel() == 1 else one for scale in (left.scale, right.scale)
    )
    done_inside = not outside and bias is None
    sums = _multiply(a_data, b_data, a_scale, b_scale, out_dtype if done_inside else torch.float32, fast_accum)[:m, :n]
    for scale in outside:
        sums = sums * scale
    return (sums if bias is None else sums + bias).to(out_dtype).contiguous()


def _multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=fast_accum)


def _padded(data: Tensor, *, rows: bool) -> Tensor:
    """Zero-pad columns, and rows if asked, to multiples of `ALIGNMENT`; a zero byte is 0.0 in every format."""
    below, right = -data.shape[0] % ALIGNMENT if rows else 0, -data.shape[1] % ALIGNMENT
    if not (below or right):
        return data
    return F.pad(data.view(torch.uint8), (0, right, 0, below)).view(data.dtype)


def _scale_vector(scale: Tensor | None, size: int, padded: int, device: torch.device) -> Tensor:
    """Row scales as a dense vector, ones where there are none (PyTorch refuses the strides of a transposed [1,n])."""
    if scale is None:
        return torch.ones(padded, device=device, dtype=torch.float32)
    return F.pad(scale.flatten().expand(size), (0, padded - size), value=1.0)
