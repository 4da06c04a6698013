"""ResidentWeight: a frozen weight that is stored in FP8 only, such as the base under LoRA adapters.

    W [N,K] in bf16         2 bytes per parameter
    data_ [N,K], b [N,1]    1 + 4/K bytes per parameter: 1.001 for K = 4096

The weights of a layer's experts are one tensor [E,·,·], each matrix with scales of its own. A weight that is widened
for its products (`octavo.nn.prepared_linear`) has adaptive FP8: uint8 codes and a scale per 128 elements of a row.
What changes the storage (`.to(device)`, `clone`, pickle) keeps the bytes, `copy_` and fills quantize. Other writes
raise: FP8 rounds away changes below 3 % of an element, as of most merged adapters and optimizer steps.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.kernels import dequantize, needs_both_orders, quantize
from octavo.kernels.adaptive import adaptive_dequantize, adaptive_quantize
from octavo.kernels.quantize.reference import transposed
from octavo.numerics.equalization import ChannelScales
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import ADAPTIVE, ADAPTIVE_BY_TEXT, AdaptiveSpec, MessageSpec, QuantSpec
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import disabled_torch_function, local_part, tree_leaves, tree_map
from octavo.tensor import ScaledTensor, placed_like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# A weight that exists in FP8 only, W [N,K] ≈ diag(b) Wq: what FSDP gathered, replaced by the next gather
# (`Fp8AllGatherOutput`), or a frozen parameter (`ResidentWeight`). With row scales the same bytes serve forward and
# dgrad, because b folds into G. Operations other than Octavo's products read the dequantized values, with a warning.

aten = torch.ops.aten
Operation = Callable[..., Any]  # an `OpOverload`, with its positional and keyword arguments
Arguments = Sequence[Any]
Options = Mapping[str, Any]
_VIEWS = (aten.detach.default, aten.alias.default, aten.as_strided.default, aten.view.default)


class Fp8Weight(Tensor):
    """A whole weight [N,K] in FP8, with the interface of a tensor of a wider dtype."""

    data_: Tensor  # FP8 values, [N,K]
    scale: Tensor  # Dequantization scales
    spec: QuantSpec
    text: str  # That of `spec`, which torch.compile can read of a transposed weight too
    read_warning: ClassVar[str]  # What the warning of an operation that reads the values states and advises
    mismatch_advice: ClassVar[str]  # What to do if a recipe needs another spec
    __torch_function__ = disabled_torch_function

    @property
    def channels(self) -> ChannelScales | None:
        """Channel scales s of the data, which are those of W diag(s); None for W."""
        return None

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.spec})"

    def same_bytes(self) -> Tensor:
        """Return another tensor with the same data and scales."""
        raise NotImplementedError

    @classmethod
    def own_operation(cls, func: Operation, args: Arguments, kwargs: Options) -> Any:
        """Run an operation that does not read the values; `NotImplemented` for others."""
        return NotImplemented

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        own = cls.own_operation(func, args, kwargs or {})
        if own is not NotImplemented:
            return own
        if func in _VIEWS:
            (weight, *rest) = args
            layout = list(weight.shape), list(weight.stride())
            if all(list(size) == own for size, own in zip(rest[:2], layout, strict=False)):
                return weight.same_bytes()

        if not SWITCH.off:
            warnings.warn(f"{func} reads a weight {cls.read_warning}", stacklevel=2)
        return call_with(Fp8Weight, lambda weight: weight.dequantized(weight.dtype), func, args, kwargs)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return W, without channel scales, as a plain tensor."""
        w = ScaledTensor(self.data_, self.scale, self.spec)
        if self.channels is None:
            return dequantize(w, dtype)
        return (dequantize(w, torch.float32) * self.channels.inverse).to(dtype)


def call_with(
    kind: type, replace: Callable[[Any], Any], func: Operation, args: Arguments, kwargs: Options | None
) -> Any:
    args, kwargs = tree_map(lambda x: replace(x) if isinstance(x, kind) else x, (args, kwargs or {}))
    return func(*args, **kwargs)


