"""quantize on a GPU: selects and launches the kernels of `device`, which match `reference` byte for byte.

A *pair* is two quantizations of one matrix in the same passes, the first row-major, the second column-major.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any, Literal, get_args

import torch
import triton
from torch import Tensor

from octavo.kernels import calibration
from octavo.kernels.direct import Plans, new_zeros
from octavo.kernels.launch import (
    INTERPRETED,
    Launch,
    PreparedLaunch,
    compile_function,
    current_stream,
    preparation,
    render,
)
from octavo.kernels.quantize.device import blocks_kernel, cast_kernel, maxima_kernel, rows_kernel
from octavo.kernels.quantize.reference import padded
from octavo.numerics.formats import E4M3
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import FULL, ROW, QuantSpec
from octavo.runtime.torch_compat import empty_strided_on, reinterpreted
from octavo.tensor import Order

# What a call of quantize does on a GPU, prepared: allocate, take addresses, launch.
#
# After the first run, `run` is a function generated for the plan. If an address is no multiple of 16, a factor has
# gaps, a profiler's hooks are installed, or another device is current, the general one runs instead.


GeneratedFunction = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


class QuantizePlan:
    """Outputs to allocate and kernels to launch, prepared at the first run, for matrices of one shape and strides."""

    def __init__(self, task: "QuantizeTask", x: Tensor, config: int | None) -> None:
        rows, columns = x.shape
        spec, spec_t = task.first.spec, (task.second or task.first).spec
        index = _fastest(task, x.device, rows, columns) if config is None else config
        self._launches = launches(task, index, strip_tiles(rows, columns, multiprocessors_of(x.device)))
        self._two_passes = len(self._launches) == 2
        self._pair, self._dtype = task.second is not None, spec.format.dtype
        self._writes_rows, self._writes_columns = task.order != "columns", self._pair or task.order != "rows"
        self._device, self._index, self._empty = x.device, x.device.index, empty_strided_on(x.device)
        self._shape, self._padded_rows = (rows, columns), padded(rows)
        self._q = self._shape, (max(columns, 1), 1)
        self._q_t = (self._shape, (1, rows)) if padded(rows) == rows else None
        self._scale_dtype, self._writes_scale = spec.scale_dtype, task.precomputed != "scale"
        scale_shape, scale_shape_t = (s.granularity.scale_shape(self._shape) for s in (spec, spec_t))
        self._s, self._s_t = ((shape, (max(shape[1], 1), 1)) for shape in (scale_shape, scale_shape_t))
        self._second_at = -(-prod(scale_shape) // 4) * 4  # 16-byte aligned
        self._maxima = self._second_at + (prod(scale_shape_t) if self._pair else 0)
        self._scalars = {
            # Where all sizes and strides are 1, ptxas 12.9 stores a register that nothing has written.
            "rows": rows, "columns": columns, "stride_r": x.stride(0) if x.numel() != 1 else 16,
            "stride_c": x.stride(1), "padded_rows": padded(rows), "grid_columns": scale_shape[1],
            "grid_columns_t": scale_shape_t[1],
        }  # fmt: skip
        self._steps: list[tuple[PreparedLaunch, Callable[..., Any]]] = []
        self._allocate: Callable[[Tensor | None], tuple[Tensor, ...]] | None = None
        self.run: GeneratedFunction = self._run

    def _run(
        self, x: Tensor, fold: Tensor | None, fold_t: Tensor | None, precomputed: Tensor | None,
        zeros: Callable[[int, torch.device, int], tuple[Tensor, int]] = new_zeros,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return q, q_t (both [R,C], the second column-major), s, s_t; another output where the task writes none."""
        # `zeros` allocates what maxima start from.
        if self._index is not None and self._index != torch.cuda.current_device():
            with torch.cuda.device(self._index):
                return self._run(x, fold, fold_t, precomputed, zeros)
        if self._allocate is None:
            constants: dict[str, Any] = {}
            lines = [*self._allocations(constants), "return Q, Q_T, COLUMNS, S, S_T"]
            self._allocate = compile_function("GIVEN", lines, constants)
        q, q_t, columns, s, s_t = self._allocate(precomputed)
        fold, fold_t = (x if factor is None else factor.contiguous() for factor in (fold, fold_t))
        bits = bits_t = x if precomputed is None else precomputed.float().contiguous()
        if self._two_passes:
            stream = 0 if self._index is None else current_stream(self._index)
            block, start = zeros(self._maxima, self._device, stream)
            bits = bits_t = reinterpreted(block, (self._maxima,), (1,), start)
            if self._pair:
                bits_t = reinterpreted(block, (self._maxima - self._second_at,), (1,), start + self._second_at)
        tensors = (x, fold, fold_t, q, columns, s, s_t, bits, bits, bits_t)
        for step, tensors_of in self._steps or self._prepare(tensors):
            step(tensors_of(tensors))
        if self.run == self._run:
            self.run = self._generated() or self._run
        return q, q_t, s, s_t

    def _generated(self) -> "GeneratedFunction | None":
        """Return `_run` for aligned addresses, without its branches; None if a kernel was not compiled for these."""
        constants: dict[str, Any] = {"new_zeros": new_zeros, "general": self._run}
        otherwise = "return general(X, FOLD, FOLD_T, GIVEN, zeros)"
        lines = self._source(constants, otherwise)
        if lines is None:
            return None
        lines = [*preparation(self._index, constants, otherwise), *lines, "return Q, Q_T, S, S_T"]
        return compile_function("X, FOLD, FOLD_T, GIVEN, zeros=new_zeros", lines, constants)

    def _source(self, constants: dict[str, Any], otherwise: str) -> list[str] | None:
        """Return lines that do what `run` does for aligned addresses; None if a kernel was not compiled for these."""
        # Names in them: tensors in capitals (X, FOLD, FOLD_T, GIVEN come in, as `zeros`; Q, Q_T, S, S_T come out),
        # addresses as kernels call them. `otherwise` is the statement for other cases; `constants` gets the objects.
        launches = [step.source(constants) for step, _ in self._steps]
        if not launches or None in launches:
            return None
        kernel = {name: value for step, _ in self._steps for name, value in step.launch.constants.items()}
        folds = [name for name in ("FOLD", "FOLD_T")[: 1 + self._pair] if kernel.get(name)]
        takes_scale = bool(kernel.get("PRECOMPUTED"))
        lines = []
        if takes_scale:
            lines += [f"BITS = GIVEN if GIVEN.dtype is {render(torch.float32, constants)} else GIVEN.float()"]
        lines += [f"if not {name}.is_contiguous(): {otherwise}" for name in (*folds, *["BITS"] * takes_scale)]
        lines += self._allocations(constants)
        addresses = {"x": "X", "q_t": "COLUMNS", "s": "S"} | {name.lower(): name for name in folds}
        addresses |= {"q": "Q"} if self._writes_rows and self._writes_columns else {}
        addresses |= {"s_t": "S_T"} if self._pair else {}
        lines += [f"{name} = {tensor}.data_ptr()" for name, tensor in addresses.items()]
        if self._two_passes:
            lines += [f"BLOCK, start = zeros({self._maxima}, {render(self._device, constants)}, stream)"]
            lines += ["amax = BLOCK.data_ptr() + 4 * start"]
        else:
            lines += ["amax = s if BITS is S else BITS.data_ptr()" if takes_scale else "amax = x"]
        second = 4 * self._second_at if self._pair and self._two_passes else 0
        others = {"fold": "x", "fold_t": "x", "q": "q_t", "s_t": "s"}
        others |= {"amax_t": f"amax + {second}", "precomputed": "amax"}
        passed = {name for step, _ in self._steps for name in step.names} - addresses.keys()
        lines += [f"{name} = {address}" for name, address in others.items() if name in passed]
        given = ["x", *(name.lower() for name in folds), *["amax"] * takes_scale]  # allocations are aligned
        lines += [f"if ({' | '.join(given)}) & 15: {otherwise}"]
        return [*lines, *map(str, launches)]

    def _allocations(self, constants: dict[str, Any]) -> list[str]:
        """Return lines that allocate Q, Q_T, COLUMNS (the memory of Q_T), S and S_T, given scales in GIVEN."""
        function, data, scales = (render(v, constants) for v in (self._empty, self._dtype, self._scale_dtype))

        def empty(shape: Sequence[int], stride: Sequence[int], dtype: str) -> str:
            return f"{function}({tuple(shape)}, {tuple(stride)}, {dtype})"

        rows, columns = self._shape
        lines = []
        if not self._writes_columns:
            lines += [f"Q = Q_T = COLUMNS = {empty(*self._q, data)}"]
        else:
            if self._q_t is not None:
                lines += [f"Q_T = COLUMNS = {empty(*self._q_t, data)}"]
            else:
                lines += [f"COLUMNS = {empty((columns, self._padded_rows), (self._padded_rows, 1), data)}"]
                lines += [f"Q_T = COLUMNS[:, :{rows}].t()"]
            lines += [f"Q = {empty(*self._q, data)}" if self._writes_rows else "Q = Q_T"]
        lines += [f"S = {empty(*self._s, scales)}" if self._writes_scale else "S = GIVEN"]
        return [*lines, f"S_T = {empty(*self._s_t, scales)}" if self._pair else "S_T = S"]

    def transposing(self, rows: bool, columns: bool) -> "QuantizePlan":
        """Return a plan that allocates q, or q_t and the scale that belongs to it alone, as [C,R]: the same memory."""
        # For products that would otherwise view their operands so. Only for columns without padding.
        plan = copy(self)
        plan.run, plan._allocate = plan._run, None
        if rows and self._writes_rows:
            plan._q = self._q[0][::-1], self._q[1][::-1]
        if columns and self._q_t is not None:
            plan._q_t = self._q_t[0][::-1], self._q_t[1][::-1]
            alone = "_s_t" if self._pair else "_s" if not self._writes_rows else None
            if alone is not None:
                shape, _ = getattr(self, alone)
                setattr(plan, alone, (shape[::-1], (max(shape[0], 1), 1)))
        return plan

    def _prepare(self, tensors: tuple[Tensor, ...]) -> list[tuple[PreparedLaunch, Callable[..., Any]]]:
        rows, columns = self._shape
        arguments: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
        if arguments["amax"].dtype == torch.float32:  # kernels read magnitudes as integers
            arguments |= {name: arguments[name].view(torch.int32) for name in ("precomputed", "amax", "amax_t")}
        if self._scale_dtype != torch.float32:  # exponents
            arguments |= {name: arguments[name].view(torch.uint8) for name in ("s", "s_t")}
        steps: list[tuple[PreparedLaunch, Callable[..., Any]]] = []
        for launch in self._launches:
            is_maxima = launch.kernel is maxima_kernel
            height = launch.constants["TILE_R"] * (launch.constants["TILES"] if is_maxima else 1)
            down = max(triton.cdiv(rows if is_maxima else padded(rows), height), 1)
            across = 1 if launch.kernel is rows_kernel else max(triton.cdiv(columns, launch.constants["TILE_C"]), 1)
            step = PreparedLaunch(launch, (down * across,), {**self._scalars, **arguments})
            steps.append((step, itemgetter(*(_TENSORS.index(name) for name in step.names))))
        self._steps = steps
        return steps


