"""Sample: the hooks of one sampled step (see `octavo.inspect.watch`), and how each operand gets its FP8 forms.

X and W are those that the linear is called with. G's forms have row scales of X and W folded in where the recipe folds
them, so these are kept from a linear's forward to the hook on its output: a number per token and per output feature.
What-if recipes have factors of their own.

Scales of earlier maxima (`octavo.nn.delayed`) are those that the layer uses; a what-if recipe has no past here, so it
has the scales of the present.

W that FSDP gathers in FP8 is not there in high precision. Its shards are: each rank counts its rows, by row with the
scales of the whole matrix, by tensor with the one that was gathered. What-if recipes with blocks that reach over
several rows have the blocks of the shard.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from octavo.inspect.tally import Form, Tallies
from octavo.kernels import dequantize, quantize
from octavo.nn.delayed import G, X, scale_now
from octavo.nn.gathered import GatheredWeight, ShardedWeight
from octavo.nn.linear import SUPPORTED_DTYPES
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import TENSOR, QuantSpec
from octavo.runtime.torch_compat import in_backward
from octavo.tensor import ScaledTensor

Factors = list[Tensor | None]
"""What is folded into G, float32, for the layer's own recipe and each what-if recipe; None where nothing is."""


@dataclass(frozen=True)
class Layer:
    """A linear, the recipe it is measured by, and the name to show for that."""

    name: str
    module: nn.Module
    recipe: Recipe
    label: str