def written(func: Any, args: Arguments, options: Options) -> Iterator[Any]:
    """Yield the tensors into which an operation writes."""
    if func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tree_leaves(args[index] if index < len(args) else options.get(argument.name))


def quantized_as(weight: Fp8Weight, spec: QuantSpec) -> ScaledTensor:
    """Return a weight as an operand. A function, because torch.compile passes no spec to a tensor's method."""
    if spec.text != weight.text:
        problem = f"this weight exists as {weight.text} only, but its layer's recipe needs {spec.text}"
        raise ValueError(f"{problem}: {weight.mismatch_advice}")
    return ScaledTensor(weight.data_, weight.scale, spec)


def for_dgrad(w: ScaledTensor) -> ScaledTensor:
    return ScaledTensor(transposed(w.data).t(), w.scale, w.spec) if needs_both_orders(w.data.device) else w


def quantized_values(weight: Tensor, spec: MessageSpec) -> tuple[Tensor, Tensor]:
    """Quantize a plain weight [N,K], or those of experts [E,N,K] matrix by matrix, not in adaptive FP8."""
    if isinstance(spec, AdaptiveSpec):
        if spec == ADAPTIVE:
            return adaptive_quantize(weight)
        codes, scale = adaptive_quantize(weight.t())
        return codes.t(), scale.t()
    if weight.ndim == 2:
        w = quantize(weight, spec)
        assert w.scale is not None
        return w.data, w.scale
    scale_shape = spec.granularity.scale_shape((weight.shape[1], weight.shape[2]))
    data = torch.empty(weight.shape, dtype=spec.format.dtype, device=weight.device)
    scale = torch.empty((len(weight), *scale_shape), dtype=spec.scale_dtype, device=weight.device)
    for expert, matrix in enumerate(weight.unbind()):
        data[expert], scale[expert] = quantized_values(matrix, spec)
    return data, scale


def dequantized_values(data: Tensor, scale: Tensor, spec: MessageSpec, dtype: torch.dtype) -> Tensor:
    """Return a matrix [N,K]; one whose transpose is stored as a view."""
    if isinstance(spec, AdaptiveSpec):
        if spec == ADAPTIVE:
            return adaptive_dequantize(data, scale, dtype)
        return adaptive_dequantize(data.t(), scale.t(), dtype).t()
    if data.is_contiguous():
        return dequantize(ScaledTensor(data, scale, spec), dtype)
    return dequantize(ScaledTensor(data.t(), scale.t(), spec.transposed), dtype).t()


_TRANSPOSES: dict[Any, Any] = {
    aten.t.default: lambda ndim: (0, 1),
    aten.transpose.int: lambda ndim, a, b: (a % ndim, b % ndim),
    aten.permute.default: lambda ndim, dims: (dims[0] % 2, 0) if ndim == 2 else (0, 0),
}
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_FILLS = (  # In-place operations whose result does not depend on the values before
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default,
    aten.random_.default,
)  # fmt: skip


