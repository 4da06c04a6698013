"""multiply on a GPU: one launch, prepared for calls like earlier ones as `octavo.kernels.quantize.quantize_plan`."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.kernels.launch import INTERPRETED, Launch, PreparedLaunch, Variant, preparation
from octavo.kernels.multiply import Outputs
from octavo.kernels.multiply.device import multiply_rows_kernel
from octavo.kernels.quantize.reference import padded
from octavo.kernels.quantize.triton import FoldedSpec, QuantizeTask, default_config, multiprocessors_of, tiles
from octavo.kernels.sources import function_of, source_of
from octavo.numerics.formats import E4M3
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import ROW, QuantSpec
from octavo.runtime.torch_compat import empty_strided_on
from octavo.tensor import Order


def launch(spec: QuantSpec, order: Order, by_column: bool, config: int = 0) -> Launch:
    """Return the kernel of a case, in one of the configurations of `quantize` by row."""
    tile_r, tile_c, num_warps = tiles(_task(spec, order))[config]
    constants = {
        "FP8_MAX": spec.format.max, "E4M3": spec.format is E4M3, "POWER_OF_TWO": spec.scale_rule != "amax",
        "BY_COLUMN": by_column, "ROWS": order != "columns", "COLUMNS": order != "rows", "TILE_R": tile_r,
        "TILE_C": tile_c, "INTERPRETED": INTERPRETED,
    }  # fmt: skip
    return Launch(kernel=multiply_rows_kernel, constants=constants, num_warps=num_warps)


def _task(spec: QuantSpec, order: Order) -> QuantizeTask:
    return QuantizeTask(first=FoldedSpec(spec=spec), order=order)


class MultiplyPlan:
    """Outputs to allocate and the kernel to launch for factors of one shape, strides, dtype and device.

    Holds no tensor. `run(a, b)` returns `Outputs`, y in a shape; it is replaced by a generated function after its first
    call. It takes factors of any shape with the addresses of such matrices.
    """

    __slots__ = ("_device", "_empty", "_index", "_launch", "_outputs", "_padded_rows", "_scalars", "_step", "run")

    def __init__(
        self, a: Tensor, b: Tensor, dtype: torch.dtype, spec: QuantSpec, order: Order,
        shape: Sequence[int] | None = None, config: int | None = None,
    ) -> None:  # fmt: skip
        rows, columns = a.shape
        if config is None:
            config = default_config(_task(spec, order), rows, multiprocessors_of(a.device))
        self._launch = launch(spec, order, b.ndim == 1, config)
        self._device, self._index, self._empty = a.device, a.device.index, empty_strided_on(a.device)
        matrix, self._padded_rows = ((rows, columns), (max(columns, 1), 1)), padded(rows)
        self._outputs: tuple[Any, ...] = (
            (tuple(shape or matrix[0]), tuple(torch.empty(shape or matrix[0], device="meta").stride()), dtype),
            (*matrix, spec.format.dtype) if order != "columns" else None,
            ((rows, columns), (1, rows), spec.format.dtype) if order != "rows" else None,
            ((rows, 1), (1, 1), spec.scale_dtype),
        )
        self._scalars = {
            "rows": rows, "columns": columns, "padded_rows": padded(rows), "a_r": a.stride(0), "a_c": a.stride(1),
            "b_r": 0 if b.ndim == 1 else b.stride(0), "b_c": b.stride(-1),
        }  # fmt: skip
        self._step: PreparedLaunch | None = None
        self.run: Callable[[Tensor, Tensor], Outputs] = self._run

    def _run(self, a: Tensor, b: Tensor) -> Outputs:
        if self._index is not None and self._index != torch.cuda.current_device():
            with torch.cuda.device(self._index):
                return self._run(a, b)
        outputs: list[Any] = [None if output is None else self._empty(*output) for output in self._outputs]
        y, q, q_t, s = outputs
        columns, rows = q_t, self._scalars["rows"]
        if q_t is not None and self._padded_rows != rows:
            columns = self._empty((self._scalars["columns"], self._padded_rows), (self._padded_rows, 1), q_t.dtype)
            q_t = columns[:, :rows].t()
        q, q_t = q if q is not None else q_t, q_t if q_t is not None else q
        tensors = {"a": a, "b": b, "y": y, "q": q, "q_t": q if columns is None else columns, "s": s}
        if self._step is None:
            grid = (max(triton.cdiv(self._padded_rows, self._launch.constants["TILE_R"]), 1),)
            self._step = self._launch.prepare(grid, {**self._scalars, **tensors})
        self._step([tensors[name] for name in self._step.names])
        if self.run == self._run:
            self.run = self._generated() or self._run
        return y, q, q_t, s

    def _generated(self) -> Callable[[Tensor, Tensor], Outputs] | None:
        """Return `_run` for aligned addresses, without its branches; None if the kernel was not compiled for these."""
        constants: dict[str, Any] = {"general": self._run}
        launched = None if self._step is None else self._step.source(constants)
        if launched is None or self._padded_rows != self._scalars["rows"]:
            return None
        empty, otherwise = source_of(self._empty, constants), "return general(A, B)"
        lines = [*preparation(self._index, constants, otherwise), "a = A.data_ptr()", "b = B.data_ptr()"]
        lines += [f"if (a | b) & 15: {otherwise}"]
        for name, output in zip(("Y", "Q", "Q_T", "S"), self._outputs, strict=True):
            lines += [] if output is None else [f"{name} = {empty}{source_of(output, constants)}"]
        names = "Q" if self._outputs[1] is not None else "Q_T", "Q_T" if self._outputs[2] is not None else "Q"
        lines += ["y = Y.data_ptr()", f"q = {names[0]}.data_ptr()", f"q_t = {names[1]}.data_ptr()", "s = S.data_ptr()"]
        return function_of("A, B", [*lines, launched, f"return Y, {names[0]}, {names[1]}, S"], constants)


def multiply(
    a: Tensor, b: Tensor, dtype: torch.dtype, spec: QuantSpec, order: Order, config: int | None = None
) -> list[Tensor]:
    """See `octavo.kernels.multiply.reference`."""
    y, q, q_t, s = MultiplyPlan(a, b, dtype, spec, order, None, config).run(a, b)
    return [y, *[q] * (order != "columns"), *[q_t.t()] * (order != "rows"), s]


def configurations(spec: QuantSpec, order: Order) -> tuple[int, ...]:
    """Return the configurations of a case."""
    return tuple(range(len(tiles(_task(spec, order)))))


def case(spec: QuantSpec, order: Order, by_column: bool) -> str:
    """Return the label of a case."""
    return f"{spec} {order}" + (" by column" if by_column else "")


def specs() -> list[QuantSpec]:
    """Return the specs by row of X in all recipes."""
    return list({recipe.x.text: recipe.x for recipe in RECIPES.values() if recipe.x.granularity == ROW}.values())


def variants() -> list[Variant]:
    """Return the kernel in every case and configuration that the recipes use, for bf16 rows of 4096."""
    orders: tuple[Order, ...] = "rows", "both"
    all_variants = []
    for spec, order, by_column in product(specs(), orders, (True, False)):
        code = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}[spec.format.name]
        types = {"a": "*bf16", "b": "*bf16", "y": "*bf16", "q": code, "q_t": code, "s": "*fp32"}
        for config in configurations(spec, order):
            tile_r, tile_c, _ = tiles(_task(spec, order))[config]
            all_variants.append(
                Variant(
                    op="multiply", case=case(spec, order, by_column), config=config,
                    launch=launch(spec, order, by_column, config), types=types, tile=tile_r * tile_c,
                    device_bytes=4 + 2 * (not by_column) + 1 + (order == "both"), equal_to_1=("a_c", "b_c"),
                    trips=4096 // tile_c,
                )
            )  # fmt: skip
    return all_variants
