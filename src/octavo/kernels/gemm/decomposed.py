"""scaled_mm for torch.compile: one `torch._scaled_mm`, which Inductor calls without Octavo."""

import torch
from torch import Tensor

from octavo.kernels.gemm.operand_layout import ALIGNMENT, Operand, oriented
from octavo.kernels.gemm.torch_scaled import is_one_call
from octavo.tensor import ScaledTensor


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor | None:
    """See `octavo.kernels.gemm.scaled_mm`. None where it takes more than one call, or may do so: for symbolic sizes
    that must be multiples of 16, and for slices at addresses that are not aligned.
    """
    left, right = oriented(a, b, layout)
    (m, k), n = left.data.shape, right.data.shape[0]
    if not (isinstance(k, int) and isinstance(n, int)) or not is_one_call(left, right, out_dtype, bias):
        return None
    tensors = [t for t in (left.data, right.data, left.scale, right.scale, bias) if t is not None]
    if any(t.storage_offset() * t.element_size() % ALIGNMENT for t in tensors):
        return None
    rows, columns = (m, n) if left.blocks.rows == 1 or right.blocks.rows == 1 else (1, 1)
    result: Tensor = torch._scaled_mm(
        left.data, right.data.t(), bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum,
        scale_a=_vector(left, rows).unsqueeze(1), scale_b=_vector(right, columns).unsqueeze(0),
    )  # fmt: skip
    return result


def _vector(operand: Operand, size: int) -> Tensor:
    """Return scales as a vector. Unit scales are slices of one, and a reduction: Inductor computes that once for all
    products of a graph, but fills a constant anew for each.
    """
    if operand.scale is not None:
        return operand.scale.reshape(-1)
    length = size + -size % _UNIT_SCALES
    return torch.ones((length, 16), device=operand.data.device, dtype=torch.float32).amax(1)[:size]


_UNIT_SCALES = 1 << 14
