"""Every Triton kernel in every configuration against the reference, byte for byte, on many random inputs.

The registry tries one small input per case. That does not find a compiler's mistakes: Triton has compiled FP8 stores so
that about a quarter of the runs in some configurations wrote NaN (triton-lang/triton issue 11111). So here each
configuration that could be chosen runs on inputs of many sizes, strides and values, twice on each, and what comes out
is compared with the plain PyTorch reference on the CPU, which is the definition. The sign of a NaN is not defined and
not compared, nor that of a sum that is zero.

Quantizers and fused kernels round like the reference by construction. Products do where every sum is exact: their
operands here hold small integers, and block scales, which multiply inside the sum, are powers of two.

Inputs are a function of (seed, round, case), so a mismatch can be looked at again.
"""

from octavo.kernels.deep.cases import checks, unavailable
from octavo.kernels.deep.compare import Check, Outcome, compare, difference
from octavo.kernels.deep.draw import GPU, INTERPRETER, Budget, Draw

__all__ = ["GPU", "INTERPRETER", "Budget", "Check", "Draw", "Outcome", "checks", "compare", "difference", "unavailable"]
