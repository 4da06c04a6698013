"""Predict the memory of a training step: the one path from a step on fake tensors to a `MemoryPlan`.

    follow_step        records a step                                   `octavo.planner.timeline`
    predict_memory     of a few blocks: extrapolates to all of them     `octavo.planner.memory_extrapolation`
                       of several GPUs: what one of them holds          `octavo.planner.sharded_memory`

A model of many equal blocks takes a second or two: the step runs on a fake copy with three of the blocks, and the
events that repeat from one to the next give those of two blocks and of, say, 80. If something follows backward, such as
a trainer's gradient norm, steps of two and three blocks run. The first blocks may differ from the others, as the dense
ones of DeepSeek-V3; they run too. If other blocks differ in shapes or in the decisions for their layers, or the steps
by more than one block, or if the operations outside of the blocks depend on their number, the whole model runs instead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo.nn.linear_subclasses import is_converted
from octavo.nn.memory_audit import Audit, dtype_name
from octavo.nn.resident import as_resident
from octavo.numerics.plan import Plan
from octavo.planner.collective_cost import FP8_BYTES_PER_ELEMENT
from octavo.planner.fake import fake_copy
from octavo.planner.memory_extrapolation import extrapolate_blocks, repeat_block
from octavo.planner.memory_plan import MemoryPlan
from octavo.planner.sharded_memory import ShardGroup, Shards, memory_per_rank
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
from octavo.runtime.blocks import find_block_list, find_blocks
from octavo.runtime.torch_compat import FakeTensorMode, local_part, tree_leaves

M = TypeVar("M", bound=nn.Module)

TRACED_BLOCKS = 2
"""Blocks of the smaller copy: in backward one is the last, and one is neither the last nor the first."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One step, as recorded."""

    events: StorageEvents  # Its storage events
    tokens: int  # Elements of the batch's first tensor
    # Parameters of the largest block, which are gathered and scattered together if the model is sharded.
    block: ShardGroup
    rest: ShardGroup  # Parameters outside the blocks
    saved: Audit  # What a forward saves for backward, if that was listed
    messages: Sequence[Message] = ()  # What it hands to collectives
    outputs: int = 0  # Number of tensors that its operations return

    def gradients(self, blocks: int) -> int:
        """Return the bytes of all gradients of a model with this many such blocks."""
        return blocks * self.block.gradients + self.rest.gradients

    def accumulated(self, blocks: int, step_config: StepConfig) -> int:
        """Return the same in the dtype in which FSDP2 adds up micro-batches."""
        return step_config.reduce_bytes * (blocks * self.block.elements + self.rest.elements)


TraceStep = Callable[[int | None, int], StepTrace]
"""Traces a step of the model with this many blocks, or all, and a batch of this many sequences."""


def predict_memory(
    trace: TraceStep,
    size: int,
    step_config: StepConfig,
    *,
    blocks: int = 0,
    leading: int | None = None,
    offloaded: bool = False,
    spread: float = 1.0,
    beside: "Beside | None" = None,
) -> MemoryPlan:
    """Predict the memory of a step on each GPU."""
    series, messages = None, list[Message]()
    sharded = step_config.shards * step_config.copies > 1 or offloaded
    count = (leading or 0) + TRACED_BLOCKS
    if leading is not None and blocks > count + 1:
        step = trace(count + 1, size)
        if step.messages:
            messages = _extrapolate_messages(trace(count, size).messages, step.messages, blocks - count)
        # The shares of blocks that differ are those of all events; of the two ends alone they are within 1 %.
        repeated = repeat_block(step.events, blocks - count - 1) if sharded and leading else None
        few = repeat_block(step.events, -1) or trace(count, size).events
        series = repeated.series if repeated else extrapolate_blocks(few, step.events, blocks - count)
    if series is None:
        step, count = trace(None, size), blocks
        series, messages = step.events.series, [*step.messages]
    if step_config.shards > 1 or offloaded:
        shards = Shards(
            ranks=step_config.shards, block=step.block, rest=step.rest, blocks=blocks,
            keeps_gathered=step_config.keeps_gathered, accumulating=step_config.micro_batches > 1, offloaded=offloaded,
            spread=spread, accumulated=step.accumulated(blocks, step_config) if step_config.pp > 1 else 0,
        )  # fmt: skip
        series = memory_per_rank(series, shards)
    # DDP's buckets hold all gradients a second time.
    buckets = {GATHERED: step.gradients(blocks)} if step_config.copies > 1 and step_config.shards == 1 else {}
    series = series.merge(BLOCK_GRADIENTS, GRADIENTS)
    if beside is not None:
        series = beside.add_to(series)
    peak = series.peak
    by_dtype = sorted(step.saved.by_dtype.items(), key=lambda item: -item[1])
    return MemoryPlan(
        batch=size,
        tokens=step.tokens,
        phase=peak.phase,
        at_peak=dict.fromkeys((*KINDS, GATHERED), 0) | peak.bytes | buckets,
        largest=dict.fromkeys((*KINDS, GATHERED), 0) | series.largest | buckets,
        saved_by_dtype={dtype_name(dtype): saved for dtype, saved in by_dtype},
        saved_by_layer=step.saved.by_owner,
        traced_blocks=(count, blocks),
        peak_by_phase=series.peak_by_phase,
        outputs=step.outputs,
        messages=(tuple(messages),),
        replan=lambda other: predict_memory(
            trace, other, step_config, blocks=blocks, leading=leading, offloaded=offloaded, spread=spread
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


def _extrapolate_messages(few: Sequence[Message], more: Sequence[Message], extra: int) -> list[Message]:
    """Return the messages of a model with `extra` blocks more than that of `few`, summed by operation; `more` is of one
    block more.
    """
    sums = [sum_messages(messages) for messages in (few, more)]
    keys = dict.fromkeys((*sums[0], *sums[1]))
    return [Message(*key, sums[0].get(key, 0) + extra * (sums[1].get(key, 0) - sums[0].get(key, 0))) for key in keys]


def sum_messages(messages: Sequence[Message]) -> dict[tuple[str, bool], int]:
    """Return the bytes of messages by operation, in forward and in backward."""
    sums: dict[tuple[str, bool], int] = {}
    for message in messages:
        key = message.op, message.backward
        sums[key] = sums.get(key, 0) + message.bytes
    return sums


def follow_step(
    model: nn.Module, batch: Any, states: Sequence[Tensor], earlier_gradients: Sequence[Tensor],
    forward_backward: Callable[[], Any], optimizer_step: Callable[[], Any], *, step_config: StepConfig,
    allocation_granularity: int, gradients: Callable[[], Sequence[Tensor]] = tuple, saved: Audit | None = None,
    states_of: Mapping[Tensor, Any] | None = None,
) -> StepTrace:  # fmt: skip
    """Record a step of a fake model under FakeTensorMode."""
    timeline, blocks = Timeline(allocation_granularity), find_blocks(model)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    timeline.label(model.parameters(), PARAMETERS)
    timeline.label(model.buffers(), BUFFERS)
    timeline.label(tensors, BATCH)
    timeline.label(states, STATES)
    timeline.label_gradients(earlier_gradients)
    if blocks and states_of is not None:
        last = [*blocks[-1].parameters(), *blocks[-1].buffers()]
        ids = {id(tensor) for tensor in last}
        others = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in ids]
        timeline.hold_block(_held(last, states_of), _held(others, states_of))
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
        saved=saved or Audit(rows=()),
        messages=timeline.messages,
        outputs=timeline.outputs,
    )  # fmt: skip


