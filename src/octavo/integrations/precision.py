"""What integrations share: `precision` as a user gives it, and the FP8 state of a model in a tool's checkpoints."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch.distributed as dist
from torch import nn

from octavo._version import __version__
from octavo.nn import change_recipe, delayed, equalized_state
from octavo.nn.experts import is_converted_experts
from octavo.nn.linear_subclasses import is_converted
from octavo.nn.select import is_layer
from octavo.numerics.names import nearest
from octavo.numerics.precision import Precision
from octavo.numerics.recipe import Recipe
from octavo.optim import AdamW
from octavo.planner.auto_convert import convert

PrecisionLike = Precision | str | Mapping[str, Any]
"""A `Precision`, the name of a level, or a table of its fields with `level`."""
KEYS = ("level", *(field.name for field in fields(Precision)))


def precision_of(value: PrecisionLike) -> Precision:
    """Return the precision that a user asks for.

    Args:
        value: A `Precision`; the name of a level, such as "fp8+activations"; or a table, as the section `[precision]`
            of a configuration: `{"level": "fp8", "recipe": "rowwise", "skip_last": 1}`.

    Raises:
        ValueError: For an unknown level, key or value.
        TypeError: For another type.
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, str):
        return Precision.level(value)
    if not isinstance(value, Mapping):
        raise TypeError(f"precision is the name of a level, a table or an octavo.Precision; got {value!r}")
    table: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
    for key in table:
        if key not in KEYS:
            raise ValueError(f"precision has no key {key!r}{nearest(str(key), KEYS)}. Known: {', '.join(KEYS)}")
    return Precision.level(table.pop("level", "fp8"), **table)


def converted(model: nn.Module) -> bool:
    """Return whether a model has a layer that computes in FP8."""
    return any(is_converted(module) or is_converted_experts(module) for module in model.modules())


def prepare(model: nn.Module, precision: Precision, verbose: bool) -> None:
    """Convert a model as asked, in place, unless its user converted it already.

    Raises:
        ValueError: As `octavo.convert`; for recipes whose scales depend on the history of one rank, on several ranks.
        TypeError: As `octavo.convert`.
    """
    if not converted(model) and (precision.matmul == "fp8" or precision.activations == "fp8"):
        convert(model, precision=precision, verbose=verbose)
    if dist.is_initialized() and dist.get_world_size() > 1:
        for name, module in model.named_modules():
            if is_converted(module) and module.recipe.layer_state:
                raise ValueError(
                    f"recipe {module.recipe.name!r} ({name}) keeps {module.recipe.layer_state}, which ranks have to "
                    "share: use recipe 'rowwise' here, or octavo.parallelize in a loop of your own"
                )


def check_optimizer(precision: Precision, optimizer: Any) -> None:
    """Raise ValueError if a precision has FP8 optimizer states and an optimizer, wrapped or not, has not."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if precision.states == "fp8" and not isinstance(inner, AdamW):
        kind = f"{type(inner).__module__}.{type(inner).__name__}"
        raise ValueError(
            f"precision={precision.label!r} has FP8 states of AdamW, but the optimizer is a {kind}: create it with "
            "octavo.AdamW(model.parameters(), …)"
        )


class Fp8State:
    """The FP8 settings and scaling state of a model, for the checkpoints of a tool.

    Args:
        model: A model, converted or not; not wrapped.
        precision: What the run asks for.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.model, self.precision = model, precision

    def state_dict(self) -> dict[str, Any]:
        """Return version, precision, the recipe of each layer, amax histories and channel scales, JSON-serializable."""
        layers = {name: module for name, module in self.model.named_modules() if is_layer(module)}
        return {
            "octavo": __version__,
            "precision": asdict(self.precision),
            "label": self.precision.label,
            "recipes": {name: _recipe_of(module) for name, module in layers.items()},
            "delayed": delayed.state_dict(self.model),
            "equalized": equalized_state.state_dict(self.model),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set recipes that changed during training (by the autopilot) and scaling state as they were saved.

        If the precision of the run is another, it is not changed, and a warning names both.
        """
        saved = state["precision"] | {key: tuple(state["precision"][key]) for key in ("skip", "only")}
        if saved != asdict(self.precision):
            warnings.warn(
                f"octavo: the checkpoint was trained with {_difference(saved, asdict(self.precision))}; this run goes "
                "on with its own setting, so its losses differ from those of an uninterrupted run",
                stacklevel=2,
            )
            return
        modules = dict(self.model.named_modules())
        for name, fields_of_recipe in state["recipes"].items():
            if name in modules and _recipe_of(modules[name]) != fields_of_recipe:
                recipe = None if fields_of_recipe is None else Recipe.from_json(dict(fields_of_recipe))
                change_recipe(self.model, name, recipe, reason="as in the checkpoint")
        delayed.load_state_dict(self.model, state["delayed"])
        equalized_state.load_state_dict(self.model, state["equalized"])


def warn_if_forgotten(used: Any, precision: Precision) -> None:
    """Warn if a model was trained in FP8, by the note in its configuration, and is now trained without."""
    if isinstance(used, Mapping) and "fp8" in str(used.get("precision")) and "fp8" not in precision.label:
        warnings.warn(
            f"octavo: this model was trained with precision {used['precision']!r}, and is now trained with "
            f"{precision.label!r}: pass precision={used['precision'].split()[0]!r} to go on as before",
            stacklevel=2,
        )


def _recipe_of(module: nn.Module) -> dict[str, Any] | None:
    return module.recipe.to_json() if is_converted(module) or is_converted_experts(module) else None


def _difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    keys = [key for key in own if saved.get(key) != own[key]]
    return ", ".join(f"precision.{key} = {saved.get(key)!r}, now {own[key]!r}" for key in keys)