_TENSORS = ("x", "fold", "fold_t", "q", "q_t", "s", "s_t", "precomputed", "amax", "amax_t")
"""Arguments of the kernels that are tensors, in the order of `QuantizePlan.run`."""


Fold = Literal["none", "rows", "columns"]
Precomputed = Literal["nothing", "amax", "scale"]


@dataclass(frozen=True, kw_only=True)
class FoldedSpec:
    """A quantization spec, and the dimension along which the fold factor varies."""

    spec: QuantSpec
    fold: Fold = "none"

    @property
    def one_pass(self) -> bool:
        """Whether scale blocks fit into a tile."""
        return FULL not in self.spec.granularity


@dataclass(frozen=True, kw_only=True)
class QuantizeTask:
    """One quantization in some memory order, or a pair: the first row-major, the second column-major."""

    first: FoldedSpec  # The only spec, or the first of a pair
    second: FoldedSpec | None = None  # The second spec of a pair
    order: Order = "rows"  # Memory orders to write; "rows" in a pair
    precomputed: Precomputed = "nothing"  # What the caller passes in, for a single spec

    @property
    def op(self) -> str:
        """Name in `torch.ops.octavo`."""
        return "quantize" if self.second is None else "quantize_pair"

    @property
    def case(self) -> tuple[str, ...]:
        """Key in the calibration table: everything that selects kernels except folds."""
        second = () if self.second is None else (self.second.spec.text,)
        return (self.first.spec.text, *second, self.order, self.precomputed)


