"""Build the default plan: the modules to convert, with reasons.

Vocabulary heads stay in high precision: their output feeds the softmax directly, and each row of their weight is the
target of one token in thousands. So do narrow linears: quantizing their wide side takes longer than FP8 saves.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from octavo.activations.candidates import fusible, storable
from octavo.nn.experts import describe_experts, experts_obstacle, looks_like_experts
from octavo.nn.filters import Filter, FilterLike, Layer, as_filter, layers_of, names_of, sizes
from octavo.nn.linear_like import LinearLike
from octavo.nn.linear_subclasses import class_obstacle, computes_linear
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.recipe import Recipe, unequalized
from octavo.numerics.suggestions import grouped, nearest
from octavo.runtime.linear_kinds import kind_of_class
from octavo.runtime.swap import has_own_forward, is_fully_sharded

NARROW = 64  # Largest in_features or out_features of a narrow linear
# A linear is narrow only if its other size is at least this many times as large, or it belongs to a LoRA adapter
NARROW_RATIO = 8
HEAD_NAMES = ("lm_head", "head", "output", "embed_out", "unembed", "unembedding")
STORED_HOW = {  # Reasons in `report` for modules that store their activations in FP8 or run fused kernels
    "norm": "norm: input stored in FP8, output recomputed",
    "glu": "gated MLP: gate and up stored in FP8, their product recomputed",
    "activation": "activation: input stored in FP8, output recomputed",
    "saved_tensors": "own forward: inputs of products, activations and gates stored in FP8, all else exactly",
    "fused_norm": "norm: one kernel in eager mode, which saves its input and a statistic of each row",
    "fused_glu": "gated MLP: act(gate)·up is one kernel in eager mode, of 16 bits, which saves gate and up",
}
_SKIPPED = "skipped by pattern"
HEAD_REASON = "vocabulary head"  # Start of the reason why a vocabulary head stays in high precision


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, converted or not: of a listed class, or a subclass of `nn.Linear`."""
    return isinstance(module, nn.Linear | LinearLike) or kind_of_class(type(module)) is not None


def is_layer(module: nn.Module) -> bool:
    return is_linear(module) or looks_like_experts(module)


def own_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the weight of a module if it is its own parameter; a parametrized one may have side effects."""
    return module._parameters.get("weight")


def default_plan(
    model: nn.Module, recipe: Recipe | None, skip: Sequence[str] = (), filter: FilterLike | None = None,
    activations: str = "bf16", recipes: Mapping[FilterLike, Recipe] | None = None,
) -> Plan:  # fmt: skip
    """Decide for every linear and experts, and for every module whose activations could be stored or fused."""
    if isinstance(skip, str):
        raise TypeError(f"skip is a list of name patterns; got the string {skip!r}: write skip=[{skip!r}]")
    heads = _vocabulary_heads(model)
    names = names_of(model)
    chosen = None if filter is None else as_filter(filter)
    rules = [(as_filter(rule), rule_recipe) for rule, rule_recipe in (recipes or {}).items()]
    used = [rule for rule in (chosen, *(rule for rule, _ in rules)) if rule is not None]
    linears = [module for module in model.modules() if is_layer(module)]
    counted = [m for m in linears if is_linear(m) and m not in heads and obstacle(m) is None]
    layers = layers_of(model, linears, counted)
    by_module = grouped((layer.module, layer) for layer in layers.values())
    mismatches = [text for rule in used for text in rule.warn(list(layers.values()))]
    decisions = {}
    matched: set[str] = set()
    storages = {} if activations == "bf16" else (fusible if activations == "fused" else storable)(model)
    for fqn, module in model.named_modules():
        storage = None if is_linear(module) else storages.get(fqn)
        if storage is None and not is_layer(module):
            continue
        kind = None if storage is None or isinstance(storage, str) else storage.kind
        pattern = next((p for p in skip if any(fnmatchcase(name, p) for name in names[module])), None)
        if pattern is not None:
            matched.add(pattern)
            decisions[fqn] = Decision(recipe=None, reason=f"{_SKIPPED} {pattern!r}")
        elif storage is not None and not looks_like_experts(module):
            reason = STORED_HOW[kind] if kind is not None else f"{storage}: stays as it is"
            decisions[fqn] = Decision(recipe=None, reason=reason, activation_storage=kind)
        elif recipe is None:
            decisions[fqn] = Decision(recipe=None, reason="precision level bf16", activation_storage=kind)
        else:
            decision = _decide(by_module[module], recipe, heads.get(module), chosen, rules)
            decisions[fqn] = replace(decision, activation_storage=kind)
    for pattern in (p for p in skip if p not in matched):
        hint = nearest(pattern.strip("*."), {part for fqn in decisions for part in fqn.split(".")})
        mismatches.append(f"skip pattern {pattern!r} matches no linear layer{hint}")
    for mismatch in mismatches:
        warnings.warn(mismatch, stacklevel=_caller_level())
    return Plan(decisions, activations)


def _caller_level() -> int:
    """Return the `stacklevel` of the caller outside of Octavo, for a warning."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("octavo."):
        frame, level = frame.f_back, level + 1
    return level


