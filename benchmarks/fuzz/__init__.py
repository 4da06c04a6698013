"""A fuzzer: random models, precisions, wrappers, optimizers, collectives and experts, Octavo beside plain PyTorch.

python -m benchmarks fuzz --minutes 10 --seed 1
python -m benchmarks fuzz --only activations
python -m benchmarks fuzz --case '{"kind": "activations", "parts": [{"op": "gate"}]}'

  draw         cases at random, as plain data (`build` makes models of them)
  activations, linear, optimizer, comm, wrappers, experts      what Octavo promises of each kind, and the comparison
  runner       runs and shrinks a case
  corpus.json  cases once found, which every run repeats first
"""

from benchmarks.fuzz.build import build
from benchmarks.fuzz.draw import draw
from benchmarks.fuzz.runner import check, main

__all__ = ["build", "check", "draw", "main"]
