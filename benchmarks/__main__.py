"""Benchmarks that anyone can repeat: `python -m benchmarks <name> [options]`, each with `--help`.

On a GPU (docs/gpu.md; elsewhere tiny shapes, nothing timed):
  smoke        converted linears: numbers, time beside bf16, profile by kernel; what to run first
  linear       a linear layer, forward and backward, beside bf16 and torchao; also times CPUs
  layer        a decoder layer: time, peak memory, bytes kept per token
  run          `octavo train` at every precision level: start-up, speed, memory beside the prediction, loss
  step         one training step by part, beside the prediction of the same parts
  host_gpu     wall time beside kernel time of eager linears and layers of few tokens
  published    workloads with public figures: bf16, torchao, Octavo and Transformer Engine in turns
  kernels      quantizers, FP8 products and fused kernels, one by one, in TB/s and TFLOP/s
  ranks        one GPU under NCCL and under Gloo: sharded training, FP8 collectives, checkpoints, beside plain ones
  deep         every kernel in every configuration beside the reference, compiled by all cores first
  loss         FP8 beside bf16 on several seeds, for as many minutes as there are; goes on where it stopped
  gpu          all of these, each in a process of its own with a limit, and what became of the targets

Without one:
  fuzz         random models, optimizers and collectives beside plain PyTorch; what fails, shrunk to a few lines
  sass         what Triton's compiler makes of each kernel
  host         host time of the eager GPU path, launches and calls, beside bf16; docs/host_time.md
  compiled     kernels and bytes of a compiled decoder layer, beside docs/compile.md
  predictions  docs/planner.md: what the planner says of what was measured and published
  performance  docs/performance.md and its images from all result files, and the picture of README (needs a Chromium)
  tutorials    the pages of docs/tutorials run as written, and their pictures
  settings     docs/settings.md from the sections of a configuration
  configs      configs/<model>.toml with predicted steps, and docs/configurations.md
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
