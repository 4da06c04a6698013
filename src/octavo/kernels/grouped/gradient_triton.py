"""Launches of `gradient_device`: G of a grouped linear quantized in two passes; rows of no expert set to zero."""

from functools import lru_cache

import torch
import triton
from torch import Tensor

from octavo.kernels.grouped import gradient_device as kernels
from octavo.kernels.grouped.gradient import reference, rows_of_groups
from octavo.kernels.launch import INTERPRETED, Launch
from octavo.kernels.quantize.reference import padded
from octavo.numerics.formats import E4M3
from octavo.numerics.spec import QuantSpec

MAXIMA_TILE, CAST_TILE = (16, 128, 4), (32, 128, 4)
"""Tile rows, tile columns, warps; larger ones leave three programs to a multiprocessor."""
STRIP = 8
"""Tiles below each other in one program of the pass for maxima."""
SCALES = 1024
"""Scales of a program."""


@lru_cache(maxsize=256)
def launches(spec: QuantSpec, by_row: bool, by_expert: bool, transposed: bool) -> tuple[Launch, Launch, Launch]:
    outputs = {"BY_ROW": by_row, "BY_EXPERT": by_expert}
    rule = {"FP8_MAX": spec.format.max, "POWER_OF_TWO": spec.scale_rule == "pow2", "INTERPRETED": INTERPRETED}
    maxima = outputs | {"TILE_R": MAXIMA_TILE[0], "TILE_C": MAXIMA_TILE[1], "TILES": STRIP}
    cast = outputs | rule | {"E4M3": spec.format is E4M3, "TRANSPOSED": transposed}
    cast |= {"TILE_R": CAST_TILE[0], "TILE_C": CAST_TILE[1]}
    return (
        Launch(kernel=kernels.grouped_maxima_kernel, constants=maxima, num_warps=MAXIMA_TILE[2]),
        Launch(kernel=kernels.expert_scales_kernel, constants=rule | {"BLOCK": SCALES}, num_warps=4),
        Launch(kernel=kernels.grouped_cast_kernel, constants=cast, num_warps=CAST_TILE[2]),
    )


def quantize_grouped(
    g: Tensor, offsets: Tensor, spec: QuantSpec, w_scale: Tensor | None, x_scale: Tensor | None, transposed: bool
) -> list[Tensor]:
    (rows, columns), experts, device = g.shape, offsets.shape[0], g.device
    by_row, by_expert = w_scale is not None, x_scale is not None
    if not g.numel():
        return reference(g, offsets, spec, w_scale, x_scale, transposed)
    outputs: list[Tensor] = []
    q = s = q_t = s_t = g
    if by_row:
        q = torch.empty((rows, columns), dtype=spec.format.dtype, device=device)
        s = torch.empty((rows, 1), dtype=torch.float32, device=device)
        outputs += [q, s]
    if by_expert:
        shape = (columns, padded(rows)) if transposed else (rows, columns)
        q_t = torch.empty(shape, dtype=spec.format.dtype, device=device)
        s_t = torch.empty((experts, columns), dtype=torch.float32, device=device)
        outputs += [q_t[:, :rows] if transposed else q_t, s_t]
    groups = (experts + 1) * columns if by_expert else 0
    amax = torch.zeros(-(-rows // 4) * 4 + groups, dtype=torch.int32, device=device)
    amax_t = amax[-(-rows // 4) * 4 :] if by_expert else amax
    inverse = torch.empty(max(groups, 1), dtype=torch.float32, device=device)
    arguments = {
        "g": g, "group": rows_of_groups(offsets, rows), "w_scale": s if w_scale is None else w_scale.contiguous(),
        "x_scale": s_t if x_scale is None else x_scale.contiguous(), "amax": amax, "amax_t": amax_t,
        "inverse_t": inverse, "q": q, "s": s, "q_t": q_t, "s_t": s_t, "rows": rows, "columns": columns,
        "padded_rows": padded(rows), "stride_r": g.stride(0), "stride_c": g.stride(1), "experts": experts,
        "size": groups, "stored": experts * columns,
    }  # fmt: skip
    maxima, scales, cast = launches(spec, by_row, by_expert, transposed)
    across = triton.cdiv(columns, MAXIMA_TILE[1])
    maxima.run((triton.cdiv(rows, MAXIMA_TILE[0] * STRIP) * across,), arguments)
    if by_expert:
        scales.run((triton.cdiv(groups, SCALES),), arguments)
    cast.run((triton.cdiv(padded(rows), CAST_TILE[0]) * triton.cdiv(columns, CAST_TILE[1]),), arguments)
    return outputs


def zero_tail(out: Tensor, offsets: Tensor) -> None:
    """Set the rows of a contiguous matrix from `offsets[-1]` on to zero."""
    rows, columns = out.shape
    arguments = {"out": out, "offsets": offsets, "rows": rows, "columns": columns, "experts": offsets.shape[0]}
    ZERO_TAIL.run((triton.cdiv(rows, 32),), arguments)


ZERO_TAIL = Launch(kernel=kernels.zero_tail_kernel, constants={"TILE_R": 32, "TILE_C": 128}, num_warps=4)
