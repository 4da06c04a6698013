"""Predict the memory of a training step: the one path from a step on fake tensors to a `MemoryPlan`.

    follow_step        records a step                                   `octavo.planner.timeline`
    predict_memory     of a few blocks: extrapolates to all of them     `octavo.planner.memory_extrapolation`
                       of several GPUs: what one of them holds          `octavo.planner.sharded_memory`

A model of many equal blocks takes a second or two: steps run on fake copies with two and with three of the blocks, and
their difference gives that of, say, 80. Another batch takes one step more. Further stacks of equal blocks, such as a
vision tower, are shortened as well. The first blocks may differ from the others, as the dense ones of DeepSeek-V3; they
run too. If other blocks differ in shapes or in the decisions for their layers, or the steps by more than one block, all
blocks of the stack run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.linear_subclasses import is_converted
from octavo.nn.resident import as_resident
from octavo.planner.collective_cost import FP8_BYTES_PER_ELEMENT
from octavo.planner.memory_extrapolation import Growth, grown, growth, growth_of
from octavo.planner.memory_plan import MemoryPlan
from octavo.planner.sharded_memory import ShardGroup, Shards, memory_per_rank
from octavo.planner.stacks import Stack, shortened
from octavo.planner.step import StepConfig
from octavo.planner.timeline import (
    ACTIVATIONS,
    ALLOCATION_GRANULARITY,
    BATCH,
    BLOCK_GRADIENTS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    KINDS,
    PARAMETERS,
    STATES,
    MemorySeries,
    Message,
    StorageEvents,
    Timeline,
)
from octavo.runtime.blocks import find_blocks
from octavo.runtime.torch_compat import local_part, tree_leaves


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One step, as recorded."""

    events: StorageEvents  # Its storage events
    tokens: int  # Elements of the batch's first tensor
    # Parameters of the largest block, which are gathered and scattered together if the model is sharded.
    block: ShardGroup
    rest: ShardGroup  # Parameters outside the blocks
    messages: Sequence[Message] = ()  # What it hands to collectives
    outputs: int = 0  # Number of tensors that its operations return


TraceStep = Callable[[Mapping[str, int], int], StepTrace]
"""Traces a step of the model with so many blocks of some stacks, by name, and a batch of this many sequences."""


@dataclass(frozen=True)
class FewBlocks:
    """A step of few blocks, and what more blocks of each stack add to it."""

    size: int  # Its sequences
    step: StepTrace
    stacks: Sequence[Stack]
    growths: Sequence[tuple[Growth, int]]  # With the number of blocks
    messages: Sequence[Message]  # Of all blocks
    rest: ShardGroup  # Parameters outside the blocks of the first stack


def trace_few_blocks(
    trace: TraceStep, size: int, stacks: Sequence[Stack], known: FewBlocks | None = None
) -> FewBlocks | None:
    """Trace a step on few blocks of each stack; None if that does not show what all blocks add. `known`: the same with
    another batch.
    """
    if known is not None and known.size == size:
        return known
    for some in shortened(stacks):
        counts, short = {stack.name: stack.few for stack in some}, [stack for stack in some if stack.extra]
        try:
            few = trace(counts, size)
            if known is not None and some is known.stacks and not few.messages:
                grows = [growth_of(few.events, known.step.events, own) for own, _ in known.growths]
                again = [(own, extra) for own, (_, extra) in zip(grows, known.growths, strict=True) if own]
                if len(again) == len(grows):
                    return replace(known, size=size, step=few, growths=again)
            more = [trace(counts | {stack.name: stack.few + 1}, size) for stack in short]
        except ValueError:
            continue
        grows = [growth(few.events, other.events) for other in more]
        if all(grows):
            return _few_blocks(size, few, more, some, list(filter(None, grows)))
    return None


def _few_blocks(
    size: int, few: StepTrace, more: Sequence[StepTrace], stacks: Sequence[Stack], growths: Sequence[Growth]
) -> FewBlocks:
    extra = [stack.extra for stack in stacks if stack.extra]
    weights = (1 - sum(extra), *extra)  # few + n (more - few), for each stack
    sums = [sum_messages(step.messages) for step in (few, *more)]
    messages = [
        Message(*key, sum(n * own.get(key, 0) for n, own in zip(weights, sums, strict=True)))
        for key in dict.fromkeys(key for own in sums for key in own)
    ]
    rest = {
        name: sum(n * getattr(step.rest, name) for n, step in zip(weights, (few, *more), strict=True))
        for name in (field.name for field in fields(ShardGroup))
    }
    return FewBlocks(size, few, stacks, list(zip(growths, extra, strict=True)), messages, ShardGroup(**rest))


