"""Change the recipe of one layer of a converted model between two steps, or move it out of FP8 and back.

The result equals that of `convert` with the changed plan: class, recipe and report. If FSDP gathers the weight in FP8,
it gathers it in the format of the new recipe from then on, or in high precision if there is none.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from octavo.activations.detect import original_class
from octavo.activations.modules import STORAGE_ATTRIBUTE
from octavo.nn.delayed import reset_history
from octavo.nn.equalized import reset_scales
from octavo.nn.experts import convert_experts, is_converted_experts, looks_like_experts, revert_experts
from octavo.nn.frozen import check_recipe_of_resident, make_plain
from octavo.nn.gathered import sharded_weights
from octavo.nn.linear_subclasses import change_since, class_fits, fp8_class, is_converted, restore_original_class
from octavo.nn.report import PLAN_ATTRIBUTE
from octavo.nn.select import checked_weight, obstacle
from octavo.numerics.names import nearest
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.runtime.swap import all_or_nothing, become
from octavo.runtime.torch_compat import local_part


def change_recipe(model: nn.Module, fqn: str, recipe: str | Recipe | None, *, reason: str) -> None:
    """Change the recipe of a linear, or of experts, of a converted model, from its next forward on.

    Call it on every rank, with the same arguments, and not between a forward and its backward.

    Args:
        model: The model that `convert` was called with, sharded or not; or a part of it.
        fqn: Name of the linear in `model`.
        recipe: The new recipe, or None for the dtype of its weight: a weight that is resident in FP8 becomes plain,
            with the FP8 values.
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
    module: Any = aliases[fqn]
    fqn = next(name for name, other in modules.items() if other is module)  # the name that a report lists
    new_recipe = None if recipe is None else get_recipe(recipe)
    experts, converted = looks_like_experts(module), is_converted(module) or is_converted_experts(module)
    if not converted:
        if (why := obstacle(module)) is not None:
            raise ValueError(f"change_recipe: {fqn!r} cannot be converted: {why}")
    elif experts or new_recipe is None or not class_fits(module, new_recipe):
        if (why := change_since(module)) is not None:
            raise ValueError(f"change_recipe: {fqn or 'the model'!r} {why}. The model was left as it was")
    if experts and new_recipe is not None and new_recipe.layer_state:
        raise ValueError(
            f"change_recipe: {fqn!r} are experts, which do not keep {new_recipe.layer_state}: use 'rowwise'"
        )
    check_recipe_of_resident(fqn, module, new_recipe)
    checked_weight(fqn, module)
    with all_or_nothing(model):
        if experts:
            storage, keep_weights = vars(module).get(STORAGE_ATTRIBUTE), getattr(module, "keep_weights", False)
            revert_experts(module)
            if new_recipe is not None:
                convert_experts(module, new_recipe, storage, keep_weights)
            else:
                make_plain([module])
        elif new_recipe is None:
            if is_converted(module):
                restore_original_class(module)
                make_plain([module])
        elif is_converted(module) and class_fits(module, new_recipe):
            vars(module)["recipe"] = new_recipe
        else:
            become(module, fp8_class(original_class(module), new_recipe), recipe=new_recipe)
        if not experts:
            reset_history(module)
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
