"""Casts of X and G, and linears of DTensors and nested tensors; the legend is that of `octavo.nn.linear`.

X, W and G are each contracted over both of their dimensions. So on a GPU each is quantized into both memory orders.
"""

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.activations.recompute import Recomputable
from octavo.activations.saved_tensors import recomputable_of
from octavo.kernels import needs_both_orders, quantize
from octavo.nn.gathered import GatheredInput
from octavo.nn.resident import Fp8Weight
from octavo.nn.weights import quantize_both
from octavo.numerics.equalization import ChannelScales
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import TENSOR
from octavo.runtime import derivatives
from octavo.runtime.execution_context import execution_context
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import autocast_dtype, has_dense_rows, jagged_like
from octavo.tensor import ScaledTensor, contiguous_strides

# Data of X for forward and for wgrad, then the scales of both; for wgrad None, or those for forward, if not needed
InputCasts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def quantized_input(
    x_MK: Tensor, recipe: Recipe, needs_wgrad: bool, fold: Tensor | None = None
) -> tuple[ScaledTensor, ScaledTensor | None]:
    """Quantize X for forward, and for wgrad if needed. With `fold`, a factor of X, both need equal specs."""
    if not needs_wgrad or recipe.wgrad_x is None:
        return quantize(x_MK, recipe.x, fold), None
    x, x_t = quantize_both(x_MK, recipe.x, fold, recipe.wgrad_x, fold)
    return x, x_t if x_t.other_order is None else ScaledTensor(x_t.other_order, x_t.scale, x_t.spec)


class _CacheEntry:
    """The casts of a tensor in this state. Holds no reference to the tensor, whose deletion calls `forget`."""

    __slots__ = ("casts", "state", "storage")

    def __init__(self, state: tuple[Any, ...], storage: weakref.ref[Any]) -> None:
        self.state, self.storage = state, storage
        self.casts: dict[Any, Any] = {}

    def forget(self, _: weakref.ref[Tensor]) -> None:
        """Free the casts, and the graph that `state` holds; called from any thread."""
        self.state, self.casts = (), {}


class ReuseCounter:
    """Whether other layers read the casts that a layer keeps."""

    __slots__ = ("unread",)

    def __init__(self) -> None:
        self.unread = 0  # Casts kept or not kept since one was read


MAX_UNUSED, RETRY_EVERY = 8, 64  # After 8 casts in a row that none read, every 64th: one costs as much as a launch


class InputCastCache(threading.local):
    """Casts of the last input of any linear, per thread, for sibling layers that read the same tensor (q, k and v)."""

    # Only tensors with a `grad_fn` are cached: others may be buffers that are written without autograd noticing. Limit,
    # as in autograd: a write that PyTorch does not report (through `.data`, NumPy or a custom kernel) is missed.

    def __init__(self) -> None:
        self.entry: tuple[weakref.ref[Tensor], _CacheEntry] | None = None

    def quantized(
        self, owner: Tensor, x_MK: Tensor, recipe: Recipe, needs_wgrad: bool, source: Hashable,
        fold: Tensor | None = None,
    ) -> InputCasts:  # fmt: skip
        """Return `quantized_input(x_MK, …, fold)`, cached by the recipe's specs and the `source` of `fold`."""
        # x_MK is the matrix view of `owner`.
        casts: dict[Any, InputCasts] | None = None if torch.compiler.is_compiling() else self.casts_of(owner)
        if casts is not None:
            cast = casts.get(cast_key(recipe, True, source))  # of both, which serves a forward alone, too
            if cast is None and not needs_wgrad:
                cast = casts.get(cast_key(recipe, False, source))
            if cast is not None:
                note_reader(casts)
                return cast
        x, x_t = quantized_input(x_MK, recipe, needs_wgrad, fold)
        cast = (x.data, None, x.scale, None) if x_t is None else (x.data, x_t.data, x.scale, x_t.scale)
        if casts is not None:
            casts[cast_key(recipe, needs_wgrad, source)] = cast
        return cast

    def casts_of(self, owner: Tensor, context: tuple[Any, ...] = ()) -> dict[Any, Any] | None:
        """Return the casts of a tensor in its present state, to look up and add to; None if it is not cached."""
        # `context` is its execution context, for a caller that knows it.
        producer = owner.grad_fn
        if producer is None or torch.is_inference_mode_enabled():
            return None
        storage = owner.untyped_storage()
        state = (
            owner._version, producer, owner.storage_offset(), owner.shape, owner.stride(), owner.dtype,
            context or execution_context(owner),
        )  # fmt: skip
        if self.entry is not None:
            reference, entry = self.entry
            if reference() is owner and entry.storage() is storage and entry.state == state:
                return entry.casts
        entry = _CacheEntry(state, weakref.ref(storage))
        self.entry = weakref.ref(owner, entry.forget), entry
        return entry.casts


def cast_key(recipe: Recipe, both: bool, source: Hashable) -> tuple[str, str | None, Hashable]:
    """Return what casts of a tensor differ in: spec for forward, for wgrad if `both`, source of the fold."""
    return recipe.x.text, recipe.wgrad_x.text if both and recipe.wgrad_x is not None else None, source


