"""Benchmarks that anyone can repeat: `python -m benchmarks <name> [options]`, each with `--help`.

  smoke        converted linears: numbers, time beside bf16, profile by kernel; what to run first on a GPU
  kernels      quantizers, FP8 products and fused kernels, one by one, in TB/s and TFLOP/s
  linear       a linear layer, forward and backward, beside bf16 and torchao; also times CPUs
  calibrate    which backend and configuration wins each FP8 product, kept for what runs after it
  layer        a Llama decoder layer: time, peak memory, bytes kept per token
  compile      the two ways of quantizing under torch.compile
  run          `octavo train` at every precision level: start-up, speed, memory beside the prediction, loss
  step         one training step by part, beside the prediction of the same parts
  host_gpu     wall time beside kernel time of eager linears and layers of few tokens
  published    workloads with public figures: bf16, torchao, Octavo and Transformer Engine in turns
  ranks        one GPU under NCCL and under Gloo: sharded training, FP8 collectives, checkpoints, beside plain ones
  deep         every kernel in every configuration beside the reference, compiled by all cores first
  loss         FP8 beside bf16 on several seeds, for as many minutes as there are; goes on where it stopped
  fuzz         random models, optimizers and collectives beside plain PyTorch; what fails, shrunk to a few lines
  suites       test suites of other projects, with Octavo in the place of what they test; needs no GPU
  gpu          all of these, each in a process of its own with a limit, and what became of the targets
  roofline     predicted times and where FP8 begins to pay; needs no GPU
  sass         what Triton's compiler makes of each kernel; needs no GPU
  host         host time of the eager GPU path, launches and calls, beside bf16; docs/host_time.md; needs no GPU
  compiled     kernels and bytes of a compiled decoder layer; docs/compile.md; needs no GPU
  rates        what the planner knows of an H100, from its result files: src/octavo/planner/h100.json; needs no GPU
  predictions  docs/planner.md: what the planner says of what was measured and published; needs no GPU
  performance  docs/performance.md and its images from all result files, and the picture of README (needs a Chromium)
  tutorials    the pages of docs/tutorials run as written, and their pictures; needs no GPU
  settings     docs/settings.md from the sections of a configuration
  configs      configs/<model>.toml with predicted steps, and docs/configurations.md; needs no GPU

Results are JSON under benchmarks/results/<device>/. Where a benchmark needs a GPU and there is none, it runs tiny
shapes, Triton's kernels in its interpreter, and says that it timed nothing.
"""

import importlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

NAMES = tuple(re.findall(r"^  (\w+) ", __doc__ or "", flags=re.M))
COMPILES_ONLY = ("sass", "host", "compiled")


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    if find_spec("octavo") is None:  # not installed: the source tree will do
        sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
    if name not in NAMES:
        sys.exit(f"python -m benchmarks: there is no benchmark {name!r}; there are: {', '.join(NAMES)}")
    if name not in COMPILES_ONLY:
        import torch

        if not torch.cuda.is_available() or "--rehearse" in rest:  # Triton reads it when it is imported
            os.environ.setdefault("TRITON_INTERPRET", "1")
    importlib.import_module(f"benchmarks.{name}").main(rest)


if __name__ == "__main__":
    main(sys.argv[1:])
