"""A fuzzer: random models, precisions, wrappers, optimizers, collectives and experts, Octavo beside plain PyTorch.

A case is plain data that `draw` draws; a module for each kind compares it. Every run begins with corpus.json.
"""

import os

# Products of FP8 operands as `reference` computes them, also where the CPU has bf16 instructions.
os.environ.setdefault("OCTAVO_CPU_PRODUCTS", "exact")

from benchmarks.fuzz.build import build
from benchmarks.fuzz.draw import first
from benchmarks.fuzz.runner import check, main

__all__ = ["build", "check", "first", "main"]
