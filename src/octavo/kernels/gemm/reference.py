"""scaled_mm in plain PyTorch: exact products, float32 sums, on any device.

Every E4M3 and E5M2 value is exact in bf16 and the product of two of them exact in float32. So the reference
multiplies the FP8 values on the bf16 matrix units where a device has them, sums in float32, and is still exact up to
the order of that sum. On a CPU that means float32 operands with oneDNN's bf16 arithmetic, because a product of bf16
tensors would round its sum to bf16 (PyTorch has no bf16 → float32 product on CPU). Scales that vary along the
contraction cannot be taken out of the sum: then the operands are dequantized to float32 and multiplied in float32,
except that power-of-two scales leave the values exact in bf16.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.kernels.gemm.operands import scale_sums
from octavo.numerics.formats import widen
from octavo.numerics.spec import FULL
from octavo.tensor import ScaledTensor


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """See `octavo.kernels.gemm.scaled_mm`; `fast_accum` is ignored, sums are float32 throughout."""
    left = a.t() if layout[0] == "t" else a
    right = b.t() if layout[1] == "t" else b
    left_outside = left.scale is None or left.spec.granularity.columns == FULL
    right_outside = right.scale is None or right.spec.granularity.rows == FULL
    if left_outside and right_outside:
        sums = _matmul(_exact(left.data), _exact(right.data), "bf16")
        scales = [operand.expanded_scale() for operand in (left, right) if operand.scale is not None]
        if len(scales) == 2:
            scale_sums(sums, *scales)
        elif scales:
            sums *= scales[0]
    else:
        exact_in_bf16 = left.spec.scale_rule != "amax" and right.spec.scale_rule != "amax"
        sums = _matmul(left.dequantize(), right.dequantize(), "bf16" if exact_in_bf16 else "ieee")
    if bias is not None:
        sums += bias
    return sums.to(out_dtype)


def _exact(q: Tensor) -> Tensor:
    """FP8 values in what `_matmul` takes without another copy."""
    return widen(q) if q.device.type == "cpu" else q.to(torch.bfloat16)


def _matmul(a: Tensor, b: Tensor, precision: Literal["ieee", "bf16"]) -> Tensor:
    """Float32 product of two matrices in float32 arithmetic, or in bf16 where they are exact in that."""
    device = a.device.type
    with torch.autocast(device, enabled=False):
        if precision == "bf16" and device == "cuda":
            return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
        with _arithmetic(device, precision):
            return a.float() @ b.float()


_SETTING = threading.RLock()
"""Held for a product: what float32 matrices are multiplied in is a setting of the whole process."""


@contextmanager
def _arithmetic(device: str, precision: Literal["ieee", "bf16"]) -> Iterator[None]:
    """What cuBLAS or oneDNN multiplies float32 matrices in, for the duration of one product."""
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    setting = backend.matmul
    with _SETTING:
        before = setting.fp32_precision
        setting.fp32_precision = precision
        try:
            yield
        finally:
            setting.fp32_precision = before
