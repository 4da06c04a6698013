"""Decide which layers compute in FP8 (`rule_plan`), convert them (`apply_plan`), and undo it (`revert`).

Both swap the class of each chosen module and change nothing else. Checks run before the first swap.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import nn

from octavo.activations.candidates import fusible, storable
from octavo.activations.modules import (
    STORAGE_ATTRIBUTE,
    HookedForward,
    Storage,
    activation_class,
    convert_activations,
    handles_activations,
    revert_activations,
)
from octavo.nn.equalized import reset_scales
from octavo.nn.experts import looks_like_experts
from octavo.nn.filters import Filter, ModuleFilter, both, of_precision
from octavo.nn.frozen import (
    check_frozen,
    check_recipe_of_resident,
    check_weight_only,
    make_plain,
    resident_parameters,
    resident_plan,
    sharded_problem,
)
from octavo.nn.gathered import sharded_weights
from octavo.nn.linear_subclasses import change_since, class_in_fp8, computes_fp8, restore_original_class
from octavo.nn.report import PLAN_ATTRIBUTE, check_module, report
from octavo.nn.resident import allow_save_pretrained, refuse_save_pretrained
from octavo.nn.select import checked_weight, default_plan, linears_with_exact_inputs, obstacle
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.precision import AUTO, Precision, check_activations
from octavo.numerics.recipe import DEFAULT, Recipe, get_recipe
from octavo.numerics.spec import MessageSpec
from octavo.numerics.suggestions import listed, nearest
from octavo.runtime.linear_kinds import KINDS
from octavo.runtime.swap import all_or_nothing, set_class
from octavo.runtime.torch_compat import local_part

M = TypeVar("M", bound=nn.Module)


def rule_plan(
    model: nn.Module, recipe: str | Recipe | Mapping[Filter | ModuleFilter, str | Recipe] | None = None, *,
    precision: Precision | None = None, skip: Sequence[str] = (), filter: Filter | ModuleFilter | None = None,
    activations: str = "bf16",
) -> Plan:  # fmt: skip
    """Decide by rule, without costs: every linear layer except vocabulary heads and layers too narrow to gain.

    Args are those of `octavo.convert`. The model is not changed.

    Raises:
        ValueError: If the model is converted, the recipe unknown, a filter does not apply, or FP8 would reach no layer.
        TypeError: If a filter is not valid, or a weight's dtype cannot be quantized.

    Examples:
        >>> octavo.nn.rule_plan(torch.nn.Sequential(torch.nn.Linear(64, 64)), "mxfp8")["0"].recipe.name
        'mxfp8'
    """
    check_module("rule_plan", model)
    check_unconverted(model)
    if precision is None:
        check_activations(activations)
        by_filter = recipe if isinstance(recipe, Mapping) else {}
        rest = get_recipe(DEFAULT if recipe is None or isinstance(recipe, Mapping) else recipe)
        recipes = {rule: get_recipe(name) for rule, name in by_filter.items()}
        plan = default_plan(model, rest, skip, filter, activations, recipes)
    else:
        name = DEFAULT.name if precision.recipe == AUTO else precision.recipe
        chosen = get_recipe(name) if precision.matmul == "fp8" else None
        rule = both(of_precision(precision), filter)
        plan = default_plan(model, chosen, precision.skip, rule, precision.activations)
    fp8_products = precision is None or precision.matmul == "fp8"
    of_activations = precision is not None and precision.activations != "bf16"
    if not plan.converted and (fp8_products or (of_activations and not plan.activation_modules)):
        raise nothing_converted(plan)
    return plan


def apply_plan(model: M, plan: Plan, *, keep_weights: bool = False, frozen: str = "bf16", verbose: bool = False) -> M:
    """Convert the layers of a model as planned, in place.

    Args are those of `octavo.convert`, with a decision per layer.

    Raises:
        ValueError: If the model is converted, or the plan does not fit it or `frozen="fp8"`. The model is unchanged.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> model = octavo.nn.apply_plan(model, octavo.nn.rule_plan(model, skip=["1"]))
        >>> [row.converted for row in octavo.report(model)]
        [True, False]
    """
    check_module("apply_plan", model)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is an octavo.Plan; got {plan!r}: read one with octavo.Plan.from_json(text)")
    check_unconverted(model)
    check_frozen(frozen)
    modules = dict(model.named_modules())
    storages = _check(plan, modules)
    specs: dict[str, MessageSpec] = {}
    if frozen == "fp8":
        plan, specs = resident_plan(plan, modules)
    for fqn in plan.converted if not specs else ():
        check_weight_only(fqn, plan[fqn].recipe, "frozen='bf16'")
    weights = resident_parameters(modules, specs)
    trained = [layer for layer, own in weights.items() if any(layer.get_parameter(name).requires_grad for name in own)]
    with all_or_nothing(model):
        for fqn in plan.converted:
            attributes: dict[str, object] = {"recipe": plan[fqn].recipe, "keep_weights": keep_weights}
            if fqn in storages:  # of experts
                attributes[STORAGE_ATTRIBUTE] = storages.pop(fqn)
            set_class(modules[fqn], class_in_fp8(modules[fqn]), **attributes)
        for layer, own in weights.items():
            layer._parameters.update(own)
        if weights:
            refuse_save_pretrained(model)
        for fqn, storage in storages.items():
            convert_activations(modules[fqn], storage)
        # Drops the predictions of octavo.plan.
        vars(model)[PLAN_ATTRIBUTE] = Plan(plan.decisions, plan.activations, plan.partial)
        if verbose:
            print(f"octavo: {report(model).summary}", file=sys.stderr)
    for layer in trained:
        layer.requires_grad_(False)  # the bias too
    return model


def check_unconverted(model: nn.Module) -> None:
    already = [fqn for fqn, m in model.named_modules() if computes_fp8(m) or handles_activations(m)]
    if already:
        raise ValueError(
            f"{len(already)} layers of this model are converted already (first: {already[0] or 'the model itself'!r}). "
            "Call octavo.revert(model) first to convert it differently, or octavo.report(model) to list its recipes"
        )


def nothing_converted(plan: Plan) -> ValueError:
    none = f"it has no {' and no '.join(kind.plain.removeprefix('torch.') for kind in KINDS)}"
    why = "; ".join(sorted({plan[fqn].reason for fqn in plan})) or none
    without = "as it is" if plan.activations == "fused" else "without FP8"
    return ValueError(f"no layer would be converted, so the model would train {without}: {why}")


def revert(model: M) -> M:
    """Undo `convert`, in place: the same modules compute in the dtype of their weights again.

    Weights that are resident in FP8 become frozen parameters with the FP8 values: what FP8 rounded stays rounded.

    Raises:
        ValueError: If no layer is converted, or the class or forward of one was replaced. The model is unchanged.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        >>> octavo.revert(model)
        Sequential(
          (0): Linear(in_features=64, out_features=64, bias=True)
        )
    """
    check_module("revert", model)
    converted = {fqn: m for fqn, m in model.named_modules() if computes_fp8(m)}
    saving = {fqn: module for fqn, module in model.named_modules() if handles_activations(module)}
    if not converted and not saving and PLAN_ATTRIBUTE not in vars(model):
        raise ValueError("revert: this model has no converted layer, so there is nothing to revert")
    for fqn, module in (converted | saving).items():
        if (why := change_since(module) or sharded_problem(module)) is not None:
            raise ValueError(f"revert: {fqn or 'the model'} {why}. The model was left as it was")
    with all_or_nothing(model):
        for module in converted.values():
            restore_original_class(module)
        make_plain(converted.values())
        allow_save_pretrained(model)
        for module in saving.values():
            revert_activations(module)
        for module in model.modules():
            vars(module).pop(PLAN_ATTRIBUTE, None)
    return model


def _check(plan: Plan, modules: dict[str, nn.Module]) -> dict[str, Storage]:
    """Check that a plan fits the modules, and return how modules handle their activations."""
    for fqn in plan:
        if fqn not in modules:
            raise ValueError(f"the plan is for another model: it names {fqn!r}, which this model does not have")
    for fqn in plan.converted:
        if (reason := obstacle(modules[fqn])) is not None:
            raise ValueError(f"the plan converts {fqn!r}, which cannot be: {reason}. The model was left as it was")
        checked_weight(fqn, modules[fqn])
    others = () if plan.partial else modules.keys() - plan.decisions.keys()
    if missing := [fqn for fqn in modules if fqn in others and obstacle(modules[fqn]) is None]:
        raise ValueError(
            f"the plan does not name {len(missing)} of this model's linear layers ({listed(missing)}), as a plan of a "
            "smaller model would not: make a plan of this model. To leave them in high precision, set partial in it: "
            'dataclasses.replace(plan, partial=True), or "partial": true in its JSON'
        )
    storages: dict[str, Storage] = {}
    if not plan.activation_modules:
        return storages
    candidates = (fusible if plan.activations == "fused" else storable)(modules[""])
    unrounded = {modules[name] for name in linears_with_exact_inputs(modules[""], plan)}
    for fqn in plan.activation_modules:
        kind, storage = plan[fqn].activation_storage, candidates.get(fqn)
        if storage is None or isinstance(storage, str) or storage.kind != kind:
            raise ValueError(
                f"the plan has {fqn!r} store its activations as {kind!r}, which does not fit: "
                f"{storage if isinstance(storage, str) else type(modules[fqn]).__name__}. The model was left as it was"
            )
        if isinstance(storage, HookedForward):
            inside = modules[fqn].named_modules()
            storage = HookedForward(unrounded=tuple(name for name, module in inside if module in unrounded and name))
        try:
            activation_class(modules[fqn], storage)
        except Exception as error:
            raise ValueError(
                f"{fqn or 'the model'!r} cannot handle its activations: making a subclass of "
                f"{type(modules[fqn]).__name__} raises {type(error).__name__}: {error}. Leave it out with "
                f"skip=[{fqn!r}]. The model was left as it was"
            ) from error
        storages[fqn] = storage
    return storages


def change_recipe(model: nn.Module, fqn: str, recipe: str | Recipe | None, *, reason: str) -> None:
    """Change the recipe of a linear, or of experts, of a converted model, from its next forward on.

    Call it on every rank, with the same arguments, and not between a forward and its backward.

    Args:
        model: The model that `convert` was called with, sharded or not; or a part of it.
        fqn: Name of the linear in `model`.
        recipe: The new one, or None for the dtype of its weight: one resident in FP8 becomes plain, with these values.
        reason: The reason that `octavo.report` shows.

    Raises:
        ValueError: If the name is not a linear of this model, the recipe is unknown, or the class of the linear cannot
            change: it is sharded by itself, or its forward was replaced after conversion. The model is unchanged.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        >>> octavo.nn.change_recipe(model, "0", "blockwise", reason="outliers in x")
        >>> print(octavo.report(model)[0].recipe)
        blockwise
    """
    modules, aliases = dict(model.named_modules()), dict(model.named_modules(remove_duplicate=False))
    if fqn not in aliases:
        raise ValueError(f"change_recipe: this model has no module {fqn!r}{nearest(fqn, aliases)}")
    module = aliases[fqn]
    fqn = next(name for name, other in modules.items() if other is module)  # the name that a report lists
    new_recipe = None if recipe is None else get_recipe(recipe)
    experts, converted = looks_like_experts(module), computes_fp8(module)
    if not converted:
        if (why := obstacle(module)) is not None:
            raise ValueError(f"change_recipe: {fqn!r} cannot be converted: {why}")
    elif experts or new_recipe is None:
        if (why := change_since(module)) is not None:
            raise ValueError(f"change_recipe: {fqn or 'the model'!r} {why}. The model was left as it was")
    if experts and new_recipe is not None and new_recipe.equalization:
        raise ValueError(f"change_recipe: {fqn!r} are experts, which do not keep channel scales: use 'rowwise'")
    check_recipe_of_resident(fqn, module, new_recipe)
    checked_weight(fqn, module)
    with all_or_nothing(model):
        if new_recipe is None:
            if converted:
                restore_original_class(module)
            make_plain([module])
        elif computes_fp8(module):
            vars(module)["recipe"] = new_recipe
        else:
            set_class(module, class_in_fp8(module), recipe=new_recipe)
        if not experts:
            reset_scales(module)
        _update_plan(modules, fqn, new_recipe, reason)
        for _, weight in list(sharded_weights(module)):
            local_part(weight).gather_format.follow()


def _update_plan(modules: dict[str, nn.Module], fqn: str, recipe: Recipe | None, reason: str) -> None:
    """Update the plan that a report reads: that of the innermost module that has one."""
    for owner in sorted(modules, key=len, reverse=True):
        inside = owner == "" or fqn == owner or fqn.startswith(f"{owner}.")
        plan: Plan | None = vars(modules[owner]).get(PLAN_ATTRIBUTE)
        if inside and plan is not None:
            name = fqn[len(owner) :].lstrip(".")
            decision = plan.decisions.get(name, Decision(recipe=None, reason=reason))
            changed = replace(decision, recipe=recipe, reason=reason, gain=None)
            vars(modules[owner])[PLAN_ATTRIBUTE] = replace(plan, decisions={**plan.decisions, name: changed})
            return
