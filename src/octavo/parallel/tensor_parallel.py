"""Tensor and sequence parallelism with FP8 on the wire: styles for `torch.distributed.tensor.parallel`.

                           W [N,K]    X                     Y                     forward      backward
    Fp8ColwiseParallel     Shard(0)   tokens sharded        features sharded      gather X     reduce ∂X
    Fp8RowwiseParallel     Shard(1)   features sharded      tokens sharded        reduce Y     gather G

Saved for backward is the gathered X in FP8, one byte for each element of all tokens.
"""

import hashlib
import inspect
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.weak import WeakIdKeyDictionary

from octavo.nn.gathered import fits
from octavo.nn.linear_like import LinearLike
from octavo.nn.operands import InputCastCache, check_recipe
from octavo.nn.report import NOTE_ATTRIBUTE
from octavo.numerics.spec import QuantSpec
from octavo.numerics.suggestions import check_choice
from octavo.parallel.agreement import EqualShapes, check_mesh, check_on_all_ranks
from octavo.parallel.combinations import check_model
from octavo.parallel.tokens import TokenExchange, check_equal_parts, gather_input, reduce_output
from octavo.runtime.blocks import Absent, find_block_list, find_blocks
from octavo.runtime.swap import all_or_nothing
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import FakeTensor, in_backward, never_compiled
from octavo.tensor import local_tensor

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


# Random numbers of tensor parallelism: equal where ranks hold the same values, different where they hold other heads.
#
# Between the first column-parallel layer of a module and its row-parallel one, generators are seeded with a hash of
# their state and the rank (Megatron's model-parallel seed, without a second state to save). Afterwards they are as they
# were, one number further if that was used: the same on all ranks, in recomputation, and after a resume.


_EAGERLY = never_compiled("octavo: dropout between divided layers draws from a generator of this rank")


def divide_dropout(model: nn.Module, columns: Iterable[str], rows: Iterable[str], rank: int) -> None:
    """Give dropout between column-parallel layers and a row-parallel one random numbers of this rank's own."""
    begins, ends = list(columns), list(rows)
    for name in dict.fromkeys(row.rpartition(".")[0] for row in ends):
        owner = model.get_submodule(name)
        if not any(rate > 0 for rate in _dropout_rates(owner)):
            continue
        divided = _Divided(owner, rank)
        owner.register_forward_pre_hook(divided.enter)
        for column in begins:
            if column.rpartition(".")[0] == name:
                model.get_submodule(column).register_forward_hook(divided.begin)
        for row in ends:
            if row.rpartition(".")[0] == name:
                model.get_submodule(row).register_forward_pre_hook(divided.end)
        owner.register_forward_hook(divided.leave, always_call=True)  # also if it failed midway


def _dropout_rates(owner: nn.Module) -> Iterator[float]:
    """Yield what may be dropout rates of a module and its parts, by name: of attributes, dropout modules, configs."""
    for module in owner.modules():
        if "dropout" in type(module).__name__.lower():
            yield getattr(module, "p", 1.0)
        for holder in (module, getattr(module, "config", None)):
            for name, value in getattr(holder, "__dict__", {}).items():
                if "drop" in name and isinstance(value, int | float):
                    yield value


