"""Products of `torch_scaled` without PyTorch's dispatcher in between, from plans (`octavo.kernels.direct`).

one call of `torch._scaled_mm`, no copies     `OneCall`: nothing is looked at again but alignment
everything else, such as scales of blocks     the backend's function, as the op calls it
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.gemm import torch_scaled
from octavo.kernels.gemm.operand_layout import ALIGNMENT, Operand, oriented
from octavo.runtime.torch_compat import reinterpreted
from octavo.tensor import ScaledTensor

PreparedProduct = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor | None]


def plan_of(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> PreparedProduct:
    """Return what computes products of operands like these from their data, scales and bias; it returns None for
    operands that are not aligned.
    """
    left, right = oriented(a, b, layout)
    if torch_scaled.is_one_call(left, right, out_dtype, bias):
        return OneCall(left, right, layout, out_dtype, fast_accum)
    a_spec, b_spec = a.spec, b.spec

    def product(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        left, right = ScaledTensor(a, a_scale, a_spec), ScaledTensor(b, b_scale, b_spec)
        return torch_scaled.scaled_mm(left, right, layout, out_dtype, bias, fast_accum)

    return product


class OneCall:
    """Products by one call of `torch._scaled_mm`. Holds no tensor but unit scales."""

    __slots__ = (
        "_a_is_column", "_a_is_unit", "_a_ones", "_a_shape", "_a_transposed", "_b_is_row", "_b_is_unit", "_b_ones",
        "_b_shape", "_b_transposed", "_columns", "_device", "_fast_accum", "_is_row", "_out_dtype", "_rows",
    )  # fmt: skip

    def __init__(
        self, left: Operand, right: Operand, layout: str, out_dtype: torch.dtype, fast_accum: bool
    ) -> None:  # fmt: skip
        (m, k), n = left.data.shape, right.data.shape[0]
        self._device, self._out_dtype, self._fast_accum = left.data.device, out_dtype, fast_accum
        self._a_transposed, self._b_transposed = layout[0] == "t", layout[1] == "t"
        self._a_shape, self._b_shape = (m, k), (k, n)
        self._is_row = torch_scaled.scaling_of(left.blocks, right.blocks) == "row"
        self._rows, self._columns = (m, n) if self._is_row else (1, 1)
        self._a_is_unit, self._b_is_unit = left.scale is None, right.scale is None
        a_ones = torch_scaled.lasting_ones(self._rows, self._device) if left.scale is None else None
        b_ones = torch_scaled.lasting_ones(self._columns, self._device) if right.scale is None else None
        self._a_ones, self._b_ones = a_ones, None if b_ones is None else b_ones.t()
        self._a_is_column = left.scale is not None and left.scale.stride() == (1, 1)
        self._b_is_row = right.scale is not None and layout[1] == "n" and right.scale.stride(0) == 1

    def __call__(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
    ) -> Tensor | None:
        """Return the product of operands in the layout; None if they are not aligned."""
        if a_scale is not None and not self._a_is_column:
            a_scale = reinterpreted(a_scale, (self._rows, 1), (1, 1), 0)
        if self._a_transposed:
            a = reinterpreted(a, self._a_shape, (self._a_shape[1], 1), 0)
        if self._b_transposed:
            b = reinterpreted(b, self._b_shape, (1, self._b_shape[0]), 0)
        return self.run(a, b, a_scale, b_scale, bias)

    def run(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None,
        aligned: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """Return A B for A [m,k] row-major, B [k,n] column-major, scales of A [m,1] and scales of B of the shape that
        the first ones had; None if they are not aligned. With `aligned` the caller says that they are, as allocations
        of PyTorch are.
        """
        if not (aligned or self._are_aligned(a, b, a_scale, b_scale, bias)):
            return None
        if a_scale is None:
            a_scale = torch_scaled.ones(self._rows, self._device) if self._a_ones is None else self._a_ones
        if b_scale is None:
            b_scale = torch_scaled.ones(self._columns, self._device).t() if self._b_ones is None else self._b_ones
        elif self._is_row and not self._b_is_row:
            b_scale = reinterpreted(b_scale, (1, self._columns), (1, 1), 0)
        result: Tensor = torch._scaled_mm(a, b, a_scale, b_scale, bias, None, self._out_dtype, self._fast_accum)
        return result

    def _are_aligned(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
    ) -> bool:
        addresses = a.data_ptr() | b.data_ptr()
        if bias is not None:
            addresses |= bias.data_ptr()
        if self._is_row:  # cuBLAS reads vectors of scales 16 bytes at a time
            for scale in (a_scale, b_scale):
                addresses |= 0 if scale is None else scale.data_ptr()
        return not addresses & (ALIGNMENT - 1)
