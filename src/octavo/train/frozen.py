"""Parameters that a run does not train: those of `model.frozen`, and those that no gradient reaches."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from octavo.numerics.suggestions import grouped, nearest
from octavo.planner.fake import fake_copy, fake_tensors
from octavo.train.config.run_config import ConfigError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the modules whose whole names, or the ends of them, match a pattern of `fnmatch`."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    for pattern in patterns:
        matches = [module for name, module in modules.items() if _matches(name, pattern)]
        if not any(next(module.parameters(), None) is not None for module in matches):
            base = getattr(model, "base_model", model)
            parts = [name for part in (base, model) for name, module in part.named_children() if module is not base]
            ends = {".".join(name.split(".")[start:]) for name in modules for start in range(name.count(".") + 1)}
            hint = nearest(pattern.strip("*."), ends) or f"; its parts are {', '.join(parts)}"
            kind = type(model).__name__
            raise ConfigError(f'model.frozen: "{pattern}" matches no module with parameters of {kind}{hint}')
        for module in matches:
            module.requires_grad_(False)
    _check_tied(model, patterns)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model.frozen = {list(patterns)} freezes all of {type(model).__name__}: nothing would train")


def _check_tied(model: nn.Module, patterns: Sequence[str]) -> None:
    parameters = model.named_parameters(remove_duplicate=False)
    for shared in grouped((id(parameter), name) for name, parameter in parameters).values():
        frozen = [name for name in shared if _is_frozen_by(name, patterns)]
        if frozen and len(frozen) < len(shared):
            other = next(name for name in shared if name not in frozen)
            problem = f"model.frozen = {list(patterns)} freezes {frozen[0]}, which is also {other} (tied)"
            remedy = f'freeze both ("{other.rpartition(".")[0]}"), or set tie_word_embeddings = false'
            raise ConfigError(f"{problem}: it would not be trained either; {remedy}")


def frozen_note(model: nn.Module, patterns: Sequence[str], *, adapters: bool = False) -> str:
    """How many parameters of a model are not trained, and why, in a line; "" if all are trained."""
    parameters = dict(model.named_parameters())
    frozen = {name: parameter.numel() for name, parameter in parameters.items() if not parameter.requires_grad}
    if not frozen:
        return ""
    total = sum(parameter.numel() for parameter in parameters.values())
    start = f"{sum(frozen.values()):,} of {total:,} parameters are not trained: "
    if adapters:
        return f"{start}[lora] trains the adapters alone"
    others = {name: count for name, count in frozen.items() if not _is_frozen_by(name, patterns)}
    reasons = [f"{sum(frozen.values()) - sum(others.values()):,} by model.frozen"] if len(others) < len(frozen) else []
    if others:
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in others))
        shown = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
        reasons.append(f"{sum(others.values()):,} that no gradient reaches ({shown})")
    return start + "; ".join(reasons)


def _is_frozen_by(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split(".")
    modules = [".".join(parts[:index]) for index in range(1, len(parts))]
    return any(_matches(module, pattern) for module in modules for pattern in patterns)


def freeze_unused(model: nn.Module, loss: Callable[[Any], Tensor]) -> list[str]:
    """Freeze the parameters that the loss does not depend on, as a tower's last layers; return their names."""
    # DDP would wait for their gradients. They are found in the graph of `loss` of a copy of the model without storage.
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
