"""Level 5: distribute one model over many GPUs with torch's FSDP2, DDP, tensor and pipeline parallelism. `parallelize`
is the entry point to data parallelism.

fsdp.py              FSDP2: sharded blocks, weights gathered in FP8, gradients scattered in FP8
ddp.py               DDP with gradients reduced in FP8
parallelize.py       selects one of them for a mesh, and checks the combination
tensor_parallel.py   styles of tensor and sequence parallelism for torch's `parallelize_module`
tensor_parallel_plan.py  `tensor_parallel`: these styles, by the plan of a Transformers config
tokens.py            what their ranks exchange, in FP8
pipeline.py          stages of torch's pipelines with FP8 messages; imported on first use, as pipelining imports slowly
pipeline_model.py    a model of Transformers as stages of a pipeline
clip_grad.py         clip_grad_norm_ for parameters on several meshes
exchange.py          the all-to-all of rows, in FP8 or exact
expert_parallel.py   experts distributed over ranks, with rows sent in FP8
ulysses.py           attention over sequences that are sharded over ranks
context_parallel.py  this attention in a model of Transformers
"""

from typing import TYPE_CHECKING, Any

from octavo.parallel.clip_grad import clip_grad_norm_
from octavo.parallel.context_parallel import context_parallel
from octavo.parallel.ddp import Fp8AllReduce
from octavo.parallel.expert_parallel import expert_parallel
from octavo.parallel.parallelize import Parallel, parallelize
from octavo.parallel.tensor_parallel import Fp8ColwiseParallel, Fp8RowwiseParallel
from octavo.parallel.tensor_parallel_plan import sum_partial_gradients, tensor_parallel
from octavo.parallel.ulysses import ulysses_attention

if TYPE_CHECKING:
    from octavo.parallel.pipeline import PipelineStage as PipelineStage

__all__ = [
    "Fp8AllReduce",
    "Fp8ColwiseParallel",
    "Fp8RowwiseParallel",
    "Parallel",
    "PipelineStage",
    "clip_grad_norm_",
    "context_parallel",
    "expert_parallel",
    "parallelize",
    "sum_partial_gradients",
    "tensor_parallel",
    "ulysses_attention",
]


def __getattr__(name: str) -> Any:
    if name != "PipelineStage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo.parallel.pipeline import PipelineStage

    globals()[name] = PipelineStage
    return PipelineStage
