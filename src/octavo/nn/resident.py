"""ResidentWeight: a frozen weight that is stored in FP8 only, such as the base under LoRA adapters.

    W [N,K] in bf16         2 bytes per parameter
    data_ [N,K], b [N,1]    1 + 4/K bytes per parameter: 1.001 for K = 4096

`octavo.convert(model, frozen="fp8")` makes such parameters (`octavo.nn.frozen`). Forward and dgrad multiply the same
bytes (`octavo.nn.fp8_weight`); there is no wgrad. Its dtype is that of the weight it was made from, and the dtype in
which other code reads its values.

What changes the storage keeps the bytes: `.to(device)`, `.half()` (only the dtype in which it is read), `clone`,
deepcopy, pickle. `copy_` from a plain tensor quantizes it, and from a `ResidentWeight` of one spec copies the bytes.
Fills (`zero_`, `normal_`, …) quantize the filled matrix. Everything else that would write into it raises an error: FP8
rounds away changes below 3 % of an element, as of most merged adapters and optimizer steps. So does unfreezing it.

A `state_dict` has two plain tensors per layer, `weight` in FP8 and `weight_scale`, named as in compressed-tensors.
`torch.save`, safetensors and distributed checkpoints store them like any tensors. Loading takes these, or a weight in
high precision, which it quantizes. Rejected: the subclass itself in the `state_dict`, which needs Octavo to be read.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.kernels import quantize
from octavo.nn.fp8_weight import Fp8Weight
from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.numerics.spec import QuantSpec
from octavo.runtime.torch_compat import tree_leaves
from octavo.tensor import ScaledTensor

aten = torch.ops.aten
SCALE_SUFFIX = "_scale"
"""Name of the scales in a `state_dict`, after that of the weight."""
_TRANSPOSES: dict[Any, Any] = {
    aten.t.default: lambda: (0, 1),
    aten.transpose.int: lambda a, b: (a % 2, b % 2),
    aten.permute.default: lambda dims: (dims[0] % 2, 0),
}
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_FILLS = (
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default,
    aten.random_.default,
)  # fmt: skip
"""In-place operations whose result does not depend on the values before."""


class ResidentWeight(Fp8Weight):
    """A frozen weight [N,K] that exists in FP8 only. As a parameter: `nn.Parameter(w, requires_grad=False)`.

    `octavo.convert(model, frozen="fp8")` makes them. Moves and copies keep the bytes; `copy_` of a plain tensor
    quantizes it; other changes of the values, and gradients, raise ValueError. Code other than Octavo's products reads
    the FP8 values in `dtype`, with a warning.

    Args:
        data: FP8 values, [N,K].
        scale: Dequantization scales of `spec`.
        spec: Format and granularity.
        dtype: Dtype of the interface: float32, bfloat16 or float16.

    Examples:
        >>> layer = octavo.convert(torch.nn.Linear(64, 32), frozen="fp8")
        >>> layer.weight, layer.weight.dtype, layer.weight.data_.dtype
        (ResidentWeight([32, 64], e4m3/row), torch.float32, torch.float8_e4m3fn)
    """

    read_warning = "that is resident in FP8: it gets a temporary copy of the FP8 values in the weight's dtype"
    mismatch_advice = "convert the model in a recipe with that format, or octavo.revert(model) first"

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> "ResidentWeight":
        """Make a tensor with the shape and device of `data`."""
        tensor: ResidentWeight = Tensor._make_wrapper_subclass(
            cls, data.size(), data.stride(), dtype=dtype, device=data.device
        )
        tensor.data_, tensor.scale, tensor.spec = data, scale, spec
        return tensor

    def __init__(self, data: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> None: ...

    @staticmethod
    @torch.no_grad()
    def quantized(weight: Tensor, spec: QuantSpec) -> "ResidentWeight":
        """Quantize a plain weight [N,K]."""
        w = quantize(weight.detach(), spec)
        assert w.scale is not None
        return ResidentWeight(w.data, w.scale, spec, weight.dtype)

    def same_bytes(self) -> "ResidentWeight":
        """See `Fp8Weight.same_bytes`."""
        return ResidentWeight(self.data_, self.scale, self.spec, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], (self.spec, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "ResidentWeight":
        return ResidentWeight(inner["data_"], inner["scale"], *context)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ResidentWeight":
        if id(self) not in memo:
            memo[id(self)] = _as_parameter_if(isinstance(self, nn.Parameter), self.clone())
        copy: ResidentWeight = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        data = self.data_.view(torch.uint8)  # Python's pickle does not read PyTorch's FP8 storages
        return _rebuilt, (data, self.scale, self.spec.text, self.dtype, isinstance(self, nn.Parameter))

    @classmethod
    def own_operation(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """See `Fp8Weight.own_operation`; raises ValueError for operations that change values or split the weight."""
        weight, *rest = args or (None,)
        if any(isinstance(value, ResidentWeight) for value in _written(func, args, kwargs)):
            return _write(func, weight, rest, kwargs)
        if not isinstance(weight, ResidentWeight):
            return NotImplemented
        if func in _TRANSPOSES:
            one, other = _TRANSPOSES[func](*rest)
            return weight.same_bytes() if one == other else _transposed(weight)
        if func is aten.clone.default:
            return weight.map(lambda part: part.clone())
        if func in (aten._to_copy.default, aten.empty_like.default):
            dtype = kwargs.get("dtype") or weight.dtype
            if dtype in SUPPORTED_DTYPES:
                options = {key: kwargs[key] for key in ("device", "non_blocking") if kwargs.get(key) is not None}
                return weight.map(lambda part: func(part, **options), dtype)
        if func in _SPLITS:
            raise ValueError(
                f"{func}: a weight that is resident in FP8 cannot be split into shards: fully_shard and tensor "
                "parallelism do not support frozen='fp8'. Use DDP, or leave out frozen='fp8' and gather weights in FP8 "
                "(octavo.parallelize); octavo.revert(model) makes the weights plain"
            )
        return NotImplemented

    def map(self, function: Any, dtype: torch.dtype | None = None) -> "ResidentWeight":
        """Return the weight with a function applied to its data and scales."""
        return ResidentWeight(function(self.data_), function(self.scale), self.spec, dtype or self.dtype)

    @torch.no_grad()
    def assign(self, value: Tensor) -> None:
        """Replace the values: by the bytes of a `ResidentWeight` of the same spec, else by quantizing `value`."""
        if not isinstance(value, Fp8Weight) or value.spec != self.spec:
            plain = value.dequantized(value.dtype) if isinstance(value, Fp8Weight) else value.detach()
            plain = plain.to(self.device, plain.dtype if plain.dtype in SUPPORTED_DTYPES else torch.float32)
            value = ResidentWeight.quantized(plain.expand(self.shape), self.spec)
        for own, other in ((self.data_, value.data_), (self.scale, value.scale)):
            own.copy_(other)
            if not own.is_inference():  # below autograd, copy_ does not count itself
                torch.autograd.graph.increment_version(own)

    def requires_grad_(self, requires_grad: bool = True) -> "ResidentWeight":
        """Return the weight.

        Raises:
            ValueError: If it should require gradients.
        """
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

    def storage(self) -> Any:
        """Raise ValueError, as `data_ptr`."""
        self.data_ptr()


def _written(func: Any, args: Any, options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tensors into which an operation writes."""
    if func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tree_leaves(args[index] if index < len(args) else options.get(argument.name))