def note_reader(casts: dict[Any, Any]) -> None:
    if (readers := casts.get(ReuseCounter)) is not None:
        readers.unread = 0


INPUT_CASTS = InputCastCache()


_LAYER = "a converted linear layer"
first_derivative_only: Callable[..., Any] = derivatives.first_derivative_only(_LAYER)
Saved = tuple[Tensor | None, ...]
# Data and scales of X for forward; those for wgrad, None where they are the same; what X is recomputed from
QuantizedInput = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Recomputable | None]
# G for dgrad, and G for wgrad; None for a product that is not needed or runs in high precision
QuantizedGradient = tuple[ScaledTensor | None, ScaledTensor | None]


def quantize_input(
    input: Tensor, x_MK: Tensor, recipe: Recipe, needs_wgrad: bool, channels: ChannelScales | None = None
) -> QuantizedInput:
    """Quantize X for forward, and for wgrad if needed; `input` is the tensor that `x_MK` is the matrix view of."""
    if isinstance(input, GatheredInput) and (gathered := input.quantized(recipe, needs_wgrad)) is not None:
        return *gathered, None, None
    recomputable = recomputable_of(input) if needs_wgrad else None
    with torch.set_grad_enabled(False):  # as no_grad, in fewer Python calls
        x, x_t, scale, scale_t = INPUT_CASTS.quantized(
            input, x_MK, recipe, needs_wgrad and recomputable is None, channels,
            None if channels is None else channels.inverse,
        )  # fmt: skip
    # Tensors that both casts share are returned once: torch.compile passes no tensor twice.
    return x, scale, None if x_t is x else x_t, None if scale_t is scale else scale_t, recomputable


def quantize_gradient(
    g_MN: Tensor, w: ScaledTensor | None, x: ScaledTensor | None, recipe: Recipe
) -> QuantizedGradient:
    """Quantize G for dgrad (if w is given) and for wgrad (if x is given), with their scales folded in."""
    fold_w = _fold(w, transposed=True) if w is not None and recipe.folds_w else None
    fold_x = _fold(x) if x is not None and recipe.folds_x else None
    spec, spec_t = recipe.dgrad_g, recipe.wgrad_g
    if x is None or spec_t is None:
        return None if w is None else quantize(g_MN, spec, fold_w), None
    if w is None:
        return None, quantize(g_MN, spec_t, fold_x, order="columns" if needs_both_orders(g_MN.device) else "rows")
    return quantize_both(g_MN, spec, fold_w, spec_t, fold_x)


class Quantizer:
    """Quantizes X and G for one forward of a linear and its backward: by their current amax, unless overridden."""

    input: Callable[..., QuantizedInput] = staticmethod(quantize_input)
    gradient: Callable[..., QuantizedGradient] = staticmethod(quantize_gradient)

    def channels(self, input: Tensor, w_NK: Tensor) -> ChannelScales | None:
        """Return the channel scales of X and W in this forward, None for none; called once, before `input`."""
        return w_NK.channels if isinstance(w_NK, Fp8Weight) else None

    def cached_channel_scales(self, input: Tensor, backward: bool) -> ChannelScales | None:
        """Return the channel scales of a forward, with a backward or not, that a plan can run; None if none can."""
        return None

    def note_backward(self) -> None:
        """Note that backward has reached this layer, with values; `gradient` does so by itself."""


JUST_IN_TIME = Quantizer()


def output_dtype(input: Tensor, weight: Tensor, dim: int = 1) -> torch.dtype | None:
    """Return the dtype of Y; None for the product of `F.linear`, as inside `octavo.disabled()`."""
    # `dim` is the dimension of the weight that is K.
    if SWITCH.off:
        return None
    if multiplies_itself(weight):
        if not torch.compiler.is_compiling():  # Dynamo traces no warnings
            warnings.warn(
                f"octavo: the weight of a converted layer is a {type(weight).__name__}, which multiplies itself, not "
                "in the layer's recipe; octavo.revert(model) makes plain layers",
                stacklevel=2,
            )
        return None
    derivatives.refuse_transforms(_LAYER, input, weight)
    if input.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"linear takes float32, bfloat16 or float16 input; got {input.dtype}")
    if input.shape[-1] != (k := weight.shape[dim]):
        raise ValueError(f"linear: the input's last dimension is in_features = {k}; got shape {tuple(input.shape)}")
    autocast = autocast_dtype(input.device.type)
    if autocast is None and input.dtype != weight.dtype:
        raise ValueError(
            f"linear: input is {input.dtype} but weight is {weight.dtype}; cast one of them, or run under "
            f"torch.autocast({input.device.type!r}, dtype=torch.bfloat16)"
        )
    return input.dtype if autocast is None else autocast


def multiplies_itself(weight: Tensor) -> bool:
    """Return whether a weight is in another library's format, as after torchao's `quantize_`."""
    kind = type(weight)
    ours = kind in (Tensor, torch.nn.Parameter) or kind.__module__.partition(".")[0] in ("torch", "octavo")
    return not ours and hasattr(kind, "__tensor_flatten__")


