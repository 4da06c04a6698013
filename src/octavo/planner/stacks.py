"""Stacks of equal blocks in a model, and copies of it with a few of them, from which all others are extrapolated."""

from collections.abc import Iterator, Mapping, Sequence
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

TRACED_BLOCKS = 2  # Blocks of the smaller copy: in backward one is the last, and one is neither the last nor the first


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
    # Equal blocks have the same modules, parameters, settings and decisions.
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


def shortened(stacks: Sequence[Stack]) -> Iterator[Sequence[Stack]]:
    """Yield the stacks, then each one short with all others whole: some towers are read at a block by its number."""
    if stacks:
        yield stacks
    short = [stack for stack in stacks if stack.extra]
    for stack in short if len(short) > 1 else ():
        yield [other if other is stack else replace(other, few=len(other.blocks)) for other in stacks]


def leading_blocks(blocks: Sequence[nn.Module], names: Mapping[int, str], plan: Plan) -> int | None:
    """Return the number of first blocks after which all are equal: 0 if all are, 3 in DeepSeek-V3. None if no two
    blocks at the end are equal, or blocks share parameters.
    """
    kinds = []
    for block in blocks:
        parts: list[Any] = []
        for name, module in block.named_modules():
            decision = plan.decisions.get(names[id(module)])
            parts.append((name, type(module), decision and (decision.recipe, decision.activation_storage)))
        tensors = [*block.named_parameters(), *block.named_buffers()]
        parts += [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]
        kinds.append(tuple(parts))
    owned = [id(parameter) for block in blocks for parameter in block.parameters()]
    if not blocks or len(set(map(id, blocks))) < len(blocks) or len(set(owned)) < len(owned):
        return None
    first = next((i + 1 for i in range(len(kinds) - 1, -1, -1) if kinds[i] != kinds[-1]), 0)
    settings = [_settings(block) for block in blocks]
    return next((i for i in range(first, len(blocks) - 1) if _are_uniform(settings[i:])), None)


_PLAIN = (str, bool, int, float, type(None), FunctionType, BuiltinFunctionType)


def _settings(block: nn.Module) -> dict[str, Any]:
    """Collect plain attributes of the modules of a block, such as its kind of attention."""
    return {
        f"{fqn}.{name}": value
        for fqn, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value))
    }


def _are_uniform(settings: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether blocks agree in each setting, or it is their index."""
    names = dict.fromkeys(name for own in settings for name in own)
    return all(_is_uniform([own.get(name) for own in settings]) for name in names)


def _is_uniform(values: list[Any]) -> bool:
    consecutive = isinstance(values[0], int) and values == list(range(values[0], values[0] + len(values)))
    return all(value == values[0] for value in values) or consecutive


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