class Sample:
    """The hooks of one step.

    Args:
        layers: The linears to watch.
        what_if: Other recipes for the same tensors.

    Attributes:
        tallies: What has been counted.
    """

    def __init__(self, layers: Sequence[Layer], what_if: Sequence[Recipe]) -> None:
        self.layers = layers
        self.tallies = Tallies([recipe.name for recipe in what_if])
        self._what_if = what_if
        self._handles: list[Any] = []
        self._shards = {layer.name: shard for layer in layers if (shard := _shard(layer.module)) is not None}
        self._of_weights: dict[str, Factors] = {}
        self._of_inputs: dict[str, Factors] = {}
        self._waiting: set[str] = set()

    @property
    def device(self) -> torch.device:
        """Where ranks exchange what was counted, if this one has counted nothing."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")

    def install(self) -> None:
        """Put the hooks on."""
        for layer in self.layers:
            self._handles.append(layer.module.register_forward_pre_hook(self._before(layer), with_kwargs=True))
            self._handles.append(layer.module.register_forward_hook(self._after(layer), with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off, those on outputs too."""
        for handle in self._handles:
            handle.remove()

    def _before(self, layer: Layer) -> Callable[..., None]:
        def count_inputs(_: nn.Module, args: Any, kwargs: Any) -> None:
            x = _input(args, kwargs)
            again = in_backward()  # in backward: activation checkpointing
            if x.dtype not in SUPPORTED_DTYPES or (again and layer.name in self._waiting):
                return
            with torch.no_grad(), _disable_current_modes():
                self._of_inputs[layer.name] = self._count_x(layer, _matrix(x), counted=not again)
                if layer.name not in self._of_weights:
                    self._of_weights[layer.name] = self._count_w(layer)

        return count_inputs

    def _after(self, layer: Layer) -> Callable[..., None]:
        def wait_for_gradient(module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
            of_x = self._of_inputs.pop(layer.name, None)
            if of_x is None:
                return
            self._waiting.discard(layer.name)  # a checkpoint that forwards without autograd has it recomputed
            if y.requires_grad:
                self._waiting.add(layer.name)
                of_w = self._of_weights[layer.name] if _input(args, kwargs).requires_grad else None
                trained = module.weight.requires_grad
                self._handles.append(y.register_hook(self._on_gradient(layer, of_w, of_x if trained else None)))

        return wait_for_gradient

    def _on_gradient(self, layer: Layer, of_w: Factors | None, of_x: Factors | None) -> Callable[[Tensor], None]:
        def count_gradient(g: Tensor) -> None:
            with torch.no_grad(), _disable_current_modes():
                g_MN = _matrix(g)
                scale = scale_now(layer.module, G, g_MN)
                if of_w is not None:
                    own = Form(layer.recipe.dgrad_g, of_w[0], scale)
                    others = [Form(r.dgrad_g, fold) for r, fold in zip(self._what_if, of_w[1:], strict=True)]
                    self.tallies.count((layer.name, "dgrad_g"), g_MN, own, others)
                if of_x is not None and layer.recipe.wgrad_g is not None:
                    own = Form(layer.recipe.wgrad_g, of_x[0], scale)
                    others = [Form(r.wgrad_g, fold) for r, fold in zip(self._what_if, of_x[1:], strict=True)]
                    self.tallies.count((layer.name, "wgrad_g"), g_MN, own, others)

        return count_gradient

    def _count_x(self, layer: Layer, x_MK: Tensor, *, counted: bool) -> Factors:
        recipes = [layer.recipe, *self._what_if]
        if not counted:
            return [_row_scales(x_MK, r.wgrad_x) if r.folds_x else None for r in recipes]
        own = Form(layer.recipe.x, scale=scale_now(layer.module, X, x_MK))
        others = [Form(recipe.x) for recipe in self._what_if]
        forms = self.tallies.count((layer.name, "x"), x_MK, own, others)
        return [
            _row_scales(x_MK, r.wgrad_x, form) if r.folds_x else None for r, form in zip(recipes, forms, strict=True)
        ]

    def _count_w(self, layer: Layer) -> Factors:
        recipes = [layer.recipe, *self._what_if]
        weight: Tensor = layer.module.weight  # type: ignore[assignment]
        forms: Sequence[ScaledTensor | None]
        if isinstance(weight, GatheredWeight):
            w_NK = self._count_shard(layer, weight)
            forms = [ScaledTensor(weight.data_, weight.scale, weight.spec)] * len(recipes)
        else:
            w_NK = weight.detach().t() if _is_transposed(layer.module) else weight.detach()
            own, *others = (Form(recipe.w) for recipe in recipes)
            forms = self.tallies.count((layer.name, "w"), w_NK, own, others)
        found = [
            _row_scales(w_NK, r.dgrad_w, form) if r.folds_w else None for r, form in zip(recipes, forms, strict=True)
        ]
        return [None if scales is None else scales.t() for scales in found]

    def _count_shard(self, layer: Layer, weight: GatheredWeight) -> Tensor:
        """Count this rank's rows. Returns the whole, to find scales in."""
        if layer.name not in self._shards:
            raise RuntimeError(
                f"Watch: the weight of {layer.name} was gathered before the step began: enter watch.step() before the "
                "first forward of a step"
            )
        shard = self._shards[layer.name]
        w_NK = shard.form.rounded(shard.local.detach()).to(weight.device)
        whole = dequantize(ScaledTensor(weight.data_, weight.scale, weight.spec), weight.dtype)
        own = Form(layer.recipe.w, scale=weight.scale if layer.recipe.w.granularity == TENSOR else None)
        others = [
            Form(r.w, scale=quantize(whole, r.w).scale if r.w.granularity == TENSOR else None) for r in self._what_if
        ]
        self.tallies.count((layer.name, "w"), w_NK, own, others)
        return whole


def _shard(module: nn.Module) -> ShardedWeight | None:
    """This rank's rows of a weight that FSDP gathers in FP8."""
    local = getattr(module.weight, "_local_tensor", None)
    return local if isinstance(local, ShardedWeight) else None


def _is_transposed(module: nn.Module) -> bool:
    """Whether W is kept as [in, out]: Transformers' `Conv1D`, converted or not."""
    return any(c.__module__ == "transformers.pytorch_utils" and c.__name__ == "Conv1D" for c in type(module).__mro__)


def _input(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The one argument of a linear."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


def _matrix(x: Tensor) -> Tensor:
    """[tokens, features], all leading dimensions flattened."""
    return x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _row_scales(x: Tensor, spec: QuantSpec | None, form: ScaledTensor | None = None) -> Tensor | None:
    """Scales [R,1] of a matrix by row, as a factor of G; those of its form if that is of the spec."""
    assert spec is not None
    q = form if form is not None and form.spec == spec else quantize(x, spec)
    return None if q.scale is None else q.scale.float()
