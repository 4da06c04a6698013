"""scaled_mm through PyTorch's FP8 products (cuBLASLt, CUTLASS), for all scale granularities that they support.

Combinations of output dtype and bias that fail their first probe (`is_supported`) run with float32 output, followed by
PyTorch ops for bias and cast; row scales without support are applied to the float32 result of unit scales.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.conformance.mismatches import low_sqnr
from octavo.kernels.gemm import reference
from octavo.kernels.gemm.operand_layout import (
    ALIGNMENT,
    Operand,
    blocks_of,
    empty_product,
    oriented,
    packed,
    scale_sums,
)
from octavo.kernels.quantize.reference import quantize
from octavo.kernels.registry import GPU_TYPES, Case, unsupported_gpu
from octavo.numerics.formats import E5M2, E8M0
from octavo.numerics.spec import FULL, TENSOR, Granularity, QuantSpec
from octavo.runtime.execution_context import is_capturing
from octavo.runtime.torch_compat import disable_current_modes, empty_strided_on, reinterpreted
from octavo.tensor import ScaledTensor

Scaling = Literal["tensor", "row", "block", "mx"]

BLOCK = 128
GROUP = 32


def unsupported_reason(device: torch.device, case: Case) -> str | None:
    """Return why this backend cannot run a case on a device, or None. Runs no kernel."""
    if device.type == "cpu":
        return "torch._scaled_mm is a slow loop on a CPU; reference is exact and faster"
    if device.type != "cuda":
        return f"torch._scaled_mm has no FP8 kernel for device type {device.type!r}"
    if (reason := unsupported_gpu(device)) is not None:
        return reason
    if (reason := unsupported_by_capability(torch.cuda.get_device_capability(device), case)) is not None:
        return reason
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    if scaling_of(*blocks_of(case)) == "block" and cuda < (12, 9):
        return f"cuBLAS supports 128-wide blocks since CUDA 12.9; this torch was built with {torch.version.cuda}"
    return None


def unsupported_by_capability(capability: tuple[int, int], case: Case) -> str | None:
    """Return why PyTorch has no such product for a compute capability, or None. Queries no device."""
    kind = scaling_of(*blocks_of(case))
    if kind is None:
        return f"PyTorch has no product for scales of {case[0]} by {case[1]}, layout {case[2]}"
    if all(text.startswith(E5M2.name) for text in case[:2]):
        return "FP8 matrix units do not multiply E5M2 by E5M2"
    device = "this device is sm_{}{}".format(*capability)
    if capability < (8, 9):
        return f"FP8 matrix units need sm_89 or later; {device}"
    if kind == "block" and capability[0] != 9:
        return f"cuBLAS supports 128-wide blocks on Hopper (sm_90) only; {device}"
    if kind == "mx" and capability[0] < 10:
        return f"products with 1x32 scales need Blackwell (sm_100); {device}"
    return None


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    left, right = oriented(a, b, layout)
    if left.data.numel() == 0 or right.data.numel() == 0:
        return empty_product(left, right, out_dtype, bias)
    kind, device = scaling_of(left.blocks, right.blocks), left.data.device
    if kind is not None and is_supported(kind, device, out_dtype, bias is not None):
        return product(kind, left, right, out_dtype, bias, fast_accum)
    if kind is not None and is_supported(kind, device, torch.float32, False):
        sums = product(kind, left, right, torch.float32, None, fast_accum)
    elif kind == "row":
        one, other = (operand._replace(scale=None, blocks=TENSOR) for operand in (left, right))
        sums = product("tensor", one, other, torch.float32, None, fast_accum)
        scale_sums(sums, left.scale, None if right.scale is None else right.scale.t())
    else:
        raise NotImplementedError(
            f"torch {torch.__version__} does not support scales of {a.spec} by {b.spec} for {out_dtype} on {device}"
        )
    if bias is not None:
        sums += bias
    return sums.to(out_dtype)


def scaling_of(left: Granularity, right: Granularity) -> Scaling | None:
    """Return PyTorch's name for a pair of scale blocks, oriented as [outside, contraction]."""
    if left.columns == right.columns == FULL:
        return "tensor" if left.rows == right.rows == FULL else "row"
    if (left, right) in (((1, BLOCK), (1, BLOCK)), ((1, BLOCK), (BLOCK, BLOCK)), ((BLOCK, BLOCK), (1, BLOCK))):
        return "block"
    return "mx" if left == right == (1, GROUP) else None


