"""Product errors: how far the products of a linear in FP8 lie from those in high precision, on the operands at hand.

What an operand loses (`octavo.inspect.stats`) may do no harm, and what a product loses does. P' is a product of
operands that went through FP8, P the same in high precision, both multiplied in float32:

    error of a row    ‖P'_r − P_r‖ / ‖P_r‖, at most 1          of rows that are not all zeros
    error of P        the mean over its rows                   tokens of Y and ∂X
                      or over its columns, if that is larger   output and input features of ∂W
    error of a layer  the largest of its products Y, ∂X and ∂W

Each row counts the same, however small: Adam takes steps of one size for gradients of any, and a norm behind a layer
brings tokens of all sizes to one. Of a product that lost nearly all of most rows the error is 1; healthy ones have
0.03 to 0.10.

X and W of the layers that are measured are copied in forward, and multiplied three times for each recipe in backward.
Of a weight that FSDP gathers in FP8 nothing else is there: the gathered form is taken for high precision. Each rank and
micro-batch compares its own products; the mean is over all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.kernels import quantize
from octavo.nn.delayed import G, X, scale_now
from octavo.nn.gathered import GatheredWeight
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

Key = tuple[str, str]
"""Layer and recipe."""


@dataclass(frozen=True)
class Operands:
    """Operands of one forward, copies in float32.

    Attributes:
        x: [M,K].
        w: [N,K].
        x_scales: Scales of X by recipe, for recipes that have others than those of its own maxima.
    """

    x: Tensor
    w: Tensor
    x_scales: Mapping[str, Tensor | None]


class ProductErrors:
    """The errors of one step.

    Args:
        measure: Recipes by layer.
    """

    def __init__(self, measure: Mapping[str, Sequence[Recipe]]) -> None:
        self._measure = measure
        self._weights: dict[str, Tensor] = {}
        self._kept: dict[str, Operands] = {}
        self._sums: dict[Key, Tensor] = {}  # float64 [4,2]: sum and number of the errors of Y, ∂X, ∂W, ∂W's columns

    def keep(self, layer: str, module: nn.Module, x_MK: Tensor) -> None:
        """Copy the operands of a forward of a layer that is to be measured."""
        if layer not in self._measure:
            return
        if layer not in self._weights:
            weight: Tensor = module.weight  # type: ignore[assignment]
            if isinstance(weight, GatheredWeight):
                weight = ScaledTensor(weight.data_, weight.scale, weight.spec).dequantize()
            elif is_transposed(module):
                weight = weight.t()
            self._weights[layer] = weight.detach().to(torch.float32, copy=True)
        own = getattr(module, "recipe", None)
        scales = {own.name: scale_now(module, X, x_MK)} if isinstance(own, Recipe) else {}
        self._kept[layer] = Operands(x_MK.to(torch.float32, copy=True), self._weights[layer], scales)

    def kept(self, layer: str) -> Operands | None:
        """The operands of the forward just made, once."""
        return self._kept.pop(layer, None)

    def measure(
        self, layer: str, module: nn.Module, operands: Operands, g_MN: Tensor, needs: tuple[bool, bool]
    ) -> None:
        """Compare the products of a layer, now that G [M,N] is there.

        Args:
            layer: Its name.
            module: It.
            operands: X and W.
            g_MN: G.
            needs: Whether ∂X and ∂W are computed.
        """
        g, x, w = g_MN.float(), operands.x, operands.w
        exact = [x @ w.t(), g @ w if needs[0] else None, g.t() @ x if needs[1] else None]
        own = getattr(module, "recipe", None)
        for recipe in self._measure[layer]:
            g_scale = scale_now(module, G, g_MN) if own is not None and own.name == recipe.name else None
            rounded = _products(x, w, g, recipe, operands.x_scales.get(recipe.name), g_scale, exact)
            found = [_row_errors(there, here) for there, here in zip(rounded, exact, strict=True)]
            found.append(_row_errors(*(None if p is None else p.t() for p in (rounded[2], exact[2]))))
            key = layer, recipe.name
            self._sums[key] = self._sums.get(key, 0.0) + torch.stack([sums.to(g.device) for sums in found])

    def reduced(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, dict[str, float]]:
        """The errors by layer and recipe, over the ranks of a group; of layers that no rank has called, none."""
        keys = [(layer, recipe.name) for layer, recipes in self._measure.items() for recipe in recipes]
        if not keys:
            return {}
        sums = torch.stack([self._sums[key].to(device) if key in self._sums else _none(device) for key in keys])
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        found: dict[str, dict[str, float]] = {}
        for (layer, recipe), values in zip(keys, sums.cpu(), strict=True):
            if values[:, 1].any():
                found.setdefault(layer, {})[recipe] = (values[:, 0] / values[:, 1].clamp(min=1)).max().item()
        return found


def is_transposed(module: nn.Module) -> bool:
    """Whether W is stored as [in, out]: Transformers' `Conv1D`, converted or not."""
    return any(c.__module__ == "transformers.pytorch_utils" and c.__name__ == "Conv1D" for c in type(module).__mro__)


def _none(device: torch.device) -> Tensor:
    return torch.zeros(4, 2, dtype=torch.float64, device=device)


def _products(
    x: Tensor, w: Tensor, g: Tensor, r: Recipe, x_scale: Tensor | None, g_scale: Tensor | None,
    exact: Sequence[Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """Y, ∂X and ∂W of operands that went through FP8; ∂X and ∂W where they are wanted."""
    x_q, w_q = quantize(x, r.x, scale=x_scale), quantize(w, r.w)
    products: list[Tensor | None] = [x_q.dequantize() @ w_q.dequantize().t(), None, exact[2]]
    if exact[1] is not None:
        w_q = w_q if r.dgrad_w == r.w else quantize(w, r.dgrad_w)
        g_q, w_q = _folded(g, r.dgrad_g, w_q, r.folds_w, g_scale, transposed=True)
        products[1] = g_q.dequantize() @ w_q.dequantize()
    if exact[2] is not None and r.wgrad_g is not None and r.wgrad_x is not None:
        x_q = x_q if r.wgrad_x == r.x else quantize(x, r.wgrad_x)
        g_q, x_q = _folded(g, r.wgrad_g, x_q, r.folds_x, g_scale, transposed=False)
        products[2] = g_q.dequantize().t() @ x_q.dequantize()
    return products


def _folded(
    g: Tensor, spec: QuantSpec, other: ScaledTensor, folds: bool, scale: Tensor | None, *, transposed: bool
) -> tuple[ScaledTensor, ScaledTensor]:
    """G quantized with the row scales of the other operand in it, and that without them; both as they are without."""
    if not folds:
        return quantize(g, spec, scale=scale), other
    assert other.scale is not None
    fold = other.scale.float()
    return quantize(g, spec, fold.t() if transposed else fold, scale=scale), other.unscaled


def _row_errors(rounded: Tensor | None, exact: Tensor | None) -> Tensor:
    """Sum and number of the errors of the rows, float64 [2]."""
    if rounded is None or exact is None:
        return torch.zeros(2, dtype=torch.float64)
    sizes = torch.linalg.vector_norm(exact, dim=1)
    errors = torch.linalg.vector_norm(rounded - exact, dim=1) / sizes
    there = (sizes > 0) & sizes.isfinite()
    errors = torch.where(there, errors.nan_to_num(1.0, 1.0, 1.0).clamp(max=1.0), 0.0)
    return torch.stack([errors.double().sum(), there.double().sum()])
