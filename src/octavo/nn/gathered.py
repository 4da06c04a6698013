"""Weights that FSDP2 gathers in FP8: what a shard says of itself, and what the gathered weight is.

    ShardedWeight    a rank's rows of W in their own dtype. When FSDP gathers, it hands over their FP8 bytes and scales.
    Fp8AllGatherOutput   the whole W as those bytes and scales, which products read as they are. Never gathered in bf16.

FSDP2 asks a tensor for both through `fsdp_pre_all_gather` and `fsdp_post_all_gather`; attributes on a plain tensor are
lost where FSDP pads, pins or moves the shard, so it takes a subclass. It has no arithmetic of its own: every operation
works on the plain tensor inside, and what comes out is plain, but for the few that FSDP makes new shards with.

By row a shard's scales are those of the whole matrix, so the bytes are those that one process would make of it, and
nothing but the gather is exchanged. By tensor the largest magnitude has to be known across ranks first: `GlobalScales`
asks for all weights at once, once per optimizer step.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from octavo.kernels import dequantize, quantize, wants_copies
from octavo.kernels.quantize.reference import scale_of, transposed
from octavo.numerics.spec import TENSOR, QuantSpec
from octavo.runtime.switch import SWITCH
from octavo.tensor import ScaledTensor, local_tensor

aten = torch.ops.aten
_STAYS_SHARDED = {
    aten.detach.default, aten.view.default, aten.as_strided.default, aten.slice.Tensor, aten.split.Tensor,
    aten.new_zeros.default, aten.clone.default, aten._to_copy.default, aten._pin_memory.default, aten.alias.default,
    aten.narrow.default, aten.empty_like.default,
}  # fmt: skip
"""Operations by which FSDP makes a shard of a shard."""


class GlobalScales:
    """Scales by tensor of sharded weights, from the largest magnitudes over all shards.

    Args:
        group: The ranks that share the weights.

    One all_reduce for all weights, when a forward begins after an optimizer has stepped or weights were loaded
    (`stale`), on every rank alike.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.stale = True
        self._group = group
        self._weights: list[
            tuple[Tensor, GatherFormat]
        ] = []  # no weak references: `module.to` swaps none that has some

    def add(self, parameter: Tensor, form: "GatherFormat") -> None:
        """Keep the scale of a sharded parameter (a DTensor), from the next forward on."""
        self._weights.append((parameter, form))
        self.stale = True

    def drop(self, form: "GatherFormat") -> None:
        """Forget a weight."""
        self._weights = [(parameter, other) for parameter, other in self._weights if other is not form]

    @torch.no_grad()
    def refresh(self) -> None:
        """Find the scales of all weights, if any may have changed."""
        if not self.stale or not self._weights:
            return
        locals_ = [local_tensor(parameter) for parameter, _ in self._weights]
        found = [
            form.rounded(local).abs().amax().float() if local.numel() else local.new_zeros((), dtype=torch.float32)
            for local, (_, form) in zip(locals_, self._weights, strict=True)
        ]
        amax = torch.stack(found)
        dist.all_reduce(amax, dist.ReduceOp.MAX, self._group)
        for value, (_, form) in zip(amax, self._weights, strict=True):
            assert form.spec is not None
            form.scale = scale_of(value.view(1, 1), form.spec)[0]
        self.stale = False


@dataclass
class GatherFormat:
    """How a sharded weight is gathered.

    Attributes:
        spec: FP8 form of the whole weight: by row or by tensor. None: in the dtype it is computed in.
        dtype: What the weight is computed in; shards of another dtype are rounded to it first. None: the shards' own.
        rows: Rows of the whole weight.
        scales: Who knows the scale, by tensor; else None.
        scale: The scale [1,1] by tensor, once it is known.
        follow: Called when the recipe of a layer that reads the weight has changed; set by who shards.
    """

    spec: QuantSpec | None
    dtype: torch.dtype | None
    rows: int
    scales: GlobalScales | None = None
    scale: Tensor | None = None
    follow: Callable[[], None] = lambda: None

    def rounded(self, local: Tensor) -> Tensor:
        """Rows in the dtype of computation."""
        return local if self.dtype is None else local.to(self.dtype)


