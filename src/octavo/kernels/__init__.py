"""Level 2: torch ops with several backends each. The `reference` backend defines the numbers (docs/architecture.md)."""

from octavo.kernels.dequantize import dequantize
from octavo.kernels.fused import glu, layer_norm, rms_norm
from octavo.kernels.gemm import needs_both_orders, scaled_mm
from octavo.kernels.grouped import grouped_mm
from octavo.kernels.quantize import quantize, quantize_pair

__all__ = [
    "dequantize", "glu", "grouped_mm", "layer_norm", "needs_both_orders", "quantize", "quantize_pair",
    "rms_norm", "scaled_mm",
]  # fmt: skip
