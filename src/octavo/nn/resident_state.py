"""What a `state_dict` has of a weight that is resident in FP8 (`octavo.nn.resident`).

    weight, weight_scale             of a linear, named as in compressed-tensors
    down_proj, down_proj_scale, …    of experts

Plain tensors: `torch.save`, safetensors and distributed checkpoints store them like any tensors. Those of a weight that
FSDP2 shards are DTensors; scales that all ranks hold whole are plain, so a checkpoint loads on any number of ranks.
Loading takes these, or a weight in high precision, which it quantizes. Rejected: the subclass itself in the
`state_dict`, which needs Octavo to be read.

In adaptive FP8 the codes are uint8, and the scales int32 [N,⌈K/128⌉,1], the bits of a float32: the last two number the
format of a group, and tools that convert the floating point tensors of a checkpoint would round them away. No other
format has scales of three dimensions for a matrix: where shapes are equal, a distributed checkpoint converts what it
reads to the dtype of the model's tensor, without an error.

`save_pretrained` of Transformers and diffusers would write the FP8 values so that `from_pretrained` reads them without
their scales. Models with resident weights get one that raises instead (`refuse_save_pretrained`).
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.resident import ResidentShard, ResidentWeight
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import AdaptiveSpec, MessageSpec
from octavo.runtime.torch_compat import local_part
from octavo.tensor import contiguous_strides

SCALE_SUFFIX = "_scale"
"""Name of the scales in a `state_dict`, after that of the weight."""


def as_resident(tensor: Any) -> ResidentWeight | None:
    """Return a tensor, or this rank's part of it, if it is resident in FP8."""
    part = local_part(tensor)
    return part if isinstance(part, ResidentWeight) else None


def resident_weight(module: nn.Module) -> ResidentWeight | None:
    """Return the weight of a linear, or this rank's rows of it, if it is resident in FP8."""
    return as_resident(module._parameters.get("weight"))


def resident_weights(module: nn.Module) -> Iterator[tuple[str, ResidentWeight]]:
    """Yield names and weights of a layer itself that are resident in FP8."""
    for name, parameter in module._parameters.items():
        if (weight := as_resident(parameter)) is not None:
            yield name, weight


def is_computed_from_resident(layer: nn.Module, name: str) -> bool:
    """Return whether a weight of a layer is computed from one that is resident in FP8, as PEFT's `target_parameters`
    adds an adapter to it. In FP8 much of the adapter would be rounded away, so its products run in high precision.
    """
    computed: Any = layer._modules.get("parametrizations")
    if computed is None or name not in computed:
        return False
    own = computed[name]  # one original, or several, as of weight_norm
    return any(as_resident(t) is not None for t in (*own._parameters.values(), *own._buffers.values()) if t is not None)


def refuse_save_pretrained(model: nn.Module) -> None:
    """Give the modules of a model that have `save_pretrained` one that raises while their weights are resident."""
    # PEFT's models save their adapters alone, and keep theirs.
    for module in model.modules():
        of_peft = any(owner.__module__.startswith("peft.") for owner in type(module).__mro__)
        if hasattr(type(module), _SAVE) and not of_peft and _has_residents(module):
            vars(module)[_SAVE] = partial(_save_pretrained, module)


def allow_save_pretrained(model: nn.Module) -> None:
    """Undo `refuse_save_pretrained`."""
    for module in model.modules():
        vars(module).pop(_SAVE, None)


def refuses_save_pretrained(model: nn.Module) -> bool:
    """Return whether `save_pretrained` of a model raises."""
    return _SAVE in vars(model) and _has_residents(model) and not getattr(model, "_hf_peft_config_loaded", False)


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    if refuses_save_pretrained(model):
        raise ValueError(
            f"save_pretrained of {type(model).__name__}, whose frozen weights are resident in FP8: from_pretrained "
            "would read the FP8 values without their scales. octavo.export(model, path, to='fp8-row') writes the same "
            "bytes so that it reads them, to='bf16' their values; octavo.revert(model) makes the weights plain. "
            "Nothing was written"
        )
    return getattr(type(model), _SAVE)(model, *args, **kwargs)  # adapters of Transformers' own, or all reverted