class _Divided:
    """The generators of a rank inside and outside of divided layers."""

    def __init__(self, owner: nn.Module, rank: int) -> None:
        self._owner, self._rank, self._entered = owner, rank, False
        self._generators: list[torch.Generator] = []
        self._outside: list[Tensor] = []
        self._inside: list[Tensor] = []

    @_EAGERLY
    def enter(self, *_: object) -> None:
        """Begin a forward of the module. A recomputed part of an earlier one may have had no end."""
        self._entered, self._outside = True, []

    @_EAGERLY
    def begin(self, layer: nn.Module, args: object, y: Tensor) -> None:
        """Seed the generators for this rank, unless the module's first divided layer has done so."""
        if not self._owner.training or y.is_meta or isinstance(y, FakeTensor):
            return
        if not (self._entered or in_backward()):  # this layer alone
            return
        if self._outside and (self._entered or all(map(torch.equal, self._inside, self._states()))):
            return
        self._generators = [torch.default_generator]
        if y.device.type != "cpu":
            self._generators.append(torch.get_device_module(y.device).default_generators[y.device.index])
        self._outside = self._states()
        digest = hashlib.blake2b(str(self._rank).encode(), digest_size=7)
        for state in self._outside:
            digest.update(state.numpy().tobytes())
        for generator in self._generators:
            generator.manual_seed(int.from_bytes(digest.digest(), "big"))
        self._inside = self._states()

    @_EAGERLY
    def end(self, *_: object) -> None:
        """Return to the random numbers of all ranks."""
        if not self._outside:
            return
        used = not all(map(torch.equal, self._inside, self._states()))
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
        self._outside = []
        if used:
            torch.rand((), device="cpu")  # whose state the next hash reads

    @_EAGERLY
    def leave(self, *_: object) -> None:
        self.end()
        self._entered = False

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]


# tensor_parallel: a causal language model of Transformers over ranks, by the plan in its config.
#
# With sequence parallelism each of t ranks has S/t tokens of every sequence between attention and MLP:
#
#     embedding ──split──▶ [B,S/t,H] ──▶ blocks ──▶ norm, head and loss of S/t tokens
#                               │  ▲
#                     gather [B,S,H]  reduce     around attention, whose heads the ranks share, and around the MLP
#
# What is not in the plan (norms, embedding, head, routers, experts) leaves a summand of its gradient on every rank.
# Rejected: these parameters as DTensors, which needs a message for each.


BlockArgs = tuple[Any, ...]  # Of a block or of attention
BlockKwargs = dict[str, Any]
_EXPERT_STYLES = ("packed_colwise", "moe_tp_experts", "grouped_gemm", "ep_dispatch_experts")
_BETWEEN_HEADS = "replicated_with_grad_allreduce"
_MIXES_TOKENS = ("attn", "attention", "mamba", "mixer", "conv", "rnn", "recurrent", "ssm", "delta")
"""Parts of names of modules in which tokens read each other."""
_BLOCK_ARGUMENTS = {
    "hidden_states", "attention_mask", "position_ids", "position_embeddings", "past_key_value", "past_key_values",
    "cache", "layer_past", "use_cache", "cache_position", "output_attentions", "output_router_logits",
    "shared_kv_states",
}  # fmt: skip
"""Arguments of blocks that are right for a part of the tokens: attention, which has all of them, reads the others."""
_PARTIAL: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""Names of the parameters of a model of whose gradients each rank has a summand."""
Wire = Literal["fp8", "bf16"]
Styles = dict[str, ParallelStyle]


def tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = True, gather: Literal["fp8", "bf16"] = "fp8",
    reduce: Literal["bf16", "fp8"] = "bf16",
) -> nn.Module:  # fmt: skip
    """Distribute the linear layers of a language model over ranks by the plan of its config, in place.

    Call it after `octavo.convert` and before `octavo.parallelize` or `fully_shard` over other dimensions of the same
    mesh, and create the optimizer last. All ranks get the same `input_ids`. With `sequence_parallel`, rank r gets
    tokens r·S/t to (r + 1)·S/t of the labels, and returns the hidden states, logits and loss of these tokens; multiply
    the loss by 1/t, and call `sum_partial_gradients` after backward.

    Args:
        model: A causal language model of Transformers whose config has a `base_model_tp_plan`, such as Llama, Qwen3,
            Mistral, Cohere or Mixtral. The same on every rank.
        mesh: One dimension, such as `mesh["tp"]`.
        sequence_parallel: Divide tokens among the ranks outside of attention and products.
        gather: As of `Fp8ColwiseParallel`; bf16 without sequence parallelism, where nothing is gathered.
        reduce: As of `Fp8ColwiseParallel`; `"fp8"` only with sequence parallelism.

    Returns:
        The model itself.

    Raises:
        TypeError: If `model` is not a module or `mesh` not a `DeviceMesh`.
        ValueError: For a model that cannot be distributed so (docs/parallel.md), or if ranks differ; on every rank, and
            the model stays as it was. In a forward: if ranks do not divide a sequence; in the first, if inputs differ.

    Examples:
        Under `torchrun`, on each rank:

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> model = octavo.convert(LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape)), verbose=False)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        >>> model = octavo.parallel.tensor_parallel(model, mesh["tp"])
        >>> tokens = torch.randint(300, (1, 17))
        >>> labels = tokens[:, 1:].chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()
        >>> loss = model(input_ids=tokens[:, :-1], labels=labels, shift_labels=labels).loss / mesh.size()
        >>> loss.backward()
        >>> octavo.parallel.sum_partial_gradients(model, mesh["tp"])
    """

    def check() -> tuple[tuple[Styles, set[str]], list[Any]]:
        check_mesh("tensor_parallel", mesh, "dp_shard", "tp")
        check_model("tensor_parallel", model)
        plan, partial_names = _plan(model, sequence_parallel, gather, reduce)
        if sequence_parallel:
            _check_blocks(model, plan)
            _check_token_mixers(model, plan)
        return (plan, partial_names), [sequence_parallel, gather, reduce, tuple(mesh.shape), sorted(plan)]

    plan, partial_names = check_on_all_ranks("tensor_parallel", model, mesh, check, compare_values=True)
    with all_or_nothing(model):
        parallelize_module(model, mesh, plan, src_data_rank=None)
        if sequence_parallel:
            _divide_tokens(model, mesh, plan, gather == "fp8", reduce == "fp8")
        else:
            rows = {name for name, style in plan.items() if isinstance(style, Fp8RowwiseParallel)}
            divide_dropout(model, plan.keys() - rows, rows, mesh.get_local_rank())
        _note_head(model, plan, sequence_parallel)
    _PARTIAL[model] = frozenset(partial_names)
    return model


def partial_parameters(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters of whose gradients each rank has a summand after `tensor_parallel`."""
    return _PARTIAL.get(model, frozenset())


