"""One training step of one rank among many, followed without a GPU, a second process or a byte of weights.

    the world       torch's fake process group: any number of ranks, of which this process is rank 0; nothing is sent
    the model       parameters on meta, sharded by `octavo.parallelize`, then given shapes without storage
    the step        forward, backward, optimizer, under FakeTensorMode, followed by the planner's `Timeline`

What is found is what the code does, call by call: the storages that FSDP2 makes, resizes and frees, and the bytes that
every collective is handed (`Wire`). Neither knows time. Kernels are those of a CPU, whose FP8 products need no second
memory order of a weight: on Hopper each takes as much again as it has bytes, one layer's at a time.

Baseline and FP8 products alone train as is usual with FSDP2: fp32 shards, which are the masters, gathered in bf16, and
`torch.optim.AdamW` with fp32 moments. `fp8+activations+optimizer` has bf16 shards and `octavo.AdamW`. Gradients are
added up in bf16 in all arms, and the loss is computed in chunks in all arms, so that neither counts as a gain of FP8.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn.causal import chunked_loss
from octavo.nn.linear_subclasses import is_converted
from octavo.parallel import Parallel, parallelize
from octavo.planner.fake import fake_tensors
from octavo.planner.model_memory import make_states
from octavo.planner.timeline import (
    ACTIVATIONS,
    ALLOCATION_GRANULARITY,
    BATCH,
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    Timeline,
)
from octavo.runtime.blocks import find_blocks

GATHERED, WHOLE, MESSAGES = "gathered parameters", "gradients before scattering", "communication buffers"
KINDS = (PARAMETERS, STATES, GRADIENTS, GATHERED, WHOLE, MESSAGES, ACTIVATIONS, TEMPORARIES)
"""Categories of memory, in the order of tables."""
Sizes = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How a model is trained.

    Attributes:
        name: Key in result files.
        level: Level of precision.
        fp8_comm: What travels in FP8, as `octavo.parallelize` takes it.
    """

    name: str
    level: str
    fp8_comm: Literal["off", "gather", "on"]

    @property
    def compact(self) -> bool:
        """Whether `octavo.AdamW` holds the states, beside bf16 shards."""
        return octavo.Precision.level(self.level).states == "fp8"


ARMS = {
    arm.name: arm
    for arm in (
        Arm(name="bf16", level="bf16", fp8_comm="off"),
        Arm(name="fp8", level="fp8", fp8_comm="off"),
        Arm(name="fp8, FP8 gather", level="fp8", fp8_comm="gather"),
        Arm(name="fp8+activations+optimizer, all FP8", level="fp8+activations+optimizer", fp8_comm="on"),
    )
}
BASELINE = "bf16"


@dataclass(frozen=True)
class Call:
    """A collective: bytes that this rank gives, ranks of the group, from one of them to the next, when it is."""

    op: str
    bytes: int
    ranks: int
    apart: int
    backward: bool


