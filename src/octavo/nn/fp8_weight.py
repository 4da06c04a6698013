"""A weight that exists in FP8 only: the tensor that products of `octavo.nn.linear` read directly.

    W [N,K] ≈ diag(b) Wq      data_ = Wq, one byte per element; scale = b [N,1], or [1,1] by tensor

With row scales the same bytes serve forward and dgrad, because b folds into G (`octavo.numerics.recipe`). The tensor
has the interface of one in a wider dtype. Operations other than Octavo's products read the dequantized values, with a
warning unless inside `octavo.disabled()`. Two kinds exist:

    Fp8AllGatherOutput   what FSDP gathered, replaced by the next gather (`octavo.nn.gathered`)
    ResidentWeight       a frozen parameter, which never changes (`octavo.nn.resident`)
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.kernels import dequantize, needs_both_orders
from octavo.kernels.quantize.reference import transposed
from octavo.numerics.equalization import ChannelScales
from octavo.numerics.spec import QuantSpec
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import disabled_torch_function, tree_leaves, tree_map
from octavo.tensor import ScaledTensor

aten = torch.ops.aten
_VIEWS = (aten.detach.default, aten.alias.default, aten.as_strided.default, aten.view.default)


class Fp8Weight(Tensor):
    """A whole weight [N,K] in FP8, with the interface of a tensor of a wider dtype; see the module docstring.

    Attributes:
        data_: FP8 values, [N,K].
        scale: Dequantization scales.
        spec: Format and granularity.
        text: That of `spec`, which torch.compile can read of a transposed weight too.
        read_warning: What the warning of an operation that reads the values states and advises.
        mismatch_advice: What to do if a recipe needs another spec.
    """

    data_: Tensor
    scale: Tensor
    spec: QuantSpec
    text: str
    read_warning: ClassVar[str]
    mismatch_advice: ClassVar[str]
    __torch_function__ = disabled_torch_function

    @property
    def channels(self) -> ChannelScales | None:
        """Channel scales s of the data, which are those of W diag(s); None for W."""
        return None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.spec})"

    def same_bytes(self) -> Tensor:
        """Return another tensor with the same data and scales."""
        raise NotImplementedError

    @classmethod
    def own_operation(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that does not read the values; `NotImplemented` for others."""
        return NotImplemented

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own = cls.own_operation(func, args, kwargs or {})
        if own is not NotImplemented:
            return own
        if func in _VIEWS:
            (weight, *rest) = args
            layout = list(weight.shape), list(weight.stride())
            if all(list(size) == own for size, own in zip(rest[:2], layout, strict=False)):
                return weight.same_bytes()

        def dequantized(value: Any) -> Any:
            return value.dequantized(value.dtype) if isinstance(value, Fp8Weight) else value

        if not SWITCH.off:
            warnings.warn(f"{func} reads a weight {cls.read_warning}", stacklevel=2)
        return func(*tree_map(dequantized, args), **tree_map(dequantized, kwargs or {}))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return W, without channel scales, as a plain tensor."""
        w = ScaledTensor(self.data_, self.scale, self.spec)
        if self.channels is None:
            return dequantize(w, dtype)
        return (dequantize(w, torch.float32) * self.channels.inverse).to(dtype)


def written(func: Any, args: Any, options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tensors into which an operation writes."""
    if func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tree_leaves(args[index] if index < len(args) else options.get(argument.name))


def quantized_as(weight: Fp8Weight, spec: QuantSpec) -> ScaledTensor:
    """Return a weight as an operand. A function, because torch.compile passes no spec to a tensor's method."""
    if spec.text != weight.text:
        raise ValueError(
            f"this weight exists as {weight.text} only, but its layer's recipe needs {spec.text}: "
            f"{weight.mismatch_advice}"
        )
    return ScaledTensor(weight.data_, weight.scale, spec)


def for_dgrad(w: ScaledTensor) -> ScaledTensor:
    """Return a weight in the memory order that dgrad needs on this device."""
    return ScaledTensor(transposed(w.data).t(), w.scale, w.spec) if needs_both_orders(w.data.device) else w
