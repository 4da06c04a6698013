"""Tensor and sequence parallelism with FP8 on the wire: styles for `torch.distributed.tensor.parallel`.

                           W [N,K]    X                     Y                     forward      backward
    Fp8ColwiseParallel     Shard(0)   tokens sharded        features sharded      gather X     reduce ∂X
    Fp8RowwiseParallel     Shard(1)   features sharded      tokens sharded        reduce Y     gather G

Saved for backward is the gathered X in FP8, one byte for each element of all tokens.
"""

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.weak import WeakIdKeyDictionary

from octavo.nn.gathered import fits
from octavo.nn.linear_like import LinearLike
from octavo.nn.operands import InputCastCache, check_recipe
from octavo.nn.report import NOTE_ATTRIBUTE
from octavo.numerics.spec import QuantSpec
from octavo.numerics.suggestions import check_choice
from octavo.parallel.agreement import EqualShapes, check_on_all_ranks
from octavo.parallel.tokens import TokenExchange, check_equal_parts, gather_input, reduce_output
from octavo.runtime.switch import SWITCH

KIND = "tensor parallelism"  # What ranks are ranks of, in messages
_GATHERED = InputCastCache()  # The last X that a column-parallel layer gathered, per thread
Args = tuple[Tensor, ...]  # Of a linear layer
Kwargs = dict[str, Tensor]
_PARTS: Any = WeakIdKeyDictionary()  # What replaced a parameter, for other layers that share it


class _Fp8Style(ParallelStyle):
    weight_dim: int
    split_size: str
    bias_placement: Placement

    def __init__(
        self, *, sequence_dim: int | None = -2, gather: Literal["fp8", "bf16"] = "fp8",
        reduce: Literal["bf16", "fp8"] = "bf16", heads: int | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("gather", gather), ("reduce", reduce)):
            check_choice(name, value, ("fp8", "bf16"))
        if sequence_dim is None and reduce == "fp8":
            raise ValueError(
                "reduce='fp8' needs a sequence_dim: a sum for all ranks would be rounded to FP8 twice. Use "
                "reduce='bf16'"
            )
        self.sequence_dim, self.gather, self.reduce, self.heads = sequence_dim, gather, reduce, heads

    def __repr__(self) -> str:
        settings = (f"{name}={value!r}" for name, value in vars(self).items() if name != "src_data_rank")
        return f"{self._public_name}({', '.join(settings)})"

    @property
    def _public_name(self) -> str:
        return next(cls.__name__ for cls in type(self).__mro__ if not cls.__name__.startswith("_"))

    @abstractmethod
    def describe(self, layer: nn.Module) -> str:
        """Return what a layer sends."""

    @abstractmethod
    def _hook(self, layer: nn.Module, exchange: TokenExchange, equal_shapes: EqualShapes) -> None: ...

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def check() -> tuple[None, list[Any]]:
            self._check(module, device_mesh)
            return None, [self]

        check_on_all_ranks(self._public_name, module, device_mesh, check)
        for name, dim in (("weight", Shard(self.weight_dim)), ("bias", self.bias_placement)):
            if (parameter := getattr(module, name)) is not None:
                if parameter not in _PARTS:
                    placed = distribute_tensor(parameter, device_mesh, [dim], src_data_rank=self.src_data_rank)
                    _PARTS[parameter] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
                module.register_parameter(name, _PARTS[parameter])
        exchange = TokenExchange(
            mesh=device_mesh, sequence_dim=self.sequence_dim, fp8_gather=self.gather == "fp8",
            fp8_reduce=self.reduce == "fp8",
        )  # fmt: skip
        self._hook(module, exchange, EqualShapes(device_mesh, KIND))
        vars(module)[NOTE_ATTRIBUTE] = self.describe
        return module

    def _check(self, module: nn.Module, mesh: DeviceMesh) -> None:
        name = self._public_name
        if not isinstance(module, nn.Linear) or not isinstance(module._parameters.get("weight"), nn.Parameter):
            raise TypeError(
                f"{name} distributes linear layers whose weight is a parameter; got {type(module).__name__}: name a "
                "linear layer in the plan"
            )
        if mesh.ndim != 1:
            raise ValueError(f"{name} takes a mesh of one dimension, such as mesh['tp']; got {mesh}")
        if isinstance(module.weight, DTensor):
            raise ValueError(
                f"{name}: this layer is distributed already, as {module.weight.placements}: name each layer in one "
                "plan, and call parallelize_module before octavo.parallelize or fully_shard"
            )
        for parameter, placement in ((module.weight, Shard(self.weight_dim)), (module.bias, self.bias_placement)):
            part = None if parameter is None else _PARTS.get(parameter)
            if part is not None and (part.device_mesh, part.placements) != (mesh, (placement,)):
                raise ValueError(
                    f"{name}: another layer shares a parameter of this one, and distributes it as {part.placements}: "
                    "give both the same style, or parameters of their own"
                )
        if isinstance(module, LinearLike):
            check_recipe(module.recipe)
        what, size = self.split_size, getattr(module, self.split_size)
        if self.heads is not None:
            if size % self.heads:
                raise ValueError(f"{name}: {what} = {size} is not {self.heads} equal heads")
            what, size = "heads", self.heads
        if size % mesh.size():
            fitting = [n for n in range(1, mesh.size() + 1) if size % n == 0]
            padded = "" if what == "heads" else f", or pad it to {size + -size % mesh.size()}"
            raise ValueError(
                f"{name}: {what} = {size} is not divided by {mesh.size()} ranks of tensor parallelism: take one of "
                f"{fitting} ranks{padded}"
            )