# Linears whose weight is a DTensor: tensor and sequence parallelism by PyTorch's styles and by Transformers' plans.
#
#     W [N,K]        X [..., K]                      Y [..., N]            gradients
#     Shard(0)       Replicate                       Shard(-1)             ∂X Partial
#     Shard(1)       Shard(-1)                       Partial()             ∂b on each rank, b in one of the summands
#     Replicate      Replicate, or Shard of tokens   as X                  ∂W, ∂b Partial where X is sharded
#
# Scales cover what a rank has: whole rows of X and W with Shard(0), parts of rows with Shard(1). X is redistributed as
# the table wants, in its own dtype; an X or b that is no DTensor counts as Replicate.


def dtensor_linear(
    linear: Callable[..., Tensor], input: Tensor, weight: Any, bias: Tensor | None, recipe: Recipe, *options: object
) -> Tensor:
    """Return `linear` of each rank's parts of a weight that is a DTensor, as a DTensor."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # slow import

    mesh, placements = weight.device_mesh, weight.placements
    check_recipe(recipe)
    whole = [Replicate()] * mesh.ndim
    placed: list[Any] = []
    for name, other in (("input", input), ("bias", bias)):
        if other is not None and not isinstance(other, DTensor):
            other = DTensor.from_local(other, mesh, whole, run_check=False)
        if other is not None and other.device_mesh != mesh:
            raise ValueError(f"linear: weight is on {mesh}, but {name} on {other.device_mesh}: give both one mesh")
        placed.append(other)
    x, b = placed
    last, first = x.ndim - 1, 1
    rows: list[tuple[Any, ...]] = []  # of each mesh dimension: X, ∂X, ∂W, ∂b and Y
    for dim, (w, x_place) in enumerate(zip(placements, x.placements, strict=True)):
        if w == Shard(0):
            rows.append((Replicate(), Partial(), w, Shard(0), Shard(last)))
        elif w == Shard(1):
            rows.append((Shard(last), Shard(last), w, Partial(), Partial()))
            first *= int(mesh.get_local_rank(dim) == 0)
        elif w.is_replicate():
            tokens = isinstance(x_place, Shard) and x_place.dim != last
            same, summed = (x_place, Partial()) if tokens else (Replicate(), w)
            rows.append((same, same, summed, summed, same))
        else:
            raise ValueError(
                f"linear: a weight [N,K] is placed as Shard(0), Shard(1) or Replicate() on each dimension of its mesh; "
                f"got {placements}: redistribute it"
            )
    x_in, x_grad, w_grad, b_grad, y_out = map(list, zip(*rows, strict=True))
    if list(x.placements) != x_in:  # if equal, the backward of `redistribute` would sum a Partial ∂X on every rank
        x = x.redistribute(placements=x_in)
    x_local = x.to_local(grad_placements=x_grad)
    b_local = None
    if b is not None:
        b = b.redistribute(placements=[p if p.is_shard() else Replicate() for p in b_grad])
        b_local = b.to_local(grad_placements=b_grad)
        if any(w == Shard(1) for w in placements):
            b_local = b_local * first
    y_local = linear(x_local, weight.to_local(grad_placements=w_grad), b_local, recipe, *options)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    return DTensor.from_local(y_local, mesh, y_out, run_check=False, shape=shape, stride=contiguous_strides(shape))


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError for a recipe whose scales cover more than a rank has."""
    if has_tensor_scale(recipe):
        raise ValueError(
            f"recipe {recipe.name!r} has one scale per tensor, which would be another on each rank of tensor "
            "parallelism: convert the model with recipe 'rowwise', whose scales belong to rows"
        )


def has_tensor_scale(recipe: Recipe) -> bool:
    return TENSOR in (recipe.x.granularity, recipe.w.granularity)


def on_values(linear: Callable[..., Tensor], input: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """Return `linear` of the rows of a nested tensor, nested in the same way; inside `octavo.disabled()`, PyTorch's."""
    if SWITCH.off:
        return F.linear(input, weight, options[0])
    if has_dense_rows(input):
        return jagged_like(input, linear(input.values(), weight, *options))
    if input.layout is torch.strided:  # nested, of any sizes
        parts = input.unbind()
        if parts and all(part.shape[-1] == weight.shape[1] for part in parts):
            rows = linear(torch.cat([part.flatten(0, -2) for part in parts]), weight, *options)
            sizes = [math.prod(part.shape[:-1]) for part in parts]
            split = zip(rows.split(sizes), parts, strict=True)
            return torch.nested.as_nested_tensor([y.view(*part.shape[:-1], -1) for y, part in split])
    raise TypeError(
        f"{_LAYER} takes dense tensors, and nested ones of in_features = {weight.shape[1]}; got "
        f"{type(input).__name__} of layout {input.layout}: pass input.to_dense(), or leave the layer out by "
        "octavo.convert(model, skip=[…])"
    )


def _fold(operand: ScaledTensor, transposed: bool = False) -> Tensor | None:
    """Return row scales [R,1] of an operand as a factor of G: [R,1], or [1,R] if transposed."""
    if operand.scale is None:
        return None
    return (operand.scale.t() if transposed else operand.scale).float()
