"""X, quantized for forward and for wgrad, and shared by sibling layers that read the same tensor."""

import threading
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import needs_both_orders, quantize, quantize_pair
from octavo.numerics.recipe import Recipe
from octavo.runtime.execution_context import execution_context
from octavo.tensor import ScaledTensor

InputCasts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Data of X for forward and for wgrad, then the scales of both; for wgrad None, or those for forward, if not needed."""


def quantized_input(
    x_MK: Tensor, recipe: Recipe, needs_wgrad: bool, amax: Tensor | None, fold: Tensor | None = None
) -> tuple[ScaledTensor, ScaledTensor | None]:
    """Quantize X for forward, and for wgrad if needed. With `amax`, which sets the scale, or `fold`, a factor of X,
    both need equal specs.
    """
    spec, spec_t, copies = recipe.x, recipe.wgrad_x, needs_both_orders(x_MK.device)
    if not needs_wgrad or spec_t is None:
        return quantize(x_MK, spec, fold, amax=amax), None
    if spec == spec_t:
        x = quantize(x_MK, spec, fold, order="both" if copies else "rows", amax=amax)
        return x, x if x.other_order is None else ScaledTensor(x.other_order, x.scale, spec)
    if copies:
        return quantize_pair(x_MK, spec, None, spec_t, None)
    return quantize(x_MK, spec), quantize(x_MK, spec_t)


class _CacheEntry:
    """The casts of a tensor in this state. Holds no reference to the tensor, whose deletion calls `forget`.

    `storage` is a weak reference, which another storage at the same address does not satisfy.
    """

    __slots__ = ("casts", "state", "storage")

    def __init__(self, state: tuple[Any, ...], storage: weakref.ref[Any]) -> None:
        self.state, self.storage = state, storage
        self.casts: dict[Any, Any] = {}

    def forget(self, _: weakref.ref[Tensor]) -> None:
        """Free the casts, and the graph that `state` holds; called from any thread."""
        self.state, self.casts = (), {}


class Readers:
    """Whether other layers read the casts that a layer keeps. After `TRIES` casts in a row that none read, the layer
    keeps only every `AGAIN`th: keeping one costs the host as much as a launch.
    """

    __slots__ = ("unread",)

    def __init__(self) -> None:
        self.unread = 0  # Casts kept or not kept since one was read


TRIES, AGAIN = 8, 64


class InputCastCache(threading.local):
    """Casts of the last input of any linear, per thread, for sibling layers that read the same tensor.

    q, k and v are called one after the other with the same tensor object; so are gate and up. The lookup is by
    identity, so it needs no knowledge of the model. An entry is dropped when its tensor is deleted or another input
    arrives. Layers whose scales have equal sources (see `quantized`) share the cast of the first: they read the same
    tensors, so their amax histories are equal.

    Only tensors with a `grad_fn` are cached. Others may be buffers that are written without autograd noticing (a
    receive buffer, a CUDA graph's input, an array shared with NumPy). A cast is not reused once the tensor's version,
    `grad_fn` or memory changes, nor on another stream, inside another dispatch mode or CUDA graph capture: see
    `execution_context`.

    Limit, as in autograd, which saves tensors by reference: the cache misses a write into an activation that PyTorch
    does not report (through `.data`, NumPy or a custom kernel) between two layers that read it. PyTorch's own gradients
    of the first layer are then wrong, too.

    Under torch.compile the graph of a training step merges equal `quantize` calls instead.
    """

    def __init__(self) -> None:
        self.entry: tuple[weakref.ref[Tensor], _CacheEntry] | None = None

    def quantized(
        self, owner: Tensor, x_MK: Tensor, recipe: Recipe, needs_wgrad: bool, amax: Tensor | None, source: Hashable,
        fold: Tensor | None = None,
    ) -> InputCasts:  # fmt: skip
        """Return `quantized_input(x_MK, …, amax, fold)`, cached by the recipe's specs and `source`, where `amax` and
        `fold` come from.
        """
        # x_MK is the matrix view of `owner`.
        casts: dict[Any, InputCasts] | None = None
        if not torch.compiler.is_compiling():
            casts = self.casts_of(owner)
        if casts is not None:
            cast = casts.get(cast_key(recipe, True, source))  # of both, which serves a forward alone, too
            if cast is None and not needs_wgrad:
                cast = casts.get(cast_key(recipe, False, source))
            if cast is not None:
                note_reader(casts)
                return cast
        x, x_t = quantized_input(x_MK, recipe, needs_wgrad, amax, fold)
        cast = (x.data, None, x.scale, None) if x_t is None else (x.data, x_t.data, x.scale, x_t.scale)
        if casts is not None:
            casts[cast_key(recipe, needs_wgrad, source)] = cast
        return cast

    def kept_casts(
        self, owner: Tensor, readers: Readers | None, context: tuple[Any, ...]
    ) -> dict[Any, InputCasts | Readers] | None:
        """Return `casts_of`, with `readers` of the layer that keeps the first, if given."""
        casts = self.casts_of(owner, context)
        if casts is not None and readers is not None:
            casts.setdefault(Readers, readers)
        return casts

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
    """Return what casts of a tensor differ in: spec for forward, for wgrad if `both`, source of the amax or fold."""
    return recipe.x.text, recipe.wgrad_x.text if both and recipe.wgrad_x is not None else None, source


def note_reader(casts: dict[Any, Any]) -> None:
    """Tell the layer that keeps these casts that another one read them."""
    if (readers := casts.get(Readers)) is not None:
        readers.unread = 0


INPUT_CASTS = InputCastCache()
