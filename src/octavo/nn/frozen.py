"""Choose the frozen layers whose weights become resident in FP8, make them so, and undo it; see `octavo.nn.resident`.

If some linears or experts are frozen already, only these become resident; else all do, and are frozen.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from octavo.nn.experts import STACKED, looks_like_experts
from octavo.nn.linear_subclasses import is_transposed
from octavo.nn.report import check_module
from octavo.nn.resident import (
    SCALE_SUFFIX,
    ResidentShard,
    ResidentWeight,
    resident_weights,
    scale_as_stored,
    scale_of_stored,
)
from octavo.nn.select import is_adapter
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.precision import AUTO
from octavo.numerics.recipe import RECIPES, Recipe, unequalized, weight_only
from octavo.numerics.spec import ADAPTIVE, ROW, MessageSpec, QuantSpec
from octavo.numerics.suggestions import check_choice, listed, nearest
from octavo.runtime.extras import needs_extras
from octavo.runtime.swap import all_or_nothing
from octavo.runtime.torch_compat import FakeTensor


def check_frozen(frozen: str) -> None:
    check_choice("frozen", frozen, ("bf16", "fp8"))


def check_weight_only_request(weight_only: Sequence[str], frozen: str, plan: Plan | None) -> None:
    if isinstance(weight_only, str):
        if weight_only == AUTO:
            return
        what = f"{AUTO!r} or a list of name patterns; got the string {weight_only!r}: write [{weight_only!r}]"
        raise TypeError(f"weight_only is {what}")
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
            without = "; without channel equalization, which a stored weight cannot follow"
            note = without if recipe != decision.recipe else ""
            specs[fqn] = _checked_spec(fqn, module, recipe)
            changed[fqn] = replace(decision, recipe=recipe, reason=decision.reason + note)
        else:
            check_weight_only(fqn, decision.recipe, "its weight is trained")
    if not specs:
        reasons = "; ".join(sorted({decision.reason for decision in changed.values()})) or "no linear is converted"
        raise ValueError(f"frozen='fp8': no weight would be resident in FP8: {reasons}. The model was left as it was")
    return replace(plan, decisions={**plan.decisions, **changed}), specs


def _layers_to_store(plan: Plan, modules: Mapping[str, nn.Module]) -> tuple[list[str], dict[nn.Module, str]]:
    """Return the frozen layers of a plan, all if none is; and the modules whose weight cannot be resident, and why."""
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
    if recipe is None or recipe.w != recipe.dgrad_w or decision.by_filter:
        return False
    # Layers of attention are: of the modules that contain one, innermost first, and the class of its parent, the first
    # named after either is named after attention and not after an MLP, as in `attn_pool.mlp.fc1`.
    *parents, _ = fqn.split(".")
    names = [type(model.get_submodule(".".join(parents))).__name__, *reversed(parents)] if fqn else []
    for name in (name.lower().replace("_", "") for name in names):
        if any(word in name for word in ("mlp", "ffn", "feedforward", "expert")):
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
    return bool(getattr(layer, "is_transposed", False)) if looks_like_experts(layer) else is_transposed(layer)


def names_in_checkpoint(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model as `save_pretrained` names, splits and joins them; it has no public name."""
    # It would quantize weights anew that loading dequantized, or fail: such a model is taken for one never loaded.
    from transformers.core_model_loading import revert_weight_conversion

    loaded_by = vars(model).get("_weight_conversions")
    operations = [op for conversion in loaded_by or () for op in getattr(conversion, "operations", None) or ()]
    try:
        if any(getattr(op, "hf_quantizer", None) is not None for op in operations):
            model._weight_conversions = None
        converted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    finally:
        if loaded_by is not None:
            model._weight_conversions = loaded_by
    return converted


