"""dequantize on a GPU: one pass over tiles. 1 byte read per element and its scales, 2 written in bf16."""

import torch
import triton
from torch import Tensor

from octavo.kernels.dequantize.device import dequantize_kernel
from octavo.kernels.launch import INTERPRETED, Launch
from octavo.numerics.formats import E4M3
from octavo.numerics.spec import QuantSpec

CONFIGS = ((8, 512, 4), (4, 1024, 8), (16, 256, 4))  # Configurations: tile rows, tile columns, warps


def launch(spec: QuantSpec, config: int = 0) -> Launch:
    tile_r, tile_c, warps = CONFIGS[config]
    constants = {
        "BLOCK": spec.granularity.columns, "E8M0": spec.scale_rule == "e8m0", "E4M3": spec.format is E4M3,
        "TILE_R": tile_r, "TILE_C": tile_c, "INTERPRETED": INTERPRETED,
    }  # fmt: skip
    return Launch(kernel=dequantize_kernel, constants=constants, num_warps=warps)


def dequantize(data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype, config: int = 0) -> Tensor:
    rows, columns = data.shape
    out = data.new_empty((rows, columns), dtype=dtype)
    if out.numel() == 0:
        return out
    step = launch(spec, config)
    arguments = {
        "q": data, "s": scale.view(torch.uint8) if spec.scale_rule == "e8m0" else scale, "out": out, "rows": rows,
        "columns": columns, "grid_columns": scale.shape[1], "q_r": data.stride(0), "q_c": data.stride(1),
    }  # fmt: skip
    down, across = triton.cdiv(rows, step.constants["TILE_R"]), triton.cdiv(columns, step.constants["TILE_C"])
    step.run((down * across,), arguments)
    return out
