"""Predict the memory of a step of a model of many equal blocks, per GPU, in a second or two.

The step runs on fake copies with two and three of the blocks; `octavo.planner.memory_extrapolation` checks the
difference and extrapolates to, say, 80. If the blocks are not equal in shapes or in the decisions for their layers, or
if the two steps differ by more than one block, the whole model runs instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.nn.linear_subclasses import is_converted
from octavo.numerics.plan import Plan
from octavo.planner.collective_cost import FP8_BYTES_PER_ELEMENT
from octavo.planner.fake import fake_copy
from octavo.planner.footprint import Footprint, footprint
from octavo.planner.memory_extrapolation import extrapolate_blocks, memory_series
from octavo.planner.model_memory import ALLOCATION_GRANULARITY
from octavo.planner.sharded_memory import Group, Shards
from octavo.planner.step import Setting
from octavo.planner.timeline import BLOCK_GRADIENTS, StorageEvents, Timeline
from octavo.runtime.blocks import find_blocks

M = TypeVar("M", bound=nn.Module)

TRACED_BLOCKS = 2
"""Blocks of the smaller copy: in backward one is the last, and one is neither the last nor the first."""


@dataclass(frozen=True)
class StepTrace:
    """The storage events of one step, and the parameters that are gathered and scattered together if the model is
    sharded.
    """

    events: StorageEvents
    block: Group
    rest: Group

    def gradients(self, blocks: int) -> int:
        """Return the bytes of all gradients of a model with this many such blocks."""
        return blocks * self.block.gradients + self.rest.gradients


TraceStep = Callable[[int | None, int], StepTrace]
"""Traces a step of the model with this many blocks, or all, and a batch of this many sequences."""


def step_footprint(
    trace: TraceStep, blocks: int, setting: Setting, size: int, *, equal: bool, offloaded: bool = False
) -> Footprint:
    """Predict the footprint of a step on each GPU.

    Args:
        trace: Traces a step.
        blocks: Blocks of the model; 0 if it has none.
        setting: How the step runs.
        size: Sequences of one forward.
        equal: Whether the blocks are equal.
        offloaded: Whether shards are in host memory.
    """
    series = None
    count = TRACED_BLOCKS
    if equal and blocks > TRACED_BLOCKS + 1:
        few, more = trace(TRACED_BLOCKS, size), trace(TRACED_BLOCKS + 1, size)
        series, groups = extrapolate_blocks(few.events, more.events, blocks - TRACED_BLOCKS), few
    if series is None:
        whole = trace(None, size)
        series, groups, count = memory_series(whole.events), whole, blocks
    shards = None
    if setting.shards > 1 or offloaded:
        shards = Shards(
            ranks=setting.shards, block=groups.block, rest=groups.rest, blocks=blocks, keeps=setting.keeps_gathered,
            accumulating=setting.micro_batches > 1, offloaded=offloaded,
        )  # fmt: skip
    copied = setting.copies > 1 and setting.shards == 1
    return footprint(
        series, shards, batch=size, traced_blocks=(count, blocks), buckets=groups.gradients(blocks) if copied else 0,
        replan=lambda other: step_footprint(trace, blocks, setting, other, equal=equal, offloaded=offloaded),
    )  # fmt: skip


def blocks_are_equal(model: nn.Module, plan: Plan) -> bool:
    """Return whether all blocks have the same modules, parameters, settings and decisions, and share no parameters."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = find_blocks(model)
    kinds, settings = set(), [_settings(block) for block in blocks]
    for block in blocks:
        parts: list[Any] = []
        for name, module in block.named_modules():
            decision = plan.decisions.get(names[id(module)])
            parts.append((name, type(module), decision and (decision.recipe, decision.storage)))
        parts += [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
        kinds.add(tuple(parts))
    owned = [id(parameter) for block in blocks for parameter in block.parameters()]
    return (
        len(kinds) == 1
        and len(set(map(id, blocks))) == len(blocks)
        and len(set(owned)) == len(owned)
        and all(_is_uniform([block_settings.get(name) for block_settings in settings]) for name in settings[0])
    )


def _settings(block: nn.Module) -> dict[str, Any]:
    """Collect plain attributes of the modules of a block, such as its kind of attention."""
    return {
        f"{fqn}.{name}": value
        for fqn, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, str | bool | int | float | None)
    }


def _is_uniform(values: list[Any]) -> bool:
    """Return whether the blocks agree in a setting, or it is their index."""
    return len(set(values)) == 1 or values == list(range(len(values)))


def copy_with_blocks(model: M, count: int | None, mode: FakeTensorMode, place: torch.device) -> M:
    """Copy a model to fake tensors with its first `count` blocks; None for all."""
    blocks = find_blocks(model)
    left_out = [] if count is None else blocks[count:]
    copy = fake_copy(model, mode, place, without=left_out)
    if left_out:
        holder = next(
            name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) and m[0] is blocks[0]
        )
        stack: Any = copy.get_submodule(holder)
        del stack[count:]
    return copy


def restrict_plan(plan: Plan, model: nn.Module) -> Plan:
    """Return the decisions for modules that the model has."""
    names = {name for name, _ in model.named_modules()}
    return Plan({name: decision for name, decision in plan.decisions.items() if name in names}, plan.activations)


def step_trace(model: nn.Module, timeline: Timeline, setting: Setting) -> StepTrace:
    """Build the `StepTrace` from the timeline of a step, while the model still has its gradients."""
    blocks = find_blocks(model)
    inside = {id(p): p for block in blocks for p in block.parameters()}
    timeline.relabel([p.grad for p in inside.values() if p.grad is not None], BLOCK_GRADIENTS)
    outside = [p for p in model.parameters() if id(p) not in inside]
    compressed = _in_fp8(model) if setting.fp8_gather else {}
    parameters_by_block = [list(block.parameters()) for block in blocks]
    largest = max(parameters_by_block, key=lambda parameters: sum(p.numel() for p in parameters), default=[])
    return StepTrace(
        timeline.events(),
        _group(largest, compressed, 0.0 if setting.fp8_reduce else setting.reduce_bytes),
        _group(outside, compressed, FP8_BYTES_PER_ELEMENT if setting.fp8_reduce else setting.reduce_bytes),
    )


def _in_fp8(model: nn.Module) -> dict[int, int]:
    """Return the bytes of each weight that is gathered in FP8, by id."""
    sizes = {}
    for module in model.modules():
        if is_converted(module) and module.recipe.gathers_w:
            weight = module.weight
            sizes[id(weight)] = weight.numel() + 4 * weight.shape[0]
    return sizes


def _group(parameters: list[nn.Parameter], compressed: dict[int, int], reduced: float) -> Group:
    granule = ALLOCATION_GRANULARITY["cuda"]
    trained = [p for p in parameters if p.requires_grad]
    return Group(
        gathered=sum(compressed.get(id(p), p.nbytes) for p in parameters),
        gradients=sum(-(-p.nbytes // granule) * granule for p in trained),
        reduced=int(reduced * sum(p.numel() for p in trained)),
    )
