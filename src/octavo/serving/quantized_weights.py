"""The FP8 values of a converted model, by the names and shapes that tensors have in its published checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import quantize
from octavo.nn.experts import Experts
from octavo.nn.frozen import names_in_checkpoint
from octavo.nn.linear_like import LinearLike
from octavo.nn.resident import SCALE_SUFFIX, ResidentWeight
from octavo.serving.export_layouts import ExportLayout
from octavo.tensor import ScaledTensor


def quantized_weights(
    model: Any, fqn: str, module: LinearLike | Experts, layout: ExportLayout, saved: Mapping[str, Tensor]
) -> dict[str, ScaledTensor] | str:
    """Quantize the weights of a converted module."""
    if not layout.fits(module.recipe):
        return f"it computes in recipe {module.recipe.name}, which {layout.name} does not describe"
    if isinstance(module, Experts):
        names, transposed = ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"], bool(module.is_transposed)
    else:
        names, transposed = ["weight"], module.weight_is_transposed
    if transposed:
        return f"its weight is stored as [in, out], for which {layout.name} has no place"
    codes: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for name in names:
        weight = module._parameters.get(name)
        if weight is None:
            return "its weight is not a parameter: it is computed from others"
        tied = [name for name, other in model.named_parameters(remove_duplicate=False) if other is weight]
        if len(tied) > 1:
            return f"its weight is tied ({', '.join(tied)})"
        if weight.shape[-1] % layout.multiple:
            return f"its {weight.shape[-1]} input features are no multiple of {layout.multiple}"
        if isinstance(weight, ResidentWeight):
            if weight.spec != module.recipe.w:
                return f"its weight is resident as {weight.spec}, for which {layout.name} has no place"
            codes[f"{fqn}.{name}"], scales[f"{fqn}.{name}"] = weight.data_.view(torch.uint8), weight.scale
            continue
        matrices = weight.detach().reshape(-1, *weight.shape[-2:])
        parts = [quantize(matrix, module.recipe.w).data.view(torch.uint8) for matrix in matrices]
        codes[f"{fqn}.{name}"] = torch.stack(parts).view(weight.shape)
    pieces = {}
    in_parts = "checkpoints store its weight in parts, and blocks of training's scales belong to two of them"
    scales = names_in_checkpoint(model, scales) if scales else {}
    for name, code in names_in_checkpoint(model, codes).items():
        part = saved.get(name)
        if part is None or part.ndim != 2 or part.shape != code.shape or not name.endswith(".weight"):
            return f"checkpoints of {type(model).__name__} do not store its weight as matrices of its own"
        granularity = module.recipe.w.granularity
        if name not in scales:
            pieces[name] = quantize(part, module.recipe.w)
        elif scales[name].shape != granularity.scale_shape((code.shape[0], code.shape[1])):
            return in_parts
        else:
            pieces[name] = ScaledTensor(part, scales[name], module.recipe.w)
        whole = code.shape[0] in {module.get_parameter(stored).shape[-2] for stored in names}
        splits_blocks = not whole and code.shape[0] % granularity.rows
        if splits_blocks or not torch.equal(pieces[name].data.view(torch.uint8), code):  # False too if shapes differ
            return in_parts
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
