"""Level 2: the ops. Each is a torch op with backends in a registry; `reference` defines the numbers.

quantize(x, spec, fold)      a matrix → its FP8 form
quantize_pair(x, …)          a matrix → two FP8 forms, row-major and column-major
scaled_mm(a, b, layout)      the product of two FP8 matrices
"""

from octavo.kernels.gemm import scaled_mm, wants_copies
from octavo.kernels.quantize import quantize, quantize_pair

__all__ = ["quantize", "quantize_pair", "scaled_mm", "wants_copies"]
