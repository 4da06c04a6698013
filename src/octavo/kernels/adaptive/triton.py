"""Adaptive FP8 on a GPU, one pass over groups: 2 bytes read and 1.03 written per element of bf16, or the reverse."""

import torch
import triton
from torch import Tensor

from octavo.kernels.adaptive.device import adaptive_dequantize_kernel, adaptive_quantize_kernel
from octavo.kernels.adaptive.reference import groups
from octavo.kernels.launch import INTERPRETED, Launch

CONFIGS = ((16, 4), (8, 4), (32, 8))  # Configurations: groups per program, warps


def launches(config: int = 0) -> tuple[Launch, Launch]:
    per, warps = CONFIGS[config]
    constants = {"PER": per, "INTERPRETED": INTERPRETED}
    quantize, dequantize = (
        Launch(kernel=kernel, constants=constants, num_warps=warps)
        for kernel in (adaptive_quantize_kernel, adaptive_dequantize_kernel)
    )
    return quantize, dequantize


def adaptive_quantize(x: Tensor, config: int = 0) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    codes = x.new_empty((rows, columns), dtype=torch.uint8)
    scale = x.new_empty((rows, groups(columns)), dtype=torch.float32)
    if x.numel():
        arguments = {
            "x": x, "codes": codes, "scales": scale, "rows": rows, "columns": columns, "x_r": x.stride(0),
            "x_c": x.stride(1),
        }  # fmt: skip
        launches(config)[0].run((triton.cdiv(scale.numel(), CONFIGS[config][0]),), arguments)
    return codes, scale


def adaptive_dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype, config: int = 0) -> Tensor:
    rows, columns = codes.shape
    out = codes.new_empty((rows, columns), dtype=dtype)
    if out.numel():
        arguments = {"codes": codes, "scales": scale, "out": out, "rows": rows, "columns": columns}
        launches(config)[1].run((triton.cdiv(scale.numel(), CONFIGS[config][0]),), arguments)
    return out