def product(
    kind: Scaling, left: Operand, right: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """Call PyTorch with padded operands and scales in its memory order."""
    m, n = left.data.shape[0], right.data.shape[0]
    a = packed(left.data, *_multiples(kind, left.blocks, 1))
    b = packed(right.data, *_multiples(kind, right.blocks, ALIGNMENT))
    if bias is not None:
        bias = bias.to(out_dtype).contiguous()
        if b.shape[0] != n or bias.data_ptr() % ALIGNMENT:
            bias = F.pad(bias, (0, b.shape[0] - n))
    if kind in ("tensor", "row"):
        scales = _scalar if kind == "tensor" else _vector
        result = torch._scaled_mm(
            a, b.t(), scale_a=scales(left, a), scale_b=scales(right, b).t(), bias=bias, out_dtype=out_dtype,
            use_fast_accum=fast_accum,
        )  # fmt: skip
    else:
        assert left.scale is not None and right.scale is not None
        (a_type, a_swizzle), (b_type, b_swizzle) = block_types(left.blocks), block_types(right.blocks)
        a_scale = block_scales(left.scale, left.blocks, a.shape)
        b_scale = block_scales(right.scale, right.blocks, b.shape)
        result = F.scaled_mm(
            a, b.t(), a_scale, a_type, b_scale, b_type, a_swizzle, b_swizzle, bias=bias, output_dtype=out_dtype
        )
    # A single row counts as contiguous with any stride, and would hold the memory of the padded one.
    return result if result.shape == (m, n) else result[:m, :n].clone(memory_format=torch.contiguous_format)


def one_call(left: Operand, right: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Scaling | None:
    """Return the kind of a product that one call of PyTorch computes without copies of data; None for others."""
    kind, device = scaling_of(left.blocks, right.blocks), left.data.device
    if kind is None or not left.data.numel() * right.data.numel():
        return None
    for operand, outside in ((left, 1), (right, ALIGNMENT)):
        (rows, columns), (of_rows, of_columns) = operand.data.shape, _multiples(kind, operand.blocks, outside)
        if rows % of_rows or columns % of_columns or operand.data.stride() != (columns, 1):
            return None
        if kind in ("tensor", "row") and operand.scale is not None:  # those of blocks are arranged anyway
            shape = (rows, 1) if kind == "row" else (1, 1)
            if operand.scale.shape != shape or not operand.scale.is_contiguous():
                return None
    if bias is not None and (bias.dtype != out_dtype or not bias.is_contiguous()):
        return None
    return kind if is_supported(kind, device, out_dtype, bias is not None) else None


def _multiples(kind: Scaling, blocks: Granularity, outside: int) -> tuple[int, int]:
    """Return the multiples to which rows and columns of an operand [outside, contraction] are padded."""
    if kind in ("tensor", "row"):
        return outside, ALIGNMENT
    return (max(blocks.rows, ALIGNMENT), BLOCK) if kind == "block" else (GROUP, GROUP)


def _scalar(operand: Operand, data: Tensor) -> Tensor:
    return ones(1, data.device) if operand.scale is None else operand.scale


def _vector(operand: Operand, data: Tensor) -> Tensor:
    """Return row scales as a dense [rows, 1], ones for unit scales."""
    rows, padded = operand.data.shape[0], data.shape[0]
    if operand.scale is None:
        return ones(padded, data.device)
    scale = operand.scale
    if rows != padded or scale.shape[0] != rows or scale.stride(0) != 1:
        return F.pad(scale.expand(rows, 1), (0, 0, 0, padded - rows), value=1.0)
    # PyTorch also checks the stride of a dimension of size 1.
    return _aligned(scale if scale.stride(1) == 1 else scale.as_strided((rows, 1), (1, 1)))


def block_types(blocks: Granularity) -> tuple["F.ScalingType", "F.SwizzleType"]:
    """Return PyTorch's names for scale blocks and for the order in which cuBLAS reads their scales."""
    if blocks == (1, GROUP):
        return F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    by_row = blocks == (1, BLOCK)
    return F.ScalingType.BlockWise1x128 if by_row else F.ScalingType.BlockWise128x128, F.SwizzleType.NO_SWIZZLE


def block_scales(scale: Tensor, blocks: Granularity, shape: Sequence[int]) -> Tensor:
    """Return block scales, oriented as data of `shape` [outside, contraction], in the order that cuBLAS reads."""
    ordered, size, stride = ordered_scales(scale, blocks, shape)
    dense = _aligned(ordered) if ordered.is_contiguous() else ordered.clone(memory_format=torch.contiguous_format)
    return reinterpreted(dense, size, stride, 0)


def ordered_scales(
    scale: Tensor, blocks: Granularity, shape: Sequence[int]
) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return a view of padded scales in cuBLAS's order once dense; and by which sizes and strides it reads."""
    if blocks == (1, GROUP):  # tiles of 128 rows × 4 groups, each 32 × (4 × 4): row r at (r mod 32, r div 32)
        tall, wide = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
        padded = _padded_to(scale.view(torch.uint8), tall * 128, wide * 4).view(E8M0.dtype)
        down, across = padded.stride()
        strides = 128 * down, 4 * across, down, 32 * down, across
        return reinterpreted(padded, (tall, wide, 32, 4, 4), strides, 0), (tall * wide * 512,), (1,)
    if blocks == (1, BLOCK):
        return _padded_to(scale.t(), shape[1] // BLOCK, shape[0]), (shape[0], shape[1] // BLOCK), (1, shape[0])
    rows, columns = scale.shape[0], scale.shape[1] + -scale.shape[1] % 4
    return _padded_to(scale, rows, columns), (columns, rows), (1, columns)


def _padded_to(scale: Tensor, rows: int, columns: int) -> Tensor:
    if scale.shape == (rows, columns):
        return scale
    memory = scale.new_zeros((rows, columns))
    memory[: scale.shape[0], : scale.shape[1]] = scale
    return memory


def _aligned(scale: Tensor) -> Tensor:
    """Return dense scales that begin at a multiple of 16 bytes; a copy only if needed."""
    return scale.clone() if scale.data_ptr() % ALIGNMENT else scale


_SUPPORTED: dict[tuple[Scaling, torch.device, torch.dtype, bool], bool] = {}
"""Probe results; they depend on device and libraries only, so they hold for the process."""


def is_supported(kind: Scaling, device: torch.device, out_dtype: torch.dtype, biased: bool) -> bool:
    """Whether PyTorch computes this kind of product correctly on a device."""
    key = (kind, device, out_dtype, biased)
    supported = _SUPPORTED.get(key)
    if supported is None:
        if is_capturing(device):
            return out_dtype == torch.bfloat16 or (kind == "tensor" and not biased)
        with disable_current_modes():  # torch.compile may be tracing
            supported = _SUPPORTED[key] = _mismatch(*key) is None
    return supported


def _mismatch(kind: Scaling, device: torch.device, out_dtype: torch.dtype, biased: bool) -> str | None:
    """Describe how a small product of this kind differs from `reference`, or return None."""
    generator = torch.Generator().manual_seed(0)
    text = {"tensor": "e4m3/tensor", "row": "e4m3/row", "block": f"e4m3/1x{BLOCK}", "mx": f"e4m3/1x{GROUP}/e8m0"}[kind]
    spec, n, k = QuantSpec.parse(text), 256, 256

    def operand(rows: int) -> ScaledTensor:
        magnitudes = (2.0 ** torch.randint(-2, 3, (rows, k // GROUP), generator=generator, device="cpu")).float()
        values = torch.randn(
            (rows, k), generator=generator, device="cpu", dtype=torch.float32
        ) * magnitudes.repeat_interleave(GROUP, 1)
        data, scale = quantize(values, spec, None)
        return ScaledTensor(data, scale, spec)

    a, b = operand(64), operand(n)
    bias = 64 * torch.randn(n, generator=generator, device="cpu", dtype=torch.float32).bfloat16() if biased else None
    expected = reference.scaled_mm(a, b, "nt", torch.float32, bias, False)
    left, right = (
        Operand(x.data.to(device), None if x.scale is None else x.scale.to(device), spec.granularity) for x in (a, b)
    )
    try:
        actual = product(kind, left, right, out_dtype, None if bias is None else bias.to(device), False)
    except torch.OutOfMemoryError:
        raise  # unrelated to the product
    except (RuntimeError, ValueError) as error:
        return str(error)
    return low_sqnr([expected], [actual], 40) if actual.dtype == out_dtype else f"its result is {actual.dtype}"


_ONES: dict[tuple[int, torch.device], Tensor] = {}
"""Unit scales; the backward products of the default recipe read a vector of them in every call."""
_MAX_ONES = 256


def ones(size: int, device: torch.device) -> Tensor:
    """Return [size, 1] of ones; on a GPU cached for the life of the process."""
    # During CUDA graph capture the cache is neither read nor written: the graph would hold a pointer that it does not
    # own. Cached tensors are never freed, because any stream may read them, and are allocated by another thread, so
    # that none lies in the pool of a graph whose warm-up this thread runs (`torch.compile`, "reduce-overhead").
    if device.type not in GPU_TYPES or is_capturing(device):
        return _new_ones(size, device)

    def synchronized() -> Tensor:
        new = _new_ones(size, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # before any other stream reads it
        return new

    cached = _ONES.get((size, device))
    if cached is None:
        with ThreadPoolExecutor(1) as thread:
            cached = thread.submit(synchronized).result()
        if len(_ONES) < _MAX_ONES:
            _ONES[size, device] = cached
    return cached


def lasting_ones(size: int, device: torch.device) -> Tensor | None:
    """Return `ones` for a plan to hold; None if the cache is full: what it does not hold, no plan holds."""
    return ones(size, device) if len(_ONES) < _MAX_ONES else None


def _new_ones(size: int, device: torch.device) -> Tensor:
    return torch.ones((size, 1), device=device, dtype=torch.float32)


def traced_scaled_mm(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor | None:
    """See `octavo.kernels.gemm.scaled_mm`; None where it may take more than one call (symbolic or unaligned)."""
    left, right = oriented(a, b, layout)
    (m, k), n = left.data.shape, right.data.shape[0]
    if not (isinstance(k, int) and isinstance(n, int)):
        return None
    if one_call(left, right, out_dtype, bias) not in ("tensor", "row"):
        return None
    tensors = [t for t in (left.data, right.data, left.scale, right.scale, bias) if t is not None]
    if any(t.storage_offset() * t.element_size() % ALIGNMENT for t in tensors):
        return None
    rows, columns = (m, n) if left.blocks.rows == 1 or right.blocks.rows == 1 else (1, 1)
    return torch._scaled_mm(
        left.data, right.data.t(), bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum,
        scale_a=_traced_vector(left, rows).unsqueeze(1), scale_b=_traced_vector(right, columns).unsqueeze(0),
    )  # fmt: skip


def _traced_vector(operand: Operand, size: int) -> Tensor:
    # Unit scales are slices of one reduction: Inductor computes it once for a graph's products, a constant for each.
    if operand.scale is not None:
        return operand.scale.reshape(-1)
    length = size + -size % _UNIT_SCALES
    return torch.ones((length, 16), device=operand.data.device, dtype=torch.float32).amax(1)[:size]


_UNIT_SCALES = 1 << 14


# Products of `torch_scaled` without PyTorch's dispatcher in between, from plans (`octavo.kernels.direct`).


PreparedProduct = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor | None]


def plan_of(
    a: ScaledTensor, b: ScaledTensor, layout: str, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> PreparedProduct:
    """Return what multiplies operands like these, by data, scales and bias; it returns None if they are not aligned."""
    left, right = oriented(a, b, layout)
    kind = one_call(left, right, out_dtype, bias)
    if kind in ("tensor", "row"):
        return OneCall(left, right, layout, out_dtype, fast_accum)
    if kind is not None:
        return BlockCall(left, right, layout, out_dtype)
    a_spec, b_spec = a.spec, b.spec

    def product(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        left, right = ScaledTensor(a, a_scale, a_spec), ScaledTensor(b, b_scale, b_spec)
        return scaled_mm(left, right, layout, out_dtype, bias, fast_accum)

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
        self._is_row = scaling_of(left.blocks, right.blocks) == "row"
        self._rows, self._columns = (m, n) if self._is_row else (1, 1)
        a_ones = lasting_ones(self._rows, self._device) if left.scale is None else None
        b_ones = lasting_ones(self._columns, self._device) if right.scale is None else None
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
            a_scale = ones(self._rows, self._device) if self._a_ones is None else self._a_ones
        if b_scale is None:
            b_scale = ones(self._columns, self._device).t() if self._b_ones is None else self._b_ones
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
            tuple([int(value.value)] for value in block_types(x.blocks)) for x in (left, right)
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
    ordered, size, stride = ordered_scales(scale, blocks, shape)
    own_size, own_stride = tuple(scale.shape), scale.stride()
    if ordered.data_ptr() != scale.data_ptr():  # padded
        return lambda stored: block_scales(reinterpreted(stored, own_size, own_stride, 0), blocks, shape)
    if ordered.is_contiguous():
        return lambda stored: reinterpreted(stored, size, stride, 0)
    own_size, own_stride, dtype = tuple(ordered.shape), ordered.stride(), scale.dtype
    empty, dense_stride = empty_strided_on(scale.device), torch.empty(own_size, device="meta").stride()

    def copied(stored: Tensor) -> Tensor:
        dense = empty(own_size, dense_stride, dtype)
        return reinterpreted(dense.copy_(reinterpreted(stored, own_size, own_stride, 0)), size, stride, 0)

    return copied
