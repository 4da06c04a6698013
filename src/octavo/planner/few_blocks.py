"""Predict what all blocks of a model do from copies of it with a few of them.

A record of n + 1 equal blocks is that of n with one block's part inserted (`insertion`), and amounts grow by the same
with each block. What is assumed is checked: blocks and records agree in everything but that part, else all blocks run.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from octavo.numerics.plan import Plan
from octavo.planner.fake import fake_copy
from octavo.runtime.blocks import SHORTENED, Absent, find_block_list, find_stacks
from octavo.runtime.torch_compat import FakeTensorMode

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")
T = TypeVar("T")

TRACED_BLOCKS = 2  # Blocks of the smaller copy: in backward one is the last, and one is neither the last nor the first


# Which blocks are equal


@dataclass(frozen=True)
class Stack:
    """Blocks of a model that are equal but for the first ones."""

    name: str  # Of their list
    blocks: Sequence[str]  # Their names
    few: int  # Blocks of the smaller copies of the model: the first ones and TRACED_BLOCKS; all if others differ

    @property
    def extra(self) -> int:
        """Number of blocks that the smaller copies do not have."""
        return len(self.blocks) - self.few


def equal_stacks(model: nn.Module, plan: Plan) -> list[Stack]:
    """List the stacks of a model, `find_block_list` first; none if no stack's blocks are equal."""
    main, stacks = find_block_list(model), list[Stack]()
    names = {id(module): name for name, module in model.named_modules()}
    firsts = {id(members[0]) for members in find_stacks(model)}
    for name, module in model.named_modules():
        if module is main or (isinstance(module, nn.ModuleList) and len(module) and id(module[0]) in firsts):
            blocks = [block for block in module if not isinstance(block, Absent)]
            leading = leading_blocks(blocks, names, plan)
            few = len(blocks) if leading is None else leading + TRACED_BLOCKS
            few = few if few + 1 < len(blocks) else len(blocks)
            stacks.insert(0 if module is main else len(stacks), Stack(name, [names[id(b)] for b in blocks], few))
    return stacks if any(stack.extra for stack in stacks) else []


def leading_blocks(blocks: Sequence[nn.Module], names: Mapping[int, str], plan: Plan) -> int | None:
    """Return the number of first blocks after which all are equal; None if the last two differ, or share parameters."""
    owned = [id(parameter) for block in blocks for parameter in block.parameters()]
    if not blocks or len(set(map(id, blocks))) < len(blocks) or len(set(owned)) < len(owned):
        return None
    kinds = block_kinds(blocks, names, plan)
    first = next((i + 1 for i in range(len(kinds) - 1, -1, -1) if kinds[i] != kinds[-1]), 0)
    return first if first < len(blocks) - 1 else None


def block_kinds(blocks: Sequence[nn.Module], names: Mapping[int, str], plan: Plan) -> list[Hashable]:
    """Return a key for each block, the same for equal ones: their modules, tensors, settings and decisions."""
    settings = [_settings(block) for block in blocks]
    # A number that grows by one from block to block is the index of the block, which tells no blocks apart.
    offsets: dict[str, list[Any]] = {}
    for index, own in enumerate(settings):
        for name, value in own.items():
            offsets.setdefault(name, []).append(value - index if type(value) is int else None)
    indices = {name for name, own in offsets.items() if len(own) > 1 and None not in own and len(set(own)) == 1}
    kinds: list[Hashable] = []
    for block, own in zip(blocks, settings, strict=True):
        decisions = ((n, type(m), plan.decisions.get(names[id(m)])) for n, m in block.named_modules())
        tensors = (*block.named_parameters(), *block.named_buffers())
        kinds.append((
            tuple((n, kind, d and (d.recipe, d.activation_storage)) for n, kind, d in decisions),
            tuple((n, t.shape, t.dtype, t.requires_grad) for n, t in tensors),
            tuple((n, value if n not in indices else "index") for n, value in own.items()),
        ))  # fmt: skip
    return kinds


_PLAIN = (str, bool, int, float, type(None), FunctionType, BuiltinFunctionType)


