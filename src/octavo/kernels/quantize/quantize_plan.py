"""What a call of quantize does on a GPU, prepared: allocate, take addresses, launch.

After the first run, `run` is a function generated for the plan. If an address is no multiple of 16, a factor has gaps,
a profiler's hooks are installed, or another device is current, the general one runs instead.
"""

from collections.abc import Callable, Sequence
from copy import copy
from math import prod
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.kernels.direct import new_zeros
from octavo.kernels.launch import Launch, PreparedLaunch, compile_function, current_stream, preparation, render
from octavo.kernels.quantize.device import maxima_kernel, rows_kernel
from octavo.kernels.quantize.reference import padded
from octavo.numerics.spec import QuantSpec
from octavo.runtime.torch_compat import empty_strided_on, reinterpreted
from octavo.tensor import Order

GeneratedFunction = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


class QuantizePlan:
    """Outputs to allocate and kernels to launch, prepared at the first run, for matrices of one shape and strides."""

    def __init__(
        self, launches: list[Launch], spec: QuantSpec, spec_t: QuantSpec | None, order: Order, scale_given: bool,
        x: Tensor,
    ) -> None:  # fmt: skip
        rows, columns = x.shape
        self._pair, self._dtype, self._e8m0 = spec_t is not None, spec.format.dtype, spec.scale_rule == "e8m0"
        self._writes_rows, self._writes_columns = order != "columns", self._pair or order != "rows"
        self._device, self._index, self._empty = x.device, x.device.index, empty_strided_on(x.device)
        self._shape, self._padded_rows = (rows, columns), padded(rows)
        self._q = self._shape, (max(columns, 1), 1)
        self._q_t = (self._shape, (1, rows)) if padded(rows) == rows else None
        self._scale_dtype, self._writes_scale = spec.scale_dtype, not scale_given
        scale_shape, scale_shape_t = (s.granularity.scale_shape(self._shape) for s in (spec, spec_t or spec))
        self._s, self._s_t = ((shape, (max(shape[1], 1), 1)) for shape in (scale_shape, scale_shape_t))
        self._launches = launches
        self._two_passes = len(self._launches) == 2
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
        if precomputed is not None and precomputed.dtype != torch.float32:
            precomputed = precomputed.float()
        fold = x if fold is None else fold if fold.is_contiguous() else fold.contiguous()
        fold_t = x if fold_t is None else fold_t if fold_t.is_contiguous() else fold_t.contiguous()
        start, bits = 0, x
        if self._two_passes:
            stream = 0 if self._index is None else current_stream(self._index)
            bits, start = zeros(self._maxima, self._device, stream)
        elif precomputed is not None:
            bits = precomputed if precomputed.is_contiguous() else precomputed.contiguous()
        bits_t = bits
        if self._two_passes:
            if self._pair:
                bits_t = reinterpreted(bits, (self._maxima - self._second_at,), (1,), start + self._second_at)
            bits = reinterpreted(bits, (self._maxima,), (1,), start)
            bits_t = bits_t if self._pair else bits
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
        if self._e8m0:
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
