"""Level 5: distribute one model over many GPUs with torch's FSDP2 and DDP. `parallelize` is the entry point.

fsdp.py          FSDP2: sharded blocks, weights gathered in FP8, gradients scattered in FP8
ddp.py           DDP with gradients reduced in FP8
amax_sync.py     one amax history for all ranks
parallelize.py   selects one of them for a mesh, and checks the combination
"""

from octavo.parallel.ddp import Fp8AllReduce
from octavo.parallel.parallelize import Parallel, parallelize

__all__ = ["Fp8AllReduce", "Parallel", "parallelize"]