def sum_partial_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Add up the gradients of which each rank has a summand, after backward and before clipping.

    Args:
        model: After `tensor_parallel`, sharded or not.
        mesh: The mesh that `tensor_parallel` got.

    Examples:
        >>> octavo.parallel.sum_partial_gradients(model, mesh["tp"])  # doctest: +SKIP
    """
    names = partial_parameters(model)
    sum_over([p.grad for name, p in model.named_parameters() if name in names and p.grad is not None], mesh)


@torch.no_grad()
def sum_over(gradients: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Add up tensors over the ranks of a mesh, in place: the local parts, in float32, in one message."""
    local = [local_tensor(gradient) for gradient in gradients]
    if not local:
        return
    message = torch.cat([part.reshape(-1).float() for part in local])
    dist.all_reduce(message, group=mesh.get_group())
    for part, total in zip(local, message.split([part.numel() for part in local]), strict=True):
        part.copy_(total.view_as(part))


def _plan(model: nn.Module, sequence_parallel: bool, gather: Wire, reduce: Wire) -> tuple[Styles, set[str]]:
    """Return styles by name of the linear layer, and the names of parameters with partial gradients."""
    kind, base = type(model).__name__, getattr(model, "base_model", model)
    config = getattr(model, "config", None)
    patterns = getattr(config.get_text_config(), "base_model_tp_plan", None) if config is not None else None
    if not patterns:
        raise ValueError(
            f"{kind} has no plan for tensor parallelism in its config (base_model_tp_plan): distribute its layers with "
            "octavo.parallel.Fp8ColwiseParallel and Fp8RowwiseParallel, or use dp_shard, cp or pp instead"
        )
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    styles: Styles = {}
    between_heads: list[str] = []
    # In the patterns of Transformers, * is a number.
    regexes = {re.escape(prefix + p).replace(r"\*", r"\d+"): s for p, s in patterns.items()}
    for name, module in model.named_modules():
        style = next((s for regex, s in regexes.items() if re.fullmatch(regex, name)), None)
        if style is None or style in _EXPERT_STYLES:
            continue
        if style == _BETWEEN_HEADS:
            between_heads.append(name)
        elif isinstance(module, nn.Linear) and style in ("colwise", "rowwise"):
            parent = model.get_submodule(name.rpartition(".")[0])
            styles[name] = _style(parent, module, style, sequence_parallel, gather, reduce)
        else:
            raise ValueError(
                f"{kind}: its plan gives {name} the style {style!r}, which Octavo does not support: use dp_shard, cp "
                "or pp instead of tensor parallelism"
            )
    attention = [n.rpartition(".")[0] for n, style in styles.items() if isinstance(style, Fp8RowwiseParallel)]
    if twice := next((n for n in attention if attention.count(n) > 1 and _is_attention(model.get_submodule(n))), None):
        raise ValueError(
            f"{kind}: its plan ends the heads of {twice} twice, by layers whose outputs are of all heads: attention of "
            "a part of the heads cannot read them. Use dp_shard or cp instead of tensor parallelism"
        )
    if not styles:
        raise ValueError(f"{kind}: no linear layer matches its plan for tensor parallelism, {list(patterns)}")
    names = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in styles}
    if not sequence_parallel:
        between = {*between_heads, *_between_features(model, styles)}
        names = {name for name in names if name.rpartition(".")[0] in between}
    return styles, names


