"""A fuzzer: random models, precisions, wrappers, optimizers, collectives and experts, Octavo beside plain PyTorch.

python -m benchmarks fuzz --minutes 10 --seed 1
python -m benchmarks fuzz --only activations
python -m benchmarks fuzz --case '{"kind": "activations", "parts": [{"op": "gate"}]}'

  draw         cases as strategies of Hypothesis, plain data (`build` makes models of them)
  activations, linear, optimizer, comm, wrappers, experts, derivatives, identity, threads
               what Octavo promises of each kind, and the comparison
  runner       runs a case, and draws and shrinks for some minutes
  corpus.json  cases once found, which every run repeats first
"""

import os

# Products of FP8 operands as `reference` computes them, also where the CPU has bf16 instructions.
os.environ.setdefault("OCTAVO_CPU_PRODUCTS", "exact")

from benchmarks.fuzz.build import build
from benchmarks.fuzz.draw import first
from benchmarks.fuzz.runner import check, main

__all__ = ["build", "check", "first", "main"]
