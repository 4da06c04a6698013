"""A fuzzer: random models, precisions, wrappers, optimizers, collectives and experts, Octavo beside plain PyTorch.

python -m benchmarks fuzz --minutes 10 --seed 1
python -m benchmarks fuzz --only activations
python -m benchmarks fuzz --case '{"kind": "activations", "parts": [{"op": "gate"}]}'

  draw         cases at random, as plain data (`build` makes models of them)
  activations, linear, optimizer, comm, wrappers, experts      what Octavo promises of each kind, and the comparison
  shrink       removes from a failing case what the failure does not need
  corpus.json  cases once found, which every run repeats first
"""

from benchmarks.fuzz.build import build
from benchmarks.fuzz.console import main
from benchmarks.fuzz.draw import draw
from benchmarks.fuzz.runner import check

__all__ = ["build", "check", "draw", "main"]
