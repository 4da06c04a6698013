"""What does not go together: settings of parallelism with each other, and functions with models. One table of each."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from octavo.nn.experts import is_converted_experts
from octavo.nn.linear_subclasses import is_converted
from octavo.nn.operands import has_tensor_scale
from octavo.nn.resident import as_resident
from octavo.runtime.torch_compat import is_dtensor

ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules of a pipeline that compute gradients of inputs and of weights apart."""
_ONE_OF_THREE = "these are not supported together; keep one of tp, cp and ep, and leave the other processes to dp_shard"
_PIPELINE = "a pipeline joins tp and data parallelism; leave ep and cp out"
_EXPERTS = "experts are sharded over all processes that hold the same ones; leave dp_replicate out"
_DDP = (
    "parallel.{0} = {{0.{0}}} with dp_replicate = {{0.dp_replicate}} and dp_shard = 1: it does not join DDP; set "
    "parallel.dp_replicate = 1 and leave dp_shard out"
)
_PAIRS = {
    ("tp", "cp"): _ONE_OF_THREE, ("tp", "ep"): _ONE_OF_THREE, ("cp", "ep"): _ONE_OF_THREE, ("pp", "ep"): _PIPELINE,
    ("pp", "cp"): _PIPELINE, ("ep", "dp_replicate"): _EXPERTS,
}  # fmt: skip
EXCLUSIVE_SETTINGS: list[tuple[Callable[[Any], bool], str]] = [
    *(
        (
            lambda p, one=one, other=other: getattr(p, one) > 1 and getattr(p, other) > 1,
            f"parallel.{one} = {{0.{one}}} with parallel.{other} = {{0.{other}}}: {reason}",
        )
        for (one, other), reason in _PAIRS.items()
    ),
    (lambda p: p.tp > 1 and p.dp_shard == 1 and p.dp_replicate > 1, _DDP.format("tp")),
    (lambda p: p.pp > 1 and p.tp == 1 and p.dp_shard == 1 and p.dp_replicate > 1, _DDP.format("pp")),
    (
        lambda p: p.pp > 1 and p.schedule in ZERO_BUBBLE and p.dp_shard != 1 and p.reshard_after_forward,
        "parallel.schedule = {0.schedule!r} loses gradients of weights that are freed after forward: set "
        "parallel.reshard_after_forward = false, or dp_shard = 1",
    ),
]
"""Settings of `[parallel]` that do not go together, and the message, formatted with the section."""

Finder = Callable[[nn.Module], Iterator[tuple[str, Any]]]  # Yields names and modules, or parameters, of a model


def _modules(test: Callable[[str, nn.Module], bool]) -> Finder:
    return lambda model: ((name, module) for name, module in model.named_modules() if test(name, module))


def _parameters(test: Callable[[Tensor], bool]) -> Finder:
    return lambda model: ((name, parameter) for name, parameter in model.named_parameters() if test(parameter))


_DISTRIBUTED_EXPERTS = _modules(lambda _, m: is_converted_experts(m) and m.octavo_exchange is not None)
REFUSED_PARTS: tuple[tuple[str, Finder, str], ...] = (
    ("parallelize", _modules(lambda _, m: type(m).__name__ == "FullyShardedDataParallel"),
     "{where} is a {kind} (FSDP1), which Octavo does not support: give parallelize the model inside it"),
    ("parallelize", _modules(lambda _, m: isinstance(m, FSDPModule | nn.parallel.DistributedDataParallel)),
     "{where} is a {kind} already: call parallelize once, on the whole model, before fully_shard or DDP"),
    ("DDP", _parameters(lambda p: isinstance(p, DTensor)),
     "this mesh has copies only, for DDP, which does not take a model under tensor parallelism: add a dp_shard "
     "dimension of two or more ranks"),
    ("tensor_parallel", _parameters(lambda p: as_resident(p) is not None),
     "{count} weights are resident in FP8 (first: {where!r}), which tensor_parallel does not divide: shard them by "
     "rows (octavo.parallelize), or convert without frozen='fp8'"),
    ("tensor_parallel", _DISTRIBUTED_EXPERTS,
     "tensor_parallel does not join expert_parallel: leave the experts whole, or leave tp out"),
    ("tensor_parallel", _modules(lambda name, _: name.endswith(".base_layer")),
     "{owner!r} has PEFT adapters, which no plan names: tensor parallelism cannot distribute it. Merge the adapters "
     "(merge_and_unload) first, or use dp_shard or cp instead"),
    ("expert_parallel", _DISTRIBUTED_EXPERTS,
     "the experts {where!r} are distributed already: call expert_parallel once"),
    ("expert_parallel", _modules(lambda _, m: is_converted_experts(m) and any(map(is_dtensor, m.parameters()))),
     "the experts {where!r} are sharded already: call expert_parallel before octavo.parallelize and fully_shard"),
    ("expert_parallel", _parameters(lambda p: isinstance(p, DTensor)),
     "{where!r} is distributed already: call expert_parallel before octavo.parallelize and fully_shard, and without "
     "tensor parallelism, which it does not join"),
    ("expert_parallel", _modules(lambda name, m: is_converted_experts(m) and name.endswith("base_layer")),
     "the experts {where!r} have PEFT adapters (target_parameters), which add up weights of all experts: "
     "expert_parallel does not support them; shard the model with octavo.parallelize instead"),
    ("pipeline", _modules(lambda _, m: is_converted(m) and has_tensor_scale(m.recipe)),
     "{where}{of} has recipe {part.recipe.name!r}, whose scales per tensor would depend on how a batch is cut into "
     "micro-batches: convert the model with recipe 'rowwise', whose scales belong to rows"),
)  # fmt: skip
"""What a function, or kind of parallelism, refuses in a model, and the message, formatted with the first such part."""


def problem_of(function: str, model: nn.Module, of: str = "") -> str | None:
    """Return why a function cannot take a model, by `REFUSED_PARTS`; `of` names the part that the model is."""
    for owner, find, message in REFUSED_PARTS:
        if owner == function and (parts := list(find(model))):
            name, part = parts[0]
            return message.format(
                where=name or "the model", owner=name.rpartition(".")[0], kind=type(part).__name__, part=part, of=of,
                count=len(parts),
            )  # fmt: skip
    return None


def check_model(function: str, model: nn.Module) -> None:
    if (problem := problem_of(function, model)) is not None:
        raise ValueError(problem)