def _write(func: Any, weight: Any, rest: Any, options: Mapping[str, Any]) -> Any:
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
    w = ScaledTensor(weight.data_, weight.scale, weight.spec).t()
    assert w.scale is not None
    return ResidentWeight(w.data, w.scale, w.spec, weight.dtype)


def _as_parameter_if(parameter: bool, weight: Tensor) -> Any:
    return nn.Parameter(weight, requires_grad=False) if parameter else weight


def _rebuilt(data: Tensor, scale: Tensor, text: str, dtype: torch.dtype, parameter: bool) -> Any:
    spec = QuantSpec.parse(text)
    return _as_parameter_if(parameter, ResidentWeight(data.view(spec.format.dtype), scale, spec, dtype))


torch.serialization.add_safe_globals([_rebuilt])


def resident_weight(module: nn.Module) -> ResidentWeight | None:
    """Return the weight of a layer if it is resident in FP8."""
    weight = module._parameters.get("weight")
    return weight if isinstance(weight, ResidentWeight) else None


def split_in_state(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Replace a resident weight in a `state_dict` by its data and scales."""
    weight = resident_weight(module)
    if weight is not None:
        name = f"{prefix}weight"
        state[name], state[name + SCALE_SUFFIX] = weight.data_.detach(), weight.scale.detach()


def join_in_state(module: nn.Module, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Replace data and scales, or values, of a resident weight in a `state_dict` by a `ResidentWeight`.

    FP8 data for a layer whose weight is not resident is an error.
    """
    weight, name = resident_weight(module), f"{prefix}weight"
    if name not in state:
        return
    if weight is None:
        if state[name].is_floating_point() and state[name].element_size() == 1:  # as numbers they lack their scales
            errors.append(f"{name} is {state[name].dtype}, but the layer's is not resident: use convert(frozen='fp8')")
            del state[name]
        return
    value, scale = state[name], state.pop(name + SCALE_SUFFIX, None)
    if isinstance(value, ResidentWeight) or value.shape != weight.shape:
        return
    if scale is not None:
        if value.dtype != weight.data_.dtype or scale.shape != weight.scale.shape:
            errors.append(
                f"{name} is resident as {weight.spec}, with {weight.data_.dtype} and scales {tuple(weight.scale.shape)}"
                f"; the checkpoint has {value.dtype} and scales {tuple(scale.shape)}: convert in the recipe it was "
                "saved with"
            )
            del state[name]
            return
        state[name] = ResidentWeight(value, scale.to(weight.scale.dtype), weight.spec, weight.dtype)
    elif not value.dtype.is_floating_point or value.element_size() == 1:
        errors.append(f"{name} is {value.dtype} without {name + SCALE_SUFFIX}: its scales are missing")
        del state[name]
    else:
        plain = value if value.dtype in SUPPORTED_DTYPES else value.float()
        quantized = ResidentWeight.quantized(plain, weight.spec)
        state[name] = quantized.map(lambda part: part, weight.dtype)