class Fp8ColwiseParallel(_Fp8Style):
    """Split a linear's output features over ranks: gather X in FP8, reduce ∂X. For `parallelize_module`.

    Args:
        sequence_dim: Dimension of the input in which each rank has an equal part of the tokens; by default the last but
            one, of [B,S,H] or [B·S,H]. None: each rank has all tokens; then nothing is gathered.
        gather: `"fp8"`, or `"bf16"` for two bytes per element. Recipes that do not quantize X once by row gather
            in two bytes in any case, as do layers that are not converted; `octavo.report` shows it.
        reduce: `"bf16"`, or `"fp8"` to send summands of ∂X in 1.03 bytes, added up in float32; only with a
            `sequence_dim`, because a sum for all ranks would be rounded twice.
        heads: Heads of the output features, which the ranks share whole; None if it has none.

    The layer takes this rank's tokens and returns its features of all tokens: [..., S/t, H] → [..., S, N/t].

    Raises:
        TypeError: From `parallelize_module`, as all of these on every rank: for a module that is no linear layer.
        ValueError: For sizes that the ranks do not divide, a recipe with one scale per tensor, a layer that is
            distributed already, or ranks that differ. In the first forward: if ranks have different numbers of tokens;
            over Gloo a later one ends a rank's process, except with `TORCH_DISTRIBUTED_DEBUG=DETAIL`.

    Examples:
        Under `torchrun`, on each rank:

        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        >>> mlp = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)))
        >>> plan = {"0": octavo.parallel.Fp8ColwiseParallel(), "1": octavo.parallel.Fp8RowwiseParallel()}
        >>> mlp = parallelize_module(mlp, mesh["tp"], plan)
        >>> mlp(torch.randn(2, 8, 64)).shape                     # eight tokens of each sequence on each rank
        torch.Size([2, 8, 64])
    """

    weight_dim, split_size, bias_placement = 0, "out_features", Shard(0)

    def describe(self, layer: nn.Module) -> str:
        """Return what a layer sends."""
        gather = "X gathered in bf16"
        if self.gather == "fp8":
            if not isinstance(layer, LinearLike):
                gather += ", because the layer is not converted"
            elif fits(layer.recipe):
                gather = "X gathered in FP8"
            else:
                gather += f", because recipe {layer.recipe.name} does not quantize X once by row"
        fp8 = self.reduce == "fp8" and isinstance(layer, LinearLike)
        parts = [f"∂X reduced in {'FP8' if fp8 else 'bf16'}"]
        return "column-parallel: " + ", ".join(parts if self.sequence_dim is None else [gather, *parts])

    def _hook(self, layer: nn.Module, exchange: TokenExchange, equal_shapes: EqualShapes) -> None:
        layer.register_forward_pre_hook(partial(_gather, exchange, equal_shapes), with_kwargs=True)
        layer.register_forward_hook(lambda module, inputs, y: as_plain(y))


