"""Level 2: torch ops with several backends each. The `reference` backend defines the numbers.

quantize(x, spec, fold)      a matrix → FP8 data and scales
quantize_pair(x, …)          a matrix → two FP8 quantizations, row-major and column-major
dequantize(x, dtype)         FP8 data and scales → a matrix
scaled_mm(a, b, layout)      the product of two FP8 matrices
grouped_mm(a, b, offsets, …) the products of rows sorted by expert with one weight per expert
adaptive.adaptive_quantize   a matrix → adaptive FP8, for messages and stored weights, and back: not for products
rms_norm, layer_norm, glu    norms and gated activations with FP8 output
"""

from octavo.kernels.dequantize import dequantize
from octavo.kernels.fused import glu, layer_norm, rms_norm
from octavo.kernels.gemm import needs_both_orders, scaled_mm
from octavo.kernels.grouped import grouped_mm
from octavo.kernels.quantize import quantize, quantize_pair

__all__ = [
    "dequantize", "glu", "grouped_mm", "layer_norm", "needs_both_orders", "quantize", "quantize_pair",
    "rms_norm", "scaled_mm",
]  # fmt: skip
