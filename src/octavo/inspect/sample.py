"""Sample: the hooks of one sampled step (see `octavo.inspect.watch`), and how each operand is quantized in them.

Recipes may fold row scales of X and W into G, so these scales, one number per token and per output feature, are saved
from a layer's forward to the hook on its output.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.inspect.accumulator import Accumulators, OperandFormat
from octavo.kernels import quantize
from octavo.nn.equalized import current_channels
from octavo.nn.gathered import Fp8AllGatherOutput, GatheredInput, ShardedWeight
from octavo.nn.linear_subclasses import is_transposed
from octavo.nn.resident import Fp8Weight
from octavo.numerics.equalization import ChannelScales, channel_amax, column_amax, equalize
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import TENSOR, QuantSpec
from octavo.runtime.execution_context import is_capturing
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import disable_current_modes, in_backward, local_part
from octavo.tensor import ScaledTensor

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


# Product errors: how far the FP8 products of a linear layer lie from those in high precision, on the current operands.
#
#     error of a row    ‖P'_r − P_r‖ / ‖P_r‖, at most 1          for rows that are not all zeros
#     error of P        the mean over its rows                   tokens of Y and ∂X
#                       or over its columns, if that is larger   output and input features of ∂W
#     error of a layer  the largest of its products Y, ∂X and ∂W
#
# P' is a product of quantized operands, P the same in high precision, both multiplied in float32. Healthy products have
# 0.03 to 0.10. Equalized recipes use the s of the layer for its own recipe, others that of these operands.


@dataclass(frozen=True)
class Operands:
    """Operands of one forward, copied in float32."""

    x: Tensor  # [M,K]
    w: Tensor  # [N,K]
    channels: Mapping[str, ChannelScales | None]  # Of each recipe to measure, by its name


class ProductErrors:
    def __init__(self, measure: Mapping[str, Sequence[Recipe]]) -> None:
        self.recipes = measure
        self._weights: dict[str, Tensor] = {}
        self.operands: dict[str, Operands] = {}  # By layer, from its forward until its gradient is known
        # By layer and recipe float64 [4,2]: sum and number of the errors of Y, ∂X, ∂W, ∂W's columns
        self._sums: dict[tuple[str, str], Tensor] = {}

    def save_operands(self, layer: str, module: nn.Module, x_MK: Tensor, channels: ChannelScales | None) -> None:
        """Copy the operands of a forward of a measured layer, with the given channel scales."""
        if layer not in self._weights:
            weight = weight_of(module)
            weight = weight.dequantized(torch.float32) if isinstance(weight, Fp8Weight) else weight
            self._weights[layer] = weight.detach().to(torch.float32, copy=True)
        w_NK, own = self._weights[layer], getattr(getattr(module, "recipe", None), "name", None)
        by_recipe = {
            r.name: channels if channels is not None and r.name == own else channels_of(r, x_MK, w_NK)
            for r in self.recipes[layer]
            # Tensor parallelism has no scale per tensor.
            if not hasattr(module.weight, "placements") or TENSOR not in (r.x.granularity, r.w.granularity)
        }
        self.operands[layer] = Operands(x_MK.to(torch.float32, copy=True), w_NK, by_recipe)

    def measure(
        self, layer: str, module: nn.Module, operands: Operands, g_MN: Tensor, needs: tuple[bool, bool]
    ) -> None:
        """Compare the products of a layer, once G [M,N] is known."""
        g, x, w = g_MN.float(), operands.x, operands.w
        exact = [x @ w.t(), g @ w if needs[0] else None, g.t() @ x if needs[1] else None]
        for recipe in self.recipes[layer]:
            if recipe.name not in operands.channels:
                continue
            rounded = products(x, w, g, recipe, operands.channels[recipe.name], exact)
            errors = [_row_errors(product, reference) for product, reference in zip(rounded, exact, strict=True)]
            errors.append(_row_errors(*(None if p is None else p.t() for p in (rounded[2], exact[2]))))
            key = layer, recipe.name
            self._sums[key] = self._sums.get(key, 0.0) + torch.stack([sums.to(g.device) for sums in errors])

    def reduced(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, dict[str, float]]:
        """Return the errors by layer and recipe over the ranks of a group; leave out layers that no rank called."""
        keys = [(layer, recipe.name) for layer, recipes in self.recipes.items() for recipe in recipes]
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


@dataclass(frozen=True)
class Factors:
    """The factors that X or W contributes to G, float32 [M,1] or [1,N]."""

    folds: list[Tensor | None]  # Factors folded into G, for the layer's own recipe and each what-if recipe
    read: Tensor  # 1 for rows of X or W with any non-zero value, else 0


@dataclass(frozen=True)
class WatchedLayer:
    """A linear layer, the recipe to measure it with, and the recipe name to report."""

    name: str
    module: nn.Module
    recipe: Recipe
    label: str
    counted: bool = True  # Whether to collect statistics, not only product errors


Channels = list[ChannelScales | None]  # Channel scales of X and W in the layer's own recipe and each what-if recipe
Args = tuple[Tensor, ...]  # Of a linear layer
Kwargs = dict[str, Tensor]


class Sample:
    def __init__(
        self, layers: Sequence[WatchedLayer], what_if: Sequence[Recipe], measure: Mapping[str, Sequence[Recipe]]
    ) -> None:
        self.layers = layers
        self.accumulators = Accumulators([recipe.name for recipe in what_if])  # The statistics so far
        self.errors = ProductErrors(measure)  # The product errors so far
        self.channels: dict[str, ChannelScales] = {}  # The channel scales of equalized layers in their last forward
        self._what_if = what_if
        self._handles: list[Any] = []
        # This rank's rows of weights that FSDP gathers in FP8.
        parts = ((layer.name, local_part(layer.module.weight)) for layer in layers)
        self._shards = {name: part for name, part in parts if isinstance(part, ShardedWeight)}
        self._of_weights: dict[str, tuple[Channels, Factors]] = {}
        self._of_inputs: dict[str, Factors] = {}
        self._before_gather: dict[str, Tensor] = {}
        self._without_graph: Counter[str] = Counter()

    @property
    def device(self) -> torch.device:
        """Device for the exchange between ranks if this rank has counted nothing."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")

    def install(self) -> None:
        for layer in self.layers:
            before, after = layer.module.register_forward_pre_hook, layer.module.register_forward_hook
            self._handles.append(before(partial(self._save_input, layer), prepend=True, with_kwargs=True))
            self._handles.append(before(partial(self._count_inputs, layer), with_kwargs=True))
            # On a DTensor before the hooks of its style, on any other tensor after all hooks.
            self._handles.append(after(partial(self._hook_output, layer, True), prepend=True, with_kwargs=True))
            self._handles.append(after(partial(self._hook_output, layer, False), with_kwargs=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _save_input(self, layer: WatchedLayer, _: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if not SWITCH.off:
            x = self._before_gather[layer.name] = _input(args, kwargs)
            if is_capturing(x.device):
                raise RuntimeError(
                    "octavo.inspect.Watch: a CUDA graph is captured inside a sampled step, but its replays call no "
                    "hooks: capture it outside of Watch.step(), and run sampled steps eagerly"
                )

    def _count_inputs(self, layer: WatchedLayer, _: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if layer.name not in self._before_gather:
            return
        x, own_x = local_part(_input(args, kwargs)), local_part(self._before_gather.pop(layer.name))
        recomputed = in_backward()
        if x.dtype not in SUPPORTED_DTYPES or (recomputed and not self._without_graph[layer.name]):
            return
        with torch.no_grad(), disable_current_modes():
            gathered = isinstance(x, GatheredInput)
            if isinstance(own_x, GatheredInput):  # by the module around the layer: this rank's part
                own_x = own_x.dequantized() if (sent := own_x.rows.sent) is None else sent.detach()
            exact = _exact(x) if layer.name in self.errors.recipes else x
            x = x.dequantized() if isinstance(x, GatheredInput) else x
            own = current_channels(layer.module, x)
            if own is not None:
                self.channels[layer.name] = own
            if layer.counted:
                channels = self._channels(layer, _matrix(x), own)
                counted = None if recomputed else own_x if gathered else x
                self._of_inputs[layer.name] = self._count_x(layer, _matrix(x), channels, counted)
                # W is counted at the first call; what it contributes to G changes with channel scales.
                last = self._of_weights.get(layer.name)
                if last is None or any(old is not new for old, new in zip(last[0], channels, strict=True)):
                    self._of_weights[layer.name] = channels, self._count_w(layer, channels, counted=last is None)
            if layer.name in self.errors.recipes:
                self.errors.save_operands(layer.name, layer.module, _matrix(exact), own)

    def _hook_output(
        self, layer: WatchedLayer, distributed: bool, module: nn.Module, args: Args, kwargs: Kwargs, y: Tensor
    ) -> None:
        places = getattr(y, "placements", None)
        if distributed and places is None:
            return
        of_x, operands = self._of_inputs.pop(layer.name, None), self.errors.operands.pop(layer.name, None)
        if of_x is None and operands is None:
            return
        if not y.requires_grad:
            self._without_graph[layer.name] += not in_backward()
            return
        self._without_graph[layer.name] -= in_backward()
        needs = _input(args, kwargs).requires_grad, bool(module.weight.requires_grad)
        of_w = self._of_weights[layer.name][1] if needs[0] and of_x is not None else None
        factors = {"dgrad_g": of_w, "wgrad_g": of_x if needs[1] else None}

        def on_gradient(g: Tensor) -> None:
            with torch.no_grad(), disable_current_modes():
                g_MN = _matrix(_local_gradient(g, places))
                self._count_gradient(layer, g_MN, factors)
                if operands is not None:
                    self.errors.measure(layer.name, layer.module, operands, g_MN, needs)

        self._handles.append(y.register_hook(on_gradient))

    def _count_gradient(self, layer: WatchedLayer, g_MN: Tensor, factors: Mapping[str, Factors | None]) -> None:
        for operand, of_other in factors.items():
            if of_other is None or getattr(layer.recipe, operand) is None:
                continue
            folds = zip([layer.recipe, *self._what_if], of_other.folds, strict=True)
            forms = [OperandFormat(getattr(recipe, operand), fold, read=of_other.read) for recipe, fold in folds]
            self.accumulators.count((layer.name, operand), g_MN, forms)

    def _channels(self, layer: WatchedLayer, x_MK: Tensor, own: ChannelScales | None) -> Channels:
        weight = weight_of(layer.module)
        others = [
            None if not recipe.equalization
            else own if recipe.name == layer.recipe.name
            else channels_of(recipe, x_MK, _whole(weight))
            for recipe in self._what_if
        ]  # fmt: skip
        return [own, *others]

    def _count_x(self, layer: WatchedLayer, x_MK: Tensor, channels: Channels, counted: Tensor | None) -> Factors:
        """Return what X contributes to G; count `counted`, which is X or this rank's tokens of it, or nothing."""
        recipes, inverses = [layer.recipe, *self._what_if], [None if s is None else s.inverse for s in channels]
        forms: Sequence[ScaledTensor | None] = [None] * len(recipes)
        if counted is not None:
            formats = [OperandFormat(r.x, fold) for r, fold in zip(recipes, inverses, strict=True)]
            quantized = self.accumulators.count((layer.name, "x"), _matrix(counted), formats)
            forms = quantized if counted.numel() == x_MK.numel() else forms
        folds = [
            _row_scales(x_MK, r.wgrad_x, fold, form) if r.folds_x else None
            for r, fold, form in zip(recipes, inverses, forms, strict=True)
        ]
        return Factors(folds, _read(x_MK))

    def _count_w(self, layer: WatchedLayer, channels: Channels, *, counted: bool) -> Factors:
        recipes, factors = [layer.recipe, *self._what_if], [None if s is None else s.factor for s in channels]
        weight = weight_of(layer.module)
        w_NK = _whole(weight)
        forms: Sequence[ScaledTensor | None] = [None] * len(recipes)
        if isinstance(weight, Fp8Weight):
            if counted and isinstance(weight, Fp8AllGatherOutput):
                self._count_shard(layer, weight, w_NK, factors)
            gathered = ScaledTensor(weight.data_, weight.scale, weight.spec)
            forms = [gathered if s is weight.channels else None for s in channels]
        elif counted:
            formats = [OperandFormat(recipe.w, factor) for recipe, factor in zip(recipes, factors, strict=True)]
            forms = self.accumulators.count((layer.name, "w"), w_NK, formats)
        row_scales = [
            _row_scales(w_NK, r.dgrad_w, factor, form) if r.folds_w else None
            for r, factor, form in zip(recipes, factors, forms, strict=True)
        ]
        return Factors([None if scales is None else scales.t() for scales in row_scales], _read(w_NK).t())

    def _count_shard(
        self, layer: WatchedLayer, weight: Fp8AllGatherOutput, whole: Tensor, factors: Sequence[Tensor | None]
    ) -> None:
        """Count this rank's rows, by tensor with the scale of the whole weight."""
        if layer.name not in self._shards:
            raise RuntimeError(
                f"Watch: the weight of {layer.name} was gathered before the step began: enter watch.step() before the "
                "first forward of a step"
            )
        shard = self._shards[layer.name]
        w_NK = shard.gather_format.rounded(shard.local.detach()).to(weight.device)
        by_tensor = layer.recipe.w.granularity == TENSOR
        own = OperandFormat(layer.recipe.w, factors[0], weight.scale if by_tensor else None)
        others = [
            OperandFormat(r.w, factor, quantize(whole, r.w).scale if r.w.granularity == TENSOR else None)
            for r, factor in zip(self._what_if, factors[1:], strict=True)
        ]
        self.accumulators.count((layer.name, "w"), w_NK, [own, *others])


def _whole(weight: Tensor) -> Tensor:
    """Return W [N,K], without channel scales; one that exists in FP8 only from its FP8 values."""
    return weight.dequantized(weight.dtype) if isinstance(weight, Fp8Weight) else weight.detach()


def _exact(x: Tensor) -> Tensor:
    """Return X in high precision; one that was gathered in FP8 is gathered again, on all ranks together."""
    if not isinstance(x, GatheredInput):
        return x
    sent, gather = x.rows.sent, x.rows.gather
    return x.dequantized() if sent is None or gather is None else gather(sent.detach())


def _local_gradient(g: Tensor, places: "Sequence[Placement] | None") -> Tensor:
    """Return this rank's part of G, which the layer gets as its output is placed; summands have whole gradients."""
    if places is None:
        return g
    from torch.distributed.tensor import DTensor, Replicate  # slow import

    whole = tuple(Replicate() if place.is_partial() else place for place in places)
    assert isinstance(g, DTensor)
    part: Tensor = local_part(g if g.placements == whole else g.redistribute(placements=whole))
    return part


def _read(x: Tensor) -> Tensor:
    """Return float32 [R,1]: 0 for rows of zeros, else 1; non-finite rows count as read."""
    return (x != 0).any(1, keepdim=True).float()


def _input(args: Args, kwargs: Kwargs) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))


def _matrix(x: Tensor) -> Tensor:
    """Flatten all leading dimensions: [tokens, features]."""
    return x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _row_scales(x: Tensor, spec: QuantSpec | None, fold: Tensor | None, form: ScaledTensor | None) -> Tensor | None:
    """Return the row scales [R,1] of a matrix · fold as a factor of G; reuse those of `form` if its spec matches."""
    assert spec is not None
    q = form if form is not None and form.spec == spec else quantize(x, spec, fold)
    return None if q.scale is None else q.scale.float()