def linears_with_exact_inputs(model: nn.Module, plan: Plan) -> list[str]:
    """Return names of linears whose inputs are saved exactly: skipped ones, heads, and those of their own behaviour."""
    heads, modules = _vocabulary_heads(model), dict(model.named_modules())
    return [
        name
        for name, decision in plan.decisions.items()
        if is_linear(modules[name]) and decision.recipe is None
        and (decision.reason.startswith(_SKIPPED) or modules[name] in heads or obstacle(modules[name]) is not None)
    ]  # fmt: skip


def obstacle(module: nn.Module) -> str | None:
    """Return why a module can never be converted, or None."""
    if is_layer(module) and is_fully_sharded(module):
        return "sharded by fully_shard already: convert before sharding"
    own = experts_obstacle(module) if looks_like_experts(module) else _linear_obstacle(module)
    if (reason := own or class_obstacle(module)) is not None:
        return reason
    if has_own_forward(module) and "_hf_hook" in vars(module):
        return (
            "accelerate's hook calls the forward that it had when the model was dispatched (device_map): call "
            "accelerate.hooks.remove_hook_from_submodules(model), then octavo.convert, then accelerate.dispatch_model"
        )
    if has_own_forward(module):
        return "its forward was replaced on the instance, so it would not be used: convert before that is done"
    return None


def _linear_obstacle(module: nn.Module) -> str | None:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if not is_linear(module):
        return f"{kind} is not a linear layer"
    if isinstance(module, nn.LazyLinear):
        return "not initialized: its shape is known after its first forward; convert then"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it, so its forward would not be used"
    if (quantized := _quantized_by(module)) is not None:
        return quantized
    if parametrize.is_parametrized(module):
        return "it is parametrized: convert the model before the parametrization is registered"
    if kind_of_class(type(module)) is None and not computes_linear(module):
        return f"{kind} is a subclass of nn.Linear with behaviour of its own; use nn.Linear there to convert it"
    return None


def _quantized_by(module: nn.Module) -> str | None:
    """Return why a linear that another library quantized stays as it is, and what to do; None for others."""
    weight = own_weight(module)
    libraries = {owner.__module__.partition(".")[0] for owner in (type(module), type(weight))}
    if type(module).__module__.startswith("torch.ao."):
        return f"{type(module).__name__} quantizes its weight (torch.ao): to train it in FP8, convert the model before"
    packed = kind_of_class(type(module)) is None and weight is not None and weight.dtype in (torch.uint8, torch.int8)
    if packed or libraries & {"bitsandbytes", "torchao"}:
        what = type(module if type(weight) is nn.Parameter else weight).__name__
        return (
            f"its weight is quantized ({what}): load the model without quantization to convert it; frozen='fp8' keeps "
            "frozen weights at 1 byte per parameter"
        )
    return None


def is_adapter(fqn: str) -> bool:
    """Return whether a layer belongs to a LoRA adapter, by PEFT's names."""
    return any(part.lower().startswith("lora_") for part in fqn.split("."))


def _narrow(layer: Layer) -> str | None:
    """Return why a linear is too narrow to gain from FP8, or None; always None for a linear that is the whole model."""
    in_features, out_features = sizes(layer.module)
    least, most = min(in_features, out_features), max(in_features, out_features)
    adapter = is_adapter(layer.fqn)
    if not layer.fqn or least > NARROW or not (adapter or most >= NARROW_RATIO * least):
        return None
    kind = "adapter of low rank" if adapter else "narrow"
    return f"{kind}: {in_features} → {out_features} features do not gain from FP8 by themselves; kept in high precision"


