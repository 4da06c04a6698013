"""Norms and gated activations that quantize their result where a spec is given, to the bytes of `quantize`.

They have no autograd formula; autograd functions call them and their deterministic gradients (`*_backward`).
"""

from octavo.kernels.fused.glu import glu, glu_backward
from octavo.kernels.fused.norm import NormOutput, layer_norm, layer_norm_backward, rms_norm, rms_norm_backward

__all__ = ["NormOutput", "glu", "glu_backward", "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]
