"""FP8 forms of weights, kept until the weight changes: by choice, for many micro-batches per optimizer step.

Without this a weight is quantized in each forward and cast again in each backward: 6 bytes of memory traffic per
parameter and micro-batch, and nothing kept. With it, once per optimizer step and 2 bytes kept per parameter (1 where
products need no second memory order). The products of a micro-batch of T tokens take 6·T operations per parameter, so
quantizing a weight costs about 3 % of them at 8192 tokens on an H200 and 11 % at 2048 (6 bytes at 4.3 TB/s against
6·T operations at 1 PFLOP/s; predicted, not measured): worth keeping where micro-batches are small.

An entry belongs to a parameter and is found by its version counter, which every optimizer step and every other
in-place change raises, its storage, its strides and its surroundings, so it cannot be stale. What is not seen is a
write behind autograd's back, through `.data`, into the same storage.

Under torch.compile nothing is kept: the graph quantizes weights where it uses them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from octavo.kernels import quantize, quantize_pair, wants_copies
from octavo.nn.surroundings import surroundings
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

Forms = tuple[ScaledTensor, ScaledTensor]
"""W for forward and W for dgrad."""


class KeptWeights:
    """The latest FP8 forms of each parameter that is asked for."""

    def __init__(self) -> None:
        self._entries: Any = WeakTensorKeyDictionary()

    def kept(self, w_NK: Tensor, recipe: Recipe) -> Forms:
        """Forms of a weight, or of a transposed view of one; quantized now if there are none or it has changed."""
        if torch.compiler.is_compiling():
            return _quantized(w_NK, recipe.w, recipe.dgrad_w)
        owner = w_NK if w_NK._base is None else w_NK._base
        state = (
            w_NK._version, w_NK.untyped_storage()._cdata, w_NK.stride(), recipe.w, recipe.dgrad_w,
            *surroundings(w_NK),
        )  # fmt: skip
        entry = self._entries.get(owner)
        if entry is None or entry[0] != state:
            with torch.no_grad():
                entry = (state, _quantized(w_NK, recipe.w, recipe.dgrad_w))
            self._entries[owner] = entry
        forms: Forms = entry[1]
        return forms

    def forget(self, weight: Tensor) -> None:
        """Drop the forms of a parameter, if there are any."""
        self._entries.pop(weight, None)


def _quantized(w_NK: Tensor, spec: QuantSpec, spec_t: QuantSpec) -> Forms:
    copies = wants_copies(w_NK.device)
    if spec == spec_t:
        w = quantize(w_NK, spec, order="both" if copies else "rows")
        return w, w
    if copies:
        return quantize_pair(w_NK, spec, None, spec_t, None)
    return quantize(w_NK, spec), quantize(w_NK, spec_t)


WEIGHTS = KeptWeights()
