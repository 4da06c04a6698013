"""Products of `torch_scaled` without PyTorch's dispatcher in between, from plans (`octavo.kernels.direct`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.gemm import torch_scaled
from octavo.kernels.gemm.operand_layout import ALIGNMENT, Operand, oriented
from octavo.runtime.torch_compat import empty_strided_on, reinterpreted
from octavo.tensor import ScaledTensor

PreparedProduct = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor | None]


def plan_of(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> PreparedProduct:
    """Return what multiplies operands like these, by data, scales and bias; it returns None if they are not aligned."""
    left, right = oriented(a, b, layout)
    kind = torch_scaled.one_call(left, right, out_dtype, bias)
    if kind in ("tensor", "row"):
        return OneCall(left, right, layout, out_dtype, fast_accum)
    if kind is not None:
        return BlockCall(left, right, layout, out_dtype)
    a_spec, b_spec = a.spec, b.spec

    def product(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        left, right = ScaledTensor(a, a_scale, a_spec), ScaledTensor(b, b_scale, b_spec)
        return torch_scaled.scaled_mm(left, right, layout, out_dtype, bias, fast_accum)

    return product


class OneCall:
    """Products by one call of `torch._scaled_mm`. Holds no tensor but unit scales."""

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
        """Return A B, A [m,k] row-major, B [k,n] column-major, scales shaped as the first ones; None if not aligned."""
        # With `aligned` the caller states that they are, as allocations of PyTorch are.
        if not (aligned or self._are_aligned(a, b, a_scale, b_scale, bias)):
            return None
        if a_scale is None:
            a_scale = torch_scaled.ones(self._rows, self._device) if self._a_ones is None else self._a_ones
        if b_scale is None:
            b_scale = torch_scaled.ones(self._columns, self._device).t() if self._b_ones is None else self._b_ones
        elif self._is_row and not self._b_is_row:
            b_scale = reinterpreted(b_scale, (1, self._columns), (1, 1), 0)
        return torch._scaled_mm(a, b, a_scale, b_scale, bias, None, self._out_dtype, self._fast_accum)

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


class BlockCall:
    """Products with scales of blocks by one call of `torch._scaled_mm_v2`, without copies of data. Holds no tensor."""

    def __init__(self, left: Operand, right: Operand, layout: str, out_dtype: torch.dtype) -> None:
        self._a_shape = tuple(left.data.shape) if layout[0] == "t" else None
        self._b_shape = tuple(right.data.shape[::-1]) if layout[1] == "t" else None
        self._left, self._right = _arrangement(left), _arrangement(right)
        # As integers, in lists: what `F.scaled_mm` makes of its arguments in each call.
        (self._a_type, self._a_order), (self._b_type, self._b_order) = (
            tuple([int(value.value)] for value in torch_scaled.block_types(x.blocks)) for x in (left, right)
        )
        self._out_dtype, self._index = out_dtype, left.data.device.index

    def __call__(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
    ) -> Tensor | None:
        """Return the product of operands in the layout; None if they are not aligned or on another device."""
        if self._index is not None and self._index != torch.cuda.current_device():
            return None  # scales are allocated on the current device
        left, right = self._left(a_scale), self._right(b_scale)
        addresses = a.data_ptr() | b.data_ptr() | left.data_ptr() | right.data_ptr()
        if (addresses if bias is None else addresses | bias.data_ptr()) & (ALIGNMENT - 1):
            return None
        if self._a_shape is not None:
            a = reinterpreted(a, self._a_shape, (self._a_shape[1], 1), 0)
        if self._b_shape is not None:
            b = reinterpreted(b, self._b_shape, (1, self._b_shape[0]), 0)
        return torch._scaled_mm_v2(
            a, b, [left], self._a_type, self._a_order, [right], self._b_type, self._b_order, bias, self._out_dtype
        )


def _arrangement(operand: Operand) -> Callable[[Any], Tensor]:
    """Return what brings scales like the operand's, as they are stored, into cuBLAS's order."""
    scale, blocks, shape = operand.scale, operand.blocks, operand.data.shape
    assert scale is not None
    ordered, size, stride = torch_scaled.ordered_scales(scale, blocks, shape)
    own_size, own_stride = tuple(scale.shape), scale.stride()
    if ordered.data_ptr() != scale.data_ptr():  # padded
        return lambda stored: torch_scaled.block_scales(reinterpreted(stored, own_size, own_stride, 0), blocks, shape)
    if ordered.is_contiguous():
        return lambda stored: reinterpreted(stored, size, stride, 0)
    own_size, own_stride, dtype = tuple(ordered.shape), ordered.stride(), scale.dtype
    empty, dense_stride = empty_strided_on(scale.device), torch.empty(own_size, device="meta").stride()

    def copied(stored: Tensor) -> Tensor:
        dense = empty(own_size, dense_stride, dtype)
        return reinterpreted(dense.copy_(reinterpreted(stored, own_size, own_stride, 0)), size, stride, 0)

    return copied
