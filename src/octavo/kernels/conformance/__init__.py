"""Compare every Triton kernel in every configuration with the reference, byte for byte, on random inputs.

The registry probes one small input per case. That misses compiler bugs: Triton has compiled FP8 stores so that about a
quarter of the runs in some configurations wrote NaN (triton-lang/triton issue 11111). So this package runs every
available configuration twice on each of many inputs of different sizes, strides and values, and compares the outputs
with the PyTorch reference on the CPU. The signs of NaNs and of sums that are zero are undefined and not compared.

Quantizers and fused kernels round like the reference by construction. Products do if every sum is exact: so their
operands are small integers here, and block scales, which multiply inside the sum, are powers of two.

`difference` and `low_sqnr` are the comparisons of everything that is to equal the reference: also of the registry's
probes, of `tests/test_gpu.py` and of the benchmarks.

Inputs are a function of (seed, round, case), so mismatches are reproducible.
"""

from octavo.kernels.conformance.cases import checks, unavailable_reason
from octavo.kernels.conformance.mismatches import CaseResult, Check, compare, difference, low_sqnr
from octavo.kernels.conformance.random_inputs import GPU, INTERPRETER, Budget, RandomInputs

__all__ = [
    "GPU", "INTERPRETER", "Budget", "CaseResult", "Check", "RandomInputs", "checks", "compare", "difference",
    "low_sqnr", "unavailable_reason",
]  # fmt: skip
