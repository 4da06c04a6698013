"""Gated activations on a GPU.

by block, no FP8               one pass over tiles: 2 + 2 bytes read per element, 2 written, or 1 per FP8 copy
by row, rows only              one program per row, held in registers: the same bytes
by row, transposed copy        one program per block of rows in two passes: h and its maxima, then the cast. h always
                               goes through memory, because computing it twice costs more time than the second read:
                               2 + 2 read, 2 written, up to 2 read again, 1 per copy
backward                       one pass over tiles: 2 + 2 + 2 read, 2 + 2 written
"""

from typing import Any

from torch import Tensor

from octavo.kernels.fused.activations import ACTIVATIONS
from octavo.kernels.fused.fp8_outputs import empty_outputs, kernel_arguments, kernel_constants
from octavo.kernels.fused.glu.device import (
    glu_backward_kernel,
    glu_blocks_kernel,
    glu_flat_kernel,
    glu_row_block_kernel,
    glu_rows_kernel,
)  # fmt: skip
from octavo.kernels.fused.tiles import TRANSPOSE, WIDEST_ROW, rows_launch, run
from octavo.kernels.launch import INTERPRETED, Launch, shared_launch
from octavo.numerics.spec import QuantSpec

FLAT_CONFIGS = ((8, 256, 4), (4, 256, 4))  # Rows, columns, warps of a tile of `glu_flat_kernel`
BLOCKS_CONFIGS = ((64, 128, 4), (32, 256, 4))  # Rows, columns, warps of a tile of `glu_blocks_kernel`
ROWS_CONFIGS = (32, 16)  # Elements per thread of `glu_rows_kernel`
ROW_BLOCK_CONFIGS = ((64, 128, 4), (32, 256, 4))  # Rows, columns, warps of a tile of `glu_row_block_kernel`
BACKWARD_CONFIGS = ((8, 256, 4), (4, 256, 4))  # Rows, columns, warps of a tile of `glu_backward_kernel`


def launches(activation: str, spec: QuantSpec | None, order: str, columns: int, config: int = 0) -> list[Launch]:
    """Return the kernels for a case and row length, in launch order."""
    own = {"ACTIVATION": ACTIVATIONS.index(activation), "INTERPRETED": INTERPRETED}
    orders = {"ROWS": order != "columns", "COLUMNS": order != "rows"}
    if spec is None:
        tile_r, tile_c, warps = FLAT_CONFIGS[config]
        constants = {**own, "TILE_R": tile_r, "TILE_C": tile_c}
        return [shared_launch(glu_flat_kernel, constants, warps)]
    rule = kernel_constants(spec)
    if rule.pop("OUTPUT") == 2:
        tile_r, tile_c, warps = BLOCKS_CONFIGS[config]
        constants = {**own, **orders, **rule, "TILE_R": tile_r, "TILE_C": tile_c}
        return [shared_launch(glu_blocks_kernel, constants, warps)]
    del rule["BLOCK"]
    if columns <= WIDEST_ROW:
        first = rows_launch(glu_rows_kernel, {**own, **rule}, columns, ROWS_CONFIGS[config])
        return [first] if order == "rows" else [first, TRANSPOSE]
    tile_r, tile_c, warps = ROW_BLOCK_CONFIGS[config]
    constants = {**own, **orders, **rule, "TILE_R": tile_r, "TILE_C": tile_c}
    return [shared_launch(glu_row_block_kernel, constants, warps)]


def backward_launch(activation: str, config: int = 0) -> Launch:
    """Return the launch of the backward kernel."""
    tile_r, tile_c, warps = BACKWARD_CONFIGS[config]
    own = {"ACTIVATION": ACTIVATIONS.index(activation), "INTERPRETED": INTERPRETED}
    return shared_launch(glu_backward_kernel, {**own, "TILE_R": tile_r, "TILE_C": tile_c}, warps)


def _strides(**tensors: Tensor) -> dict[str, int]:
    return {f"{name}_{'rc'[dim]}": tensor.stride(dim) for name, tensor in tensors.items() for dim in (0, 1)}


def glu(gate: Tensor, up: Tensor, activation: str, spec: QuantSpec | None, order: str, config: int = 0) -> list[Tensor]:
    """See `reference.glu`."""
    rows, columns = gate.shape
    steps = launches(activation, spec, order, columns, config)
    outputs = empty_outputs(gate, spec, order) or [gate.new_empty((rows, columns))]
    h = gate.new_empty((rows, columns)) if steps[0].kernel is glu_row_block_kernel else outputs[0]
    arguments: dict[str, Any] = {
        "gate": gate, "up": up, "h": h, "rows": rows, "columns": columns, **_strides(gate=gate, up=up),
        **kernel_arguments(outputs, spec, order, gate),
    }  # fmt: skip
    if steps[-1] is TRANSPOSE and order == "columns":
        arguments["q"] = gate.new_empty((rows, columns), dtype=arguments["qt"].dtype)
    run(steps, (glu_rows_kernel, glu_row_block_kernel), arguments)
    return outputs


def glu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, joined: bool, config: int = 0
) -> list[Tensor]:
    """See `reference.glu_backward`."""
    rows, columns = gate.shape
    if joined:
        gradients = [gate.new_empty((rows, 2 * columns))]
        dgate, dup = gradients[0][:, :columns], gradients[0][:, columns:]
    else:
        gradients = [dgate, dup] = [gate.new_empty((rows, columns)), gate.new_empty((rows, columns))]
    arguments: dict[str, Any] = {
        "grad": grad, "gate": gate, "up": up, "dgate": dgate, "dup": dup, "rows": rows, "columns": columns,
        **_strides(grad=grad, gate=gate, up=up), "out_r": dgate.stride(0),
    }  # fmt: skip
    run([backward_launch(activation, config)], (), arguments)
    return gradients