class ResidentWeight(Fp8Weight):
    """A frozen weight [N,K], or those of experts [E,N,K], that exists in FP8 only. As a parameter:
    `nn.Parameter(w, requires_grad=False)`.

    `octavo.convert(model, frozen="fp8")` makes them. Moves and copies keep the bytes; `copy_` of a plain tensor
    quantizes it; other changes of values, and gradients, raise ValueError. Other code reads the FP8
    values in `dtype`, with a warning.

    Args:
        data: FP8 values, [N,K] or [E,N,K]; codes uint8 [N,K] of adaptive FP8.
        scale: Dequantization scales of `spec`, for each expert.
        spec: Format and granularity of a matrix.
        dtype: Dtype of the interface: float32, bfloat16 or float16.

    Examples:
        >>> layer = octavo.convert(torch.nn.Linear(64, 32), frozen="fp8")
        >>> layer.weight, layer.weight.dtype, layer.weight.data_.dtype
        (ResidentWeight([32, 64], e4m3/row), torch.float32, torch.float8_e4m3fn)
    """

    read_warning = "that is resident in FP8: it gets a temporary copy of the FP8 values in the weight's dtype"
    mismatch_advice = "convert the model in a recipe with that format, or octavo.revert(model) first"
    spec: MessageSpec  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, spec: MessageSpec, dtype: torch.dtype) -> "ResidentWeight":
        """Make a tensor with the shape and device of `data`."""
        layout = data.size(), data.stride()
        tensor: ResidentWeight = Tensor._make_wrapper_subclass(cls, *layout, dtype=dtype, device=data.device)
        tensor.data_, tensor.scale, tensor.spec, tensor.text = data, scale, spec, spec.text
        return tensor

    def __init__(self, data: Tensor, scale: Tensor, spec: MessageSpec, dtype: torch.dtype) -> None: ...

    @staticmethod
    @torch.no_grad()
    def quantized(weight: Tensor, spec: MessageSpec) -> "ResidentWeight":
        """Quantize a plain weight [N,K]; one of experts [E,N,K] matrix by matrix, not in adaptive FP8."""
        return ResidentWeight(*quantized_values(weight.detach(), spec), spec, weight.dtype)

    @property
    def shards_scale(self) -> bool:
        """Whether each row, or expert, has scales of its own, which follow it to another rank."""
        return self.ndim == 3 or self.spec.granularity.rows == 1

    def same_bytes(self) -> "ResidentWeight":
        """See `Fp8Weight.same_bytes`."""
        return self.like(self.data_, self.scale)

    def like(self, data: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> "ResidentWeight":
        """Return a weight of the same kind with other data and scales."""
        return type(self)(data, scale, self.spec, dtype or self.dtype, *self._whole)

    _whole: tuple[int, ...] = ()  # What a shard knows of the whole weight

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], (self.spec, self.dtype, *self._whole)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Any, ...], size: object, stride: object
    ) -> "ResidentWeight":
        return cls(inner["data_"], inner["scale"], *context)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ResidentWeight":
        if id(self) not in memo:
            memo[id(self)] = _as_parameter_if(isinstance(self, nn.Parameter), self.clone())
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: object) -> Any:
        data = self.data_.view(torch.uint8)  # Python's pickle does not read PyTorch's FP8 storages
        return _rebuilt, (data, self.scale, self.spec.text, self.dtype, isinstance(self, nn.Parameter))

    @classmethod
    def own_operation(cls, func: Operation, args: Arguments, kwargs: Options) -> Any:
        """See `Fp8Weight.own_operation`; raises ValueError for operations that change values or split the weight."""
        weight: Any
        weight, *rest = args or (None,)
        if any(isinstance(value, ResidentWeight) for value in written(func, args, kwargs)):
            return _write(func, weight, rest, kwargs)
        if not isinstance(weight, ResidentWeight):
            return NotImplemented
        if func in _TRANSPOSES:
            one, other = _TRANSPOSES[func](weight.ndim, *rest)
            if one == other:
                return weight.same_bytes() if func is not aten.permute.default or weight.ndim == 2 else NotImplemented
            return _transposed(weight) if weight.ndim == 2 or 0 not in (one, other) else NotImplemented
        if func is aten.clone.default:
            return weight.map(lambda part: part.clone())
        if func in (aten._to_copy.default, aten.empty_like.default, aten._pin_memory.default):
            dtype = kwargs.get("dtype") or weight.dtype
            if dtype in SUPPORTED_DTYPES:
                options = {key: kwargs[key] for key in ("device", "non_blocking") if kwargs.get(key) is not None}
                return weight.map(lambda part: func(part, **options), dtype)
        if func is aten.new_empty.default:
            options = {"dtype": weight.dtype, "device": weight.device}
            return torch.empty(rest[0], **options | {k: v for k, v in kwargs.items() if v is not None})
        if func is aten.is_pinned.default:
            return weight.data_.is_pinned()
        if weight.ndim == 3 and func is aten.unbind.int and not any(rest):
            return [_expert(weight, index) for index in range(len(weight))]
        if weight.ndim == 3 and func is aten.select.int and rest[0] % 3 == 0:
            return _expert(weight, rest[1])
        return _shard_operation(func, weight, rest, kwargs)

    def map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "ResidentWeight":
        """Return the weight with a function applied to its data and scales."""
        return self.like(function(self.data_), function(self.scale), dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return W as a plain tensor."""
        if self.ndim == 2:
            return dequantized_values(self.data_, self.scale, self.spec, dtype)
        values = torch.empty(self.shape, dtype=dtype, device=self.device)
        for expert in range(len(self)):
            values[expert] = _expert(self, expert).dequantized(dtype)
        return values

    @torch.no_grad()
    def assign(self, value: Tensor) -> None:
        """Replace the values: by the bytes of a `ResidentWeight` of the same spec, else by quantizing `value`.

        Raises ValueError for integers and FP8, as in a `state_dict`: they lack their scales.
        """
        if not value.dtype.is_floating_point or value.element_size() == 1:
            raise ValueError(
                f"copy_ of {value.dtype} into a weight {tuple(self.shape)} that is resident in FP8: its bytes lack "
                "their scales. load_state_dict takes both, sharded as torch.distributed.checkpoint reads "
                "them; set_model_state_dict(full_state_dict=True) does not"
            )
        if not isinstance(value, ResidentWeight) or value.spec != self.spec:
            plain = value.dequantized(value.dtype) if isinstance(value, Fp8Weight) else value.detach()
            plain = plain.to(self.device, plain.dtype if plain.dtype in SUPPORTED_DTYPES else torch.float32)
            value = self.quantized_alike(plain.expand(self.shape))
        for own, other in ((self.data_, value.data_), (self.scale, value.scale)):
            own.copy_(other)
            if not own.is_inference():  # below autograd, copy_ does not count itself
                torch.autograd.graph.increment_version(own)

    def quantized_alike(self, plain: Tensor) -> "ResidentWeight":
        """Quantize other values for this weight."""
        return ResidentWeight.quantized(plain, self.spec)

    def requires_grad_(self, requires_grad: bool = True) -> "ResidentWeight":
        """Return the weight. Raises ValueError if it should require gradients."""
        if requires_grad:
            raise ValueError(
                f"a weight {tuple(self.shape)} that is resident in FP8 is frozen and cannot be trained: an optimizer's "
                "steps would be rounded away. octavo.revert(model) makes such weights plain; to train some layers, "
                "unfreeze them before octavo.convert(model, frozen='fp8')"
            )
        return self

    @property
    def requires_grad(self) -> bool:
        """False."""
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    @property
    def data(self) -> "ResidentWeight":
        """The same bytes, detached."""
        return self.same_bytes()

    @data.setter
    def data(self, value: Tensor) -> None:
        same = isinstance(value, ResidentWeight) and value.spec == self.spec and value.shape == self.shape
        if not same or value.dtype != self.dtype or value.device != self.device:
            kind = "resident in FP8" if isinstance(value, ResidentWeight) else "not resident in FP8"
            raise ValueError(
                f"weight.data = … of a weight {tuple(self.shape)}, {self.dtype} on {self.device}, that is resident in "
                f"FP8: the new value is {tuple(value.shape)}, {value.dtype} on {value.device}, {kind}. weight.copy_(…) "
                "quantizes values, model.to(…) moves them; to merge adapters, call octavo.revert(model) first"
            )
        assert isinstance(value, ResidentWeight)
        self.data_, self.scale = value.data_, value.scale

    def share_memory_(self) -> "ResidentWeight":
        """Move data and scales to shared memory."""
        self.data_.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether the data is in shared memory."""
        return bool(self.data_.is_shared())

    def data_ptr(self) -> int:
        """Raise ValueError: at no address are there values of the weight's dtype."""
        raise ValueError(
            "a weight that is resident in FP8 has no memory of its dtype: read weight.data_ and weight.scale, or copy "
            "the values, weight.dequantized(dtype)"
        )

    storage = data_ptr


def _write(func: Operation, weight: ResidentWeight, rest: Arguments, options: Options) -> ResidentWeight:
    """Run an operation that replaces all values; raise ValueError for any other that writes."""
    if func is aten.copy_.default:
        weight.assign(rest[0])
    elif func in _FILLS:
        weight.assign(func(torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), *rest, **options))
    else:
        raise ValueError(
            f"{func} would change a weight that is resident in FP8, which would round away small changes. "
            "octavo.revert(model) makes such weights plain: merge adapters, or train the weights, after that"
        )
    return weight