TILES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "blocks": ((64, 128, 4), (32, 256, 4)),
    "blocks 128": ((128, 128, 8), (128, 256, 16)),
    "pairs of blocks 128": ((128, 128, 8),),
    "rows": ((4, 2048, 4), (4, 4096, 8), (8, 1024, 4)),
    "rows transposed": ((32, 512, 16), (16, 1024, 16), (8, 1024, 8)),
    "two passes": ((64, 128, 4), (128, 64, 4), (128, 128, 8)),
}
"""Configurations: tile rows, tile columns, warps. `default_config` is used until calibration has measured all."""


def tiles(task: QuantizeTask) -> tuple[tuple[int, int, int], ...]:
    """Return the configurations of a task's kernels."""
    if task.first.one_pass:
        extents = [extent for folded in (task.first, task.second) if folded for extent in folded.spec.granularity]
        if max(extents) <= 64:
            return TILES["blocks"]
        return TILES["blocks 128" if task.second is None else "pairs of blocks 128"]
    if task.second is None and task.precomputed == "nothing" and task.first.spec.granularity == ROW:
        return TILES["rows" if task.order == "rows" else "rows transposed"]
    return TILES["two passes"]


@lru_cache(maxsize=4096)
def _fastest(task: QuantizeTask, device: torch.device, rows: int, columns: int) -> int:
    """Return the fastest measured configuration; the default without one, or if the table predates `TILES`."""
    measured = calibration.config(device, "quantize", task.case, rows, columns)
    if measured is not None and measured < len(tiles(task)):
        return measured
    return default_config(task, rows, multiprocessors_of(device))


