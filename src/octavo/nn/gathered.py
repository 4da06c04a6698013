"""Weights that FSDP2 gathers in FP8: linears [N,K], sharded by rows, and experts [E,N,K], sharded by experts.

    ShardedWeight        a rank's rows of W in their own dtype; FSDP gathers their FP8 bytes and scales
    Fp8AllGatherOutput   the whole W as those bytes and scales, which products read directly; never gathered in bf16

FSDP2 pads, pins and moves shards, which drops attributes of a plain tensor, so this needs a subclass.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.kernels import dequantize, needs_both_orders, quantize
from octavo.kernels.quantize.reference import scale_of, transposed
from octavo.nn.resident import Arguments, Fp8Weight, Operation, Options, call_with, pad_rows, written
from octavo.numerics.equalization import ChannelScales
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import ROW, TENSOR, QuantSpec
from octavo.runtime.torch_compat import disabled_torch_function, local_part, tree_map
from octavo.tensor import ScaledTensor, contiguous_strides, local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# `GatheredInput`: X [..., K] that ranks of tensor parallelism gathered in FP8, each row quantized on the rank that has
# it. Row scales know nothing of other rows, so these are the bytes and scales of one process. Recipes whose X is one
# copy by row read them in both products (`fits`). Any other operation reads the dequantized values, with a warning.

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)


def fits(recipe: Recipe) -> bool:
    """Whether rows of X can be quantized apart, once for forward and wgrad."""
    return recipe.x.granularity == ROW and recipe.wgrad_x == recipe.x and not recipe.equalization


class Rows:
    """Quantized rows of X, shared by views and by the layers that read them."""

    def __init__(
        self, x: ScaledTensor, sent: Tensor | None = None, gather: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.x = x  # Data [M,K], row-major, and scales [M,1]
        self._sent = None if sent is None else weakref.ref(sent)
        self.gather = gather  # Gathers such a part of all ranks in high precision
        self._columns: Tensor | None = None

    @property
    def sent(self) -> Tensor | None:
        """This rank's part before it was quantized, [..., K]; None where it has been freed."""
        return None if self._sent is None else self._sent()

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
        stride, device = contiguous_strides(shape), rows.x.data.device
        tensor: GatheredInput = Tensor._make_wrapper_subclass(cls, shape, stride, dtype=dtype, device=device)
        tensor.rows = rows
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"GatheredInput({list(self.shape)}, {self.rows.x.spec})"

    def quantized(self, recipe: Recipe, needs_wgrad: bool) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """Return data and scales for forward, and data for wgrad if they differ; None if the recipe needs others."""
        if not (fits(recipe) and recipe.x == self.rows.x.spec):
            return None
        data, x_t = self.rows.x.data, self.rows.for_wgrad() if needs_wgrad else None
        return data, self.rows.x.scale, None if x_t is data else x_t

    def dequantized(self) -> Tensor:
        return dequantize(self.rows.x, self.dtype).view(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        owner = args[0]
        if func in (aten.view_as.default, aten.reshape.default):  # inference mode does not decompose them
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
        return call_with(GatheredInput, GatheredInput.dequantized, func, args, kwargs)


_STAYS_SHARDED = {  # Operations by which FSDP makes a new shard from a shard
    aten.detach.default, aten.view.default, aten.as_strided.default, aten.slice.Tensor, aten.split.Tensor,
    aten.new_zeros.default, aten.clone.default, aten._to_copy.default, aten._pin_memory.default, aten.alias.default,
    aten.narrow.default, aten.empty_like.default,
}  # fmt: skip


class AmaxGroup:
    """Weights that FSDP2 gathers together, in this order; it computes their per-tensor scales, in every gather."""

    # Not reused: no version counter proves that a weight is as it was, because `.data` and `to_local()` write to it.

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = list(weights)
        for weight in self._weights:
            local_part(weight).gather_format.group = self

    def compute_scales(self, gather_format: "GatherFormat", ranks: dist.ProcessGroup, device: torch.device) -> None:
        """Compute all scales with one all_reduce, if this is the format of the first weight that has one."""
        formats = [(weight, local_part(weight).gather_format) for weight in self._weights]
        formats = [(weight, form) for weight, form in formats if form.by_tensor]
        if formats[0][1] is not gather_format:
            return
        amaxes = []
        for weight, form in formats:
            local = form.rounded(local_tensor(weight))
            amaxes.append(local.abs().amax().float() if local.numel() else local.new_zeros((), dtype=torch.float32))
        amax = torch.stack(amaxes).to(device)
        dist.all_reduce(amax, dist.ReduceOp.MAX, ranks)
        for value, (_, form) in zip(amax, formats, strict=True):
            form.scale = scale_of(value.view(1, 1), form.spec)[0]


@dataclass
class GatherFormat:
    # FP8 spec of the whole weight, with scales per row or per tensor. None: gathered in the compute dtype.
    spec: QuantSpec | None
    # Compute dtype; shards of another dtype are rounded to it first. None: the shards' dtype.
    dtype: torch.dtype | None
    rows: int  # Size of dimension 0 of the whole weight
    group: AmaxGroup | None = None  # Computes the scale, if per tensor; set by `octavo.parallelize`, as the next two
    scale: Tensor | None = None  # The per-tensor scale [1,1] of the last gather
    follow: Callable[[], None] = lambda: None  # Called after a change of the recipe of a layer that reads the weight
    # Returns the channel scales s with which all ranks gather W diag(s), or None.
    channels: Callable[[], ChannelScales | None] = lambda: None
    transposed: bool = False  # Whether a weight of experts is stored as [E,K,N]: its transpose [E,N,K] is gathered

    @property
    def by_tensor(self) -> bool:
        return self.spec is not None and self.spec.granularity == TENSOR

    def rounded(self, local: Tensor) -> Tensor:
        return local if self.dtype is None else local.to(self.dtype)

    def quantized(self, local: Tensor, factor: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return FP8 data [...,N,K] and scales of a shard."""
        assert self.spec is not None
        w = local.transpose(-1, -2) if self.transposed else local
        quantized = quantize(w.flatten(0, -2), self.spec, factor, scale=scale)
        assert quantized.scale is not None
        by_row = quantized.scale.shape[0] == quantized.data.shape[0]
        return quantized.data.view(w.shape), quantized.scale.view(*w.shape[:-1], 1) if by_row else quantized.scale


class ShardedWeight(Tensor):
    local: Tensor
    gather_format: GatherFormat
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, local: Tensor, gather_format: GatherFormat) -> "ShardedWeight":
        tensor: ShardedWeight = Tensor._make_wrapper_subclass(
            cls, local.size(), local.stride(), local.storage_offset(), dtype=local.dtype, device=local.device,
            layout=local.layout, requires_grad=local.requires_grad,
        )  # fmt: skip
        tensor.local, tensor.gather_format = local, gather_format
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.local}, gathered as {self.gather_format.spec})"

    def __tensor_flatten__(self) -> tuple[list[str], GatherFormat]:
        return ["local"], self.gather_format

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], gather_format: GatherFormat, size: object, stride: object
    ) -> "ShardedWeight":
        return ShardedWeight(inner["local"], gather_format)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        out = call_with(ShardedWeight, lambda weight: weight.local, func, args, kwargs)
        owner = args[0] if args and isinstance(args[0], ShardedWeight) else None
        if owner is None:
            return out
        if func in _STAYS_SHARDED:
            form = owner.gather_format
            return tree_map(lambda value: ShardedWeight(value, form) if isinstance(value, Tensor) else value, out)
        return owner if out is owner.local else out  # in place

    def fsdp_pre_all_gather(self, mesh: "DeviceMesh") -> tuple[tuple[Tensor, ...], ChannelScales | None]:
        """Return FP8 bytes of the rows, and their scales, padded to the size that every rank sends."""
        gather_format, local = self.gather_format, self.gather_format.rounded(self.local)
        padded_rows = -(-gather_format.rows // mesh.size())
        if gather_format.spec is None:
            return (pad_rows(local, padded_rows),), None
        if gather_format.by_tensor:
            assert gather_format.group is not None
            gather_format.group.compute_scales(gather_format, mesh.get_group(), torch.device(mesh.device_type))
        # For shards in host memory the scale is computed there.
        scale = None if gather_format.scale is None else gather_format.scale.to(local.device)
        channels = gather_format.channels()
        factor = None if channels is None else channels.to(local.device).factor
        data, scales = gather_format.quantized(local, factor, scale)
        data = pad_rows(data.view(torch.uint8), padded_rows)
        # One scale is gathered too: later gathers refill its memory, which backward reads, along with the bytes.
        return (data, scales if gather_format.by_tensor else pad_rows(scales, padded_rows)), channels

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: ChannelScales | None, dtype: torch.dtype, *, out: object = None
    ) -> Any:
        """Return the whole weight, a view of the memory that every later gather refills."""
        if out is not None:
            out = local_part(out)  # of a weight that tensor parallelism placed
            if isinstance(out, Fp8AllGatherOutput):
                out.channels = metadata if metadata is None else metadata.to(out.data_.device)
            return None
        gather_format = self.gather_format
        if gather_format.spec is None:
            return outputs[0][: gather_format.rows], ()
        scale = outputs[1][: 1 if gather_format.by_tensor else gather_format.rows]
        data = outputs[0].view(gather_format.spec.format.dtype)[: gather_format.rows]
        channels = metadata if metadata is None else metadata.to(data.device)
        dtype = gather_format.dtype or self.local.dtype
        return Fp8AllGatherOutput(data, scale, gather_format.spec, dtype, channels, gather_format.transposed), ()


class Fp8AllGatherOutput(Fp8Weight):
    """A whole weight [N,K] that FSDP gathered in FP8, or of all experts, [E,N,K] or [E,K,N], with data [E,N,K]."""

    # A later gather into the same memory replaces data, scales and channel scales, so operations that write raise.

    channel_factor: Tensor
    channel_inverse: Tensor
    is_transposed: bool
    _channels: ChannelScales | None
    read_warning = (
        "that was gathered in FP8, so it gets a copy of the FP8 values, not the exact ones, and what it or its result "
        "writes there is lost. Leave that layer out of convert (skip=[...]), or set fp8_comm='off'"
    )
    mismatch_advice = (
        "after octavo.parallelize, change a recipe with octavo.nn.change_recipe(model, name, recipe, reason=…)"
    )

    @staticmethod
    def __new__(
        cls, data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype, channels: ChannelScales | None = None,
        transposed: bool = False,
    ) -> "Fp8AllGatherOutput":  # fmt: skip
        shape = data.transpose(-1, -2).shape if transposed else data.shape
        strides = contiguous_strides(shape)
        tensor: Fp8AllGatherOutput = Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype, device=data.device)
        tensor.data_, tensor.scale, tensor.spec, tensor.channels = data, scale, spec, channels
        tensor.text = spec.text
        tensor.is_transposed = transposed
        return tensor

    @property
    def channels(self) -> ChannelScales | None:
        return self._channels

    @channels.setter
    def channels(self, channels: ChannelScales | None) -> None:
        self._channels = channels
        if channels is not None:  # attributes, because torch.compile passes a tensor's tensors by name
            self.channel_factor, self.channel_inverse = channels.factor, channels.inverse

    @classmethod
    def own_operation(cls, func: Operation, args: Arguments, kwargs: Options) -> Any:
        """See `Fp8Weight.own_operation`; raises ValueError for operations that write."""
        if any(isinstance(value, Fp8AllGatherOutput) for value in written(func, args, kwargs)):
            raise ValueError(_write_error(str(func)))
        return NotImplemented

    @property
    def data(self) -> "Fp8AllGatherOutput":
        return self.same_bytes()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ValueError(_write_error("weight.data = …"))

    def same_bytes(self) -> "Fp8AllGatherOutput":
        return Fp8AllGatherOutput(self.data_, self.scale, self.spec, self.dtype, self.channels, self.is_transposed)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        channels = [] if self.channels is None else ["channel_factor", "channel_inverse"]
        return ["data_", "scale", *channels], (self.spec, self.dtype, self.is_transposed)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], size: object, stride: object
    ) -> "Fp8AllGatherOutput":
        scales = inner.get("channel_factor"), inner.get("channel_inverse")
        channels = None if scales[0] is None or scales[1] is None else ChannelScales(scales[0], scales[1])
        spec, dtype, transposed = context
        return Fp8AllGatherOutput(inner["data_"], inner["scale"], spec, dtype, channels, transposed)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        if self.ndim == 2:
            return super().dequantized(dtype)
        whole = rows_of(self).dequantized(dtype).view(self.data_.shape)
        return whole.transpose(-1, -2).contiguous() if self.is_transposed else whole


def _write_error(operation: str) -> str:
    return (
        f"{operation} would change a weight that FSDP2 has gathered in FP8, and its shards would stay as they are: "
        "call reshard() of the modules on which fully_shard was called, and write to the shards"
    )


def rows_of(weight: Fp8AllGatherOutput) -> Fp8AllGatherOutput:
    """Return the rows of all experts' weights, [E·N,K]; a weight [N,K] itself."""
    if weight.ndim == 2:
        return weight
    data, scale = weight.data_.flatten(0, 1), weight.scale.flatten(0, 1)
    return Fp8AllGatherOutput(data, scale, weight.spec, weight.dtype, weight.channels)


def sharded_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and parameters whose shards are `ShardedWeight`s, each once."""
    for name, parameter in model.named_parameters():
        if isinstance(local_part(parameter), ShardedWeight):
            yield name, parameter