class Fp8RowwiseParallel(_Fp8Style):
    """Split a linear's input features over ranks: reduce Y, gather G in FP8. For `parallelize_module`.

    Args:
        sequence_dim: Dimension of the output in which each rank gets an equal part of the tokens; by default the last
            but one. None: each rank gets all tokens; then nothing is gathered.
        gather: `"fp8"` sends G in 1.03 bytes; `"bf16"` in two bytes, as layers that are not converted do.
        reduce: `"bf16"`, or `"fp8"` for the summands of Y, as `Fp8ColwiseParallel`.
        heads: Heads of the input features, which the ranks share whole; None if it has none.

    The layer takes this rank's features of all tokens and returns its tokens: [..., S, K/t] → [..., S/t, N].

    Raises:
        TypeError: As `Fp8ColwiseParallel`.
        ValueError: As `Fp8ColwiseParallel`. In each forward: if the ranks do not divide the tokens.

    Examples:
        >>> octavo.parallel.Fp8RowwiseParallel(reduce="fp8", heads=32)
        Fp8RowwiseParallel(sequence_dim=-2, gather='fp8', reduce='fp8', heads=32)

        `Fp8ColwiseParallel` has an example of both in a plan.
    """

    weight_dim, split_size, bias_placement = 1, "in_features", Replicate()

    def describe(self, layer: nn.Module) -> str:
        """Return what a layer sends."""
        fp8 = isinstance(layer, LinearLike)
        reduce, gather = ("FP8" if fp8 and wire == "fp8" else "bf16" for wire in (self.reduce, self.gather))
        parts = [f"Y reduced in {reduce}", f"G gathered in {gather}"]
        return "row-parallel: " + ", ".join(parts[: 1 if self.sequence_dim is None else 2])

    def _hook(self, layer: nn.Module, exchange: TokenExchange, equal_shapes: EqualShapes) -> None:
        layer.register_forward_pre_hook(partial(_features, exchange, equal_shapes), with_kwargs=True)
        layer.register_forward_hook(lambda module, inputs, y: reduce_output(y, present(module, exchange)))


def _gather(
    exchange: TokenExchange, equal_shapes: EqualShapes, layer: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    exchange, input = present(layer, exchange), _input_of(args, kwargs)
    x = _local(input, exchange, exchange.placement(input))
    if exchange.sequence_dim is not None:
        equal_shapes(x)
    spec = gathered_spec(layer, exchange)
    key = exchange, spec, torch.is_grad_enabled()
    if (gathered := _GATHERED.casts_of(input)) is None:
        gathered = {}
    if key not in gathered:
        gathered[key] = gather_input(x, exchange, spec)
    return (gathered[key],), {}


def _features(
    exchange: TokenExchange, equal_shapes: EqualShapes, layer: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    input = _input_of(args, kwargs)
    x = equal_shapes(_local(input, exchange, Shard(input.ndim - 1)))
    return (DTensor.from_local(x, exchange.mesh, [Shard(x.ndim - 1)], run_check=False),), {}


def as_plain(y: DTensor) -> Tensor:
    """Return this rank's part of Y, not as a view: FSDP2 warns about those, and they cannot be changed in place."""
    local = y.to_local()
    return torch.ops.aten._unsafe_view(local, local.shape)  # type: ignore[no-any-return]


def present(layer: nn.Module, exchange: TokenExchange) -> TokenExchange:
    """Return how a layer exchanges tokens now: in high precision if it computes so."""
    in_fp8 = not SWITCH.off and isinstance(layer, LinearLike)
    return exchange if in_fp8 else replace(exchange, fp8_gather=False, fp8_reduce=False)


def gathered_spec(layer: nn.Module, exchange: TokenExchange) -> QuantSpec | None:
    """Return the FP8 spec in which `present` ranks gather X for a layer; None for high precision."""
    return layer.recipe.x if exchange.fp8_gather and isinstance(layer, LinearLike) and fits(layer.recipe) else None


def _input_of(args: Args, kwargs: Kwargs) -> Tensor:
    return args[0] if args else kwargs["input"]


def _local(x: Tensor, exchange: TokenExchange, placement: Placement) -> Tensor:
    """Return this rank's part of an input that is a DTensor; a plain tensor is one."""
    if not isinstance(x, DTensor):
        return x
    if isinstance(placement, Shard):
        check_equal_parts(x, placement.dim, exchange.mesh.size())
    if x.placements != (placement,):
        x = x.redistribute(placements=[placement])
    return x.to_local()