def parts_in_checkpoint(model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the parts of a tensor, as views of it, by their names in a published checkpoint."""
    # Experts, as an example: `mlp.experts.down_proj` [E,H,I] has E parts [H,I], `block_sparse_moe.experts.0.w2.weight`
    # to that of the last expert. To fill the parts is to fill the tensor.
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}
    try:
        with _Views():
            parts = names_in_checkpoint(model, {name: tensor})
    except (RuntimeError, ValueError):
        return {}
    own = tensor.untyped_storage()._cdata
    views = all(part.untyped_storage()._cdata == own for part in parts.values())
    return parts if views and sum(part.numel() for part in parts.values()) == tensor.numel() else {}


class _Views(TorchFunctionMode):
    """Lets `contiguous` return the view itself."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


# `load_frozen`: at any moment one tensor exists in high precision, besides those that stay in it. That of a layer's
# experts is the largest: published checkpoints store each expert by itself, and one by one they fill it.

M = TypeVar("M", bound=nn.Module)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Build modules with parameters on the meta device and buffers where they are made, as rotary frequencies.

    Under `torch.device("meta")` buffers that no checkpoint stores would have no values. Applies to all threads.

    Examples:
        >>> with octavo.nn.meta_parameters():
        ...     layer = torch.nn.Linear(64, 64)
        >>> layer.weight.device.type
        'meta'
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    with register_module_parameter_registration_hook(on_meta):
        yield


def load_frozen(model: M, path: str | Path, *, device: str | torch.device = "cpu") -> M:
    """Load safetensors into a model, tensor by tensor; weights that are resident in FP8 are quantized one by one.

    Args:
        model: After `octavo.convert(model, frozen="fp8")` and before `get_peft_model`. Parameters on the meta device
            are made on `device`, in their dtype; others are overwritten.
        path: A safetensors file, or a folder as `save_pretrained` writes it: `model.safetensors`, or the files of
            `model.safetensors.index.json`. Without either, all safetensors files of the folder. Names are those of
            `model.state_dict()`, or of the published checkpoints of a Transformers model, which store each expert by
            itself. A resident weight may be stored in high precision, or in FP8 with its scales, which it keeps,
            named `weight_scale`, or `weight_scale_inv` as in DeepSeek's layout.
        device: Where parameters on the meta device go. Buffers stay where they are: `model.to(device)` moves them.

    Raises:
        FileNotFoundError: If there is no safetensors file.
        ValueError: If a file is damaged, two files have a tensor of one name, tensors are missing or of another shape
            or format, or buffers on the meta device are in no file. Nothing was loaded then.

    Examples:
        >>> from safetensors.torch import save_file
        >>> save_file(torch.nn.Sequential(torch.nn.Linear(64, 64)).state_dict(), "base.safetensors")
        >>> with octavo.nn.meta_parameters():
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> model = octavo.convert(model, frozen="fp8")
        >>> octavo.nn.load_frozen(model, "base.safetensors")[0].weight
        ResidentWeight([64, 64], e4m3/row)
    """
    check_module("load_frozen", model)
    stored = _stored(Path(path).expanduser())
    slots = _slots(model)
    _check(slots, stored, path, model)
    with all_or_nothing(model), torch.no_grad():
        for slot in slots:
            slot.load(*slot.read(model, stored), device)
    return model


@dataclass
class _Slot:
    """A parameter or persistent buffer with its names and the dictionaries of modules that hold it."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    holders: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    # The tensors of the checkpoint that have its values, by name, on meta; and their scales, if it is resident in FP8.
    parts: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    # Formats that it may have instead of adaptive FP8, without another rounding: of checkpoints, or its recipe's.
    others: list[QuantSpec] = field(default_factory=list)
    stored_name: str = ""

    def find(self, model: nn.Module, stored: Mapping[str, Any]) -> None:
        """Find the tensors of the checkpoint that have its values; none if they are not all there."""
        old = self.tensor
        empty = torch.empty(old.shape, dtype=old.dtype, device="meta")
        for name in sorted(self.names, key=lambda name: name not in stored):  # whole ones first
            parts = {name: empty} if name in stored else parts_in_checkpoint(model, name, empty)
            if parts and all(part in stored for part in parts):
                self.stored_name, self.parts = name, parts
                if isinstance(old, ResidentWeight):
                    scale = scale_as_stored(old.scale, old.spec).to("meta")
                    self.scales = {name: scale} if name in stored else parts_in_checkpoint(model, name, scale)
                return

    def read(self, model: nn.Module, stored: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        first = next(iter(self.parts))
        with_scales = isinstance(self.tensor, ResidentWeight) and (scale_name := _scale_name(first, stored)) in stored
        if list(self.parts) == [self.stored_name]:
            scale = stored[scale_name].get_tensor(scale_name) if with_scales else None
            return stored[first].get_tensor(first), scale
        dtype = _DTYPES.get(stored[first].get_slice(first).get_dtype(), torch.float32)
        value = torch.empty(self.tensor.shape, dtype=dtype, device="cpu")
        bits = value.view(torch.uint8) if dtype in _FP8 else value
        for name, part in parts_in_checkpoint(model, self.stored_name, bits).items():
            source = stored[name].get_tensor(name)
            part.copy_(source.view(torch.uint8) if dtype in _FP8 else source)
        if not with_scales:
            return value, None
        assert isinstance(self.tensor, ResidentWeight)
        scale = torch.empty(self.tensor.scale.shape, dtype=self.tensor.scale.dtype, device="cpu")
        for name, part in parts_in_checkpoint(model, self.stored_name, scale).items():
            name = _scale_name(name, stored)
            part.copy_(stored[name].get_tensor(name))
        return value, scale

    def spec_of_bytes(self, dtype: torch.dtype | None, scale_shape: list[int]) -> MessageSpec:
        """Return the format of stored bytes for a resident weight, which fits them if any does."""
        assert isinstance(self.tensor, ResidentWeight)
        of_dtype: list[MessageSpec] = [spec for spec in self.others if spec.format.dtype == dtype]
        of_dtype = of_dtype or [self.tensor.spec]
        return next((spec for spec in of_dtype if self.scale_shape(spec) == scale_shape), of_dtype[0])

    def scale_shape(self, spec: MessageSpec) -> list[int]:
        return list(spec.granularity.scale_shape((self.tensor.shape[-2], self.tensor.shape[-1])))

    def load(self, value: Tensor, scale: Tensor | None, device: str | torch.device) -> None:
        """Set the values; on the meta device by a new tensor on `device`."""
        old, replaces = self.tensor, self.tensor.is_meta
        target = device if old.is_meta else old.device
        if isinstance(old, ResidentWeight):
            if scale is not None:  # copied, because what safetensors returns may be mapped to the file
                spec = self.spec_of_bytes(value.dtype, list(scale.shape))
                data, scale = (part.to(target, copy=True) for part in (value, scale_of_stored(scale, spec)))
                new: Tensor = ResidentWeight(data, scale, spec, old.dtype)
                replaces = replaces or spec != old.spec
            else:
                plain = value if value.dtype in SUPPORTED_DTYPES else value.float()
                new = ResidentWeight.quantized(plain.to(target), old.spec).to(old.dtype)
        else:
            new = value.to(target, old.dtype, copy=True)
        if not replaces:
            old.copy_(new)
            return
        loaded = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
        for holder, name in self.holders:
            holder[name] = loaded


def _slots(model: nn.Module) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
        for holder, names in ((module._parameters, set(module._parameters)), (module._buffers, buffers)):
            for name in names:
                tensor = holder[name]
                if tensor is not None:
                    slot = slots.setdefault(id(tensor), _Slot(tensor))
                    slot.names.append(f"{prefix}.{name}".lstrip("."))
                    slot.holders.append((holder, name))
                    if isinstance(tensor, ResidentWeight) and tensor.spec == ADAPTIVE and hasattr(module, "recipe"):
                        specs = (module.recipe.w, QuantSpec(granularity=ROW))
                        slot.others += [spec.transposed if stores_transposed(module) else spec for spec in specs]
    return list(slots.values())


def _check(slots: list[_Slot], stored: Mapping[str, Any], path: str | Path, model: nn.Module) -> None:
    for slot in slots:
        slot.find(model, stored)
    missing = [slot.names[0] for slot in slots if not slot.parts]
    known = {name for slot in slots for name in (*slot.names, *slot.parts)}
    known |= {_scale_name(name, stored) for slot in slots for name in (*slot.names, *slot.scales) if slot.scales}
    unknown = [name for name in stored if name not in known]
    others = f"{len(unknown)} tensors that the model lacks ({listed(unknown)})" if unknown else "no others"
    if missing:
        raise ValueError(
            f"load_frozen: {path} lacks {len(missing)} tensors of the model ({listed(missing)}), and has {others}. "
            "Names must be those of model.state_dict(): call load_frozen on the base model, before get_peft_model. "
            "Nothing was loaded"
        )
    loaded = {name for slot in slots for name in slot.names}
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in loaded]
    if buffers:
        raise ValueError(
            f"load_frozen: {len(buffers)} buffers on the meta device are in no checkpoint ({listed(buffers)}): build "
            "the model inside octavo.nn.meta_parameters(), not torch.device('meta'). Nothing was loaded"
        )
    for slot in slots:
        for name, part in slot.parts.items():
            if (problem := _misfit(name, part, slot, stored, path)) is not None:
                raise ValueError(f"load_frozen: {problem}. Nothing was loaded")
    if unknown:
        warnings.warn(f"load_frozen: {path} has {others}: not loaded", stacklevel=3)


def _misfit(name: str, part: Tensor, slot: _Slot, stored: Mapping[str, Any], path: str | Path) -> str | None:
    """Return why a stored tensor, or its scales, do not fit a part of a slot, or None."""
    resident = slot.tensor if isinstance(slot.tensor, ResidentWeight) else None
    scale_name = _scale_name(name, stored)
    has_scales = resident is not None and scale_name in stored
    shape, dtype = _stored_shape(name, stored)
    if shape != list(part.shape):
        return f"{name} in {path} has shape {shape}, the model's has {list(part.shape)}"
    expected: tuple[torch.dtype, ...] = (*SUPPORTED_DTYPES, torch.float64)
    if resident is not None and has_scales:
        expected = tuple({resident.data_.dtype: 0} | {spec.format.dtype: 0 for spec in slot.others})
        scale_shape, scale_dtype = _stored_shape(scale_name, stored)
        spec = slot.spec_of_bytes(dtype, scale_shape)
        own = list(slot.scales[name].shape) if spec == resident.spec else slot.scale_shape(spec)
        if dtype in expected and scale_shape != own:
            return f"{scale_name} in {path} has shape {scale_shape}, the model's has {own}: convert in its recipe"
        dtypes = (torch.int32,) if dtype == torch.uint8 else SUPPORTED_DTYPES
        if dtype in expected and scale_dtype not in dtypes:
            got = stored[scale_name].get_slice(scale_name).get_dtype()
            return f"{scale_name} in {path} has dtype {got}; expected {_either(dtypes)}"
    if not part.is_floating_point() or dtype in expected or (resident is None and dtype == part.dtype):
        return None
    problem = f"{name} in {path} has dtype {stored[name].get_slice(name).get_dtype()}"
    if dtype in _FP8 and resident is None:
        problem += ", but its layer is not resident in FP8"
    elif resident is not None and not has_scales and dtype in (*_FP8, torch.uint8):
        problem += f", without scales ({scale_name})"
    return f"{problem}; expected {_either(expected)}"


def _scale_name(name: str, stored: Mapping[str, Any]) -> str:
    """Return the name of a weight's scales: Octavo's, or that of DeepSeek's layout, which multiply all the same."""
    return inverse if (inverse := f"{name}_scale_inv") in stored else name + SCALE_SUFFIX


def _stored_shape(name: str, stored: Mapping[str, Any]) -> tuple[list[int], torch.dtype | None]:
    part = stored[name].get_slice(name)
    return part.get_shape(), _DTYPES.get(part.get_dtype())


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": _FP8[0],
    "F8_E5M2": _FP8[1], "U8": torch.uint8, "I32": torch.int32,
}  # fmt: skip


