"""Norms and gated activations on a GPU; docs/kernels.md has the passes of each case."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.fused import device as kernels
from octavo.kernels.fused.activations import ACTIVATIONS
from octavo.kernels.fused.reference import ROW_BLOCK, empty_outputs, kernel_arguments, kernel_constants
from octavo.kernels.launch import INTERPRETED, Launch, shared_launch
from octavo.numerics.spec import QuantSpec

ROWS_CONFIGS = (32, 16)  # Elements per thread of the kernels on whole rows
WIDEST_ROW = 32768  # Longest row, in elements, that registers hold
TRANSPOSE = Launch(kernel=kernels.transpose_kernel, constants={"TILE_R": 64, "TILE_C": 128}, num_warps=4)


def rows_launch(kernel: object, constants: dict[str, Any], columns: int, per_thread: int) -> Launch:
    """Return a launch on tiles of whole rows: at least 128 threads with about `per_thread` elements each."""
    tile_c = max(1 << (columns - 1).bit_length(), 128)  # not by Triton's functions, which take the host microseconds
    tile_r = max(128 * per_thread // tile_c, 1)
    warps = min(max(tile_r * tile_c // (32 * per_thread), 1), 32)
    return shared_launch(kernel, {**constants, "TILE_R": tile_r, "TILE_C": tile_c}, warps)


def _tiled(kernel: object, constants: Mapping[str, Any], tile: tuple[int, int, int]) -> Launch:
    return shared_launch(kernel, {**constants, "TILE_R": tile[0], "TILE_C": tile[1]}, tile[2])


def run(steps: list[Launch], arguments: dict[str, Any]) -> None:
    """Launch steps in order, with one program per group of whole rows for kernels on these, per tile else."""
    rows, columns = arguments["rows"], arguments["columns"]
    if steps[-1] is TRANSPOSE and arguments["q"] is arguments["qt"]:  # the result has no row-major data
        arguments["q"] = arguments["qt"].new_empty((rows, columns))
    for step in steps:
        down = max(-(-rows // step.constants["TILE_R"]), 1)
        across = max(-(-columns // step.constants["TILE_C"]), 1)
        if step is TRANSPOSE:  # it reads the bytes that the step before wrote
            arguments |= {name: arguments[name].view(torch.uint8) for name in ("q", "qt")}
        step.run((down,) if step.kernel in _WHOLE_ROWS else (down, across), arguments)


_WHOLE_ROWS = (
    kernels.norm_rows_kernel, kernels.norm_row_block_kernel, kernels.glu_rows_kernel, kernels.glu_row_block_kernel,
)  # fmt: skip


NORM_ROW_BLOCK_CONFIGS = ((16, 512, 4), None)
"""With a transposed copy: rows, columns, warps of a tile of `norm_row_block_kernel`; None for the two steps."""
WIDEST_ROW_BLOCK = 4096  # Longest row, in elements, whose row blocks in flight fit into L2; longer ones take two steps


def norm_launches(
    spec: QuantSpec | None, order: str, columns: int, flags: dict[str, bool], config: int = 0
) -> list[Launch]:
    """Return the kernels for a case and row length, in launch order. `flags`: CENTER, OFFSET, BIAS."""
    constants = {**kernel_constants(spec), **flags, "INTERPRETED": INTERPRETED}
    transposed = spec is not None and order != "rows"
    row_block = NORM_ROW_BLOCK_CONFIGS[config] if transposed else None
    if row_block is not None and config == 0 and WIDEST_ROW_BLOCK < columns <= WIDEST_ROW:
        row_block = None
    if row_block is None and (columns <= WIDEST_ROW or spec is None):
        first = rows_launch(kernels.norm_rows_kernel, constants, columns, ROWS_CONFIGS[0 if transposed else config])
        return [first, TRANSPOSE] if transposed else [first]
    constants |= {"ROWS": order != "columns", "COLUMNS": transposed}
    return [_tiled(kernels.norm_row_block_kernel, constants, row_block or (16, 512, 4))]


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: bool, center: bool, spec: QuantSpec | None,
    order: str, config: int = 0,
) -> list[Tensor]:  # fmt: skip
    rows, columns = x.shape
    rstd = x.new_empty((rows, 1), dtype=torch.float32)
    mean = torch.empty_like(rstd) if center else None
    outputs = empty_outputs(x, spec, order)
    arguments: dict[str, Any] = {
        "x": x, "weight": weight.contiguous(), "bias": (weight if bias is None else bias).contiguous(),
        "y": outputs[0] if spec is None else x, "mean": rstd if mean is None else mean, "rstd": rstd, "rows": rows,
        "columns": columns, "stride_r": x.stride(0), "stride_c": x.stride(1), "eps": eps,
        "count": float(max(columns, 1)), **kernel_arguments(outputs, spec, order, x),
    }  # fmt: skip
    flags = {"CENTER": center, "OFFSET": offset, "BIAS": bias is not None}
    run(norm_launches(spec, order, columns, flags, config), arguments)
    return [rstd, *([] if mean is None else [mean]), *outputs]


NORM_BACKWARD_CONFIGS = (16, 8)  # Elements per thread of `norm_backward_kernel`
SUMS = Launch(
    kernel=kernels.column_sums_kernel, constants={"TILE_R": 64, "TILE_C": 32, "INTERPRETED": INTERPRETED}, num_warps=4
)
WIDEST_SUMS = 8192  # Longest row, in elements, that fits into registers next to column sums; half of it with a bias


def norm_backward_launches(columns: int, flags: dict[str, bool], config: int = 0) -> list[Launch]:
    """Return the backward kernels for a row length: dx and column sums together, or in turn for long rows."""
    # `flags`: CENTER, OFFSET, BIAS.
    kernel, tile_c = kernels.norm_backward_kernel, max(1 << (columns - 1).bit_length(), 128)
    warps = min(max(tile_c // (32 * NORM_BACKWARD_CONFIGS[config]), 1), 32)
    rows = {**flags, "TILE_C": tile_c, "INTERPRETED": INTERPRETED}
    if tile_c <= WIDEST_SUMS // (1 + flags["BIAS"]):
        both = {**rows, "DX": True, "SUMS": True, "ROW_BLOCK": ROW_BLOCK}
        return [shared_launch(kernel, both, warps)]
    dx = {**rows, "DX": True, "SUMS": False, "ROW_BLOCK": 1}
    sums = {**rows, "DX": False, "SUMS": True, "ROW_BLOCK": ROW_BLOCK, "TILE_C": 1024}
    return [shared_launch(kernel, dx, warps), shared_launch(kernel, sums, 4)]


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None, offset: bool, bias: bool,
    config: int = 0,
) -> list[Tensor]:  # fmt: skip
    rows, columns = x.shape
    parts = -(-rows // ROW_BLOCK)
    dx = x.new_empty((rows, columns))
    partial = [x.new_empty((max(parts, 1), columns), dtype=torch.float32) for _ in range(1 + bias)]
    arguments: dict[str, Any] = {
        "grad": grad, "x": x, "weight": weight.contiguous(), "rstd": rstd.contiguous(),
        "mean": (rstd if mean is None else mean).contiguous(), "dx": dx, "partial_weight": partial[0],
        "partial_bias": partial[-1], "rows": rows, "columns": columns, "grad_r": grad.stride(0),
        "grad_c": grad.stride(1), "stride_r": x.stride(0), "stride_c": x.stride(1), "count": float(max(columns, 1)),
    }  # fmt: skip
    flags = {"CENTER": mean is not None, "OFFSET": offset, "BIAS": bias}
    for step in norm_backward_launches(columns, flags, config):
        down, across = (-(-n // step.constants[of]) for n, of in ((rows, "ROW_BLOCK"), (columns, "TILE_C")))
        step.run((max(down, 1), max(across, 1)), arguments)
    sums = [weight.new_empty(weight.shape) for _ in partial]
    for source, target in zip(partial, sums, strict=True):
        SUMS.run(
            (max(-(-columns // SUMS.constants["TILE_C"]), 1),),
            {"partial": source, "sums": target, "parts": parts, "columns": columns},
        )
    return [dx, *sums]


GLU_FLAT_CONFIGS = ((8, 256, 4), (4, 256, 4))  # Rows, columns, warps of a tile of `glu_flat_kernel`
GLU_BLOCKS_CONFIGS = ((64, 128, 4), (32, 256, 4))  # Of a tile of `glu_blocks_kernel` and `glu_row_block_kernel`
GLU_BACKWARD_CONFIGS = ((8, 256, 4), (4, 256, 4))  # Rows, columns, warps of a tile of `glu_backward_kernel`


def glu_launches(activation: str, spec: QuantSpec | None, order: str, columns: int, config: int = 0) -> list[Launch]:
    own = {"ACTIVATION": ACTIVATIONS.index(activation), "INTERPRETED": INTERPRETED}
    orders = {"ROWS": order != "columns", "COLUMNS": order != "rows"}
    if spec is None:
        return [_tiled(kernels.glu_flat_kernel, own, GLU_FLAT_CONFIGS[config])]
    rule = kernel_constants(spec)
    if rule.pop("OUTPUT") == 2:
        return [_tiled(kernels.glu_blocks_kernel, {**own, **orders, **rule}, GLU_BLOCKS_CONFIGS[config])]
    del rule["BLOCK"]
    if columns <= WIDEST_ROW:
        first = rows_launch(kernels.glu_rows_kernel, {**own, **rule}, columns, ROWS_CONFIGS[config])
        return [first] if order == "rows" else [first, TRANSPOSE]
    return [_tiled(kernels.glu_row_block_kernel, {**own, **orders, **rule}, GLU_BLOCKS_CONFIGS[config])]


def glu_backward_launch(activation: str, config: int = 0) -> Launch:
    own = {"ACTIVATION": ACTIVATIONS.index(activation), "INTERPRETED": INTERPRETED}
    return _tiled(kernels.glu_backward_kernel, own, GLU_BACKWARD_CONFIGS[config])


def _strides(**tensors: Tensor) -> dict[str, int]:
    return {f"{name}_{'rc'[dim]}": tensor.stride(dim) for name, tensor in tensors.items() for dim in (0, 1)}


def glu(gate: Tensor, up: Tensor, activation: str, spec: QuantSpec | None, order: str, config: int = 0) -> list[Tensor]:
    rows, columns = gate.shape
    steps = glu_launches(activation, spec, order, columns, config)
    outputs = empty_outputs(gate, spec, order)
    h = gate.new_empty((rows, columns)) if steps[0].kernel is kernels.glu_row_block_kernel else outputs[0]
    arguments: dict[str, Any] = {
        "gate": gate, "up": up, "h": h, "rows": rows, "columns": columns, **_strides(gate=gate, up=up),
        **kernel_arguments(outputs, spec, order, gate),
    }  # fmt: skip
    run(steps, arguments)
    return outputs


def glu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, joined: bool, config: int = 0
) -> list[Tensor]:
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
    run([glu_backward_launch(activation, config)], arguments)
    return gradients
