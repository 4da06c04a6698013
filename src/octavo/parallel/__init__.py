"""Level 5: one model on many GPUs. `parallelize` is the front door; the engine is torch's own.

fsdp.py        FSDP2: blocks sharded, weights gathered in FP8, gradients scattered in FP8
ddp.py         DDP, with gradients added up in FP8
parallelize.py which of them, on which mesh, and what does not go together
"""

from octavo.parallel.ddp import Fp8AllReduce
from octavo.parallel.parallelize import Parallel, parallelize

__all__ = ["Fp8AllReduce", "Parallel", "parallelize"]
