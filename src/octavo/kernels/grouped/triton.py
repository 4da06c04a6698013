"""grouped_mm as one persistent Triton kernel for all experts: any numbers of rows, no offsets on the host.

Accumulation, scales and rounding are those of `octavo.kernels.gemm.triton`. docs/kernels.md has the design.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.gemm import triton as gemm
from octavo.kernels.gemm.operand_layout import ALIGNMENT, packed
from octavo.kernels.grouped import reference
from octavo.kernels.grouped.device import grouped_kernel
from octavo.kernels.launch import INTERPRETED, Launch
from octavo.tensor import ScaledTensor


def grouped_mm(
    a: ScaledTensor, b: ScaledTensor, offsets: Tensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None,
    fast_accum: bool, config: int | None = None,
) -> Tensor:  # fmt: skip
    """See `octavo.kernels.grouped.grouped_mm`; `config` is an index into `CONFIGS`, None for an estimate."""
    if not a.data.numel() or not b.data.numel():
        return reference.grouped_mm(a, b, offsets, layout, out_dtype, bias, fast_accum)
    experts, device = offsets.numel(), a.data.device
    left = _operand(a.data.t() if layout == "tn" else a.data)
    right, weight_step = _operand(b.data if layout == "nt" else b.data.t()), left.shape[1]
    if layout == "nn" and weight_step % ALIGNMENT:
        right, weight_step = _spread(b.data, experts)
    tokens = a.data.shape[0]
    rows = left.shape[0]
    columns = right.shape[0] // experts if layout == "nt" else right.shape[0]
    target = gemm.target_for(device)
    fast = fast_accum and target.limited_accumulator
    kind = target, fast, False, out_dtype.itemsize
    each = -(-tokens // experts) if layout != "tn" else rows
    available = available_configs(layout, *kind)
    fastest = gemm.estimated_fastest(available, each, columns, target, experts)
    chosen = gemm.CONFIGS[config if config in available else fastest]
    launch = launch_of(chosen, target, layout, experts, bias is not None, fast)
    shape = (experts, rows, columns) if layout == "tn" else (tokens, columns)
    out = torch.empty(shape, dtype=out_dtype, device=device)
    arguments = {
        "a": gemm.descriptor(left, (chosen.tile_m, chosen.tile_k)) if target.tma else left,
        "b": gemm.descriptor(right, (chosen.tile_n, chosen.tile_k)) if target.tma else right,
        "out": out, "offsets": offsets, "a_scale": a.scale, "b_scale": out if b.scale is None else b.scale,
        "bias": out if bias is None else bias.contiguous(), "rows": rows, "columns": columns,
        "contraction": left.shape[1], "weight_step": weight_step, "tokens": tokens, "experts": experts,
    }  # fmt: skip
    for name, operand in (("a", left), ("b", right)):
        arguments |= {f"{name}_rows": operand.shape[0], f"{name}_stride": operand.stride(0)}
    tiles_m = experts * -(-rows // chosen.tile_m) if layout == "tn" else -(-tokens // chosen.tile_m) + experts
    launch.run((min(tiles_m * -(-columns // chosen.tile_n), chosen.programs(target)),), arguments)
    return out


def available_configs(layout: str, target: gemm.Target, fast: bool, blocked: int, out_bytes: int) -> tuple[int, ...]:
    """Return the configurations of a product, as `octavo.kernels.gemm.triton.configurations`, that do not spill."""
    return tuple(
        index for index in gemm.configurations(target, fast, blocked, out_bytes) if (layout, index) not in _SPILLING
    )


_SPILLING = (("tn", 4),)
"""Configurations in which the steps that zero a part of both operands take too many registers on sm_90 and sm_120."""


def _operand(data: Tensor) -> Tensor:
    """Return [outside, contraction] contiguous along the contraction, rows aligned and in memory; a copy if needed."""
    rows, stride = data.shape[0], data.stride(0)
    ready = data.stride(1) == 1 and not (stride % ALIGNMENT or data.data_ptr() % ALIGNMENT)
    if ready and data.untyped_storage().nbytes() >= data.storage_offset() + rows * stride:
        return data
    return packed(data, 1, ALIGNMENT)[:, : data.shape[1]]


def _spread(data: Tensor, experts: int) -> tuple[Tensor, int]:
    """Return W [E·N,K] as [K,E·P], where each expert begins at a multiple P of 16, at least N; and P."""
    by_expert = data.view(torch.uint8).unflatten(0, (experts, -1))
    step = by_expert.shape[1] + -by_expert.shape[1] % ALIGNMENT
    memory = by_expert.new_zeros((by_expert.shape[2], experts, step))
    memory[:, :, : by_expert.shape[1]] = by_expert.permute(2, 0, 1)
    return memory.flatten(1).view(data.dtype), step


@lru_cache(maxsize=1024)
def launch_of(config: gemm.Config, target: gemm.Target, layout: str, experts: int, bias: bool, fast: bool) -> Launch:
    constants: dict[str, Any] = {
        "LAYOUT": layout, "EXPERTS": 1 << experts.bit_length(), "BIAS": bias, "FAST": fast, "TILE_M": config.tile_m,
        "TILE_N": config.tile_n, "TILE_K": config.tile_k, "GROUP": gemm.GROUP, "TMA": target.tma,
        "INTERPRETED": INTERPRETED,
    }  # fmt: skip
    stages = config.stages_within(target.shared)
    return Launch(kernel=grouped_kernel, constants=constants, num_warps=config.warps, num_stages=stages)