_SAVE = "save_pretrained"


def _has_residents(model: nn.Module) -> bool:
    return any(True for module in model.modules() for _ in resident_weights(module))


def split_in_state(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Replace the resident weights of a layer in a `state_dict` by their data and scales."""
    for name, weight in resident_weights(module):
        parameter, key = module._parameters[name], prefix + name
        state[key] = _distributed(parameter, weight.data_.detach())
        scale = scale_as_stored(weight.scale.detach(), weight.spec)
        state[key + SCALE_SUFFIX] = _distributed(parameter, scale) if weight.shards_scale else scale


def join_in_state(module: nn.Module, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Replace data and scales, or values, of resident weights in a `state_dict` by `ResidentWeight`s."""
    # FP8 data for a layer whose weight is not resident is an error.
    for name, parameter in module._parameters.items():
        key, weight = prefix + name, as_resident(parameter)
        if key in state and weight is not None:
            _join(key, parameter, weight, state, errors)
        elif key in state and state[key].element_size() == 1 and parameter is not None and parameter.element_size() > 1:
            # As numbers they lack their scales.
            errors.append(f"{key} is {state[key].dtype}, but the layer's is not resident: use convert(frozen='fp8')")
            del state[key]


def _join(key: str, parameter: Any, weight: ResidentWeight, state: dict[str, Any], errors: list[str]) -> None:
    value, scale = state[key], state.pop(key + SCALE_SUFFIX, None)
    if as_resident(value) is not None or value.shape != parameter.shape:
        return
    if getattr(value, "placements", None) != getattr(parameter, "placements", None):
        errors.append(
            f"{key} of the checkpoint is not sharded as the model is: load it with torch.distributed.checkpoint"
        )
        del state[key]
        return
    data = local_part(value)
    if scale is not None:
        scale, own = local_part(scale), scale_as_stored(weight.scale, weight.spec)
        converts = own.is_floating_point() and scale.is_floating_point()
        is_misfit = value.dtype != weight.data_.dtype or scale.shape != own.shape
        if is_misfit or not (converts or scale.dtype == own.dtype):
            errors.append(
                f"{key} is resident as {weight.spec}, with {weight.data_.dtype} and scales {own.dtype} "
                f"{tuple(own.shape)}; the checkpoint has {value.dtype} and scales {scale.dtype} {tuple(scale.shape)}: "
                "convert in the recipe, and with the weight_only, it was saved with"
            )
            del state[key]
            return
        state[key] = _distributed(parameter, weight.like(data, scale_of_stored(scale, weight.spec)))
    elif not value.dtype.is_floating_point or value.element_size() == 1:
        errors.append(f"{key} is {value.dtype} without {key + SCALE_SUFFIX}: its scales are missing")
        del state[key]
    elif isinstance(weight, ResidentShard) and not weight.shards_scale:
        errors.append(f"{key}: scales of {weight.spec} depend on other ranks: load {value.dtype} before fully_shard")
        del state[key]
    else:
        plain = data if data.dtype in SUPPORTED_DTYPES else data.float()
        quantized = weight.quantized_alike(plain)
        state[key] = _distributed(parameter, weight.like(quantized.data_, quantized.scale))


def scale_as_stored(scale: Tensor, spec: MessageSpec) -> Tensor:
    """Return the scales that a `state_dict` has of a resident weight, given its own."""
    return scale.view(torch.int32).unsqueeze(-1) if isinstance(spec, AdaptiveSpec) else scale


def scale_of_stored(scale: Tensor, spec: MessageSpec) -> Tensor:
    """Return the scales of a resident weight, given those of a `state_dict`."""
    return scale.squeeze(-1).view(torch.float32) if isinstance(spec, AdaptiveSpec) else scale.to(spec.scale_dtype)


def _distributed(parameter: Any, part: Tensor) -> Tensor:
    """Return a tensor that is sharded as a parameter is, given this rank's part of it."""
    if not hasattr(parameter, "placements"):
        return part
    shape = (parameter.shape[0], *part.shape[1:])
    dtensor: Any = sys.modules["torch.distributed.tensor"].DTensor
    sharded: Tensor = dtensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=contiguous_strides(shape),
    )
    return sharded
