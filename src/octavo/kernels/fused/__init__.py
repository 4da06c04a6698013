"""Fused ops: norms and gated activations that also quantize their result, without another read.

    rms_norm, layer_norm    [x + residual →] norm → y, FP8 of y, its transposed copy
    glu                     activation(gate) · up → h, FP8 of h, its transposed copy
    *_backward              gradients, deterministic

Fusion changes no number: the FP8 output equals `quantize` of the result. y itself is written only on request
(`return_unquantized`). The ops have no autograd formula; autograd functions call them.
"""

from octavo.kernels.fused.glu import GluOutput, glu, glu_backward
from octavo.kernels.fused.norm import NormOutput, layer_norm, layer_norm_backward, rms_norm, rms_norm_backward

__all__ = [
    "GluOutput",
    "NormOutput",
    "glu",
    "glu_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]
