"""scaled_mm in PyTorch operations: exact products, float32 sums, on any device.

FP8 values are exact in bf16, and products of two in float32. A CPU multiplies float32 operands by oneDNN's bf16
arithmetic, because a product of bf16 tensors would round its sum. Scales along the contraction are multiplied in first.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.kernels.gemm.operand_layout import scale_sums
from octavo.numerics.formats import widen
from octavo.numerics.spec import FULL
from octavo.tensor import ScaledTensor


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """See `octavo.kernels.gemm.scaled_mm`; ignores `fast_accum`, sums in float32."""
    left = a.t() if layout[0] == "t" else a
    right = b.t() if layout[1] == "t" else b
    if scales_afterwards(left, right):
        sums = _matmul(_exact(left.data), _exact(right.data), "bf16")
        scale_sums(sums, *(None if operand.scale is None else operand.expanded_scale() for operand in (left, right)))
    else:
        exact_in_bf16 = left.spec.scale_rule != "amax" and right.spec.scale_rule != "amax"
        sums = _matmul(left.dequantize(), right.dequantize(), "bf16" if exact_in_bf16 else "ieee")
    if bias is not None:
        sums += bias
    return sums.to(out_dtype)


def scales_afterwards(left: ScaledTensor, right: ScaledTensor) -> bool:
    """Whether no scale of two operands [M,K] and [K,N] varies along the contraction, so that they apply to the sums."""
    left_outside = left.scale is None or left.spec.granularity.columns == FULL
    return left_outside and (right.scale is None or right.spec.granularity.rows == FULL)


def _exact(q: Tensor) -> Tensor:
    """Convert FP8 values exactly to the dtype that `_matmul` takes without another copy."""
    return widen(q) if q.device.type == "cpu" else q.to(torch.bfloat16)


def _matmul(a: Tensor, b: Tensor, precision: Literal["ieee", "bf16"]) -> Tensor:
    """Multiply two matrices to float32, in float32 arithmetic or, for values exact in it, bf16."""
    device = a.device.type
    with torch.autocast(device, enabled=False):
        if precision == "bf16" and device == "cuda":
            return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
        with _arithmetic(device, precision):
            return a.float() @ b.float()


_SETTING = threading.RLock()  # Guards the process-wide precision of float32 products


@contextmanager
def _arithmetic(device: str, precision: Literal["ieee", "bf16"]) -> Iterator[None]:
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    setting = backend.matmul
    with _SETTING:
        before = setting.fp32_precision
        setting.fp32_precision = precision
        try:
            yield
        finally:
            setting.fp32_precision = before
