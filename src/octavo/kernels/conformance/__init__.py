"""Compare every Triton kernel in every configuration with the reference, on random inputs (docs/kernels.md)."""