def _stored(path: Path) -> dict[str, Any]:
    with needs_extras("octavo.nn.load_frozen"):
        from safetensors import SafetensorError, safe_open
    stored: dict[str, Any] = {}
    files: dict[str, Path] = {}
    for file in _files(path):
        try:
            reader: Any = safe_open(file, framework="pt", device="cpu")
        except SafetensorError as error:
            raise ValueError(f"load_frozen: {file} is damaged: {error}. Nothing was loaded") from None
        for name in reader.keys():
            if name in stored:
                raise ValueError(
                    f"load_frozen: {files[name]} and {file} both have {name}: give the path of one file, or a folder "
                    "with model.safetensors or its index. Nothing was loaded"
                )
            stored[name], files[name] = reader, file
    return stored


def _files(path: Path) -> list[Path]:
    """Return the files that `from_pretrained` would read."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        files = [whole]
    elif index.is_file():
        try:
            files = sorted({path / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"load_frozen: {index} is damaged: {type(error).__name__}: {error}") from None
    if not path.exists():
        raise FileNotFoundError(f"load_frozen: there is no file or folder {path}")
    if not files:
        raise FileNotFoundError(f"load_frozen: {path} has no *.safetensors file; save_pretrained writes them")
    if missing := [file.name for file in files if not file.is_file()]:
        first = ", ".join(missing[:3]) + ", …" * (len(missing) > 3)
        raise FileNotFoundError(f"load_frozen: {path} lacks {first}, which {index.name} lists")
    return files
