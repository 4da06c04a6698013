"""Parameters that a run does not train: those of `model.frozen`, and those that no gradient reaches."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from octavo.numerics.names import nearest
from octavo.planner.fake import fake_copy, fake_tensors
from octavo.train.config.run_config import ConfigError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters of the modules that a pattern matches, and all in them.

    A pattern is that of `fnmatch`, for the whole name of a module or for its end: "vision_tower" and "*.mlp" match
    "model.vision_tower" and "model.layers.0.mlp".

    Raises:
        ConfigError: For a pattern that matches no module with parameters, with the nearest name, and if nothing is left
            to train.
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    for pattern in patterns:
        matches = [module for name, module in modules.items() if _matches(name, pattern)]
        if not any(next(module.parameters(), None) is not None for module in matches):
            ends = {end for name in modules for end in _ends(name)}
            raise ConfigError(
                f'model.frozen: "{pattern}" matches no module with parameters of {type(model).__name__}'
                f"{nearest(pattern.strip('*.'), ends) or '; its parts are ' + ', '.join(_parts(model))}"
            )
        for module in matches:
            module.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model.frozen = {list(patterns)} freezes all of {type(model).__name__}: nothing would train")


def freeze_unused(model: nn.Module, loss: Callable[[Any], Tensor]) -> list[str]:
    """Freeze the parameters that the loss does not depend on, as the last layers of a vision tower.

    Returns their names.

    Such parameters would stay as they are, and break what waits for their gradients (DDP). They are found in the graph
    of `loss` of a copy of the model without storage.
    """
    with fake_tensors() as mode, torch.enable_grad():
        copy = fake_copy(model, mode, torch.device("cpu"))
        used = _leaves(loss(copy).grad_fn)
        unused = [name for name, parameter in copy.named_parameters() if id(parameter) not in used]
    parameters = dict(model.named_parameters())
    names = [name for name in unused if parameters[name].requires_grad]
    for name in names:
        parameters[name].requires_grad_(False)
    return names


def _leaves(node: Any) -> set[int]:
    """Identities of the leaves behind a node of the autograd graph."""
    waiting, visited, leaves = [node], {node}, set()
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        for function, _ in node.next_functions:
            if function is not None and function not in visited:
                visited.add(function)
                waiting.append(function)
    return leaves


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _ends(name: str) -> list[str]:
    """Of "a.b.c": "a.b.c", "b.c" and "c"."""
    parts = name.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]


def _parts(model: nn.Module) -> list[str]:
    """Names of the largest parts of a model."""
    base = getattr(model, "base_model", model)
    return [name for part in (base, model) for name, module in part.named_children() if module is not base]