def _transposed(weight: ResidentWeight) -> ResidentWeight:
    data, scale = weight.data_.transpose(-1, -2), weight.scale.transpose(-1, -2)
    return ResidentWeight(data, scale, weight.spec.transposed, weight.dtype)


def _expert(weight: ResidentWeight, index: int) -> ResidentWeight:
    return ResidentWeight(weight.data_[index], weight.scale[index], weight.spec, weight.dtype)


def _as_parameter_if(parameter: bool, weight: Tensor) -> Any:
    return nn.Parameter(weight, requires_grad=False) if parameter else weight


def _rebuilt(data: Tensor, scale: Tensor, text: str, dtype: torch.dtype, parameter: bool) -> Any:
    spec = ADAPTIVE_BY_TEXT.get(text) or QuantSpec.parse(text)
    data = data if isinstance(spec, AdaptiveSpec) else data.view(spec.format.dtype)
    return _as_parameter_if(parameter, ResidentWeight(data, scale, spec, dtype))


torch.serialization.add_safe_globals([_rebuilt])


class ResidentShard(ResidentWeight):
    """The rows, or the experts, of a resident weight that FSDP2 gave to one rank; it gathers a `ResidentWeight`."""

    # Scales by row, and those of experts, are sharded with the data. Others are whole on every rank: blocks may cross.

    rows: int  # Size of dimension 0 of the whole weight

    def __init__(self, *arguments: object) -> None: ...

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, spec: MessageSpec, dtype: torch.dtype, rows: int) -> "ResidentShard":
        shard = super().__new__(cls, data, scale, spec, dtype)
        assert isinstance(shard, ResidentShard)
        shard.rows, shard._whole = rows, (rows,)
        return shard

    def quantized_alike(self, plain: Tensor) -> ResidentWeight:
        if not self.shards_scale:
            raise ValueError(
                f"values of a sharded weight that is resident in FP8 as {self.spec}: its scales depend on rows of "
                "other ranks. Load values in high precision before fully_shard, or bytes with their scales"
            )
        return super().quantized_alike(plain)

    def fsdp_pre_all_gather(self, mesh: "DeviceMesh") -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the bytes of the shard, and scales that are sharded too, padded to the size that every rank sends."""
        rows = -(-self.rows // mesh.size())
        data = pad_rows(self.data_.view(torch.uint8), rows)  # Gloo has no FP8
        gathers_scale = self.shards_scale and mesh.size() > 1  # one rank passes on the first tensor alone
        return (data, pad_rows(self.scale, rows)) if gathers_scale else (data,), self.scale

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the whole weight, a view of the memory that every later gather refills."""
        scale = outputs[1][: self.rows] if len(outputs) > 1 else metadata
        if out is not None:
            local_part(out).scale = scale
            return None
        return ResidentWeight(outputs[0][: self.rows].view(self.data_.dtype), scale, self.spec, dtype), ()


def pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    full = x.new_zeros((rows, *x.shape[1:]))
    full[: x.shape[0]] = x
    return full


def _shard_operation(func: Operation, weight: ResidentWeight, rest: Arguments, options: Options) -> Any:
    """Run an operation by which FSDP2 makes a shard; `NotImplemented` for others."""
    whole = weight.rows if isinstance(weight, ResidentShard) else weight.shape[0]

    def shard(start: int, stop: int) -> ResidentShard:
        scale = weight.scale[start:stop] if weight.shards_scale else weight.scale
        return ResidentShard(weight.data_[start:stop], scale, weight.spec, weight.dtype, whole)

    if func in _SPLITS and not (rest[1:] and rest[1]) and not options.get("dim"):
        sizes = rest[0]
        if isinstance(sizes, int):
            sizes = [min(sizes, weight.shape[0] - start) for start in range(0, max(weight.shape[0], 1), sizes)]
        stops = list(accumulate(sizes))
        return [shard(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    if func is aten.new_zeros.default and not options.get("dtype") and list(rest[0][1:]) == list(weight.shape[1:]):
        rows = rest[0][0]
        scale = weight.scale.new_ones((rows, *weight.scale.shape[1:])) if weight.shards_scale else weight.scale.clone()
        data = torch.zeros(rest[0], dtype=torch.uint8, device=weight.device).view(weight.data_.dtype)
        return ResidentShard(data, scale, weight.spec, weight.dtype, whole)
    if isinstance(weight, ResidentShard):
        if func is aten.slice.Tensor and rest[0] == 0 and rest[3:] in ([], [1]):
            start, stop, _ = slice(*rest[1:3]).indices(weight.shape[0])
            return shard(start, stop)
        if func is aten.view.default and list(rest[0]) in ([-1], [weight.numel()]):
            return weight.same_bytes()  # FSDP2 keeps a flat view that it does not read if there are extensions
    return NotImplemented


# A `state_dict` has data and scales as plain tensors (`weight`, `weight_scale`, named as in compressed-tensors), of a
# weight that FSDP2 shards as DTensors; scales that all ranks hold whole are plain. Loading takes these, or a weight in
# high precision, which it quantizes. Rejected: the subclass itself, which needs Octavo to be read.
#
# In adaptive FP8 the codes are uint8, and the scales int32 [N,⌈K/128⌉,1], the bits of a float32: the last two number
# the format of a group, and tools that convert the floating point tensors of a checkpoint would round them away. No
# other format has scales of three dimensions for a matrix: where shapes are equal, a distributed checkpoint converts
# what it reads to the dtype of the model's tensor, without an error.

SCALE_SUFFIX = "_scale"  # Name of the scales in a `state_dict`, after that of the weight


class StatesOfResident(nn.Module):
    """Base class of layers whose `state_dict` has data and scales of weights that are resident in FP8."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, weight in resident_weights(self):
            parameter, key = self._parameters[name], prefix + name
            destination[key] = _distributed(parameter, weight.data_.detach())
            scale = scale_as_stored(weight.scale.detach(), weight.spec)
            destination[key + SCALE_SUFFIX] = _distributed(parameter, scale) if weight.shards_scale else scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name, parameter in self._parameters.items():
            key, weight = prefix + name, as_resident(parameter)
            problem = None
            if key in state_dict and weight is not None:
                problem = _join(key, parameter, weight, state_dict)
            elif key in state_dict and parameter is not None:
                value = state_dict[key]
                if value.element_size() == 1 < parameter.element_size():  # numbers that lack their scales
                    problem = f"{key} is {value.dtype}, but the layer's is not resident: use convert(frozen='fp8')"
            if problem is not None:
                arguments[-1].append(problem)
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def as_resident(tensor: object) -> ResidentWeight | None:
    part = local_part(tensor)
    return part if isinstance(part, ResidentWeight) else None


def resident_weight(module: nn.Module) -> ResidentWeight | None:
    """Return the weight of a linear, or this rank's rows of it, if it is resident in FP8."""
    return as_resident(module._parameters.get("weight"))


def resident_weights(module: nn.Module) -> Iterator[tuple[str, ResidentWeight]]:
    """Yield names and weights of a layer itself that are resident in FP8."""
    for name, parameter in module._parameters.items():
        if (weight := as_resident(parameter)) is not None:
            yield name, weight


def is_computed_from_resident(layer: nn.Module, name: str) -> bool:
    """Return whether a weight of a layer is computed from one that is resident in FP8, as by PEFT's adapters."""
    # In FP8 much of the adapter would be rounded away, so its products run in high precision.
    computed: Any = layer._modules.get("parametrizations")
    if computed is None or name not in computed:
        return False
    own = computed[name]  # one original, or several, as of weight_norm
    return any(as_resident(t) is not None for t in (*own._parameters.values(), *own._buffers.values()) if t is not None)


def refuse_save_pretrained(model: nn.Module) -> None:
    """Give the modules of a model that have `save_pretrained` one that raises while their weights are resident."""
    # PEFT's models save their adapters alone, and keep theirs.
    for module in model.modules():
        of_peft = any(owner.__module__.startswith("peft.") for owner in type(module).__mro__)
        if hasattr(type(module), _SAVE) and not of_peft and _has_residents(module):
            vars(module)[_SAVE] = partial(_save_pretrained, module)


def allow_save_pretrained(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(_SAVE, None)


def refuses_save_pretrained(model: nn.Module) -> bool:
    return _SAVE in vars(model) and _has_residents(model) and not getattr(model, "_hf_peft_config_loaded", False)


def _save_pretrained(model: nn.Module, *args: object, **kwargs: object) -> Any:
    if refuses_save_pretrained(model):
        raise ValueError(
            f"save_pretrained of {type(model).__name__}, whose frozen weights are resident in FP8: from_pretrained "
            "would read the FP8 values without their scales. octavo.export(model, path, to='fp8-row') writes the same "
            "bytes so that it reads them, to='bf16' their values; octavo.revert(model) makes the weights plain. "
            "Nothing was written"
        )
    return getattr(type(model), _SAVE)(model, *args, **kwargs)  # adapters of Transformers' own, or all reverted


_SAVE = "save_pretrained"


def _has_residents(model: nn.Module) -> bool:
    return any(True for module in model.modules() for _ in resident_weights(module))


def _join(key: str, parameter: Any, weight: ResidentWeight, state: dict[str, Any]) -> str | None:
    """Replace data and scales, or values, of one weight in a `state_dict`; return why that is not possible, or None."""
    value, scale = state[key], state.pop(key + SCALE_SUFFIX, None)
    if as_resident(value) is not None or value.shape != parameter.shape:
        return None
    if getattr(value, "placements", None) != getattr(parameter, "placements", None):
        return f"{key} of the checkpoint is not sharded as the model is: load it with torch.distributed.checkpoint"
    data = local_part(value)
    if scale is not None:
        scale, own = local_part(scale), scale_as_stored(weight.scale, weight.spec)
        converts = own.is_floating_point() and scale.is_floating_point()
        is_misfit = value.dtype != weight.data_.dtype or scale.shape != own.shape
        if is_misfit or not (converts or scale.dtype == own.dtype):
            return (
                f"{key} is resident as {weight.spec}, with {weight.data_.dtype} and scales {own.dtype} "
                f"{tuple(own.shape)}; the checkpoint has {value.dtype} and scales {scale.dtype} {tuple(scale.shape)}: "
                "convert in the recipe, and with the weight_only, it was saved with"
            )
        new = weight.like(data, scale_of_stored(scale, weight.spec))
    elif not value.dtype.is_floating_point or value.element_size() == 1:
        return f"{key} is {value.dtype} without {key + SCALE_SUFFIX}: its scales are missing"
    elif isinstance(weight, ResidentShard) and not weight.shards_scale:
        return f"{key}: scales of {weight.spec} depend on other ranks: load {value.dtype} before fully_shard"
    else:
        quantized = weight.quantized_alike(data if data.dtype in SUPPORTED_DTYPES else data.float())
        new = weight.like(quantized.data_, quantized.scale)
    state[key] = _distributed(parameter, new)
    return None


def scale_as_stored(scale: Tensor, spec: MessageSpec) -> Tensor:
    """Return the scales that a `state_dict` has of a resident weight, given its own."""
    return scale.view(torch.int32).unsqueeze(-1) if isinstance(spec, AdaptiveSpec) else scale


def scale_of_stored(scale: Tensor, spec: MessageSpec) -> Tensor:
    return scale.squeeze(-1).view(torch.float32) if isinstance(spec, AdaptiveSpec) else scale.to(spec.scale_dtype)


def _distributed(parameter: Any, part: Tensor) -> Tensor:
    if not hasattr(parameter, "placements"):
        return part
    sharded: Tensor = placed_like(parameter, part, (parameter.shape[0], *part.shape[1:]))
    return sharded
