"""An input that ranks of tensor parallelism gathered in FP8: what a linear multiplies, without X in high precision.

    GatheredInput    X [..., K], each row quantized on the rank that has it, as bytes [M,K] and row scales [M,1]

Row scales know nothing of other rows, so these are the bytes and scales of one process. Recipes whose X is one copy by
row read them in both products (`fits`). Any other operation reads the dequantized values, with a warning.
"""

import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import dequantize, needs_both_orders
from octavo.kernels.quantize.reference import transposed
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import ROW
from octavo.runtime.torch_compat import disabled_torch_function, tree_map
from octavo.tensor import ScaledTensor, contiguous_strides

aten = torch.ops.aten
_COMPOSITE = (aten.view_as.default, aten.reshape.default)
"""Operations that inference mode does not decompose into the following."""
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)


def fits(recipe: Recipe) -> bool:
    """Whether rows of X can be quantized apart, once for forward and wgrad."""
    return recipe.x.granularity == ROW and recipe.wgrad_x == recipe.x and recipe.layer_state is None


class Rows:
    """Quantized rows of X, shared by views and by the layers that read them."""

    def __init__(
        self, x: ScaledTensor, sent: Tensor | None = None, gather: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.x = x  # Data [M,K], row-major, and scales [M,1]
        self._sent = None if sent is None else weakref.ref(sent)
        self._gather = gather
        self._columns: Tensor | None = None

    @property
    def sent(self) -> Tensor | None:
        """This rank's part before it was quantized, [..., K]; None where it has been freed."""
        return None if self._sent is None else self._sent()

    def in_high_precision(self) -> Tensor | None:
        """Gather X [..., K] of all ranks in high precision, on all of them together; None where it has been freed."""
        sent = self.sent
        return None if sent is None or self._gather is None else self._gather(sent.detach())

    def for_wgrad(self) -> Tensor:
        """Return the data in the memory order that wgrad needs on this device; transposed at the first call."""
        if self._columns is None:
            both = needs_both_orders(self.x.data.device)
            self._columns = transposed(self.x.data).t() if both else self.x.data
        return self._columns


class GatheredInput(Tensor):
    """X [..., K] in FP8, with the interface of a tensor of a wider dtype."""

    rows: Rows
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, rows: Rows, shape: tuple[int, ...], dtype: torch.dtype) -> "GatheredInput":
        """Make a tensor of a shape whose last dimension is K."""
        stride = contiguous_strides(shape)
        tensor: GatheredInput = Tensor._make_wrapper_subclass(
            cls, shape, stride, dtype=dtype, device=rows.x.data.device
        )
        tensor.rows = rows
        return tensor

    def __init__(self, rows: Rows, shape: tuple[int, ...], dtype: torch.dtype) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredInput({list(self.shape)}, {self.rows.x.spec})"

    def quantized(self, recipe: Recipe, needs_wgrad: bool) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """Return data and scales for forward, and data for wgrad if they differ; None if the recipe needs others."""
        if not (fits(recipe) and recipe.x == self.rows.x.spec):
            return None
        data, x_t = self.rows.x.data, self.rows.for_wgrad() if needs_wgrad else None
        return data, self.rows.x.scale, None if x_t is data else x_t

    def dequantized(self) -> Tensor:
        """Return the FP8 values as a plain tensor."""
        return dequantize(self.rows.x, self.dtype).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        owner = args[0]
        if func in _COMPOSITE:
            return func.decompose(*args)
        if func in (aten.detach.default, aten.alias.default):
            return GatheredInput(owner.rows, owner.shape, owner.dtype)
        if func in _VIEWS:
            shape = tuple(torch.empty(owner.shape, device="meta").view(args[1]).shape)
            if shape and shape[-1] == owner.shape[-1] and math.prod(shape) == owner.numel():
                return GatheredInput(owner.rows, shape, owner.dtype)
        warnings.warn(
            f"{func} reads an input that was gathered in FP8, so it gets the FP8 values, not the exact ones: use "
            "gather='bf16' for this layer",
            stacklevel=2,
        )

        def dequantized(value: Any) -> Any:
            return value.dequantized() if isinstance(value, GatheredInput) else value

        return func(*tree_map(dequantized, args), **tree_map(dequantized, kwargs or {}))
