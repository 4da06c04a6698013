"""Fused ops: norms and gated activations that quantize their result where a spec is given, without another read.

    rms_norm, layer_norm    norm → y, or FP8 of y and its transposed copy
    glu                     activation(gate) · up → h, or FP8 of h and its transposed copy
    *_backward              gradients, deterministic

Fusion changes no number: the FP8 result equals `quantize` of the other. The ops have no autograd formula; autograd
functions call them.
"""

from octavo.kernels.fused.glu import glu, glu_backward
from octavo.kernels.fused.norm import NormOutput, layer_norm, layer_norm_backward, rms_norm, rms_norm_backward

__all__ = ["NormOutput", "glu", "glu_backward", "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]
