"""Data and scales of a weight that is resident in FP8 (`octavo.nn.resident`), from its values and back."""

import torch
from torch import Tensor

from octavo.kernels import dequantize, quantize
from octavo.kernels.adaptive import adaptive_dequantize, adaptive_quantize
from octavo.numerics.spec import ADAPTIVE, AdaptiveSpec, MessageSpec
from octavo.tensor import ScaledTensor


def quantized_values(weight: Tensor, spec: MessageSpec) -> tuple[Tensor, Tensor]:
    """Quantize a plain weight [N,K], or those of experts [E,N,K] matrix by matrix, not in adaptive FP8."""
    if isinstance(spec, AdaptiveSpec):
        if spec == ADAPTIVE:
            return adaptive_quantize(weight)
        codes, scale = adaptive_quantize(weight.t())
        return codes.t(), scale.t()
    if weight.ndim == 2:
        w = quantize(weight, spec)
        assert w.scale is not None
        return w.data, w.scale
    scale_shape = spec.granularity.scale_shape((weight.shape[1], weight.shape[2]))
    data = torch.empty(weight.shape, dtype=spec.format.dtype, device=weight.device)
    scale = torch.empty((len(weight), *scale_shape), dtype=spec.scale_dtype, device=weight.device)
    for expert, matrix in enumerate(weight.unbind()):
        data[expert], scale[expert] = quantized_values(matrix, spec)
    return data, scale


def dequantized_values(data: Tensor, scale: Tensor, spec: MessageSpec, dtype: torch.dtype) -> Tensor:
    """Return a matrix [N,K]; one whose transpose is stored as a view."""
    if isinstance(spec, AdaptiveSpec):
        if spec == ADAPTIVE:
            return adaptive_dequantize(data, scale, dtype)
        return adaptive_dequantize(data.t(), scale.t(), dtype).t()
    if data.is_contiguous():
        return dequantize(ScaledTensor(data, scale, spec), dtype)
    return dequantize(ScaledTensor(data.t(), scale.t(), spec.transposed), dtype).t()
