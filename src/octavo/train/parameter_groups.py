"""The settings of each parameter: weight decay, learning rate and optimizer, by rule or by `[[optim.groups]]`.

By rule, weights of products and embeddings decay (`decayed_parameters`). With `optim.name = "muon"` Muon optimizes the
hidden matrices (`hidden_matrices`), AdamW the rest. A group of the configuration changes both for the parameters that
its pattern matches; of several groups the first that matches counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from octavo.nn.experts import STACKED
from octavo.numerics.names import nearest
from octavo.optim.muon import newton_schulz_flops
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Optim

STATE_SPACE_NAMES = ("A_log",)
"""Logarithms of a state space model's decay rates (Mamba), which their authors exclude from weight decay."""
HEADS = ("lm_head", "classifier", "score")
"""Names of the modules of Transformers that map to the vocabulary or to classes."""


@dataclass(frozen=True, kw_only=True, order=True)
class ParameterSettings:
    """How a parameter is optimized. Parameters with equal settings are one group; groups have the order of these."""

    group: int = -1  # Number of the group of the configuration; -1 for none
    adamw: bool = True  # Whether AdamW takes its steps, and not Muon
    undecayed: bool = False  # Whether its rule is no weight decay
    lr: float  # Peak learning rate
    weight_decay: float  # Decoupled weight decay


def parameter_settings(model: nn.Module, optim: Optim, *, part: bool = False) -> dict[str, ParameterSettings]:
    """Return the settings of each trained parameter of a model, by name."""
    # Call it before FSDP, which replaces the parameters and drops their marks.
    decayed, hidden = decayed_parameters(model), hidden_matrices(model) if optim.name == "muon" else set()
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    settings = {}
    for name in names:
        number = next((n for n, group in enumerate(optim.groups) if matches(name, group.match)), -1)
        group = optim.groups[number] if number >= 0 else None
        decay = optim.weight_decay if name in decayed else 0.0
        muon = name in hidden and (group is None or group.muon is not False)
        if group is not None and group.muon and not muon:
            raise ConfigError(
                f'optim.groups: "{group.match}" matches {name}, which muon = true does not fit: Muon optimizes hidden '
                "matrices (no embeddings, heads, norms, biases and vectors)"
            )
        settings[name] = ParameterSettings(
            group=number,
            adamw=not muon,
            undecayed=name not in decayed,
            lr=optim.lr if group is None or group.lr is None else group.lr,
            weight_decay=decay if group is None or group.weight_decay is None else group.weight_decay,
        )
    for number, group in enumerate(optim.groups):
        if not part and not any(setting.group == number for setting in settings.values()):
            raise ConfigError(_unmatched(group.match, names, [other.match for other in optim.groups[:number]]))
    return settings


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern, as in `fnmatch`, matches the whole name of a parameter or of a module around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _unmatched(pattern: str, names: Sequence[str], earlier: Sequence[str]) -> str:
    taken = next((other for other in earlier for name in names if matches(name, pattern) and matches(name, other)), "")
    if taken:
        return (
            f'optim.groups: "{pattern}" matches only parameters that "{taken}" before it matches, and the first match '
            "counts: put it first, or leave it out"
        )
    ends = {".".join(name.split(".")[start:]) for name in names for start in range(name.count(".") + 1)}
    hint = nearest(pattern.strip("*."), sorted(ends)) or f"; the first one is {names[0]}"
    return f'optim.groups: "{pattern}" matches no trained parameter{hint}'


def decayed_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: weights of products and embeddings, of any shape."""
    # Excluded, for any number of dimensions: parameters of norms (modules whose class name has "norm"), biases (names
    # that end in "bias"), `STATE_SPACE_NAMES`, parameters marked `_no_weight_decay`, and vectors, also of shape [1, …,
    # 1, N]. Call it before FSDP, which replaces the parameters and drops the marks.
    names: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        norm = "norm" in type(module).__name__.lower()
        for leaf, param in module.named_parameters(prefix=path, recurse=False):
            name = leaf.rpartition(".")[2]
            vector = param.dim() < 2 or (param.dim() > 2 and max(param.shape[:-1]) == 1)
            excluded = norm or vector or name.endswith("bias") or name in STATE_SPACE_NAMES
            if not excluded and not getattr(param, "_no_weight_decay", False):
                names.add(leaf)
    return names


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon optimizes: 2-D weights of products, and 3-D weights of experts."""
    # Excluded are embeddings, tied ones too, heads (`get_output_embeddings`, `HEADS`), convolutions, and all that
    # `decayed_parameters` excludes.
    module: Any = model
    head = module.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    excluded = {id(param) for param in ([] if head is None else head.parameters())}
    for path, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, nn.Embedding | nn.modules.conv._ConvNd) or path.rpartition(".")[2] in HEADS:
            excluded |= {id(param) for param in part.parameters()}
    decayed = decayed_parameters(model)
    return {
        name
        for name, param in model.named_parameters()
        if name in decayed and id(param) not in excluded
        and (param.dim() == 2 or (param.dim() == 3 and name.rpartition(".")[2] in STACKED))
    }  # fmt: skip


def muon_flops(model: nn.Module, optim: Optim) -> float:
    """Floating point operations of Muon's products in a step of a whole model; 0 for AdamW."""
    if optim.name != "muon":
        return 0.0
    adamw = {name for name, own in parameter_settings(model, optim, part=True).items() if own.adamw}
    trained = ((name, param) for name, param in model.named_parameters() if param.requires_grad)
    return sum(newton_schulz_flops(param.shape) for name, param in trained if name not in adamw)


def groups_table(settings: Mapping[str, ParameterSettings], sizes: Mapping[str, int], optim: Optim) -> list[str]:
    """Return a line for each group of parameters: what matched, how many, and their settings; [] for the default."""
    if not optim.groups and optim.name == "adamw":
        return []
    rows = []
    for setting in sorted(set(settings.values())):
        names = [name for name, own in settings.items() if own == setting]
        count = sum(sizes[name] for name in names)
        rows.append((
            optim.groups[setting.group].match if setting.group >= 0 else "others",
            f"{len(names)} parameter{'s' if len(names) > 1 else ''} ({count:,} elements)",
            "adamw" if setting.adamw else "muon",
            f"lr {setting.lr:g}",
            f"weight decay {setting.weight_decay:g}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
