"""Level 5: distribute one model over many GPUs with torch's FSDP2, DDP, tensor and pipeline parallelism.

`parallelize` is the entry point to data parallelism. `pipeline` is imported on first use, as torch's imports slowly.
"""

from typing import TYPE_CHECKING

from octavo.parallel.clip_grad import clip_grad_norm_
from octavo.parallel.context_parallel import context_parallel, ulysses_attention
from octavo.parallel.ddp import Fp8AllReduce
from octavo.parallel.expert_parallel import expert_parallel
from octavo.parallel.parallelize import Parallel, parallelize
from octavo.parallel.tensor_parallel import (
    Fp8ColwiseParallel,
    Fp8RowwiseParallel,
    sum_partial_gradients,
    tensor_parallel,
)
from octavo.runtime.extras import lazy_names

if TYPE_CHECKING:
    from octavo.parallel.pipeline import PipelineStage as PipelineStage

__all__ = [
    "Fp8AllReduce", "Fp8ColwiseParallel", "Fp8RowwiseParallel", "Parallel", "PipelineStage", "clip_grad_norm_",
    "context_parallel", "expert_parallel", "parallelize", "sum_partial_gradients", "tensor_parallel",
    "ulysses_attention",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, {"parallel.pipeline": ("PipelineStage",)})
