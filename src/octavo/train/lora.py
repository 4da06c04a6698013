"""LoRA: low-rank adapters of PEFT on a frozen model, as `[lora]` asks for.

PEFT puts them into the model itself, so that its class, loss and blocks stay. Optimizer, checkpoints and exports have
the adapters alone, under PEFT's names. The base is made anew on resume: from `model.path`, or from the seed.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from octavo.nn.resident import as_resident
from octavo.numerics.suggestions import grouped, nearest
from octavo.planner.fake import fake_copy, fake_tensors
from octavo.tensor import local_tensor
from octavo.train.config.run_config import ConfigError, naming, optional_package
from octavo.train.config.sections import LoraConfig
from octavo.train.optimizer import matches
from octavo.train.ranks import Ranks

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "default"  # PEFT's name of the adapter
PREFIX = "base_model.model."  # What PEFT's files have before the name of a module


def add_adapters(model: nn.Module, lora: LoraConfig, seed: int, base: str | None) -> None:
    """Freeze a model and add adapters to it, in place; their initial weights depend on the seed alone."""
    peft = optional_package("peft", "[lora] is of PEFT", "pip install peft")
    targets = "all-linear" if lora.targets == ("all-linear",) else list(lora.targets)
    writes_text = hasattr(model, "prepare_inputs_for_generation")  # what PeftModel.from_pretrained asks of the type
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets,
        use_rslora=lora.rank_stabilized, task_type="CAUSAL_LM" if writes_text else None, base_model_name_or_path=base,
    )  # fmt: skip
    torch.manual_seed(seed)
    model.requires_grad_(False)
    too_large = naming(f"lora.rank = {lora.rank}: the adapters cannot be made", RuntimeError)
    with too_large, naming("[lora]", ValueError, TypeError):
        peft.inject_adapter_in_model(settings, model, ADAPTER)
    model.train()


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def checkpointed(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model, by name: of one with adapters these alone, else its `state_dict`."""
    state = model.state_dict()
    if not has_adapters(model):
        return state
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def save(state: Mapping[str, Tensor], folder: Path) -> None:
    tensors = {_stored_name(name): value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Read the adapters in a folder, by their names in the model. Raises ConfigError if they are not all there."""
    stored = load_file(folder / WEIGHTS_FILE)
    names = {_stored_name(name): name for name in checkpointed(model)}
    if missing := sorted(stored.keys() ^ names.keys()):
        raise ConfigError(f"{WEIGHTS_FILE} has other adapters than the model (first: {missing[0]})")
    return {names[name]: value for name, value in stored.items()}


def merge(model: nn.Module) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # as PEFT does, for a product in fp32
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, layer in layers:
        layer.merge()  # rounds once; with safe_merge also the change
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config


def _stored_name(name: str) -> str:
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


def base_digest(model: nn.Module, ranks: Ranks) -> str:
    """Hash of the frozen parameters on all ranks, from exact sums of the bytes of each; "" without adapters."""
    if not has_adapters(model):
        return ""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # of which some parameters may be gathered
            module.reshard()
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            weight = as_resident(parameter)
            for part in (local_tensor(parameter.detach()),) if weight is None else (weight.data_, weight.scale):
                digest.update(f"{name} {tuple(part.shape)} {part.dtype}\0".encode())
                rows = part.reshape(-1, part.shape[-1] if part.ndim else 1).contiguous().view(torch.uint8)
                for dim in (0, 1):  # of both: in one of them an exchange of two values shows
                    digest.update(rows.sum(dim, dtype=torch.int64).cpu().numpy().tobytes())
    digests = ranks.all_gather(digest.hexdigest())
    alike = len(set(digests)) == 1  # copies; shards differ
    return digests[0] if alike else hashlib.sha256("".join(digests).encode()).hexdigest()


# Parameters that a run does not train: those of `model.frozen`, and those that no gradient reaches.


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the modules whose whole names, or the ends of them, match a pattern of `fnmatch`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        frozen = [parameter for name, parameter in parameters.items() if _is_frozen_by(name, [pattern])]
        if not frozen:
            base = getattr(model, "base_model", model)
            parts = [name for part in (base, model) for name, module in part.named_children() if module is not base]
            modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
            ends = {".".join(name.split(".")[start:]) for name in modules for start in range(name.count(".") + 1)}
            hint = nearest(pattern.strip("*."), ends) or f"; its parts are {', '.join(parts)}"
            kind = type(model).__name__
            raise ConfigError(f'model.frozen: "{pattern}" matches no module with parameters of {kind}{hint}')
        for parameter in frozen:
            parameter.requires_grad_(False)
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
    module = name.rpartition(".")[0]
    return any(matches(module, end) for pattern in patterns for end in (pattern, f"*.{pattern}"))


def freeze_unused(model: nn.Module, loss: Callable[[Any], Tensor]) -> list[str]:
    """Freeze the parameters that the loss does not depend on, as a tower's last layers; return their names."""
    # DDP would wait for their gradients. Backward runs on a copy of the model without storage.
    with fake_tensors() as mode, torch.enable_grad():
        copy = fake_copy(model, mode, torch.device("cpu"))
        trained = {name: parameter for name, parameter in copy.named_parameters() if parameter.requires_grad}
        gradients = torch.autograd.grad(loss(copy), list(trained.values()), allow_unused=True)
    names = [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names
