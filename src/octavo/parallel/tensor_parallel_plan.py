"""tensor_parallel: a causal language model of Transformers over ranks, by the plan in its config.

With sequence parallelism each of t ranks has S/t tokens of every sequence between attention and MLP:

    embedding ──split──▶ [B,S/t,H] ──▶ blocks ──▶ norm, head and loss of S/t tokens
                              │  ▲
                    gather [B,S,H]  reduce     around attention, whose heads the ranks share, and around the MLP

What is not in the plan (norms, embedding, head, routers, experts) leaves a summand of its gradient on every rank.
Rejected: these parameters as DTensors, which needs a message for each.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from octavo.nn.report import NOTE_ATTRIBUTE
from octavo.parallel.agreement import EqualShapes, check_mesh, check_on_all_ranks
from octavo.parallel.combinations import check_model
from octavo.parallel.divided_random import divide_dropout
from octavo.parallel.tensor_parallel import (
    KIND,
    Fp8ColwiseParallel,
    Fp8RowwiseParallel,
    as_plain,
    gathered_spec,
    present,
)
from octavo.parallel.tokens import TokenExchange, check_equal_parts, gather_input
from octavo.runtime.blocks import Absent, find_block_list, find_blocks
from octavo.runtime.swap import all_or_nothing
from octavo.tensor import local_tensor

Args = tuple[Any, ...]  # Of a block or of attention
Kwargs = dict[str, Any]
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
        first.register_forward_pre_hook(partial(_split_input, mesh), with_kwargs=True)
    readers: dict[str, list[nn.Module]] = {}
    for name, style in plan.items():
        if isinstance(style, _ColwiseOfGathered):
            readers.setdefault(name.rpartition(".")[0], []).append(model.get_submodule(name))
    for name, linears in readers.items():
        hook = partial(_gather_attention_input, exchange, EqualShapes(mesh, KIND), linears)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def _split_input(mesh: DeviceMesh, block: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    return _with_hidden_states(args, kwargs, lambda x: split_tokens(x, mesh))


def _gather_attention_input(
    exchange: TokenExchange, equal_shapes: EqualShapes, linears: list[nn.Module], attention: nn.Module, args: Args,
    kwargs: Kwargs,
) -> tuple[Args, Kwargs]:  # fmt: skip
    exchange = present(linears[0], exchange)
    specs = {gathered_spec(layer, exchange) for layer in linears}  # one if all read the same FP8 rows
    spec = specs.pop() if len(specs) == 1 else None
    return _with_hidden_states(args, kwargs, lambda x: gather_input(equal_shapes(x), exchange, spec))


def _with_hidden_states(args: Args, kwargs: Kwargs, change: Callable[[Tensor], Tensor]) -> tuple[Args, Kwargs]:
    """Change the hidden states among the arguments of a block or of attention."""
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
    return (change(args[0]), *args[1:]), kwargs


def split_tokens(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's tokens of [B,S,H]; the gradient of the others' is zero here."""
    check_equal_parts(x, 1, mesh.size())
    size = x.shape[1] // mesh.size()
    return x.narrow(1, mesh.get_local_rank() * size, size).contiguous()
