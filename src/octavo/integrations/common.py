"""What integrations share: `precision` as a user gives it, and the FP8 state of a model in a tool's checkpoints."""

import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from typing import Any

import torch.distributed as dist
from torch import nn

from octavo._version import __version__
from octavo.activations.modules import handles_activations
from octavo.inspect import Autopilot, Watch
from octavo.inspect.autopilot import FALLBACK_RECIPES
from octavo.nn import change_recipe, equalized
from octavo.nn.experts import is_converted_experts
from octavo.nn.linear_subclasses import is_converted
from octavo.nn.report import PLAN_ATTRIBUTE
from octavo.nn.select import is_layer
from octavo.numerics.precision import AUTO, Precision
from octavo.numerics.recipe import DEFAULT, Recipe, get_recipe
from octavo.numerics.suggestions import nearest
from octavo.optim import AdamW
from octavo.planner.auto_convert import convert

# What integrations report to the loggers of their tool: findings of a `Watch`, and moves of an `Autopilot`.


DEFAULT_EVERY = 50  # Steps between the samples of an autopilot, if none is given


def fallback_recipes() -> tuple[str, ...]:
    """Return the names of recipes to which an autopilot may move layers: on several ranks, none with channel scales."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return tuple(name for name in FALLBACK_RECIPES if ranks == 1 or not get_recipe(name).equalization)


class Monitor:
    """Samples the layers of a model in a tool's training loop."""

    def __init__(self, model: nn.Module, every: int, autopilot: bool, verbose: bool) -> None:
        every = every or DEFAULT_EVERY
        self.autopilot = Autopilot(model, every=every, fallback_recipes=fallback_recipes()) if autopilot else None
        self.watch = Watch(model, every=every) if self.autopilot is None else self.autopilot.watch
        self._verbose = verbose
        self._open: ExitStack | None = None

    @property
    def number(self) -> int:
        """Number of the last step, 1, 2, …"""
        return self.watch.number

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[dict[str, float]]:
        """Run a step, or its first micro-batch, inside; afterwards the yielded dictionary has its metrics."""
        metrics: dict[str, float] = {}
        number = self.number + 1 if number is None else number
        with self.watch.step(number) if self.autopilot is None else self.autopilot.step(number):
            yield metrics
        if self.watch.rows:
            metrics["octavo/findings"] = len(self.watch.findings())
            sqnrs = [row.sqnr for row in self.watch.rows if not math.isnan(row.sqnr)]
            metrics["octavo/lowest_sqnr_db"] = min(sqnrs, default=math.nan)
        if self.autopilot is not None:
            metrics["octavo/moved_layers"] = len({change.layer for change in self.autopilot.changes})
            for change in self.autopilot.last_changes if self._verbose else ():
                print(f"octavo: {change}", file=sys.stderr)

    def begin(self) -> None:
        """Begin a step, unless one is running: for loops that are not Octavo's to wrap."""
        if self._open is None:
            stack = ExitStack()
            self._metrics = stack.enter_context(self.step())
            self._open = stack

    def end(self) -> dict[str, float]:
        """End the step that `begin` began, and return its metrics if it was sampled."""
        if self._open is None:
            return {}
        self._open.close()
        self._open = None
        return self._metrics if self.watch.rows else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last step and the state of the autopilot."""
        return {"step": self.number, "autopilot": None if self.autopilot is None else self.autopilot.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, here with an autopilot or without."""
        self.watch.number = state.get("step", self.number)
        if self.autopilot is not None and state.get("autopilot") is not None:
            self.autopilot.load_state_dict(state["autopilot"])


def monitor_of(model: nn.Module, every: int, autopilot: bool, verbose: bool) -> Monitor | None:
    """Return a `Monitor`, or None if neither samples nor an autopilot are asked for."""
    if every < 0:
        raise ValueError(f"inspect_every is a number of steps, or 0 for none; got {every}")
    return Monitor(model, every, autopilot, verbose) if every or autopilot else None


PrecisionLike = Precision | str | Mapping[str, Any]  # The name of a level, or a table of its fields with `level`
KEYS = ("level", *(field.name for field in fields(Precision)))


def precision_of(value: PrecisionLike) -> Precision:
    """Return the precision that a user asks for."""
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


def prepare(model: nn.Module, precision: Precision, verbose: bool) -> None:
    """Convert a model as asked, in place. A model that was converted before keeps its recipes."""
    recipes = {module.recipe.name for module in model.modules() if is_converted(module) or is_converted_experts(module)}
    if recipes or any(handles_activations(module) for module in model.modules()):
        _check_conversion(model, recipes, precision)
    elif precision.matmul == "fp8" or precision.activations != "bf16":
        convert(model, precision=precision, verbose=verbose)
    _check_ranks(model)


def has_fp8_states(precision: Precision) -> bool:
    """Return whether a precision has states that only `octavo.AdamW` makes."""
    return precision.states == "fp8" or precision.master == "remainder"