def _between_features(model: nn.Module, styles: Styles) -> Iterator[str]:
    """Yield the modules of an MLP that compute on its features, as an activation function with parameters."""
    for owner in {name.rpartition(".")[0] for name in styles}:
        parent = model.get_submodule(owner)
        for name, child in () if _is_attention(parent) else parent.named_children():
            vectors = all(parameter.ndim < 2 for parameter in child.parameters())  # no router
            if vectors and not isinstance(child, nn.Linear) and "norm" not in type(child).__name__.lower():
                yield f"{owner}.{name}"


def _style(
    parent: nn.Module, linear: nn.Linear, style: str, sequence_parallel: bool, gather: Wire, reduce: Wire
) -> Fp8ColwiseParallel | Fp8RowwiseParallel:
    head_dim = getattr(parent, "head_dim", None)
    split = linear.out_features if style == "colwise" else linear.in_features
    heads = split // head_dim if isinstance(head_dim, int) and head_dim and split % head_dim == 0 else None
    dim = -2 if sequence_parallel else None
    if style == "rowwise":
        return Fp8RowwiseParallel(sequence_dim=dim, gather=gather, reduce=reduce, heads=heads)
    kind = _ColwiseOfGathered if sequence_parallel and _is_attention(parent) else Fp8ColwiseParallel
    return kind(sequence_dim=dim, gather=gather, reduce=reduce, heads=heads)


class _ColwiseOfGathered(Fp8ColwiseParallel):
    """The style of layers whose parent gathers their input."""

    def _hook(self, layer: nn.Module, exchange: TokenExchange, equal_shapes: EqualShapes) -> None:
        layer.register_forward_hook(lambda module, inputs, y: as_plain(y))


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "is_causal") or "attention" in type(module).__name__.lower()


def _check_blocks(model: nn.Module, plan: Styles) -> None:
    """Raise ValueError for layers outside the blocks, and for blocks that read more of all tokens than their states."""
    kind, names = type(model).__name__, {module: name for name, module in model.named_modules()}
    stack = find_block_list(model)
    holder = names.get(stack, "")
    if outside := [name for name in plan if not name.startswith(f"{holder}.")]:
        raise ValueError(
            f"{kind}: tokens are divided at the first block of {holder!r}, and {outside[0]} is not in these blocks: "
            "use sequence_parallel=False"
        )
    for block in find_blocks(model):
        parameters = inspect.signature(type(block).forward).parameters.values()
        others = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        others -= _BLOCK_ARGUMENTS | {"self"}
        if not getattr(block, "hidden_size_per_layer_input", True):  # of Gemma's blocks
            others.discard("per_layer_input")
        if others:
            raise ValueError(
                f"{kind}: {names[block]} ({type(block).__name__}) takes {', '.join(sorted(others))} beside hidden "
                "states, of which Octavo does not divide the tokens: use sequence_parallel=False"
            )


