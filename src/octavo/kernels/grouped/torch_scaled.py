"""grouped_mm through PyTorch's `torch._scaled_grouped_mm` (CUTLASS): forward and dgrad by row, bf16, on Hopper."""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.gemm.operand_layout import ALIGNMENT, packed
from octavo.kernels.gemm.torch_scaled import ones
from octavo.kernels.registry import Case, unsupported_gpu
from octavo.runtime.extras import lazy_function
from octavo.tensor import ScaledTensor


def unsupported_reason(device: torch.device, case: Case) -> str | None:
    """Return why this backend cannot run a case on a device, or None. Runs no kernel."""
    if device.type != "cuda":
        return f"torch._scaled_grouped_mm has no kernel for device type {device.type!r}"
    if (reason := unsupported_gpu(device)) is not None:
        return reason
    if case[2] == "tn":
        return "torch._scaled_grouped_mm contracts over the rows of an expert only if they begin at multiples of 16"
    if case[3]:
        return "torch._scaled_grouped_mm adds no bias"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "torch._scaled_grouped_mm multiplies with scales by row on Hopper only"
    return None


def grouped_mm(
    a: ScaledTensor, b: ScaledTensor, offsets: Tensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None,
    fast_accum: bool,
) -> Tensor:  # fmt: skip
    """See `octavo.kernels.grouped.grouped_mm`; layouts nt and nn without bias. Other dtypes than bf16 round twice."""
    experts, (m, contraction) = offsets.numel(), a.data.shape
    n = b.data.shape[0] // experts
    columns = n if layout == "nt" else b.data.shape[1]
    if not m * columns * contraction:
        return a.data.new_zeros((m, columns), dtype=out_dtype)
    left = packed(a.data, 1, ALIGNMENT)
    weights = b.data.unflatten(0, (experts, n))
    weights = weights.transpose(1, 2) if layout == "nt" else weights  # [E, contraction, columns]
    padded_columns = columns + -columns % ALIGNMENT
    right = _columns_first(weights, left.shape[1], padded_columns)
    b_scale = ones(experts * padded_columns, left.device).view(experts, padded_columns)
    if b.scale is not None and padded_columns == columns:
        b_scale = b.scale.view(experts, columns)
    elif b.scale is not None:
        b_scale = F.pad(b.scale.view(experts, columns), (0, padded_columns - columns), value=1.0)
    assert a.scale is not None
    product = torch._scaled_grouped_mm(
        left, right, a.scale.view(-1), b_scale, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
    )
    product = product if padded_columns == columns else product[:, :columns].contiguous()
    zero_tail(product, offsets)
    return product.to(out_dtype)


zero_tail = lazy_function("octavo.kernels.grouped.gradient_triton:zero_tail")


def _columns_first(weights: Tensor, contraction: int, columns: int) -> Tensor:
    """Return weights [E, contraction, columns] zero-padded, each contiguous along the contraction; a copy if needed."""
    experts, k, n = weights.shape
    ready = weights.stride(1) == 1 and not weights.stride(2) % ALIGNMENT and not weights.stride(0) % ALIGNMENT
    if ready and (k, n) == (contraction, columns) and not weights.data_ptr() % ALIGNMENT:
        return weights
    memory = torch.zeros((experts, columns, contraction), dtype=torch.uint8, device=weights.device)
    memory[:, :n, :k] = weights.transpose(1, 2).view(torch.uint8)
    return memory.view(weights.dtype).transpose(1, 2)
