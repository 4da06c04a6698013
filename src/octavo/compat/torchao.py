"""`convert_to_float8_training` with the arguments of `torchao.float8`, for code that moves from torchao to Octavo.

Two things differ: torchao's row scales are powers of two, Octavo's are not; and Octavo leaves vocabulary heads and
layers too narrow to gain in high precision. torchao itself is not needed.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from octavo.numerics.suggestions import nearest
from octavo.planner.auto_convert import convert

M = TypeVar("M", bound=nn.Module)

# Octavo's recipe for each recipe name of torchao
RECIPE_NAMES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise_hp_wgrad"}
_NO_EFFECT = (  # Fields of torchao's configuration that do not change the recipe
    "enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate", "force_recompute_fp8_weight_in_bwd",
    "gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight",
)  # fmt: skip


def convert_to_float8_training(
    module: M, *, module_filter_fn: Callable[[nn.Module, str], bool] | None = None, config: object = None
) -> M:
    """Convert the linear layers of a model to FP8, in place, with torchao's arguments.

    Args:
        module: As `model` of `octavo.convert`.
        module_filter_fn: Called with a linear layer and its name; True to convert it.
        config: The name of a torchao recipe, also as a `Float8LinearRecipeName`; a `torchao.float8.Float8LinearConfig`;
            or None for torchao's default, "tensorwise".

    Raises:
        ValueError: For an unknown recipe name, a configuration that is no recipe of torchao, or as `octavo.convert`.

    Examples:
        >>> from octavo.compat.torchao import convert_to_float8_training
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> model = convert_to_float8_training(model, module_filter_fn=lambda m, name: name != "1", config="rowwise")
        >>> [row.recipe for row in octavo.report(model)]
        ['rowwise', None]
    """
    name = _recipe_name(config)
    if getattr(config, "enable_fsdp_float8_all_gather", False):
        warnings.warn(
            "octavo: enable_fsdp_float8_all_gather has no effect here; shard the model with "
            "octavo.parallelize(model, fp8_comm='gather') to gather weights in FP8",
            stacklevel=2,
        )
    return convert(module, RECIPE_NAMES[name], filter=module_filter_fn)


def _recipe_name(config: object) -> str:
    if config is None:
        return "tensorwise"
    name = getattr(config, "value", config)  # of torchao's enumeration of names
    if isinstance(name, str):
        if name not in RECIPE_NAMES:
            known = ", ".join(RECIPE_NAMES)
            raise ValueError(f"torchao has no recipe {name!r}{nearest(name, RECIPE_NAMES)}. Known: {known}")
        return name
    if not (dataclasses.is_dataclass(config) and hasattr(config, "from_recipe_name")):
        raise TypeError(f"config is the name of a torchao recipe or a Float8LinearConfig; got {config!r}")
    for name in RECIPE_NAMES:
        if _fields(config) == _fields(config.from_recipe_name(name)):
            return name
    raise ValueError(
        f"this Float8LinearConfig is none of torchao's recipes {', '.join(RECIPE_NAMES)}: choose one by name"
    )


def _fields(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _NO_EFFECT}


__all__ = ["convert_to_float8_training"]
