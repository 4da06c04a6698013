"""Decide which modules of a model can store their activations in FP8, or run fused kernels, and how.

A module that contains a stack of blocks gets no hooks, which would hold what the whole model saves until it returns.
"""

from collections.abc import Iterator

import torch
from torch import nn

from octavo.activations.detect import (
    Activation,
    Glu,
    ModuleSpec,
    Norm,
    activation_of,
    calls_one_kernel,
    original_class,
    registered,
    spec_of,
)
from octavo.activations.modules import Fused, HookedForward, Storage, gate_of
from octavo.runtime.blocks import find_stacks
from octavo.runtime.linear_kinds import kind_of
from octavo.runtime.swap import has_own_forward, is_fully_sharded

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # Modules that are not called
# Modules whose saved tensors stay unchanged: recurrences, tables, and TorchScript
_EXCLUDED = (nn.RNNBase, nn.Embedding, nn.EmbeddingBag, torch.jit.ScriptModule)


def storable(model: nn.Module) -> dict[str, Storage | str]:
    """Return how modules of a model can store their activations, by fully qualified name, in model order."""
    # For a module that cannot, although its class name resembles one that can, the value is the reason.
    modules = dict(model.named_modules())
    owners = {id(owner) for owner in _owners_of_matrices(modules)}
    found = ((fqn, _storage(module, id(module) in owners)) for fqn, module in modules.items())
    storages = {fqn: storage for fqn, storage in found if storage is not None}
    parts = {f"{fqn}.{storage.activation}" for fqn, storage in storages.items() if isinstance(storage, Glu)}
    return {fqn: storage for fqn, storage in storages.items() if fqn not in parts}


def fusible(model: nn.Module) -> dict[str, Storage | str]:
    """Return which norms and gated MLPs of a model can run fused kernels, and reasons, as `storable` does."""
    candidates: dict[str, Storage | str] = {}
    for fqn, storage in storable(model).items():
        name = original_class(module := model.get_submodule(fqn)).__name__
        if isinstance(storage, Norm) and calls_one_kernel(module):
            candidates[fqn] = f"{name} is one kernel of PyTorch"
        elif isinstance(storage, Glu) and gate_of(module)[2] is None:
            candidates[fqn] = f"{name} has an activation without a kernel, or with hooks"
        elif isinstance(storage, Norm | Glu):
            candidates[fqn] = Fused(kind=f"fused_{storage.kind}")
        elif isinstance(storage, str):
            candidates[fqn] = storage
    return candidates


def _storage(module: nn.Module, owns_matrices: bool) -> Storage | str | None:
    owner = original_class(module)
    spec: Storage | None = _detected_spec(module)
    if spec is None and owns_matrices:
        spec = HookedForward()
    if spec is None:
        if getattr(module, "inplace", False) and spec_of(module) is not None:
            return f"{owner.__name__} works in place and overwrites its input"
        return _why_unknown(module, owner)
    if is_fully_sharded(module):
        return f"{owner.__name__} is sharded by fully_shard already: convert before sharding"
    if has_own_forward(module):
        return (
            f"{owner.__name__} has a forward that was replaced on the instance, as by accelerate: it would not be used"
        )
    return spec


def _detected_spec(module: nn.Module) -> ModuleSpec | None:
    """Return the spec of a module with recognized code; for activation functions, only if they can be stored."""
    spec = spec_of(module)
    if spec is None or (isinstance(spec, Activation) and activation_of(module) is None):
        return None
    if registered(original_class(module)):
        from octavo.activations.verify import check_registered  # rarely needed

        check_registered(module, spec)
    return spec


def _why_unknown(module: nn.Module, owner: type) -> str | None:
    """Return why a module whose name resembles a norm or an activation is not recognized."""
    name, simple = owner.__name__.lower(), next(module.children(), None) is None
    own = next(module.parameters(recurse=False), None) is not None
    resembling = ("norm",) if own else ("silu", "swish", "gelu", "activation")
    others = ("batchnorm", "groupnorm", "instancenorm")
    if not simple or not any(part in name for part in resembling) or any(part in name for part in others):
        return None
    return f"{owner.__name__} has a forward that is not recognized, so it keeps its own; declare it: octavo.nn.register"


def _owners_of_matrices(modules: dict[str, nn.Module]) -> Iterator[nn.Module]:
    """Yield modules that are called and own matrices, directly or in containers, except single linears and tables."""
    seen: set[int] = set()  # owners of many leaves, such as a flat list of linears, are searched once
    for fqn, module in modules.items():
        if isinstance(module, _EXCLUDED) or all(p.ndim < 2 for p in module.parameters(recurse=False)):
            continue
        owner, name = module, fqn
        while name and (_is_leaf(owner) or isinstance(owner, _CONTAINERS)):
            name = name.rpartition(".")[0]
            owner = modules[name]
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, _CONTAINERS) or _is_leaf(owner) or find_stacks(owner):
            continue
        if _detected_spec(owner) is None and not isinstance(owner, _EXCLUDED):
            yield owner


def _is_leaf(module: nn.Module) -> bool:
    """Return whether a module is a linear or a convolution, i.e. a single operation."""
    others = (nn.modules.conv._ConvNd, nn.Bilinear, nn.Embedding)
    return isinstance(module, others) or kind_of(module) is not None
