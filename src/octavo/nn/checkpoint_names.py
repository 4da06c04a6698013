"""The names that tensors of a Transformers model have in its published checkpoints, and the parts they have there."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


def names_in_checkpoint(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model as `save_pretrained` names, splits and joins them; it has no public name."""
    # Of a model whose weights were dequantized in loading it would quantize them anew, or fail: for such a one, as for
    # a model that was not loaded.
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


def parts_in_checkpoint(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))
