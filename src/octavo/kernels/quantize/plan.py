"""What a call of quantize does on a GPU, prepared: allocate, take addresses, launch.

Addresses, not tensors, go to the launches. If all are multiples of 16 and no profiler's hooks are installed, the
compiled kernels are called directly (`PreparedLaunch.direct`), else each launch looks for itself.
"""

from collections.abc import Callable
from copy import copy
from math import prod
from operator import itemgetter
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from octavo.kernels.direct import new_zeros
from octavo.kernels.launch import HOOKS, Launch, PreparedLaunch, current_stream
from octavo.kernels.quantize.device import maxima_kernel
from octavo.kernels.quantize.reference import padded
from octavo.kernels.quantize.rows_device import rows_kernel
from octavo.numerics.spec import QuantSpec
from octavo.runtime.torch_compat import empty_strided_on, reinterpreted

Order = Literal["rows", "columns", "both"]


class QuantizePlan:
    """Outputs to allocate and kernels to launch for matrices of one shape, strides, dtype and device.

    Holds no tensor. Launches are prepared at the first run.

    Args:
        launches: The kernels.
        spec: The only spec, or the first of a pair.
        spec_t: The second spec of a pair.
        order: Memory orders to write; "rows" in a pair.
        scale_given: Whether the caller passes the scale in.
        x: Such a matrix.
    """

    __slots__ = (
        "_device", "_direct", "_dtype", "_e8m0", "_empty", "_index", "_launches", "_maxima", "_padded_rows", "_pair",
        "_q", "_q_t", "_s", "_s_t", "_scalars", "_scale_dtype", "_second_at", "_shape", "_steps", "_two_passes",
        "_writes_columns", "_writes_rows", "_writes_scale",
    )  # fmt: skip

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
            "rows": rows,
            "columns": columns,
            "stride_r": x.stride(0),
            "stride_c": x.stride(1),
            "padded_rows": padded(rows),
            "grid_columns": scale_shape[1],
            "grid_columns_t": scale_shape_t[1],
        }
        self._steps: list[tuple[PreparedLaunch, Callable[..., Any]]] = []
        self._direct: list[Callable[..., None]] = []

    def run(
        self, x: Tensor, fold: Tensor | None, fold_t: Tensor | None, precomputed: Tensor | None,
        zeros: Callable[[int, torch.device], tuple[Tensor, int]] = new_zeros,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return q, q_t (both [R,C], the second column-major), s, s_t; an output that the task does not write is
        another one. `zeros` allocates what maxima start from.
        """
        if self._index is not None and self._index != torch.cuda.current_device():
            with torch.cuda.device(self._index):
                return self.run(x, fold, fold_t, precomputed, zeros)
        empty, dtype = self._empty, self._dtype
        if not self._writes_columns:
            q = q_t = columns = empty(*self._q, dtype)
        else:
            if self._q_t is not None:
                q_t = columns = empty(*self._q_t, dtype)
            else:
                columns = empty((self._shape[1], self._padded_rows), (self._padded_rows, 1), dtype)
                q_t = columns[:, : self._shape[0]].t()
            q = empty(*self._q, dtype) if self._writes_rows else q_t
        if precomputed is None or self._writes_scale:
            s = empty(*self._s, self._scale_dtype)
        else:
            s, precomputed = precomputed, precomputed if precomputed.dtype == torch.float32 else precomputed.float()
        s_t = empty(*self._s_t, self._scale_dtype) if self._pair else s
        fold = x if fold is None else fold if fold.is_contiguous() else fold.contiguous()
        fold_t = x if fold_t is None else fold_t if fold_t.is_contiguous() else fold_t.contiguous()
        start, bits = 0, x
        if self._two_passes:
            bits, start = zeros(self._maxima, self._device)
        elif precomputed is not None:
            bits = precomputed if precomputed.is_contiguous() else precomputed.contiguous()
        if not self._direct or HOOKS.launch_enter_hook.calls or HOOKS.launch_exit_hook.calls:
            self._launch((x, fold, fold_t, q, columns, s, s_t), bits, start)
            return q, q_t, s, s_t
        at, at_fold, at_fold_t, at_q = x.data_ptr(), fold.data_ptr(), fold_t.data_ptr(), q.data_ptr()
        at_columns, at_s, at_s_t = columns.data_ptr(), s.data_ptr(), s_t.data_ptr()
        amax = bits.data_ptr() + 4 * start
        amax_t = amax + 4 * self._second_at if self._pair else amax
        if (at | at_fold | at_fold_t | at_q | at_columns | at_s | at_s_t | amax | amax_t) & 15:
            self._launch((x, fold, fold_t, q, columns, s, s_t), bits, start)
            return q, q_t, s, s_t
        stream = current_stream(self._index)
        for launch in self._direct:
            launch(stream, at, at_fold, at_fold_t, at_q, at_columns, at_s, at_s_t, amax, amax, amax_t)
        return q, q_t, s, s_t

    def transposing(self, rows: bool, columns: bool) -> "QuantizePlan":
        """Return a plan that allocates q, or q_t and the scale that belongs to it alone, as [C,R]: the same memory.

        For products that would otherwise view their operands so. Only for columns without padding.
        """
        plan = copy(self)
        if rows and self._writes_rows:
            plan._q = self._q[0][::-1], self._q[1][::-1]
        if columns and self._q_t is not None:
            plan._q_t = self._q_t[0][::-1], self._q_t[1][::-1]
            alone = "_s_t" if self._pair else "_s" if not self._writes_rows else None
            if alone is not None:
                shape, _ = getattr(self, alone)
                setattr(plan, alone, (shape[::-1], (max(shape[0], 1), 1)))
        return plan

    def _launch(self, tensors: tuple[Tensor, ...], bits: Tensor, start: int) -> None:
        """Launch without knowing alignments; `bits` are precomputed scales, or zeros from `start` on for maxima."""
        bits_t = bits
        if self._two_passes:
            if self._pair:
                bits_t = reinterpreted(bits, (self._maxima - self._second_at,), (1,), start + self._second_at)
            bits = reinterpreted(bits, (self._maxima,), (1,), start)
            bits_t = bits_t if self._pair else bits
        tensors = (*tensors, bits, bits, bits_t)
        for step, tensors_of in self._steps or self._prepare(tensors):
            step(tensors_of(tensors))
        if not self._direct:
            direct = [step.direct(_TENSORS) for step, _ in self._steps]
            self._direct = [launch for launch in direct if launch is not None]
            if None in direct:
                self._direct = []

    def _prepare(self, tensors: tuple[Tensor, ...]) -> list[tuple[PreparedLaunch, Callable[..., Any]]]:
        rows, columns = self._shape
        arguments: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
        if arguments["amax"].dtype == torch.float32:  # kernels read magnitudes as integers
            arguments |= {name: arguments[name].view(torch.int32) for name in ("precomputed", "amax", "amax_t")}
        if self._e8m0:
            arguments |= {name: arguments[name].view(torch.uint8) for name in ("s", "s_t")}
        steps: list[tuple[PreparedLaunch, Callable[..., Any]]] = []
        for launch in self._launches:
            covered = rows if launch.kernel is maxima_kernel else padded(rows)
            down = max(triton.cdiv(covered, launch.constants["TILE_R"]), 1)
            across = 1 if launch.kernel is rows_kernel else max(triton.cdiv(columns, launch.constants["TILE_C"]), 1)
            step = launch.prepare((down * across,), {**self._scalars, **arguments})
            steps.append((step, itemgetter(*(_TENSORS.index(name) for name in step.names))))
        self._steps = steps
        return steps


_TENSORS = ("x", "fold", "fold_t", "q", "q_t", "s", "s_t", "precomputed", "amax", "amax_t")
"""Arguments of the kernels that are tensors, in the order of `QuantizePlan.run`."""
