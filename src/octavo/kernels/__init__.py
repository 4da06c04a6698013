"""Level 2: the ops. Each is a torch op with backends in a registry; `reference` defines the numbers.

quantize(x, spec, fold)      a matrix → its FP8 form
scaled_mm(a, b, layout)      the product of two FP8 matrices
"""

from octavo.kernels.gemm import scaled_mm
from octavo.kernels.quantize import quantize

__all__ = ["quantize", "scaled_mm"]
