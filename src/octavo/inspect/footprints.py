"""Footprints: the memory of a step of a model of many equal blocks, on one GPU or on each of many, in a second or two.

The step is followed on copies without storage that have two and three of the blocks, and what 80 take follows from the
difference (`octavo.planner.moments`, which checks that it does). Where blocks are not equal, in shapes or in what was
decided for their layers, or the two steps differ by more than one block, the whole model is followed instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.inspect.memory import GRANULES
from octavo.nn.report import is_converted
from octavo.numerics.plan import Plan
from octavo.numerics.recipe import Recipe
from octavo.planner.fake import fake_copy
from octavo.planner.footprint import Footprint, footprint
from octavo.planner.moments import moments, of_more_blocks
from octavo.planner.shards import Group, Shards
from octavo.planner.step import Setting
from octavo.planner.timeline import OF_BLOCKS, Line, Timeline
from octavo.planner.wire import MESSAGE
from octavo.runtime.blocks import find_blocks

M = TypeVar("M", bound=nn.Module)

FEW = 2
"""Blocks of the smaller of two copies: in backward one is the last, and one neither the last nor the first."""


@dataclass(frozen=True)
class Followed:
    """A step that was followed, and what of the model is gathered and scattered together where it is sharded."""

    line: Line
    block: Group
    rest: Group

    def gradients(self, blocks: int) -> int:
        """Bytes of all gradients of a model with so many such blocks."""
        return blocks * self.block.gradients + self.rest.gradients


Follow = Callable[[int | None, int], Followed]
"""Follows a step of the model with so many blocks, or with all of them, and a batch of so many sequences."""


def of_step(
    follow: Follow, blocks: int, setting: Setting, size: int, *, equal: bool, offloaded: bool = False
) -> Footprint:
    """The footprint of a step on each GPU.

    Args:
        follow: Follows it.
        blocks: Of the model; 0 where it has none.
        setting: How it is run.
        size: Sequences of one forward.
        equal: Whether its blocks are.
        offloaded: Whether shards are in host memory.
    """
    found = None
    count = FEW
    if equal and blocks > FEW + 1:
        few, more = follow(FEW, size), follow(FEW + 1, size)
        found, groups = of_more_blocks(few.line, more.line, blocks - FEW), few
    if found is None:
        whole = follow(None, size)
        found, groups, count = moments(whole.line), whole, blocks
    shards = None
    if setting.shards > 1 or offloaded:
        shards = Shards(
            ranks=setting.shards, block=groups.block, rest=groups.rest, blocks=blocks, keeps=setting.keeps_gathered,
            accumulating=setting.micro_batches > 1, offloaded=offloaded,
        )  # fmt: skip
    copied = setting.copies > 1 and setting.shards == 1
    return footprint(
        found, shards, batch=size, followed=(count, blocks), buckets=groups.gradients(blocks) if copied else 0,
        again=lambda other: of_step(follow, blocks, setting, other, equal=equal, offloaded=offloaded),
    )  # fmt: skip


def are_equal(model: nn.Module, plan: Plan) -> bool:
    """Whether the blocks of a model have the same modules, parameters, settings and decisions, each block its own."""
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
        and all(_alike([found.get(name) for found in settings]) for name in settings[0])
    )


def _settings(block: nn.Module) -> dict[str, Any]:
    """Plain attributes of the modules of a block, such as what kind of attention it has."""
    return {
        f"{fqn}.{name}": value
        for fqn, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, str | bool | int | float | None)
    }


def _alike(values: list[Any]) -> bool:
    """Whether the blocks agree in a setting, or count themselves by it."""
    return len(set(values)) == 1 or values == list(range(len(values)))


def with_blocks(model: M, count: int | None, mode: FakeTensorMode, place: torch.device) -> M:
    """A copy of a model without storage that has the first so many of its blocks; None for all of them."""
    blocks = find_blocks(model)
    left_out = [] if count is None else blocks[count:]
    copy = fake_copy(model, mode, place, without=left_out)
    if left_out:
        holder = next(
            name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) and m[0] is blocks[0]
        )
        made: Any = copy.get_submodule(holder)
        del made[count:]
    return copy


def part_of(plan: Plan, model: nn.Module) -> Plan:
    """The decisions about modules that a model has."""
    names = {name for name, _ in model.named_modules()}
    return Plan({name: each for name, each in plan.decisions.items() if name in names}, plan.activations)


def followed(model: nn.Module, timeline: Timeline, setting: Setting) -> Followed:
    """What a timeline saw of a step of a model, converted or not, whose gradients are there still, if any were kept."""
    blocks = find_blocks(model)
    inside = {id(p): p for block in blocks for p in block.parameters()}
    timeline.rename([p.grad for p in inside.values() if p.grad is not None], OF_BLOCKS)
    outside = [p for p in model.parameters() if id(p) not in inside]
    compressed = _in_fp8(model) if setting.fp8_gather else {}
    sizes = [list(block.parameters()) for block in blocks]
    largest = max(sizes, key=lambda parameters: sum(p.numel() for p in parameters), default=[])
    return Followed(
        timeline.line(),
        _group(largest, compressed, 0.0 if setting.fp8_reduce else setting.reduce_bytes),
        _group(outside, compressed, MESSAGE if setting.fp8_reduce else setting.reduce_bytes),
    )


def _in_fp8(model: nn.Module) -> dict[int, int]:
    """Bytes of each weight that is gathered in FP8."""
    found = {}
    for module in model.modules():
        if is_converted(module) and isinstance(module.recipe, Recipe) and module.recipe.gathers_w:
            weight = module.weight
            assert isinstance(weight, Tensor)
            found[id(weight)] = weight.numel() + 4 * weight.shape[0]
    return found


def _group(parameters: list[nn.Parameter], compressed: dict[int, int], reduced: float) -> Group:
    granule = GRANULES["cuda"]
    trained = [p for p in parameters if p.requires_grad]
    return Group(
        gathered=sum(compressed.get(id(p), p.nbytes) for p in parameters),
        gradients=sum(-(-p.nbytes // granule) * granule for p in trained),
        reduced=int(reduced * sum(p.numel() for p in trained)),
    )
