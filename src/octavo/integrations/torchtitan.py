"""FP8 in torchtitan: a converter for its model configs, which is also an override for its command line.

The converter builds the model once on the meta device, lets `octavo.convert` decide there, and replaces each
`Linear.Config` that gets a recipe. Experts compute in FP8 through `GroupedExperts._grouped_mm`.
"""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.experts import grouped_linear
from octavo.nn.filters import layers_of, names_of, of_precision
from octavo.nn.linear_subclasses import fp8_class
from octavo.nn.report import PLAN_ATTRIBUTE
from octavo.numerics.plan import Plan
from octavo.numerics.precision import AUTO, Precision
from octavo.numerics.recipe import DEFAULT, get_recipe
from octavo.numerics.suggestions import listed
from octavo.planner.auto_convert import convert
from octavo.runtime.extras import needs_extras

with needs_extras("octavo.integrations.torchtitan", "pip install torchtitan"):
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.config import derive, override
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.protocols.model import BaseModel
    from torchtitan.tools.logging import logger


class Fp8Converter(QuantizationConverter):
    """Replace configs of linears and experts by configs that build them in FP8.

    Args:
        config: Which layers, and how.

    Raises:
        ValueError: For an unknown recipe, one that keeps a state, or numbers below 0; in `convert`, if all stays bf16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """Fields of `octavo.Precision` with the same meaning; names are torchtitan's, as `layers.0.feed_forward.w1`."""

        recipe: str = DEFAULT.name
        """A recipe of `octavo.RECIPES`, or "auto": on a GPU the fastest of each layer by predicted cost."""
        skip: list[str] = field(default_factory=list)
        """Name patterns, as in `fnmatch`, of modules that stay in high precision."""
        only: list[str] = field(default_factory=list)
        """Name patterns of the layers to convert; empty for all."""
        skip_first: int = 0
        """Blocks at the beginning of the model that stay in high precision."""
        skip_last: int = 0
        """The same at its end."""
        min_features: int = 0
        """Smallest in_features and out_features of a layer that is converted."""
        experts: bool = True
        """Whether the experts of mixtures compute in FP8."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.precision = Precision(
            recipe=config.recipe, skip=tuple(config.skip), only=tuple(config.only), skip_first=config.skip_first,
            skip_last=config.skip_last, min_features=config.min_features,
        )  # fmt: skip
        if config.recipe != AUTO and get_recipe(config.recipe).equalization:
            raise ValueError(
                f"recipe {config.recipe!r} keeps channel scales, which torchtitan's checkpoints would lose: use "
                "'rowwise'"
            )

    def convert(self, model_config: Any) -> Any:
        """Replace configs in a model's tree, and return its root."""
        with torch.device("meta"):
            model = model_config.build()
        plan = self._plan(model)
        places = {fqn: place for fqn, *place in model_config.traverse(Linear.Config)}
        done = [fqn for fqn in plan.converted if fqn in places]
        for fqn in done:
            cfg, parent, attribute = places[fqn]
            recipe = plan[fqn].recipe
            assert recipe is not None
            new = derive(cfg, _fp8_linear(type(cfg)._owner).Config, recipe=recipe.name)
            model_config = _put(new, parent, attribute, model_config)
        expert_names = self._convert_experts(model_config, model)
        if not done and not expert_names:
            reasons = {decision.reason for decision in plan.decisions.values()}
            raise ValueError(f"no layer would be converted, so the model would train without FP8: {reasons}")
        for text in self._summary(plan, done, expert_names):
            logger.info(text)
        return model_config

    def _plan(self, model: nn.Module) -> Plan:
        """Decide about the linears of a model, which is converted for that; a model of experts alone has none."""
        if not any(isinstance(module, nn.Linear) for module in model.modules()):
            return Plan({})
        converted = convert(model, precision=self.precision, verbose=False)
        plan: Plan = vars(converted)[PLAN_ATTRIBUTE]
        return plan

    def _convert_experts(self, model_config: Any, model: nn.Module) -> list[str]:
        """Replace the configs of experts that the settings select, and return their names."""
        if not self.config.experts:
            return []
        modules, names = dict(model.named_modules()), names_of(model)
        places = {fqn: place for fqn, *place in model_config.traverse(GroupedExperts.Config) if fqn in modules}
        layers = layers_of(model, [modules[fqn] for fqn in places], [])
        rule = of_precision(replace(self.precision, min_features=0))
        done = []
        for fqn, (cfg, parent, attribute) in places.items():
            skipped = any(fnmatchcase(name, pattern) for name in names[modules[fqn]] for pattern in self.precision.skip)
            excluded = rule is not None and not rule.match(layers[fqn])[0]
            if skipped or excluded or min(cfg.dim, cfg.hidden_dim) < self.precision.min_features:
                continue
            owner = type(cfg)._owner
            if owner._grouped_mm is not GroupedExperts._grouped_mm:
                logger.warning(f"octavo: {fqn} stays in high precision: {owner.__name__} has products of its own")
                continue
            recipe = DEFAULT.name if self.config.recipe == AUTO else self.config.recipe
            _put(derive(cfg, _fp8_experts(owner).Config, recipe=recipe), parent, attribute, None)
            done.append(fqn)
        return done

    def _summary(self, plan: Plan, done: list[str], expert_names: list[str]) -> list[str]:
        recipes = sorted({str(row.recipe) for row in plan.rows if row.name in done} or {self.config.recipe})
        text = f"octavo: {len(done)} of {len(plan)} linear layers compute in FP8 ({', '.join(recipes)})"
        text += f", and {len(expert_names)} modules of experts" if expert_names else ""
        why: dict[str, list[str]] = {}
        for row in plan.rows:
            if row.name not in done:
                reason = "its module has no Linear.Config in the model's config" if row.converted else row.reason
                why.setdefault(reason, []).append(row.name)
        return [text, *(f"octavo: in high precision: {listed(names)}: {reason}" for reason, names in why.items())]


