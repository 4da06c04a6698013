"""dequantize: x = q · s, multiplied in float32 and rounded once. It restores activations saved for backward in FP8."""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.dequantize import reference
from octavo.kernels.library import define, sample
from octavo.kernels.quantize import quantize
from octavo.kernels.registry import Case, register, same_bytes, triton_backend, triton_unsupported
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

__all__ = ["DEQUANTIZE", "dequantize"]


def dequantize(x: ScaledTensor, dtype: torch.dtype) -> Tensor:
    """Dequantize row-major FP8 data [R,C] to float32, bfloat16 or float16, contiguous.

    Raises ValueError for another dtype, unit scales, or scales whose shape does not fit the spec.
    """
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"dequantize: dtype must be float32, bfloat16 or float16; got {dtype}")
    scale_shape = x.spec.granularity.scale_shape((x.data.shape[0], x.data.shape[1]))
    if x.scale is None or x.scale.shape != scale_shape:
        got = None if x.scale is None else list(x.scale.shape)
        shape = list(x.data.shape)
        raise ValueError(f"dequantize: scales of {shape} by {x.spec} must be {list(scale_shape)}; got {got}")
    return _DEQUANTIZE(x.data, x.scale, x.spec.text, dtype)


def _triton_unsupported(device: torch.device, case: Case) -> str | None:
    if device.type == "cuda" and QuantSpec.parse(case[0]).granularity.rows != 1:
        return "this kernel supports scales by row or by block of a row only"
    return triton_unsupported(device, case)


def _inputs(device: torch.device, case: Case) -> list[tuple[Any, ...]]:
    spec = QuantSpec.parse(case[0])
    quantized = quantize(sample(device)[0], spec)
    return [(quantized.data, quantized.scale, spec, dtype) for dtype in SUPPORTED_DTYPES]


_STORED = "e4m3/1x32/e8m0"

DEQUANTIZE = register(
    "dequantize", {_STORED: (_STORED,)}, same_bytes(reference.dequantize, _inputs),
    triton_backend("dequantize.triton:dequantize", unsupported_reason=_triton_unsupported),
    reference=reference.dequantize,
)  # fmt: skip


def _run(data: Tensor, scale: Tensor, spec: str, dtype: torch.dtype) -> Tensor:
    return DEQUANTIZE.choose(data.device, (spec,)).run(data, scale, QuantSpec.parse(spec), dtype)


_DEQUANTIZE = define("dequantize", _run, lambda data, scale, spec, dtype: data.new_empty(data.shape, dtype=dtype))