def default_config(task: QuantizeTask, rows: int, multiprocessors: int) -> int:
    """Return the first configuration; for a transposed copy by row, the first that fills 3/4 of the device."""
    sizes = tiles(task)
    if sizes is not TILES["rows transposed"]:
        return 0
    filling = (index for index, size in enumerate(sizes) if 4 * triton.cdiv(rows, size[0]) >= 3 * multiprocessors)
    return next(filling, min(range(len(sizes)), key=lambda index: sizes[index][0]))


@lru_cache(maxsize=32)
def multiprocessors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; a few for the interpreter, so that it runs all branches."""
    return 3 if device.type != "cuda" else int(torch.cuda.get_device_properties(device).multi_processor_count)


MAXIMA_TILE = (32, 128, 4)
"""Tile rows, tile columns, warps of the amax pass: the fastest of those measured on an H100 (docs/performance.md)."""
STRIPS = (16, 4, 1)  # Tiles below each other in one program of the amax pass


def strip_tiles(rows: int, columns: int, multiprocessors: int) -> int:
    """Return the longest strip with which the programs of the amax pass still fill the device."""
    across = triton.cdiv(columns, MAXIMA_TILE[1])
    fills = (n for n in STRIPS if triton.cdiv(rows, n * MAXIMA_TILE[0]) * across >= 2 * multiprocessors)
    return next(fills, STRIPS[-1])


def launches(task: QuantizeTask, config: int = 0, strip: int = STRIPS[0]) -> list[Launch]:
    """Return a task's kernels, in launch order; `strip` is the tiles of a program of the amax pass."""
    spec, second = task.first.spec, task.second
    if second is not None and task.first.one_pass != second.one_pass:
        raise ValueError(f"quantize_pair: {spec} and {second.spec} cannot be quantized together; call quantize twice")
    tile_r, tile_c, warps = tiles(task)[config]
    other = second or task.first
    (r, c), (r_t, c_t) = spec.granularity, other.spec.granularity
    constants: dict[str, Any] = {
        "FP8_MAX": spec.format.max, "E4M3": spec.format is E4M3, "POWER_OF_TWO": spec.scale_rule != "amax",
        "E8M0": spec.scale_rule == "e8m0", "PRECOMPUTED": get_args(Precomputed).index(task.precomputed),
        "FOLD": _FOLDS.index(task.first.fold), "PAIR": second is not None, "FOLD_T": _FOLDS.index(other.fold),
        "ROWS": task.order != "columns", "COLUMNS": task.order != "rows", "R": r, "C": c, "R_T": r_t, "C_T": c_t,
        "AXIS": _axis(spec), "AXIS_T": _axis(other.spec), "TILES": strip, "TILE_R": tile_r, "TILE_C": tile_c,
        "INTERPRETED": INTERPRETED,
    }  # fmt: skip

    def launch(kernel: Any, num_warps: int, **tile: int) -> Launch:
        own = {name: value for name, value in (constants | tile).items() if name in kernel.arg_names}
        return Launch(kernel=kernel, constants=own, num_warps=num_warps)

    if task.first.one_pass:
        return [launch(blocks_kernel, warps)]
    if second is None and task.precomputed == "nothing" and spec.granularity == ROW:
        return [launch(rows_kernel, warps)]
    cast = launch(cast_kernel, warps)
    if task.precomputed != "nothing":
        return [cast]
    return [launch(maxima_kernel, MAXIMA_TILE[2], TILE_R=MAXIMA_TILE[0], TILE_C=MAXIMA_TILE[1]), cast]


