"""The repeated blocks of a model, found rather than named: what is recomputed, sharded and offloaded piece by piece."""

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Members of the longest `nn.ModuleList` of one type, the first of equals; [] where there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    uniform = [list(module) for module in lists if len({type(member) for member in module}) == 1]
    return max(uniform, key=len, default=[])