def _settings(block: nn.Module) -> dict[str, Any]:
    """Collect plain attributes of the modules of a block, such as its kind of attention."""
    return {
        f"{fqn}.{name}": value
        for fqn, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value))
    }


# Copies with a few of them


def copy_with_blocks(model: M, counts: Mapping[str, int], mode: FakeTensorMode, place: torch.device) -> M:
    """Copy a model to fake tensors with so many first blocks of some stacks."""
    ends: dict[str, int] = {}
    removed: list[nn.Module] = []
    for name, count in counts.items():
        members: Any = model.get_submodule(name)
        here = [index for index, member in enumerate(members) if not isinstance(member, Absent)]
        ends[name] = here[count] if count < len(here) else len(members)
        removed += members[ends[name] :]
    copy = fake_copy(model, mode, place, without=removed)
    for name, end in ends.items():
        shortened: Any = copy.get_submodule(name)
        whole = len(shortened)
        del shortened[end:]
        if name == next(iter(ends)):
            setattr(shortened, SHORTENED, True)
        # Transformers counts hidden states from the end of as many blocks as the configuration says.
        parents = [copy, *(copy.get_submodule(name[:i]) for i, letter in enumerate(name) if letter == ".")]
        for config in {id(config): config for m in parents if (config := getattr(m, "config", None))}.values():
            if getattr(config, "num_hidden_layers", None) == whole:
                config.num_hidden_layers = end
    return copy


def restrict_plan(plan: Plan, model: nn.Module) -> Plan:
    """Return the decisions for modules that the model has."""
    names = {name for name, _ in model.named_modules()}
    decisions = {name: decision for name, decision in plan.decisions.items() if name in names}
    return Plan(decisions, plan.activations, plan.partial)


# What they have in common


def from_few_blocks(
    stacks: Sequence[Stack], trace: Callable[[Mapping[str, int]], T],
    combine: Callable[[Sequence[Stack], T, Sequence[T]], R | None],
) -> R | None:  # fmt: skip
    """Combine a record of few blocks with one of a block more of each stack; None if none is a basis for all blocks."""
    # `trace` takes numbers of blocks by stack. First all stacks, then each one short with all others whole.
    short = [stack for stack in stacks if stack.extra]
    tries = [stacks] if stacks else []
    for stack in short if len(short) > 1 else ():
        tries.append([other if other is stack else replace(other, few=len(other.blocks)) for other in stacks])
    for some in tries:
        counts = {stack.name: stack.few for stack in some}
        try:
            few, *more = map(trace, (counts, *(counts | {stack.name: stack.few + 1} for stack in some if stack.extra)))
        except ValueError:  # some towers are read at a block by its number
            continue
        if (combined := combine(some, few, more)) is not None:
            return combined
    return None


@dataclass(frozen=True)
class Insertion:
    """What one block more adds to a sequence."""

    at: int  # Index in the sequence of few blocks
    part: Sequence[Any]
    source: int | None  # Index of the same part in that sequence, next to it; None if it is not there


def insertion(few: Sequence[Any], more: Sequence[Any]) -> Insertion | None:
    """Return what `more` has beyond `few`; None if they differ in several places."""
    length, last = len(more) - len(few), _common_prefix(few, more)
    first = len(few) - _common_prefix(few[::-1], more[::-1])
    if first > last:
        return None
    # Between the two any index will do: try those after and before which the same block may stand.
    choices = []
    for at, source in ((last, last - length), (first, first)):
        part = more[at : at + length]
        choices.append(Insertion(at, part, source if source >= 0 and few[source : source + length] == part else None))
    return next((choice for choice in choices if choice.source is not None), choices[0])


def insert(few: Sequence[T], insertions: Sequence[tuple[Insertion, int]]) -> list[T]:
    """Return a sequence with parts inserted, each so many times."""
    whole, done = list[T](), 0
    for added, times in sorted(insertions, key=lambda pair: pair[0].at):
        whole += [*few[done : added.at], *list(added.part) * times]
        done = added.at
    return [*whole, *few[done:]]


def _common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
