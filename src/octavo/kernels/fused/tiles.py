"""Tile sizes and launches of the fused kernels."""

from collections.abc import Mapping
from typing import Any

import torch

from octavo.kernels.fused.device import transpose_kernel
from octavo.kernels.launch import Launch, shared_launch

WIDEST_ROW = 32768  # Longest row, in elements, that registers hold
TRANSPOSE = Launch(kernel=transpose_kernel, constants={"TILE_R": 64, "TILE_C": 128}, num_warps=4)


def rows_launch(kernel: Any, constants: dict[str, Any], columns: int, per_thread: int) -> Launch:
    """Return a launch on tiles of whole rows: at least 128 threads with about `per_thread` elements each."""
    tile_c = max(1 << (columns - 1).bit_length(), 128)  # not by Triton's functions, which take the host microseconds
    tile_r = max(128 * per_thread // tile_c, 1)
    warps = min(max(tile_r * tile_c // (32 * per_thread), 1), 32)
    return shared_launch(kernel, {**constants, "TILE_R": tile_r, "TILE_C": tile_c}, warps)


def run(steps: list[Launch], whole_rows: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
    """Launch steps in order, with one program per group of whole rows for kernels in `whole_rows`, per tile else."""
    # The transpose step reads the bytes that the previous step wrote.
    for step in steps:
        down = max(-(-arguments["rows"] // step.constants["TILE_R"]), 1)
        across = max(-(-arguments["columns"] // step.constants["TILE_C"]), 1)
        step_arguments = arguments
        if step is TRANSPOSE:
            step_arguments = {
                **arguments, "q": arguments["q"].view(torch.uint8), "qt": arguments["qt"].view(torch.uint8),
            }  # fmt: skip
        step.run((down,) if step.kernel in whole_rows else (down, across), step_arguments)