def check_optimizer(precision: Precision, optimizer: Any) -> None:
    """Raise ValueError if either a precision or the states of an optimizer are FP8 ones, and the other is not."""
    bare, problem = optimizer, None
    while hasattr(bare, "optimizer"):  # wrappers of accelerate and Lightning
        bare = bare.optimizer
    if has_fp8_states(precision) and not isinstance(bare, AdamW):
        problem = f"a {type(bare).__module__}.{type(bare).__name__}"
    elif precision.states == "fp8" and all(group["states"] != "fp8" for group in bare.param_groups):
        problem = "an octavo.AdamW with states='fp32'"
    if problem is not None:
        raise ValueError(
            f"precision={precision.label!r} has FP8 states of AdamW, but the optimizer is {problem}: create it with "
            "octavo.AdamW(model.parameters(), …), in a Trainer by optim='adamw_torch'; or use precision='fp8' or "
            "'fp8+activations'"
        )
    states = getattr(bare, "state", None)  # optimizers of other libraries may keep something else there, or nothing
    each = [state for state in states.values() if isinstance(state, Mapping)] if isinstance(states, Mapping) else []
    if not isinstance(bare, AdamW) and any("exp_avg_fp8" in state for state in each):
        name = f"{type(bare).__module__}.{type(bare).__name__}"
        raise ValueError(
            f"the checkpoint has FP8 optimizer states, which {name} does not read: go on "
            "with precision='fp8+activations+optimizer', or load the checkpoint without its optimizer states"
        )


def _check_conversion(model: nn.Module, recipes: set[str], precision: Precision) -> None:
    plans = [vars(module)[PLAN_ATTRIBUTE] for module in model.modules() if PLAN_ATTRIBUTE in vars(module)]
    problem = None
    if precision.matmul == "bf16" and recipes:
        problem = f"its layers compute in FP8 ({', '.join(sorted(recipes))})"
    elif precision.matmul == "fp8" and not recipes:
        problem = "its layers do not compute in FP8"
    elif precision.activations not in ("bf16", *(plan.activations for plan in plans)):
        problem = f"without activations={precision.activations!r}"
    elif precision.matmul == "fp8" and precision.recipe not in {DEFAULT.name, AUTO, *recipes}:
        problem = f"to {', '.join(sorted(recipes))}"
    if problem is not None:
        raise ValueError(
            f"precision={precision.label!r}, but this model was converted before: {problem}. Call octavo.revert(model) "
            "first, or pass the precision that it has"
        )


def _check_ranks(model: nn.Module) -> None:
    """Raise ValueError if several ranks have layers whose channel scales are those of one rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for name, module in model.named_modules():
            if is_converted(module) and module.recipe.equalization:
                raise ValueError(
                    f"recipe {module.recipe.name!r} ({name}) keeps channel scales, which ranks have to share: "
                    "use recipe 'rowwise' here, or octavo.parallelize in a loop of your own"
                )


class Fp8State:
    """The FP8 settings and scaling state of a model, for the checkpoints of a tool."""

    def __init__(self, model: nn.Module, precision: Precision, monitor: Monitor | None = None) -> None:
        self.model, self.precision, self.monitor = model, precision, monitor

    def state_dict(self) -> dict[str, Any]:
        """Return version, precision, recipes, channel scales, step and state of the autopilot, JSON-serializable."""
        layers = {name: module for name, module in self.model.named_modules() if is_layer(module)}
        return {
            "octavo": __version__, "precision": asdict(self.precision), "label": self.precision.label,
            "recipes": {name: _recipe_of(module) for name, module in layers.items()},
            "equalized": equalized.state_dict(self.model),
            **({"autopilot": None} if self.monitor is None else self.monitor.state_dict()),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set recipes that changed during training (by the autopilot) and scaling state as they were saved."""
        # If the precision of the run is another, it is not changed, and a warning names both.
        saved = state["precision"] | {key: tuple(state["precision"][key]) for key in ("skip", "only")}
        now = asdict(self.precision)
        if keys := [key for key in {**now, **saved} if saved.get(key) != now.get(key)]:
            changes = ", ".join(f"precision.{key} = {saved.get(key)!r}, now {now.get(key)!r}" for key in keys)
            warnings.warn(
                f"octavo: the checkpoint was trained with {changes}; this run goes "
                "on with its own setting, so its losses differ from those of an uninterrupted run",
                stacklevel=2,
            )
            return
        modules = dict(self.model.named_modules())
        unknown = [name for name, recipe in state["recipes"].items() if recipe is not None and name not in modules]
        own = [name for name, module in modules.items() if is_layer(module) and _recipe_of(module) is not None]
        if unknown or (unnamed := [name for name in own if name not in state["recipes"]]):
            fault = f"this one has no {unknown[0]!r}" if unknown else f"it has no recipe of {unnamed[0]!r}"
            raise ValueError(f"the FP8 state is of another model: {fault}")
        recipes = {name: recipe and Recipe.from_json(recipe) for name, recipe in state["recipes"].items()}
        if self.monitor is not None:
            self.monitor.load_state_dict(state)
        for name, recipe in recipes.items():
            if name in modules and _recipe_of(modules[name]) != state["recipes"][name]:
                change_recipe(self.model, name, recipe, reason="as in the checkpoint")
        _check_ranks(self.model)
        equalized.load_state_dict(self.model, state["equalized"])


def warn_if_forgotten(used: object, precision: Precision) -> None:
    """Warn if a model was trained in FP8, by the note in its configuration, and is now trained without."""
    if isinstance(used, Mapping) and "fp8" in str(used.get("precision")) and "fp8" not in precision.label:
        warnings.warn(
            f"octavo: this model was trained with precision {used['precision']!r}, and is now trained with "
            f"{precision.label!r}: pass precision={used['precision'].split()[0]!r} to go on as before",
            stacklevel=2,
        )


def _recipe_of(module: nn.Module) -> dict[str, Any] | None:
    return module.recipe.to_json() if is_converted(module) or is_converted_experts(module) else None
