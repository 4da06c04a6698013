"""grouped_mm in PyTorch operations: one product per expert by the reference of scaled_mm. Reads offsets on the host."""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.gemm import reference
from octavo.tensor import ScaledTensor


def grouped_mm(
    a: ScaledTensor, b: ScaledTensor, offsets: Tensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None,
    fast_accum: bool, product: Callable[..., Tensor] = reference.scaled_mm,
) -> Tensor:  # fmt: skip
    """See `octavo.kernels.grouped.grouped_mm`; `product` multiplies the rows of one expert."""
    experts, (m, columns), (rows, k) = offsets.numel(), a.data.shape, b.data.shape
    n = columns if layout != "nt" else rows // experts
    shape = {"nt": (m, n), "nn": (m, k), "tn": (experts, n, k)}[layout]
    out = a.data.new_zeros(shape, dtype=out_dtype)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        tokens, weight = slice(start, end), slice(expert * n, (expert + 1) * n)
        if layout == "tn":
            left, right = _rows(a, tokens, slice(expert, expert + 1)), _rows(b, tokens, tokens)
            out[expert] = product(left, right, layout, out_dtype, None, fast_accum)
        elif end > start:
            own_bias = None if bias is None else bias[expert]
            left, right = _rows(a, tokens, tokens), _rows(b, weight, weight)
            out[tokens] = product(left, right, layout, out_dtype, own_bias, fast_accum)
        start = end
    return out


def _rows(operand: ScaledTensor, rows: slice, scales: slice) -> ScaledTensor:
    scale = None if operand.scale is None else operand.scale[scales]
    return ScaledTensor(operand.data[rows], scale, operand.spec)