class Wire(TorchDispatchMode):
    """Records every collective, and tells a timeline which tensors are messages, and what FSDP2 makes and takes."""

    _KNOWN: ClassVar[dict[str, tuple[str, int]]] = {
        "_allgather_base_": ("all-gather", 1), "_reduce_scatter_base_": ("reduce-scatter", 1),
        "alltoall_base_": ("all-to-all", 1), "allreduce_": ("all-reduce", 0),
    }  # fmt: skip

    def __init__(self, timeline: Timeline | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._timeline = timeline

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            if name not in self._KNOWN:
                raise ValueError(f"a collective whose bytes are not counted: {name}")
            op, place = self._KNOWN[name]
            operand_tensors = _flat(args[place])
            ranks = dist.get_process_group_ranks(_group(args))
            apart = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            backward = torch._C._current_graph_task_id() != -1
            self.calls.append(Call(op, sum(t.nbytes for t in operand_tensors), len(ranks), apart, backward))
            if self._timeline is not None:
                self._timeline.relabel([*_flat(args[0]), *operand_tensors], MESSAGES)
        elif self._timeline is not None and func.namespace == "fsdp" and name == "chunk_cat":
            self._timeline.relabel(args[0], WHOLE)
        elif self._timeline is not None and name == "split_with_sizes_copy":
            self._timeline.relabel((kwargs or {}).get("out", []), GATHERED)
        return func(*args, **(kwargs or {}))


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in _flat(v)]


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
    return dist.ProcessGroup.unbox(boxed)


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is the first and the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(kind: str, config: Sizes, arm: Arm) -> nn.Module:
    """A causal language model of Transformers on meta, converted as its arm is, to be copied for each `trace`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        settings = AutoConfig.for_model(kind, **config)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16 if arm.compact else torch.float32)
    trained: nn.Module = octavo.convert(model.train(), precision=octavo.Precision.level(arm.level), verbose=False)
    return trained


def facts(model: nn.Module, tokens: int) -> Row:
    """What the time of a converted model's step is computed from.

    Returns:
        `parameters`; weights of `converted` linears and of the `head`; `attention`, heads times their dimension in all
        layers; `tokens`.
    """
    settings: Any = model.config
    head = model.get_output_embeddings().weight.numel()  # type: ignore[operator]
    width = settings.num_attention_heads * (
        getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    )
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "converted": sum(m.weight.numel() for m in model.modules() if is_converted(m)),  # type: ignore[operator, misc]
        "head": head, "attention": width * settings.num_hidden_layers, "tokens": tokens,
    }  # fmt: skip


def sharded(converted: nn.Module, arm: Arm, *, replicas: int = 1, recompute: bool = False) -> nn.Module:
    """A copy of a model on meta, spread over the world there is.

    Args:
        converted: What `build` made for this arm.
        arm: How it is trained.
        replicas: Copies of the model (HSDP); the ranks of a copy follow one another.
        recompute: Full activation checkpointing of the blocks.
    """
    model = copy.deepcopy(converted)
    chunked_loss(model)
    blocks = find_blocks(model)
    settings = Parallel(dp_replicate=replicas, fp8_comm=arm.fp8_comm)
    parallelize(model, settings, dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if recompute:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def trace(
    model: nn.Module, arm: Arm, *, tokens: int, allocation_granularity: int = ALLOCATION_GRANULARITY["cuda"]
) -> Row:
    """Follow one step of rank 0 of the world there is.

    Args:
        model: What `sharded` made for this arm. It is used up.
        arm: How it is trained.
        tokens: Length of the one sequence that is its batch.
        allocation_granularity: Bytes in whole multiples of which memory is handed out.

    Returns:
        Bytes: `peak`, `at_peak` by category, `phase`, `held` at all times (shards and states); and `wire`, a row for
        each kind of call with its bytes given, and of them those at the edges of the step, which nothing hides.
    """
    import transformers.masking_utils  # noqa: F401  which fake_tensors keeps from taking every batch for a packed one

    with fake_tensors():
        model.to_empty(device="cpu")
        timeline = Timeline(allocation_granularity)
        wire = Wire(timeline)
        optimizer = make_optimizer(model, arm)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        timeline.label(model.parameters(), PARAMETERS)
        timeline.label(model.buffers(), BUFFERS)
        timeline.label([ids], BATCH)
        timeline.label(make_states(optimizer), STATES)
        before = timeline.events()
        timeline.follow(model)
        with timeline, wire:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            timeline.label_gradients([p.grad for p in model.parameters() if p.grad is not None])
            timeline.set_phase("optimizer step")
            if not arm.compact:  # a step of ours takes no memory beside its states
                optimizer.step()
    held, peak = before.series.peak.bytes, timeline.events().series.peak
    return {
        "peak": peak.total, "phase": peak.phase, "at_peak": {kind: size for kind, size in peak.bytes.items() if size},
        "held": {kind: held[kind] for kind in (PARAMETERS, STATES)}, "wire": summed(wire.calls),
    }  # fmt: skip


def summed(calls: Sequence[Call]) -> list[Row]:
    """One row for each kind of call. At the edges: the first two gathers, and the last two of each other kind."""
    rows = []
    for kind in dict.fromkeys((call.op, call.ranks, call.apart, call.backward) for call in calls):
        alike = [call.bytes for call in calls if (call.op, call.ranks, call.apart, call.backward) == kind]
        op, ranks, apart, backward = kind
        edge = ([] if backward else alike[:2]) if op == "all-gather" else alike[-2:]
        rows.append({
            "op": op, "ranks": ranks, "apart": apart, "backward": backward, "calls": len(alike), "bytes": sum(alike),
            "edge_calls": len(edge), "edge_bytes": sum(edge),
        })  # fmt: skip
    return rows


def make_optimizer(model: nn.Module, arm: Arm) -> torch.optim.Optimizer:
    """The optimizer of an arm."""
    if arm.compact:
        return octavo.AdamW(model.parameters())
    return torch.optim.AdamW(model.parameters(), fused=True)
