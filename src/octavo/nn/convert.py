"""Convert a model to FP8 (`convert`), and back (`revert`).

Both swap the class of each chosen module and change nothing else: the module object, its parameters, hooks, buffers,
training flag and names stay the same. So optimizers, weight tying, `state_dict` and references keep working, and a
root that is itself a linear converts in place. Checks run before the first swap; an error after it undoes all swaps. A
failed conversion leaves the model unchanged.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from torch import nn

from octavo.activations.candidates import storable
from octavo.activations.modules import Scoped, Storage, is_storing, make_plain, make_storing, storing_class
from octavo.nn.filters import Filter, ModuleFilter, both, of_precision
from octavo.nn.linear_subclasses import change_since, fp8_class, make_exact
from octavo.nn.report import PLAN_ATTRIBUTE, check_module, is_converted, report
from octavo.nn.select import checked_weight, default_plan, exact_linears, obstacle
from octavo.numerics.plan import Plan
from octavo.numerics.precision import AUTO, Precision, check_activations
from octavo.numerics.recipe import DEFAULT, Recipe, get_recipe
from octavo.runtime.swap import all_or_nothing, become

M = TypeVar("M", bound=nn.Module)

_HINTS = {
    "plan": ": read one with octavo.Plan.from_json(text)",
    "precision": ": make one with octavo.Precision.level('fp8')",
}


def convert(
    model: M,
    recipe: str | Recipe | Mapping[Filter | ModuleFilter, str | Recipe] | None = None,
    *,
    precision: Precision | None = None,
    plan: Plan | None = None,
    skip: Sequence[str] = (),
    filter: Filter | ModuleFilter | None = None,
    keep_weights: bool = False,
    activations: Literal["bf16", "fp8"] = "bf16",
    verbose: bool = True,
) -> M:
    """Make the linear layers of a model compute in FP8, in place, without a decision by cost.

    Every `nn.Linear` and Transformers `Conv1D` is converted, except vocabulary heads and layers too narrow to gain
    (LoRA adapters, routers, classifiers). `octavo.convert` calls this function, after it has decided by cost on a GPU;
    arguments, result and errors are its own, without `tokens`. The default recipe is `rowwise`.

    Examples:
        >>> model = octavo.nn.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "mxfp8", verbose=False)
        >>> octavo.report(model)[0].recipe
        'mxfp8'
    """
    check_module("convert", model)
    already = [fqn for fqn, module in model.named_modules() if is_converted(module) or is_storing(module)]
    if already:
        raise ValueError(
            f"{len(already)} layers of this model are converted already (first: {already[0] or 'the model itself'!r}). "
            "Call octavo.revert(model) first to convert it differently, or octavo.report(model) to list its recipes"
        )
    for name, argument, expected in (("plan", plan, Plan), ("precision", precision, Precision)):
        if argument is not None and not isinstance(argument, expected):
            raise TypeError(f"{name} is an octavo.{expected.__name__}; got {argument!r}{_HINTS[name]}")
    allows_none = precision is not None and precision.matmul == "bf16" and precision.activations == "bf16"
    allows_storing_only = plan is not None or (precision is not None and precision.matmul == "bf16")
    if plan is None:
        plan = _plan(model, recipe, precision, skip, filter, keep_weights, activations)
    elif recipe is not None or precision is not None or skip or filter is not None or activations != "bf16":
        raise ValueError(
            "plan replaces recipe, precision, skip, filter and activations: pass plan alone, or those without plan"
        )
    if not (plan.converted or allows_none or (plan.storing and allows_storing_only)):
        raise ValueError(f"no layer would be converted, so the model would train without FP8: {_why_none(plan)}")
    modules = dict(model.named_modules())
    storages = _check(plan, modules)
    keeps_weight = keep_weights if precision is None else precision.keep_weights
    with all_or_nothing(model):
        for fqn in plan.converted:
            become(modules[fqn], fp8_class(modules[fqn]), recipe=plan[fqn].recipe, keeps_weight=keeps_weight)
        for fqn, storage in storages.items():
            make_storing(modules[fqn], storage)
        # Drops the predictions of octavo.plan.
        vars(model)[PLAN_ATTRIBUTE] = Plan(plan.decisions, plan.activations)
        if verbose:
            print(f"octavo: {report(model).summary}", file=sys.stderr)
    return model


def revert(model: M) -> M:
    """Undo `convert`, in place: the same modules compute in the dtype of their weights again.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If the model has no converted layer, or the class or forward of one was replaced since. The model is
            unchanged.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        >>> octavo.revert(model)
        Sequential(
          (0): Linear(in_features=64, out_features=64, bias=True)
        )
    """
    check_module("revert", model)
    converted = {fqn: module for fqn, module in model.named_modules() if is_converted(module)}
    storing = {fqn: module for fqn, module in model.named_modules() if is_storing(module)}
    if not converted and not storing and PLAN_ATTRIBUTE not in vars(model):
        raise ValueError("revert: this model holds no converted layer; octavo.convert(model) makes some")
    for fqn, module in (converted | storing).items():
        if (why := change_since(module)) is not None:
            raise ValueError(f"revert: {fqn or 'the model'} {why}. The model was left as it was")
    with all_or_nothing(model):
        for module in converted.values():
            make_exact(module)
        for module in storing.values():
            make_plain(module)
        for module in model.modules():
            vars(module).pop(PLAN_ATTRIBUTE, None)
    return model


def _check(plan: Plan, modules: dict[str, nn.Module]) -> dict[str, Storage]:
    """Check that a plan fits the modules, and return how each module stores its activations."""
    for fqn in plan:
        if fqn not in modules:
            raise ValueError(f"the plan is for another model: it names {fqn!r}, which this model does not have")
    for fqn in plan.converted:
        reason = obstacle(modules[fqn])
        if reason is not None:
            raise ValueError(
                f"the plan converts {fqn!r}, which is not possible: {reason}. The model was left as it was"
            )
        checked_weight(fqn, modules[fqn])
    storages: dict[str, Storage] = {}
    candidates = storable(modules[""]) if plan.storing else {}
    exact = {modules[name] for name in exact_linears(modules[""], plan)} if plan.storing else set()
    for fqn in plan.storing:
        kind, storage = plan[fqn].storage, candidates.get(fqn)
        if storage is None or isinstance(storage, str) or storage.kind != kind:
            raise ValueError(
                f"the plan has {fqn!r} store its activations as {kind!r}, which does not fit: "
                f"{storage if isinstance(storage, str) else type(modules[fqn]).__name__}. The model was left as it was"
            )
        if isinstance(storage, Scoped):
            inside = modules[fqn].named_modules()
            storage = Scoped(exact=tuple(name for name, module in inside if module in exact and name))
        try:
            storing_class(modules[fqn], storage)
        except Exception as error:
            raise ValueError(
                f"{fqn or 'the model'!r} cannot store its activations in FP8: making a subclass of "
                f"{type(modules[fqn]).__name__} raises {type(error).__name__}: {error}. Leave it out with "
                f"skip=[{fqn!r}]. The model was left as it was"
            ) from error
        storages[fqn] = storage
    return storages


def _plan(
    model: nn.Module,
    recipe: str | Recipe | Mapping[Filter | ModuleFilter, str | Recipe] | None,
    precision: Precision | None,
    skip: Sequence[str],
    filter: Filter | ModuleFilter | None,
    keep_weights: bool,
    activations: str,
) -> Plan:
    check_activations(activations)
    if precision is None:
        by_filter = recipe if isinstance(recipe, Mapping) else {}
        rest = get_recipe(DEFAULT if recipe is None or isinstance(recipe, Mapping) else recipe)
        recipes = {rule: get_recipe(name) for rule, name in by_filter.items()}
        return default_plan(model, rest, skip, filter, activations, recipes)
    if recipe is not None or skip or keep_weights or activations != "bf16":
        raise ValueError(
            "precision holds recipe, skip, keep_weights and activations: set them there, or pass them without precision"
        )
    name = DEFAULT.name if precision.recipe == AUTO else precision.recipe
    chosen = get_recipe(name) if precision.matmul == "fp8" else None
    return default_plan(model, chosen, precision.skip, both(of_precision(precision), filter), precision.activations)


def _why_none(plan: Plan) -> str:
    reasons = {plan[fqn].reason for fqn in plan}
    return "; ".join(sorted(reasons)) if reasons else "it has no nn.Linear and no transformers Conv1D"
