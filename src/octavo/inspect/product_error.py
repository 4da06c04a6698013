"""Product errors: how far the FP8 products of a linear layer lie from those in high precision, on the current operands.

    error of a row    ‖P'_r − P_r‖ / ‖P_r‖, at most 1          for rows that are not all zeros
    error of P        the mean over its rows                   tokens of Y and ∂X
                      or over its columns, if that is larger   output and input features of ∂W
    error of a layer  the largest of its products Y, ∂X and ∂W

P' is a product of quantized operands, P the same in high precision, both multiplied in float32. Healthy products have
0.03 to 0.10. Equalized recipes use the s of the layer for its own recipe, others that of these operands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.kernels import quantize
from octavo.nn.linear_subclasses import is_transposed
from octavo.nn.resident import Fp8Weight
from octavo.numerics.equalization import ChannelScales, channel_amax, column_amax, equalize
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import TENSOR, QuantSpec
from octavo.runtime.torch_compat import local_part
from octavo.tensor import ScaledTensor


@dataclass(frozen=True)
class Operands:
    """Operands of one forward, copied in float32."""

    x: Tensor  # [M,K]
    w: Tensor  # [N,K]
    channels: Mapping[str, ChannelScales | None]  # Of each recipe to measure, by its name


class ProductErrors:
    def __init__(self, measure: Mapping[str, Sequence[Recipe]]) -> None:
        self._measure = measure
        self._weights: dict[str, Tensor] = {}
        self._operands: dict[str, Operands] = {}
        # By layer and recipe float64 [4,2]: sum and number of the errors of Y, ∂X, ∂W, ∂W's columns
        self._sums: dict[tuple[str, str], Tensor] = {}

    def measures(self, layer: str) -> bool:
        return layer in self._measure

    def save_operands(self, layer: str, module: nn.Module, x_MK: Tensor, channels: ChannelScales | None) -> None:
        """Copy the operands of a forward of a measured layer, with the given channel scales."""
        if layer not in self._weights:
            weight = weight_of(module)
            weight = weight.dequantized(torch.float32) if isinstance(weight, Fp8Weight) else weight
            self._weights[layer] = weight.detach().to(torch.float32, copy=True)
        w_NK, own = self._weights[layer], getattr(getattr(module, "recipe", None), "name", None)
        by_recipe = {
            r.name: channels if channels is not None and r.name == own else channels_of(r, x_MK, w_NK)
            for r in self._measure[layer]
            # Tensor parallelism has no scale per tensor.
            if not hasattr(module.weight, "placements") or TENSOR not in (r.x.granularity, r.w.granularity)
        }
        self._operands[layer] = Operands(x_MK.to(torch.float32, copy=True), w_NK, by_recipe)

    def pop_operands(self, layer: str) -> Operands | None:
        return self._operands.pop(layer, None)

    def measure(
        self, layer: str, module: nn.Module, operands: Operands, g_MN: Tensor, needs: tuple[bool, bool]
    ) -> None:
        """Compare the products of a layer, once G [M,N] is known."""
        g, x, w = g_MN.float(), operands.x, operands.w
        exact = [x @ w.t(), g @ w if needs[0] else None, g.t() @ x if needs[1] else None]
        for recipe in self._measure[layer]:
            if recipe.name not in operands.channels:
                continue
            rounded = products(x, w, g, recipe, operands.channels[recipe.name], exact)
            errors = [_row_errors(product, reference) for product, reference in zip(rounded, exact, strict=True)]
            errors.append(_row_errors(*(None if p is None else p.t() for p in (rounded[2], exact[2]))))
            key = layer, recipe.name
            self._sums[key] = self._sums.get(key, 0.0) + torch.stack([sums.to(g.device) for sums in errors])

    def reduced(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, dict[str, float]]:
        """Return the errors by layer and recipe over the ranks of a group; leave out layers that no rank called."""
        keys = [(layer, recipe.name) for layer, recipes in self._measure.items() for recipe in recipes]
        if not keys:
            return {}
        none = torch.zeros(4, 2, dtype=torch.float64, device=device)
        sums = torch.stack([self._sums[key].to(device) if key in self._sums else none for key in keys])
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        errors: dict[str, dict[str, float]] = {}
        for (layer, recipe), values in zip(keys, sums.cpu(), strict=True):
            if values[:, 1].any():
                errors.setdefault(layer, {})[recipe] = (values[:, 0] / values[:, 1].clamp(min=1)).max().item()
        return errors


def weight_of(module: nn.Module) -> Tensor:
    """Return W [N,K] of a layer, or this rank's part."""
    weight: Tensor = local_part(module.weight)
    return weight.t() if is_transposed(module) else weight


def channels_of(recipe: Recipe, x_MK: Tensor, w_NK: Tensor) -> ChannelScales | None:
    """Return the channel scales that a recipe would have for these operands alone; None if it does not equalize."""
    return equalize(channel_amax(x_MK), column_amax(w_NK)) if recipe.equalization else None


def products(
    x: Tensor, w: Tensor, g: Tensor, r: Recipe, channels: ChannelScales | None, exact: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return Y, ∂X and ∂W of quantized operands; ∂X and ∂W only if `exact` has them."""
    factor, inverse = (None, None) if channels is None else (channels.factor, channels.inverse)
    x_q, w_q = quantize(x, r.x, inverse), quantize(w, r.w, factor)
    products: list[Tensor | None] = [x_q.dequantize() @ w_q.dequantize().t(), None, exact[2]]
    if exact[1] is not None:
        w_q = w_q if r.dgrad_w == r.w else quantize(w, r.dgrad_w, factor)
        g_q, w_q = _quantize_folded(g, r.dgrad_g, w_q, r.folds_w, transposed=True)
        product = g_q.dequantize() @ w_q.dequantize()
        products[1] = product if inverse is None else product * inverse
    if exact[2] is not None and r.wgrad_g is not None and r.wgrad_x is not None:
        x_q = x_q if r.wgrad_x == r.x else quantize(x, r.wgrad_x, inverse)
        g_q, x_q = _quantize_folded(g, r.wgrad_g, x_q, r.folds_x, transposed=False)
        product = g_q.dequantize().t() @ x_q.dequantize()
        products[2] = product if factor is None else product * factor
    return products


def _quantize_folded(
    g: Tensor, spec: QuantSpec, other: ScaledTensor, folds: bool, *, transposed: bool
) -> tuple[ScaledTensor, ScaledTensor]:
    """Quantize G with the row scales of the other operand folded in, if so, and return that without them."""
    if not folds:
        return quantize(g, spec), other
    assert other.scale is not None
    fold = other.scale.float()
    return quantize(g, spec, fold.t() if transposed else fold), other.unscaled


def _row_errors(rounded: Tensor | None, exact: Tensor | None) -> Tensor:
    """Return the sum and number of the errors of the rows, float64 [2]."""
    if rounded is None or exact is None:
        return torch.zeros(2, dtype=torch.float64, device="cpu")
    sizes = torch.linalg.vector_norm(exact, dim=1)
    errors = torch.linalg.vector_norm(rounded - exact, dim=1) / sizes
    valid = (sizes > 0) & sizes.isfinite()
    errors = torch.where(valid, errors.nan_to_num(1.0, 1.0, 1.0).clamp(max=1.0), 0.0)
    return torch.stack([errors.double().sum(), valid.double().sum()])