def predict_memory(
    trace: TraceStep, size: int, step_config: StepConfig, *, blocks: int = 0, stacks: Sequence[Stack] = (),
    offloaded: bool = False, spread: float = 1.0, beside: "Beside | None" = None, known: FewBlocks | None = None,
) -> MemoryPlan:  # fmt: skip
    """Predict the memory of a step on each GPU."""
    few = trace_few_blocks(trace, size, stacks if known is None else known.stacks, known)
    if few is None:
        step = trace({}, size)
        series, messages, rest, count = step.events.series, step.messages, step.rest, blocks
    else:
        step, messages, rest, count = few.step, few.messages, few.rest, few.stacks[0].few
        series = grown(step.events, few.growths)
    if step_config.shards > 1 or offloaded:
        shards = Shards(
            ranks=step_config.shards, block=step.block, rest=rest, blocks=blocks,
            keeps_gathered=step_config.keeps_gathered, accumulating=step_config.micro_batches > 1, offloaded=offloaded,
            spread=spread,
            accumulated=(
                step_config.reduce_bytes * (blocks * step.block.elements + rest.elements) if step_config.pp > 1 else 0
            ),
        )  # fmt: skip
        series = memory_per_rank(series, shards)
    # DDP's buckets hold all gradients a second time.
    doubled = step_config.copies > 1 and step_config.shards == 1
    buckets = {GATHERED: blocks * step.block.gradients + rest.gradients} if doubled else {}
    series = series.merge(BLOCK_GRADIENTS, GRADIENTS)
    if beside is not None:
        series = beside.add_to(series)
    peak = series.peak
    return MemoryPlan(
        batch=size,
        tokens=step.tokens,
        phase=peak.phase,
        at_peak=dict.fromkeys((*KINDS, GATHERED), 0) | peak.bytes | buckets,
        largest=dict.fromkeys((*KINDS, GATHERED), 0) | series.largest | buckets,
        traced_blocks=(count, blocks),
        peak_by_phase=series.peak_by_phase,
        outputs=step.outputs,
        messages=(tuple(messages),),
        replan=lambda other: predict_memory(
            trace, other, step_config, blocks=blocks, stacks=stacks, offloaded=offloaded, spread=spread, known=few
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Memory that a GPU of a pipeline has beside a stage's micro-batch, in bytes."""

    held: Mapping[str, int]  # What other stages of the GPU hold all the time, by category
    forward: int = 0  # Activations of other micro-batches during a forward, at most
    backward: int = 0  # The same during a backward

    def add_to(self, series: MemorySeries) -> MemorySeries:
        """Return the series with these bytes."""
        kinds = tuple(dict.fromkeys((*series.kinds, *self.held, ACTIVATIONS)))
        table = torch.zeros(len(series.phases), len(kinds), dtype=torch.int64, device="cpu")
        table[:, : len(series.kinds)] = series.table
        for kind, size in self.held.items():
            table[:, kinds.index(kind)] += size
        for phase, size in (("forward", self.forward), ("backward", self.backward)):
            rows = torch.tensor([other == phase for other in series.phases], device="cpu")
            table[:, kinds.index(ACTIVATIONS)] += rows * size
        return MemorySeries(kinds, series.phases, table)


def sum_messages(messages: Sequence[Message]) -> dict[tuple[str, bool], int]:
    """Return the bytes of messages by operation, in forward and in backward."""
    sums: dict[tuple[str, bool], int] = {}
    for message in messages:
        key = message.op, message.backward
        sums[key] = sums.get(key, 0) + message.bytes
    return sums


def follow_step(
    model: nn.Module, batch: Any, states: Sequence[Tensor], earlier_gradients: Sequence[Tensor],
    forward_backward: Callable[[], Any], optimizer_step: Callable[[], Any], *,
    step_config: StepConfig, allocation_granularity: int,
    gradients: Callable[[], Sequence[Tensor]] = tuple,
) -> StepTrace:  # fmt: skip
    """Record a step of a fake model under FakeTensorMode."""
    timeline, blocks = Timeline(allocation_granularity), find_blocks(model)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    timeline.label(model.parameters(), PARAMETERS)
    timeline.label(model.buffers(), BUFFERS)
    timeline.label(tensors, BATCH)
    timeline.label(states, STATES)
    timeline.label_gradients(earlier_gradients)
    timeline.follow(model, blocks)
    timeline.set_phase("forward")
    with timeline:
        forward_backward()
        timeline.label_gradients(gradients())
        timeline.set_phase("optimizer step")
        optimizer_step()
    inside = {id(p): p for block in blocks for p in block.parameters()}
    timeline.relabel([p.grad for p in inside.values() if p.grad is not None], BLOCK_GRADIENTS)
    compressed = _in_fp8(model) if step_config.fp8_gather else {}
    parameters_by_block = [list(block.parameters()) for block in blocks]
    largest = max(
        parameters_by_block, key=lambda parameters: sum(local_part(p).numel() for p in parameters), default=[]
    )
    return StepTrace(
        events=timeline.events(),
        tokens=max(tensors[0].numel(), 1),
        block=_group(largest, compressed, 0.0 if step_config.fp8_reduce else step_config.reduce_bytes),
        rest=_group(
            [p for p in model.parameters() if id(p) not in inside], compressed,
            FP8_BYTES_PER_ELEMENT if step_config.fp8_reduce else step_config.reduce_bytes,
        ),
        messages=timeline.messages,
        outputs=timeline.outputs,
    )  # fmt: skip


def _in_fp8(model: nn.Module) -> dict[int, int]:
    """Return the bytes of each weight that is gathered in FP8, by id."""
    sizes = {}
    for module in model.modules():
        if is_converted(module) and module.recipe.supports_fp8_gather:
            weight = local_part(module.weight)
            sizes[id(module.weight)] = weight.numel() + 4 * weight.shape[0]
    return sizes


def _gathered_bytes(parameter: nn.Parameter) -> int:
    resident = as_resident(parameter)
    size: int = local_part(parameter).nbytes if resident is None else resident.data_.nbytes + resident.scale.nbytes
    return size


def _group(parameters: list[nn.Parameter], compressed: dict[int, int], reduced: float) -> ShardGroup:
    allocation_granularity = ALLOCATION_GRANULARITY["cuda"]
    trained = [local_part(p) for p in parameters if p.requires_grad]
    elements = sum(p.numel() for p in trained)
    return ShardGroup(
        gathered=sum(compressed.get(id(p)) or _gathered_bytes(p) for p in parameters),
        gradients=sum(-(-p.nbytes // allocation_granularity) * allocation_granularity for p in trained),
        reduced=int(reduced * elements),
        elements=elements,
    )