_FOLDS: tuple[Fold, ...] = get_args(Fold)


def _axis(spec: QuantSpec) -> int:
    """The dimension along which scales differ, as the kernels count it."""
    return 1 if spec.granularity.rows == 1 else 2 if spec.granularity.columns == 1 else 0


def _fold_name(fold: Tensor | None, rows: int) -> Fold:
    return "none" if fold is None else "rows" if fold.shape == (rows, 1) else "columns"


def quantize(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, amax: Tensor | None, scale: Tensor | None, order: Order,
    config: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return data in the requested orders (column-major as [C,R]), then scales unless `scale` is passed."""
    # `config` is an index into `tiles`; None takes the fastest one measured by `octavo calibrate`, else the first.
    plan = plan_of(x, spec, fold, amax, scale, order, config)
    q, q_t, s, _ = plan.run(x, fold, None, amax if scale is None else scale)
    return [q] * (order != "columns") + [q_t.t()] * (order != "rows") + [s] * (scale is None)


def quantize_pair(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec, fold_t: Tensor | None,
    config: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return row-major data and scales for `spec`, then column-major data (as [C,R]) and scales for `spec_t`."""
    q, q_t, s, s_t = pair_plan_of(x, spec, fold, spec_t, fold_t, config).run(x, fold, fold_t, None)
    return [q, s, q_t.t(), s_t]


def plan_of(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, amax: Tensor | None, scale: Tensor | None, order: Order,
    config: int | None = None,
) -> QuantizePlan:  # fmt: skip
    """Return the plan of `quantize` for arguments like these."""
    precomputed: Precomputed = "scale" if scale is not None else "amax" if amax is not None else "nothing"
    folded = FoldedSpec(spec=spec, fold=_fold_name(fold, x.shape[0]))
    return _plan(QuantizeTask(first=folded, order=order, precomputed=precomputed), x, config)


def pair_plan_of(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec, fold_t: Tensor | None,
    config: int | None = None,
) -> QuantizePlan:  # fmt: skip
    """Return the plan of `quantize_pair` for arguments like these."""
    first = FoldedSpec(spec=spec, fold=_fold_name(fold, x.shape[0]))
    second = FoldedSpec(spec=spec_t, fold=_fold_name(fold_t, x.shape[0]))
    return _plan(QuantizeTask(first=first, second=second), x, config)


def _plan(task: QuantizeTask, x: Tensor, config: int | None) -> QuantizePlan:
    key = (task, x.dtype, x.shape, x.stride(), x.device, config)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS.add(key, QuantizePlan(task, x, config))
    return plan


_PLANS: Plans[QuantizePlan] = Plans()  # By what determines allocations, launches and their scalars


def recipe_tasks() -> dict[QuantizeTask, str]:
    """Return the tasks of all recipes, with their labels."""
    specs = {spec for r in RECIPES.values() for spec in r.specs.values() if spec}
    tasks = {}
    for spec in sorted(specs, key=str):
        for order in get_args(Order):
            for fold in _FOLDS if order == "rows" else _FOLDS[:1]:
                tasks[QuantizeTask(first=FoldedSpec(spec=spec, fold=fold), order=order)] = f"{spec} fold={fold} {order}"
            given = QuantizeTask(first=FoldedSpec(spec=spec), order=order, precomputed="scale")
            tasks[given] = f"{spec} scale given {order}"
        tasks[QuantizeTask(first=FoldedSpec(spec=spec), order="both", precomputed="amax")] = f"{spec} amax given both"
    for r in RECIPES.values():
        for first, second in r.pairs:
            folded = first.granularity == ROW and first is r.dgrad_g
            row_major = FoldedSpec(spec=first, fold="columns" if folded else "none")
            column_major = FoldedSpec(spec=second, fold="rows" if folded else "none")
            label = f"{first} and {second}{' folded' if folded else ''}"
            tasks[QuantizeTask(first=row_major, second=column_major)] = label
    return tasks


def device_bytes(task: QuantizeTask, launch: Launch) -> float:
    """Return the device-memory traffic of one launch, in bytes per element of a bf16 matrix."""
    # Row blocks are read once: true of 4096 columns on H100; `device` has figures of longer rows.
    written = 2 if task.second is not None or task.order == "both" else 1
    return 2 + (0 if launch.kernel is maxima_kernel else written)
