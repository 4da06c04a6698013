"""What a product by Triton does, prepared: take addresses, allocate, launch (`octavo.kernels.direct`)."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.gemm.operand_layout import ALIGNMENT, Operand, packed
from octavo.kernels.launch import Launch, PreparedLaunch, compile_function, preparation, render
from octavo.runtime.torch_compat import empty_strided_on


class TritonProduct:
    """Products by one kernel, for operands and bias of equal shapes, strides, dtypes and device. Holds no tensor."""

    def __init__(
        self, launch: Launch, programs: int, left: Operand, right: Operand, bias: Tensor | None, layout: str,
        out_dtype: torch.dtype, tiles: list[tuple[int, int]] | None, gluon: bool,
    ) -> None:  # fmt: skip
        (m, k), n, device = left.data.shape, right.data.shape[0], left.data.device
        self._launch, self._programs, self._tiles, self._gluon = launch, programs, tiles, gluon
        self._device, self._empty, self._out = device, empty_strided_on(device), ((m, n), (n, 1), out_dtype)
        self._transposed = layout[0] == "t", layout[1] == "n"
        self._scaled, self._biased = (left.scale is not None, right.scale is not None), bias is not None
        self._scalars = {"m": m, "n": n, "k": k + -k % ALIGNMENT}
        for name, operand in (("a", left), ("b", right)):
            r, c = (n, 1) if operand.scale is None else operand.scale.stride()
            self._scalars |= {f"{name}_stride_r": r, f"{name}_stride_k": c}
        dense = all(operand.data.is_contiguous() for operand in (left, right))
        self._as_they_are = dense and not k % ALIGNMENT and (bias is None or bias.is_contiguous())
        self._step: PreparedLaunch | None = None
        self.run: Callable[..., Tensor] = self._run

    def __call__(
        self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return self.run(a, b, a_scale, b_scale, bias)

    def _run(self, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        index = self._device.index
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self._run(a, b, a_scale, b_scale, bias)
        left, right = (
            packed(x.t() if transposed else x, 1, ALIGNMENT)
            for x, transposed in zip((a, b), self._transposed, strict=True)
        )
        out = self._empty(*self._out)
        others = out if a_scale is None else a_scale, out if b_scale is None else b_scale
        tensors = left, right, out, *others, out if bias is None else bias.contiguous()
        if self._step is None:
            arguments = dict(zip(_TENSORS, tensors, strict=True)) | self._scalars
            for name, data, tile in zip("ab", (left, right), self._tiles or (), strict=False):
                arguments[name] = descriptor(data, tile, self._gluon)
            self._step = self._launch.prepared((self._programs,), arguments)
        elif self.run == self._run and self._as_they_are:  # a product that runs once, as that of an op, is not worth it
            self.run = self._generated(self._step) or self._run
        self._step(tensors)
        return out

    def _generated(self, step: PreparedLaunch) -> Callable[..., Tensor] | None:
        """Return `_run` for aligned operands read as they are, without branches; None if none was compiled."""
        constants: dict[str, Any] = {"general": self._run}
        launched = step.source(constants)
        if launched is None:
            return None
        otherwise = f"return general({', '.join(_PARAMETERS)})"
        read = [True, True, *self._scaled, self._biased]
        addresses = [name.lower() for name, present in zip(_PARAMETERS, read, strict=True) if present]
        lines = [
            *preparation(self._device.index, constants, otherwise),
            *(f"{name} = {name.upper()}.data_ptr()" for name in addresses),
            f"if ({' | '.join(addresses)}) & 15: {otherwise}",
            f"OUT = {render(self._empty, constants)}{render(self._out, constants)}",
            "out = OUT.data_ptr()",
            *(f"{name.lower()} = out" for name, present in zip(_PARAMETERS, read, strict=True) if not present),
        ]
        return compile_function(", ".join(_PARAMETERS), [*lines, launched, "return OUT"], constants)


def descriptor(data: Tensor, tile: tuple[int, int], gluon: bool = False) -> Any:
    """Return a TMA descriptor of a matrix in Triton's language or in Gluon."""
    sizes = list(data.shape), list(data.stride()), list(tile)
    if not gluon:
        return TensorDescriptor(data, *sizes)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor(data, *sizes, tile_layout())


@lru_cache(maxsize=1)
def tile_layout() -> Any:
    """Return the layout of operands in shared memory, which the matrix units read: rows of 128 bytes, swizzled."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


_TENSORS = ("a", "b", "out", "a_scale", "b_scale", "bias")  # Arguments of the kernels that are tensors, in their order
_PARAMETERS = ("A", "B", "A_SCALE", "B_SCALE", "BIAS")
