"""Compare every Triton kernel in every configuration with the reference, on random inputs (docs/kernels.md)."""

from octavo.kernels.conformance.cases import checks, unavailable_reason
from octavo.kernels.conformance.mismatches import (
    GPU,
    INTERPRETER,
    Budget,
    CaseResult,
    Check,
    RandomInputs,
    compare,
    difference,
    low_sqnr,
)

__all__ = [
    "GPU", "INTERPRETER", "Budget", "CaseResult", "Check", "RandomInputs", "checks", "compare", "difference",
    "low_sqnr", "unavailable_reason",
]  # fmt: skip