class ShardedWeight(Tensor):
    """A rank's rows of a weight; see the module."""

    local: Tensor
    gather_format: GatherFormat
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, form: GatherFormat) -> "ShardedWeight":
        """As seen from outside, a tensor like `local`."""
        made: ShardedWeight = Tensor._make_wrapper_subclass(
            cls, local.size(), local.stride(), local.storage_offset(), dtype=local.dtype, device=local.device,
            layout=local.layout, requires_grad=local.requires_grad,
        )  # fmt: skip
        made.local, made.gather_format = local, form
        return made

    def __init__(self, local: Tensor, form: GatherFormat) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.local}, gathered as {self.gather_format.spec})"

    def __tensor_flatten__(self) -> tuple[list[str], GatherFormat]:
        return ["local"], self.gather_format

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], form: GatherFormat, size: Any, stride: Any) -> "ShardedWeight":
        return ShardedWeight(inner["local"], form)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def unwrapped(value: Any) -> Any:
            return value.local if isinstance(value, ShardedWeight) else value

        out = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        owner = args[0] if args and isinstance(args[0], ShardedWeight) else None
        if owner is None:
            return out
        if func in _STAYS_SHARDED:
            return tree_map(
                lambda value: ShardedWeight(value, owner.gather_format) if isinstance(value, Tensor) else value, out
            )
        return owner if out is owner.local else out  # in place

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """FP8 bytes of the rows, and their scales where each row has its own, padded to what every rank sends."""
        form, local = self.gather_format, self.gather_format.rounded(self.local)
        sent = -(-form.rows // mesh.size())
        if form.spec is None:
            return (_padded(local, sent),), None
        if form.scales is not None and form.scales.stale:
            raise RuntimeError(
                "octavo: scales of weights are by tensor, and are found when the model given to octavo.parallelize "
                "begins its forward: call that, not a part of it; or use recipe 'rowwise', which needs no such thing"
            )
        scale = None if form.scale is None else form.scale.to(local.device)  # of shards in host memory, found there
        quantized = quantize(local, form.spec, scale=scale)
        data = _padded(quantized.data.view(torch.uint8), sent)
        if form.spec.granularity == TENSOR:
            return (data,), scale
        assert quantized.scale is not None
        return (data, _padded(quantized.scale, sent)), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The whole weight, made once of the memory that every later gather fills again."""
        if out is not None:
            if isinstance(out, Fp8AllGatherOutput) and metadata is not None:
                out.scale = metadata
            return None
        form = self.gather_format
        if form.spec is None:
            return outputs[0][: form.rows], ()
        scale = metadata if metadata is not None else outputs[1][: form.rows]
        data = outputs[0].view(form.spec.format.dtype)[: form.rows]
        return Fp8AllGatherOutput(data, scale, form.spec, form.dtype or self.local.dtype), ()


class Fp8AllGatherOutput(Tensor):
    """A whole weight [N,K] in FP8; to anything but our products a tensor of a wider dtype with its values.

    What else reads it gets the values of the FP8 form, with a warning unless `octavo.disabled()` asks for it.
    """

    data_: Tensor
    scale: Tensor
    spec: QuantSpec
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> "Fp8AllGatherOutput":
        """As seen from outside, a tensor of the shape of `data`."""
        made: Fp8AllGatherOutput = Tensor._make_wrapper_subclass(
            cls, data.size(), data.stride(), dtype=dtype, device=data.device
        )
        made.data_, made.scale, made.spec = data, scale, spec
        return made

    def __init__(self, data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fp8AllGatherOutput({list(self.shape)}, {self.spec})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], (self.spec, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "Fp8AllGatherOutput":
        return Fp8AllGatherOutput(inner["data_"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (aten.detach.default, aten.alias.default, aten.as_strided.default, aten.view.default):
            (weight, *rest) = args
            same = not rest or list(rest[0]) == list(weight.shape)
            if same and weight.data_.is_contiguous():
                return Fp8AllGatherOutput(weight.data_, weight.scale, weight.spec, weight.dtype)

        def widened(value: Any) -> Any:
            if not isinstance(value, Fp8AllGatherOutput):
                return value
            return dequantize(ScaledTensor(value.data_, value.scale, value.spec), value.dtype)

        if SWITCH.enabled:
            warnings.warn(
                f"{func} reads a weight that was gathered in FP8, and gets its FP8 values; without FP8 gathers it "
                "reads the exact ones. Leave that layer out of convert (skip=[...]), or set fp8_comm='off'",
                stacklevel=2,
            )
        return func(*tree_map(widened, args), **tree_map(widened, kwargs or {}))


def quantized_as(weight: Fp8AllGatherOutput, spec: QuantSpec) -> ScaledTensor:
    """What products read of a gathered weight. A function, as torch.compile passes no spec to a tensor's method.

    Raises:
        ValueError: Where it was gathered in another spec.
    """
    if spec != weight.spec:
        raise ValueError(
            f"this weight is gathered as {weight.spec}, but its layer's recipe wants {spec}: after octavo.parallelize, "
            "change a recipe with octavo.nn.change_recipe(model, name, recipe, reason=…)"
        )
    return ScaledTensor(weight.data_, weight.scale, spec)


def for_dgrad(w: ScaledTensor) -> ScaledTensor:
    """A row-major weight, in the memory order that dgrad's product over its rows wants on this device."""
    return ScaledTensor(transposed(w.data).t(), w.scale, w.spec) if wants_copies(w.data.device) else w


def sharded_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters whose shards are `ShardedWeight`s, each once."""
    for name, parameter in model.named_parameters():
        if isinstance(getattr(parameter, "_local_tensor", None), ShardedWeight):
            yield name, parameter


def _padded(x: Tensor, rows: int) -> Tensor:
    """A matrix with rows of zeros up to `rows`."""
    if x.shape[0] == rows:
        return x.contiguous()
    full = x.new_zeros((rows, x.shape[1]))
    full[: x.shape[0]] = x
    return full
