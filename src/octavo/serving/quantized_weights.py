"""The FP8 values of a converted model, by the names and shapes that tensors have in its published checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import quantize
from octavo.nn.experts import Experts
from octavo.nn.linear_like import LinearLike
from octavo.nn.resident import SCALE_SUFFIX, ResidentWeight, resident_weight
from octavo.serving.export_layouts import ExportLayout
from octavo.tensor import ScaledTensor


def quantized_weights(
    model: Any, fqn: str, module: LinearLike | Experts, layout: ExportLayout, saved: Mapping[str, Tensor]
) -> dict[str, ScaledTensor] | str:
    """Quantize the weights of a converted module.

    Args:
        model: The whole model.
        fqn: Name of the module.
        module: The module.
        layout: The layout.
        saved: All tensors of the checkpoint by name: in high precision, or the data of weights resident in FP8.

    Returns:
        The quantized weights by name, or why there are none.
    """
    if not layout.fits(module.recipe):
        return f"it computes in recipe {module.recipe.name}, which {layout.name} does not describe"
    if isinstance(module, Experts):
        names, transposed = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"], bool(module.is_transposed)
    else:
        names, transposed = ["weight"], module.weight_is_transposed
    if transposed:
        return f"its weight is stored as [in, out], for which {layout.name} has no place"
    codes = {}
    for name in names:
        weight = module._parameters.get(name)
        if weight is None:
            return "its weight is not a parameter: it is computed from others"
        if tied := _tied(model, weight):
            return f"its weight is tied ({', '.join(tied)})"
        if weight.shape[-1] % layout.multiple:
            return f"its {weight.shape[-1]} input features are no multiple of {layout.multiple}"
        if isinstance(weight, ResidentWeight):
            codes[f"{fqn}.{name}"] = weight.data_.view(torch.uint8)
            continue
        matrices = weight.detach().reshape(-1, *weight.shape[-2:])
        parts = [quantize(matrix, module.recipe.w).data.view(torch.uint8) for matrix in matrices]
        codes[f"{fqn}.{name}"] = torch.stack(parts).view(weight.shape)
    pieces = {}
    for name, code in names_in_checkpoint(model, codes).items():
        part = saved.get(name)
        if part is None or part.ndim != 2 or part.shape != code.shape or not name.endswith(".weight"):
            return f"checkpoints of {type(model).__name__} do not store its weight as matrices of its own"
        resident = None if isinstance(module, Experts) else resident_weight(module)
        if resident is None:
            pieces[name] = quantize(part, module.recipe.w)
        else:
            pieces[name] = ScaledTensor(resident.data_, resident.scale, resident.spec)
        if not torch.equal(pieces[name].data.view(torch.uint8), code):  # False too if the shapes differ
            return "checkpoints store its weight in parts, and blocks of training's scales belong to two of them"
    return pieces


def resident_weights(model: Any) -> dict[str, ResidentWeight]:
    """Return the weights that are resident in FP8, by all their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: weight for name, weight in parameters if isinstance(weight, ResidentWeight)}


def state_dict(model: Any) -> dict[str, Tensor]:
    """Return the state of a model, with the data of resident weights and without their scales."""
    scales = {name + SCALE_SUFFIX for name in resident_weights(model)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in scales}


def on_cpu(weight: ResidentWeight) -> Tensor:
    """Return the values of a resident weight on the CPU, in the dtype of its interface."""
    return weight.dequantized(weight.dtype).cpu()


def has_nonfinite(tensor: Tensor) -> bool:
    """Return whether a tensor holds NaN or infinity."""
    if isinstance(tensor, ResidentWeight):
        tensor = tensor.dequantized(torch.float32)
    return tensor.is_floating_point() and tensor.element_size() > 1 and not bool(torch.isfinite(tensor).all())


def names_in_checkpoint(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model as `save_pretrained` names, splits and joins them; it has no public name.

    Of a model whose weights were dequantized in loading it would quantize them anew, or fail: for such a one, as for a
    model that was not loaded.
    """
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


def _tied(model: Any, weight: Tensor) -> list[str]:
    """Return all names of a parameter that has several."""
    names = [name for name, other in model.named_parameters(remove_duplicate=False) if other is weight]
    return names if len(names) > 1 else []