def checked_weight(fqn: str, module: nn.Module) -> Tensor:
    """Return the weight of a linear, or one of experts; raise TypeError if its dtype cannot be quantized."""
    weight = module.down_proj if looks_like_experts(module) else module.weight
    assert isinstance(weight, Tensor)
    if weight.dtype not in SUPPORTED_DTYPES:
        supported = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES)
        raise TypeError(
            f"cannot convert {fqn or 'the model'}: its weight is {weight.dtype}; FP8 training starts from {supported}. "
            f"Cast the weight, or leave the layer out with skip=[{fqn!r}]. The model was left as it was"
        )
    return weight


def _decide(
    names: Sequence[Layer], recipe: Recipe, head: str | None, chosen: Filter | None,
    rules: Sequence[tuple[Filter, Recipe]],
) -> Decision:  # fmt: skip
    """Decide one linear, given a `Layer` for each of its names: convert it if no name excludes it."""
    first = names[0]
    if (reason := obstacle(first.module)) is not None:
        return Decision(recipe=None, reason=reason)
    if head is not None:
        return Decision(recipe=None, reason=f"{HEAD_REASON} ({head}) kept in high precision")
    for layer in names:
        if (narrow := _narrow(layer)) is not None:
            return Decision(recipe=None, reason=narrow + _as_named(layer, first))
    reason, by_filter = "linear", False
    if chosen is not None:
        results = [chosen.match(layer) for layer in names]
        for layer, (selected, fact) in zip(names, results, strict=True):
            if not selected:
                reason = _with_fact("excluded by filter", fact) + _as_named(layer, first)
                return Decision(recipe=None, reason=reason)
        reason = _with_fact(reason, results[0].reason)
    for layer, (rule, other) in ((layer, pair) for pair in rules for layer in names):
        matches, fact = rule.match(layer)
        if matches:
            by_filter, recipe = True, other
            reason = _with_fact(f"{reason}; {other.name}", fact) + _as_named(layer, first)
            break
    own = own_weight(first.module)
    if own is not None and own.dtype == torch.float64:
        return Decision(recipe=None, reason="float64 kept: FP8 training starts from float32, bfloat16 or float16")
    weight = checked_weight(first.fqn, first.module)
    if not looks_like_experts(first.module):
        return Decision(recipe=recipe, reason=reason + _padding(weight), by_filter=by_filter)
    note = "; without channel equalization, for which experts have no scales" if recipe.equalization else ""
    recipe = unequalized(recipe)
    return Decision(recipe=recipe, reason=describe_experts(first.module, recipe) + reason.removeprefix("linear") + note)


def _as_named(layer: Layer, first: Layer) -> str:
    return "" if layer is first else f" (as {layer.fqn!r})"


def _with_fact(reason: str, fact: str) -> str:
    return f"{reason}: {fact}" if fact else reason


def _padding(weight: Tensor) -> str:
    rows, columns = weight.shape
    padded = [-(-size // 16) * 16 for size in (rows, columns)]
    if padded == [rows, columns] or rows * columns == 0:
        return ""
    more = padded[0] * padded[1] / (rows * columns) - 1
    return f", padded inside from {rows}×{columns} to {padded[0]}×{padded[1]} (+{more:.0%} arithmetic)"


def _vocabulary_heads(model: nn.Module) -> dict[nn.Module, str]:
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tied = {id(weight) for m in embeddings if (weight := own_weight(m)) is not None}
    rows = {m.num_embeddings for m in embeddings}
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    declared = set(head.modules()) if isinstance(head, nn.Module) else set()
    heads = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if not is_linear(module):
            continue
        *parents, name = fqn.split(".")
        if id(own_weight(module)) in tied:
            heads[module] = "tied to an embedding"
        elif module in declared or name == "lm_head" or ("lm_head" in parents and sizes(module)[1] in rows):
            heads[module] = "the model's output embedding"  # or one of the parts into which PEFT splits it
        elif name in HEAD_NAMES and isinstance(module, nn.Linear) and module.out_features in rows:
            heads[module] = f"{module.out_features} outputs, as many as an embedding has rows"
    return heads
