"""Choose the frozen layers whose weights become resident in FP8, make them so, and undo it; see `octavo.nn.resident`.

Before `get_peft_model` nothing is frozen: `octavo.convert(model, frozen="fp8")` then freezes the linears and experts
whose weights become resident. If some of them are frozen already, as after `get_peft_model`, only these become
resident, and the others train as usual. Adapters, vocabulary heads, embeddings and norms keep their dtype.

Conversion quantizes every weight before it replaces the first, so that an error leaves the model unchanged: a model
already in memory takes 3 bytes per parameter meanwhile. `octavo.nn.load_frozen` never holds more than one tensor in
high precision.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.experts import STACKED, looks_like_experts
from octavo.nn.linear_subclasses import is_transposed
from octavo.nn.resident import ResidentShard, ResidentWeight
from octavo.nn.resident_state import resident_weights
from octavo.nn.select import is_adapter
from octavo.numerics.names import nearest
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.precision import AUTO
from octavo.numerics.recipe import RECIPES, Recipe, unequalized, weight_only
from octavo.numerics.spec import ADAPTIVE, MessageSpec
from octavo.runtime.torch_compat import FakeTensor

FROZEN = ("bf16", "fp8")
_MLP_WORDS = ("mlp", "ffn", "feedforward", "expert")
"""What names of MLPs contain, in lower case without underscores."""


def check_frozen(frozen: str) -> None:
    """Raise ValueError unless `frozen` is a valid argument of `octavo.convert`."""
    if frozen not in FROZEN:
        raise ValueError(f"frozen is 'bf16' or 'fp8'; got {frozen!r}{nearest(str(frozen), FROZEN)}")


def check_weight_only_request(weight_only: Sequence[str], frozen: str, plan: Plan | None) -> None:
    """Raise TypeError or ValueError for an invalid `weight_only` of `octavo.convert`, and for name patterns without
    frozen="fp8", or with a plan.
    """
    if isinstance(weight_only, str):
        if weight_only == AUTO:
            return
        raise TypeError(
            f"weight_only is {AUTO!r} or a list of name patterns; got the string {weight_only!r}: write "
            f"[{weight_only!r}]"
        )
    if other := [pattern for pattern in weight_only if not isinstance(pattern, str)]:
        raise TypeError(f"weight_only is a list of name patterns, such as ['*.v_proj']; got {other[0]!r} in it")
    if weight_only and (frozen != "fp8" or plan is not None):
        raise ValueError(
            f"weight_only = {weight_only!r} is for weights that frozen='fp8' stores: "
            + ("add that" if plan is None else "a plan has the recipe of each layer, so leave it out")
        )


def resident_plan(plan: Plan, modules: Mapping[str, nn.Module]) -> tuple[Plan, dict[str, MessageSpec]]:
    """Choose the layers of a plan whose weights become resident in FP8."""
    changed: dict[str, Decision] = {}
    specs: dict[str, MessageSpec] = {}
    layers, shared = _layers_to_store(plan, modules)
    for fqn in plan.converted:
        decision, module = plan[fqn], modules[fqn]
        assert decision.recipe is not None
        if is_adapter(fqn):
            changed[fqn] = Decision(recipe=None, reason="adapter kept in high precision, beside a base in FP8")
        elif fqn in layers:
            if module in shared:
                check_weight_only(fqn, decision.recipe, f"its weight is not resident: {shared[module]}")
                note = f"; not resident: {shared[module]}"
                changed[fqn] = replace(decision, reason=decision.reason + note)
                continue
            recipe = unequalized(decision.recipe)
            note = (
                "; without channel equalization, which a stored weight cannot follow"
                if recipe != decision.recipe
                else ""
            )
            specs[fqn] = _checked_spec(fqn, module, recipe)
            changed[fqn] = replace(decision, recipe=recipe, reason=decision.reason + note)
        else:
            check_weight_only(fqn, decision.recipe, "its weight is trained")
    if not specs:
        reasons = "; ".join(sorted({decision.reason for decision in changed.values()})) or "no linear is converted"
        raise ValueError(f"frozen='fp8': no weight would be resident in FP8: {reasons}. The model was left as it was")
    return replace(plan, decisions={**plan.decisions, **changed}), specs


def _layers_to_store(plan: Plan, modules: Mapping[str, nn.Module]) -> tuple[list[str], dict[nn.Module, str]]:
    """Return the frozen layers of a plan, all if none is frozen; and those of their modules that share a weight with
    others, with the reason why it cannot be resident.
    """
    layers = [fqn for fqn in plan.converted if not is_adapter(fqn)]
    frozen = [fqn for fqn in layers if not any(p.requires_grad for p in _weights(modules[fqn]))]
    return frozen or layers, _shared_with_others({modules[fqn] for fqn in frozen or layers}, modules)


def with_weight_only(plan: Plan, patterns: Sequence[str], model: nn.Module) -> Plan:
    """Return a plan whose layers with a matching name multiply their FP8 weights in the dtype of X."""
    decisions, matched, modules = dict(plan.decisions), set(), dict(model.named_modules())
    layers, shared = _layers_to_store(plan, modules)
    stored = {fqn for fqn in layers if modules[fqn] not in shared}
    others = {id(w) for fqn in stored if not _is_by_default(plan, fqn, model) for w in _weights(modules[fqn])}
    for fqn in plan.converted:
        decision, parts = plan[fqn], fqn.split(".")
        recipe, names = decision.recipe, [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if recipe is None or is_adapter(fqn):
            continue
        if patterns == AUTO:
            ties = any(id(weight) in others for weight in _weights(modules[fqn]))
            chosen = fqn in stored and _is_by_default(plan, fqn, model) and not ties
            why = "weight only, as of attention"
        else:
            hits = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
            matched.update(hits)
            chosen, why = bool(hits), "weight only"
        if chosen and not recipe.weight_only:
            reason = f"{decision.reason}; {why}: products in the dtype of the input"
            decisions[fqn] = replace(decision, recipe=weight_only(unequalized(recipe)), reason=reason)
    if patterns != AUTO and (unmatched := [pattern for pattern in patterns if pattern not in matched]):
        hint = nearest(unmatched[0].strip("*."), {part for fqn in plan.converted for part in fqn.split(".")})
        raise ValueError(f"weight_only: {unmatched[0]!r} matches no layer that computes in FP8{hint}")
    return replace(plan, decisions=decisions)


def _is_by_default(plan: Plan, fqn: str, model: nn.Module) -> bool:
    """Return whether a layer is weight-only under `"auto"` if its weight is its own."""
    decision, recipe = plan[fqn], plan[fqn].recipe
    possible = recipe is not None and not recipe.history and recipe.w == recipe.dgrad_w
    return possible and not decision.by_filter and _in_attention(model, fqn)


def _in_attention(model: nn.Module, fqn: str) -> bool:
    """Return whether a layer belongs to attention: of the modules that contain it, innermost first, and the class of
    its parent, the first named after either is named after attention and not after an MLP, as in `attn_pool.mlp.fc1`.
    """
    *parents, _ = fqn.split(".")
    names = [type(model.get_submodule(".".join(parents))).__name__, *reversed(parents)] if fqn else []
    for name in (name.lower().replace("_", "") for name in names):
        if any(word in name for word in _MLP_WORDS):
            return False
        if "attn" in name or "attention" in name:
            return True
    return False


def check_weight_only(fqn: str, recipe: Recipe | None, why: str) -> None:
    """Raise ValueError if a recipe needs a weight that is resident in FP8; `why` is the reason that it is not."""
    if recipe is not None and recipe.weight_only:
        raise ValueError(
            f"recipe {recipe.name!r} of {fqn!r} needs a weight that is resident in FP8, but {why}. "
            "octavo.convert(model, frozen='fp8', weight_only=[…]) makes such layers. The model was left as it was"
        )


@torch.inference_mode(False)  # inference tensors could not be saved for backward
def resident_parameters(
    modules: Mapping[str, nn.Module], specs: Mapping[str, MessageSpec]
) -> dict[nn.Module, dict[str, nn.Parameter]]:
    """Quantize the weights of layers; a weight that several layers share once."""
    quantized: dict[int, Any] = {}
    parameters: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for fqn, spec in specs.items():
        for name in weight_names(modules[fqn]):
            weight: Any = modules[fqn]._parameters[name]
            if id(weight) not in quantized:
                parameter: Any = nn.Parameter(ResidentWeight.quantized(weight, spec), requires_grad=False)
                quantized[id(weight)] = parameter
            if quantized[id(weight)].spec != spec:
                raise ValueError(
                    f"frozen='fp8': {fqn!r} shares its weight with a layer of another recipe, and one FP8 weight has "
                    "one format: convert both in one recipe, both with weight_only or neither"
                )
            parameters.setdefault(modules[fqn], {})[name] = quantized[id(weight)]
    return parameters


@torch.inference_mode(False)
def make_plain(layers: Iterable[nn.Module]) -> None:
    """Replace resident weights by frozen parameters with the FP8 values, in the dtype of their interface."""
    plain: dict[int, nn.Parameter] = {}
    for layer in layers:
        for name, weight in list(resident_weights(layer)):
            if id(weight) not in plain:
                plain[id(weight)] = nn.Parameter(weight.dequantized(weight.dtype), requires_grad=False)
            layer._parameters[name] = plain[id(weight)]


def sharded_problem(layer: nn.Module) -> str | None:
    """Return why resident weights of a layer cannot become plain, or None."""
    if any(isinstance(weight, ResidentShard) for _, weight in resident_weights(layer)):
        return "is resident in FP8 and sharded: its weights become plain only before fully_shard or parallelize"
    return None


def check_recipe_of_resident(fqn: str, layer: nn.Module, recipe: Recipe | None) -> None:
    """Raise ValueError if a layer's weight is resident in FP8 and a recipe needs another form of it."""
    _, weight = next(resident_weights(layer), (None, None))
    if weight is None:
        check_weight_only(fqn, recipe, "its weight is plain")
        return
    if recipe is None:
        if (why := sharded_problem(layer)) is not None:
            raise ValueError(f"change_recipe: {fqn!r} {why}")
        return
    if recipe.weight_only and not looks_like_experts(layer):  # reads any
        return
    spec = weight.spec.transposed if stores_transposed(layer) else weight.spec
    if recipe.equalization or recipe.w != spec or recipe.dgrad_w != spec:
        fitting = [r.name for r in RECIPES.values() if r.w == r.dgrad_w == spec and not r.equalization]
        others = f"use one of {', '.join(fitting)}, or" if fitting else "its products are weight-only; use"
        raise ValueError(
            f"change_recipe: the weight of {fqn!r} is resident in FP8 as {spec}, which {recipe.name!r} cannot read: "
            f"{others} None for the FP8 values in {weight.dtype}"
        )


