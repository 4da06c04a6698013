"""One layer of a converted model, moved to another recipe or out of FP8 and back, between two steps.

The model afterwards is the one that `convert` makes of the plan with that decision changed: class, recipe and report.
A weight that FSDP gathers in FP8 travels from then on in the form that its layer's new recipe reads, or in high
precision where there is none.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from octavo.nn.delayed import forget
from octavo.nn.gathered import ShardedWeight
from octavo.nn.linear_subclasses import change_since, fp8_class, make_exact
from octavo.nn.report import PLAN_ATTRIBUTE, is_converted
from octavo.nn.select import checked_weight, obstacle
from octavo.numerics.names import nearest
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.runtime.swap import all_or_nothing, become


def change_recipe(model: nn.Module, fqn: str, recipe: str | Recipe | None, *, reason: str) -> None:
    """Let a linear of a converted model compute in another recipe from its next forward on.

    On every rank alike where several train the model. Not between a forward and its backward.

    Args:
        model: The model that `convert` was called with, sharded or not; or a part of it.
        fqn: Name of the linear in `model`.
        recipe: What it computes in, or None for the dtype of its weight.
        reason: What `octavo.report` shows.

    Raises:
        ValueError: For a name that is no linear of this model, an unknown recipe, or a linear that keeps its class: one
            that is sharded by itself, or whose forward was replaced since it was converted. The model is as it was.
    """
    modules, aliases = dict(model.named_modules()), dict(model.named_modules(remove_duplicate=False))
    if fqn not in aliases:
        raise ValueError(f"change_recipe: this model has no module {fqn!r}{nearest(fqn, aliases)}")
    module: Any = aliases[fqn]
    fqn = next(name for name, each in modules.items() if each is module)  # the name that a report lists
    wanted = None if recipe is None else get_recipe(recipe)
    if not is_converted(module):
        if (why := obstacle(module)) is not None:
            raise ValueError(f"change_recipe: {fqn!r} cannot be converted: {why}")
    elif wanted is None and (why := change_since(module)) is not None:
        raise ValueError(f"change_recipe: {fqn or 'the model'!r} {why}. The model was left as it was")
    weight = checked_weight(fqn, module)
    with all_or_nothing(model):
        if wanted is None:
            if is_converted(module):
                make_exact(module)
        elif is_converted(module):
            vars(module)["recipe"] = wanted
        else:
            become(module, fp8_class(module), recipe=wanted)
        forget(module)
        _note(modules, fqn, wanted, reason)
        local = getattr(weight, "_local_tensor", None)
        if isinstance(local, ShardedWeight):
            local.gather_format.follow()


def _note(modules: dict[str, nn.Module], fqn: str, recipe: Recipe | None, reason: str) -> None:
    """Change the plan that a report reads: the one of the innermost module that has one."""
    for owner in sorted(modules, key=len, reverse=True):
        inside = owner == "" or fqn == owner or fqn.startswith(f"{owner}.")
        plan: Plan | None = vars(modules[owner]).get(PLAN_ATTRIBUTE)
        if inside and plan is not None:
            name = fqn[len(owner) :].lstrip(".")
            before = plan.decisions.get(name, Decision(recipe=None, reason=reason))
            changed = replace(before, recipe=recipe, reason=reason, gain=None)
            vars(modules[owner])[PLAN_ATTRIBUTE] = replace(plan, decisions={**plan.decisions, name: changed})
            return
