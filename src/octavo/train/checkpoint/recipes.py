"""The recipe of each converted layer in a checkpoint: what `octavo export` needs to write the FP8 values of training.

The configuration does not tell: with recipe "auto" they depend on the GPU, and the autopilot moves layers.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from octavo.nn import apply_plan, rule_plan
from octavo.nn.experts import is_converted_experts
from octavo.nn.linear_subclasses import is_converted
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.recipe import get_recipe


def recipes_of(model: nn.Module) -> dict[str, str]:
    """Return the name of the recipe of each converted layer, by the layer's name."""
    modules = model.named_modules()
    return {fqn: m.recipe.name for fqn, m in modules if is_converted(m) or is_converted_experts(m)}


def convert_as(model: nn.Module, recipes: Mapping[str, str]) -> None:
    """Convert a model to what `recipes_of` returned, in place. Raises ValueError for recipes of another model."""
    if recipes:
        decisions = {
            fqn: decision
            if decision.recipe is None
            else replace(decision, recipe=None, reason="in high precision in training")
            for fqn, decision in rule_plan(model).decisions.items()
        }
        in_fp8 = {fqn: Decision(recipe=get_recipe(name), reason="as in training") for fqn, name in recipes.items()}
        apply_plan(model, Plan(decisions | in_fp8, partial=True))