def weight_names(layer: nn.Module) -> list[str]:
    """Return the names of the parameters of a layer that its products multiply by."""
    names = STACKED if looks_like_experts(layer) else ("weight",)
    return [name for name in names if layer._parameters.get(name) is not None]


def _weights(layer: nn.Module) -> list[Tensor]:
    """Return the matrices that a layer trains; several of experts, or if its weight is parametrized."""
    names = weight_names(layer)
    return [layer.get_parameter(name) for name in names] or [p for p in layer.parameters() if p.ndim >= 2]


def _shared_with_others(layers: set[nn.Module], modules: Mapping[str, nn.Module]) -> dict[nn.Module, str]:
    """Return layers whose weight must keep its dtype, with the reason."""
    owners: dict[int, str] = {}
    for fqn, module in modules.items():
        own = weight_names(module) if module in layers else []
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in own:
                owners[id(parameter)] = f"{fqn}.{name}".lstrip(".")
    reasons = {}
    for layer in layers:
        names = weight_names(layer)
        if not names:
            reasons[layer] = "its weight is computed from others"
        for name in names:
            if (other := owners.get(id(layer._parameters[name]))) is not None:
                reasons[layer] = f"its weight is also {other!r}, which reads it in high precision"
    return reasons


def _checked_spec(fqn: str, module: nn.Module, recipe: Recipe) -> MessageSpec:
    """Return the format of a layer's weight as stored: adaptive FP8 if it is widened for its products."""
    if recipe.w != recipe.dgrad_w:
        fitting = ", ".join(r.name for r in RECIPES.values() if r.w == r.dgrad_w and not r.equalization)
        raise ValueError(
            f"frozen='fp8' stores one FP8 form of each weight, but recipe {recipe.name!r} of {fqn!r} needs one for "
            f"forward and another for backward: use one of {fitting}. The model was left as it was"
        )
    for weight in _weights(module):
        if type(weight) not in (nn.Parameter, FakeTensor) or hasattr(weight, "placements"):
            raise ValueError(
                f"frozen='fp8' takes plain parameters; {fqn!r} has a {type(weight).__name__}: convert before the model "
                "is sharded or quantized by another library, or leave it out with skip=[…]. The model was left as it "
                "was"
            )
    if recipe.weight_only and not looks_like_experts(module):
        return ADAPTIVE
    return recipe.w.transposed if stores_transposed(module) else recipe.w


def stores_transposed(layer: nn.Module) -> bool:
    """Return whether a layer stores its weights as [in, out]."""
    return bool(getattr(layer, "is_transposed", False)) if looks_like_experts(layer) else is_transposed(layer)
