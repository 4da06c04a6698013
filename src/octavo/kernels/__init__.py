"""Level 2: the ops. Each is a torch op with backends in a registry; `reference` defines the numbers.

quantize(x, spec, fold)      a matrix → its FP8 form
quantize_pair(x, …)          a matrix → two FP8 forms, row-major and column-major
dequantize(x, dtype)         the matrix that an FP8 form stands for
scaled_mm(a, b, layout)      the product of two FP8 matrices
rms_norm, layer_norm, glu    what makes a matrix, and its FP8 form with it
"""

from octavo.kernels.dequantize import dequantize
from octavo.kernels.fused import glu, layer_norm, rms_norm
from octavo.kernels.gemm import scaled_mm, wants_copies
from octavo.kernels.quantize import quantize, quantize_pair

__all__ = ["dequantize", "glu", "layer_norm", "quantize", "quantize_pair", "rms_norm", "scaled_mm", "wants_copies"]