def _check_token_mixers(model: nn.Module, plan: Styles) -> None:
    """Raise ValueError for a module that mixes tokens and whose input the plan does not gather."""
    names = {module: name for name, module in model.named_modules()}
    attention = {n.rpartition(".")[0] for n, style in plan.items() if isinstance(style, _ColwiseOfGathered)}
    for block in find_blocks(model):
        for child in block.modules():
            kind = type(child).__name__.lower()
            mixes = hasattr(child, "is_causal") or any(part in kind for part in _MIXES_TOKENS)
            distributed = any(name.startswith(f"{names[child]}.") for name in plan)
            distributed |= any(names[child].startswith(f"{owner}.") for owner in attention)  # a part of it
            if child is not block and mixes and "norm" not in kind and not distributed:
                raise ValueError(
                    f"{names[child]} ({type(child).__name__}) reads all tokens of a sequence, and the plan of "
                    f"{type(model).__name__} does not distribute it: use sequence_parallel=False"
                )


def _note_head(model: nn.Module, plan: Styles, sequence_parallel: bool) -> None:
    """Have `octavo.report` say of the head that no rank has a part of the vocabulary."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if isinstance(head, nn.Linear) and not any(model.get_submodule(name) is head for name in plan):
        tokens = "its part of the tokens" if sequence_parallel else "all tokens"
        vars(head)[NOTE_ATTRIBUTE] = lambda head: f"whole on each rank of tensor parallelism, for {tokens}"


def _divide_tokens(model: nn.Module, mesh: DeviceMesh, plan: Styles, fp8_gather: bool, fp8_reduce: bool) -> None:
    """Divide tokens before the first block, and gather them before attention."""
    exchange = TokenExchange(mesh=mesh, sequence_dim=-2, fp8_gather=fp8_gather, fp8_reduce=fp8_reduce)
    first = find_block_list(model)[0]
    if not isinstance(first, Absent):
        split = partial(split_tokens, mesh=mesh)
        first.register_forward_pre_hook(lambda _, x, options: _with_hidden_states(x, options, split), with_kwargs=True)
    readers: dict[str, list[nn.Module]] = {}
    for name, style in plan.items():
        if isinstance(style, _ColwiseOfGathered):
            readers.setdefault(name.rpartition(".")[0], []).append(model.get_submodule(name))
    for name, linears in readers.items():
        hook = partial(_gather_attention_input, exchange, EqualShapes(mesh, KIND), linears)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def _gather_attention_input(
    exchange: TokenExchange, equal_shapes: EqualShapes, linears: list[nn.Module], attention: nn.Module, args: BlockArgs,
    kwargs: BlockKwargs,
) -> tuple[BlockArgs, BlockKwargs]:  # fmt: skip
    exchange = present(linears[0], exchange)
    specs = {gathered_spec(layer, exchange) for layer in linears}  # one if all read the same FP8 rows
    spec = specs.pop() if len(specs) == 1 else None
    return _with_hidden_states(args, kwargs, lambda x: gather_input(equal_shapes(x), exchange, spec))


def _with_hidden_states(
    args: BlockArgs, kwargs: BlockKwargs, change: Callable[[Tensor], Tensor]
) -> tuple[BlockArgs, BlockKwargs]:
    """Change the hidden states among the arguments of a block or of attention."""
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
    return (change(args[0]), *args[1:]), kwargs


def split_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's tokens of [B,S,H]; the gradient of the others' is zero here."""
    check_equal_parts(x, 1, mesh.size())
    size = x.shape[1] // mesh.size()
    return x.narrow(1, mesh.get_local_rank() * size, size).contiguous()
