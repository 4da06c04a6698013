"""scaled_mm for CPUs with bf16 instructions: products of bf16 tensors, in half the time of `reference`.

PyTorch rounds the sum to bf16 before scales and bias apply: 53 dB from `reference`. So it computes bf16 results only.
`OCTAVO_CPU_PRODUCTS=exact` in the environment switches it off, as Octavo's tests do.
"""

import os

import torch
from torch import Tensor

from octavo.kernels.gemm import reference
from octavo.kernels.gemm.operand_layout import UNIT_SCALE, blocks_of, scale_sums
from octavo.kernels.registry import Case
from octavo.numerics.formats import row_chunks, widen
from octavo.numerics.spec import FULL, QuantSpec
from octavo.runtime.torch_compat import has_bf16_instructions
from octavo.tensor import ScaledTensor

SWITCH = "OCTAVO_CPU_PRODUCTS"


def unsupported_reason(device: torch.device, case: Case) -> str | None:
    if device.type != "cpu":
        return f"it is for CPUs; this device is {device.type!r}"
    if (value := os.environ.get(SWITCH, "fast")) not in ("fast", "exact"):
        raise ValueError(f"{SWITCH} must be 'fast' or 'exact'; got {value!r}")
    if value == "exact":
        return f"{SWITCH}=exact"
    if not has_bf16_instructions():
        return "this CPU has no bf16 instructions (AVX512_BF16, AMX)"
    left, right = blocks_of(case)
    is_exact = all(text == UNIT_SCALE or QuantSpec.parse(text).scale_rule != "amax" for text in case[:2])
    if not left.columns == right.columns == FULL and not is_exact:
        return "the scales vary along the contraction, and values times scales are not exact in bf16"
    return None


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    if out_dtype != torch.bfloat16:
        return reference.scaled_mm(a, b, layout, out_dtype, bias, fast_accum)
    left = a.t() if layout[0] == "t" else a
    right = b.t() if layout[1] == "t" else b
    if not reference.scales_afterwards(left, right):
        y = _matmul(left.dequantize().bfloat16(), right.dequantize().bfloat16())
        return y if bias is None else y.add_(bias)
    y = _matmul(widen(left.data, torch.bfloat16), widen(right.data, torch.bfloat16))
    if left.scale is None and right.scale is None and bias is None:
        return y
    rows, columns = (None if operand.scale is None else operand.expanded_scale() for operand in (left, right))
    for chunk in row_chunks((y.shape[0], y.shape[1])):
        sums = y[chunk].float()
        scale_sums(sums, rows if rows is None or rows.shape[0] == 1 else rows[chunk], columns)
        y[chunk].copy_(sums if bias is None else sums.add_(bias))
    return y


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return a @ b
