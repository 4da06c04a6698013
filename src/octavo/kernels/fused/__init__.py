"""Fused producers: what makes a linear's input also makes its FP8 form, from the one read it needs anyway.

    rms_norm, layer_norm    [x + residual →] norm → y, FP8 of y, its transposed copy
    glu                     activation(gate) · up → h, FP8 of h, its transposed copy
    *_backward              their gradients, deterministic

Fusing changes no number: the FP8 form equals `quantize` of the result. y itself is written only where it is kept. The
functions have no autograd formula; they are parts of what differentiates.
"""

from octavo.kernels.fused.glu import Gated, glu, glu_backward
from octavo.kernels.fused.norm import Normed, layer_norm, layer_norm_backward, rms_norm, rms_norm_backward

__all__ = [
    "Gated",
    "Normed",
    "glu",
    "glu_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]