def _held(tensors: Sequence[Tensor], states_of: Mapping[Tensor, Any]) -> list[Tensor]:
    """List parameters and buffers with their gradients and states."""
    leaves = tree_leaves([(t, t.grad, states_of.get(t)) for t in tensors])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def leading_blocks(model: nn.Module, plan: Plan) -> int | None:
    """Return the number of first blocks after which all are equal: 0 if all are, 3 in DeepSeek-V3."""
    # Equal blocks have the same modules, parameters, settings and decisions. None if no two blocks at the end are
    # equal, or blocks share parameters.
    names = {id(module): name for name, module in model.named_modules()}
    blocks = find_blocks(model)
    kinds = []
    for block in blocks:
        parts: list[Any] = []
        for name, module in block.named_modules():
            decision = plan.decisions.get(names[id(module)])
            parts.append((name, type(module), decision and (decision.recipe, decision.activation_storage)))
        parts += [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
        kinds.append(tuple(parts))
    owned = [id(parameter) for block in blocks for parameter in block.parameters()]
    if not blocks or len(set(map(id, blocks))) < len(blocks) or len(set(owned)) < len(owned):
        return None
    first = next((i + 1 for i in range(len(kinds) - 1, -1, -1) if kinds[i] != kinds[-1]), 0)
    settings = [_settings(block) for block in blocks[first:]]
    uniform = all(_is_uniform([own.get(name) for own in settings]) for name in settings[0])
    return first if uniform and first < len(blocks) - 1 else None


def _settings(block: nn.Module) -> dict[str, Any]:
    """Collect plain attributes of the modules of a block, such as its kind of attention."""
    return {
        f"{fqn}.{name}": value
        for fqn, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, str | bool | int | float | None)
    }


def _is_uniform(values: list[Any]) -> bool:
    """Return whether blocks agree in a setting, or it is their index."""
    consecutive = isinstance(values[0], int) and values == list(range(values[0], values[0] + len(values)))
    return len(set(values)) == 1 or consecutive


def copy_with_blocks(model: M, count: int | None, mode: FakeTensorMode, place: torch.device) -> M:
    """Copy a model to fake tensors with its first `count` blocks; None for all."""
    blocks = find_blocks(model)
    removed = [] if count is None else blocks[count:]
    copy = fake_copy(model, mode, place, without=removed)
    if removed:
        members = find_block_list(model)
        holder = next(name for name, module in model.named_modules() if module is members)
        stack: Any = copy.get_submodule(holder)
        del stack[next(index for index, member in enumerate(members) if member is removed[0]) :]
    return copy


def restrict_plan(plan: Plan, model: nn.Module) -> Plan:
    """Return the decisions for modules that the model has."""
    names = {name for name, _ in model.named_modules()}
    decisions = {name: decision for name, decision in plan.decisions.items() if name in names}
    return Plan(decisions, plan.activations, plan.partial)


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
