"""The repeated blocks of a model, found rather than named: recomputed, sharded, offloaded and counted one by one."""

from torch import nn

CALLED_OUTSIDE = "octavo_called_outside"
"""Attribute, True, of a module inside a block that is called outside of it as well: FSDP shards the block with the rest
of the model, which stays gathered until backward."""


SHORTENED = "octavo_shortened"
"""Attribute of the list of blocks in a copy of a model with fewer blocks, where another list may be longer."""


class Absent(nn.Module):
    """In the place of a module that another rank of a pipeline has: returns its first argument."""

    def forward(self, x: object = None, *args: object, **kwargs: object) -> object:
        """Return the first argument, such as the hidden states of a block."""
        return kwargs.get("hidden_states") if x is None else x


def find_block_list(model: nn.Module) -> nn.ModuleList:
    """The longest `nn.ModuleList` of one type (and `Absent`), first of equals, or the `SHORTENED` one; else empty."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    lists = [members for members in lists if hasattr(members, SHORTENED)] or lists
    uniform = [members for members in lists if len({type(m) for m in members if not isinstance(m, Absent)}) == 1]
    return max(uniform, key=len, default=nn.ModuleList())


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of `find_block_list` that are here."""
    return [block for block in find_block_list(model) if not isinstance(block, Absent)]


def find_stacks(module: nn.Module) -> list[list[nn.Module]]:
    """Every stack of blocks of a model, none inside another's block: one of a decoder, two of encoder and decoder."""
    # A stack is an `nn.ModuleList` that is not all of different types (layers with and without attention, in turns, are
    # one stack), or an `nn.Sequential` of two or more members of one type. An `nn.ModuleDict` with numbers for keys, as
    # torchtitan's models have, is a list. Its blocks have parts: a list of linears is none.
    members = list(module.children())
    kinds = {type(member) for member in members}
    listed = isinstance(module, nn.ModuleList) or (isinstance(module, nn.ModuleDict) and all(map(str.isdigit, module)))
    repeated = len(kinds) == 1 or (listed and len(kinds) < len(members))
    enough = len(members) > 1 or listed
    have_parts = all(next(member.children(), None) is not None for member in members)
    if (listed or isinstance(module, nn.Sequential)) and repeated and enough and have_parts:
        return [members]
    return [stack for member in members for stack in find_stacks(member)]