@override(target=BaseModel.Config, description="Octavo: linears and experts in FP8")
def fp8(cfg: Any, **settings: Any) -> Any:
    """Convert a model's config from torchtitan's command line; `settings` are the fields of `Fp8Converter.Config`."""
    return Fp8Converter.Config(**settings).build().convert(cfg)


def _put(new: Any, parent: Any, attribute: Any, root: Any) -> Any:
    """Set a config in its parent, and return the root of the tree."""
    if parent is None:
        return new
    if isinstance(parent, list):
        parent[attribute] = new
    else:
        setattr(parent, attribute, new)
    return root


@cache
def _fp8_linear(owner: Any) -> Any:
    linear: Any = fp8_class(owner)

    class Fp8Linear(linear):
        octavo_original = owner
        __reduce_ex__ = object.__reduce_ex__  # a copy is of its own class: LoRA makes subclasses

        @dataclass(kw_only=True, slots=True)
        class Config(owner.Config):
            recipe: str = DEFAULT.name

        def __init__(self, config: Any) -> None:
            owner.__init__(self, config)
            self.recipe = get_recipe(config.recipe)

    Fp8Linear.__name__ = Fp8Linear.__qualname__ = f"Fp8{owner.__name__}"
    return Fp8Linear


@cache
def _fp8_experts(owner: Any) -> Any:
    class Fp8Experts(owner):
        @dataclass(kw_only=True, slots=True)
        class Config(owner.Config):
            recipe: str = DEFAULT.name

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.recipe = get_recipe(config.recipe)

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            return grouped_linear(A, B_t.transpose(-2, -1), None, offs, self.recipe)

        def extra_repr(self) -> str:
            return f"recipe={self.recipe.name}"

    Fp8Experts.__name__ = Fp8Experts.__qualname__ = f"Fp8{owner.__name__}"
    return Fp8Experts


__all__ = ["Fp8Converter", "fp8"]
