"""Make language models of Transformers compute their loss without the whole logits: `chunked_loss`.

Given labels, the instance's `forward` runs the base model (everything but the head) and `linear_cross_entropy`. If a
router's loss is part of the loss, the model itself runs, with the logits of one token, for its `aux_loss`.
"""

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import update_wrapper
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from octavo.nn.experts import looks_like_experts
from octavo.nn.linear_like import LinearLike
from octavo.nn.loss import linear_cross_entropy
from octavo.runtime.blocks import find_block_list
from octavo.runtime.swap import stand_in_weights, weights_on_meta
from octavo.runtime.switch import disabled
from octavo.runtime.torch_compat import FakeTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Models may scale their logits (Cohere, Granite) or apply a soft cap (Gemma). A trial runs the model on a few tokens,
# with chosen numbers in place of the head's output, of several decades to reveal a soft cap. Candidates come from the
# numbers in the config; one must reproduce the logits. The loss must equal the shifted cross-entropy in value and in
# its autograd graph: another term, as a z-loss, is a second branch, however small its coefficient.
#
# A copy of fake tensors has no numbers to compare. For a plan, `decide_head` runs the trial on the model on meta, and
# the copies follow its result, so that a plan and its run compute the same loss.

PROBE_SHAPE = 2, 8  # Sequences and tokens of the trial
IGNORE = -100  # Label of ignored tokens, as in Transformers
# Relative tolerance between logits of a model and a candidate in this dtype; each operation rounds once
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

DECIDED = "octavo_head"  # Attribute with the result of `decide_head`: fields of its `Head`, or why there is none


@dataclass(frozen=True, kw_only=True)
class Head:
    """How a model computes logits: softcap(scale · linear(base(inputs)))."""

    base: nn.Module  # The base model; its first output is hidden states [..., D]
    linear: nn.Linear  # The vocabulary head, [V, D]
    scale: float  # Factor of the logits
    softcap: float | None  # Bound of the logits, or None
    # Whether the loss has a router's loss, `router_aux_loss_coef` · `aux_loss`, where the config requests it.
    routed: bool = False

    def finish(self, z: Tensor) -> Tensor:
        z = z * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def find_head(model: Any) -> Head:
    """Find how a causal language model computes its logits, and check that its loss is the shifted cross-entropy."""
    kind = type(model).__name__
    getter = getattr(model, "get_output_embeddings", None)
    linear: Any = getter() if callable(getter) else None
    base: nn.Module = getattr(model, "base_model", model)
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        head_kind = "no output embedding" if linear is None else f"an output embedding of type {class_path(linear)}"
        raise ValueError(f"{kind} has {head_kind}: the chunked loss multiplies with the weight of a plain nn.Linear")
    if base is model:
        raise ValueError(f"{kind} has no base model beside its head")
    routed = adds_router_loss(model, {})
    if routed and not any(p.name == "logits_to_keep" or p.kind is p.VAR_KEYWORD for p in parameters(model.forward)):
        raise ValueError(f"{kind} computes its router's loss with whole logits: its forward takes no logits_to_keep")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} makes its decoder's inputs from the labels")
    if not any(p.name == "labels" or p.kind is p.VAR_KEYWORD for p in parameters(model.forward)):
        raise ValueError(f"{kind}.forward takes no labels")
    candidates = _candidates(model.config.get_text_config())
    heads = [Head(base=base, linear=linear, scale=scale, softcap=cap, routed=routed) for scale, cap in candidates]
    try:
        with evaluating(model), disabled():
            if isinstance(linear.weight, FakeTensor):
                return _decided(model, heads[-1])
            if not linear.weight.is_meta:
                # No weight matters, and products of real ones take seconds; what fails on meta is tried with them.
                with suppress(Exception), weights_on_meta(model):
                    return _matching_head(model, heads)
            return _matching_head(model, heads)
    except RuntimeError as error:
        if not linear.weight.is_meta:
            raise
        reason = " ".join(str(error).split())
        raise ValueError(f"{kind} cannot run the trial on meta; load its weights first: {reason}") from error


def decide_head(model: "PreTrainedModel") -> None:
    """Find the head of a model on meta as a run finds it with weights, for the copies of fake tensors of a plan."""
    # What a trial on meta does not find, one with stand-in weights may. Two blocks stand for all, if the model runs so.
    decided: dict[str, Any] | str = ""
    blocks = find_block_list(model)
    members = [*blocks]
    for count, numbers in ((2, False), (2, True), (len(members), True)):
        del blocks[count:]
        try:
            with _without_experts(model), stand_in_weights(model) if numbers else nullcontext():
                head = find_head(model)
            decided = {"scale": head.scale, "softcap": head.softcap, "routed": head.routed}
            break
        except Exception as error:  # of no common type
            decided = str(error)
        finally:
            blocks.extend(members[count:])
    setattr(model, DECIDED, decided)


@contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    """Let experts return their input: what they compute says nothing of the head, takes long, and needs numbers."""
    experts = [(module, vars(module).get("forward")) for module in model.modules() if looks_like_experts(module)]
    try:
        for module, _ in experts:
            vars(module)["forward"] = lambda hidden, *_, **__: hidden * 1
        yield
    finally:
        for module, own in experts:
            del vars(module)["forward"]
            vars(module).update({} if own is None else {"forward": own})


def _decided(model: "PreTrainedModel", assumed: Head) -> Head:
    """The head of a copy of fake tensors: what `decide_head` found, else what its config says."""
    decided = getattr(model, DECIDED, None)
    if isinstance(decided, str):
        raise ValueError(decided)
    if decided is not None:
        return replace(assumed, **decided)
    _check_loss(model, assumed)
    return assumed


def adds_router_loss(model: "PreTrainedModel", inputs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Return whether a mixture of experts adds a loss that balances its router, given the inputs of its forward."""
    if (requested := inputs.get("output_router_logits")) is None:
        requested = getattr(model.config.get_text_config(), "output_router_logits", False)
    return bool(requested)


def _candidates(config: Any) -> list[tuple[float, float | None]]:
    """Return factors and soft caps from the numbers of a config; (1, None) first, all combined last."""
    numbers = {
        name: float(value)
        for name, value in config.to_dict().items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value
    }
    factors = [v for name, v in numbers.items() if ("logit" in name and "scal" in name) or "head_multiplier" in name]
    caps = [v for name, v in numbers.items() if "softcap" in name and not name.startswith("attn")]
    scales = [1.0, *(f for v in factors for f in (1 / v, v))]
    return [(scale, cap) for cap in (None, *caps) for scale in scales]


@torch.no_grad()
def _matching_head(model: "PreTrainedModel", heads: list[Head]) -> Head:
    """Return the first head that reproduces the logits of its model, in all decades and of both signs."""
    # Raises as `_check_loss`.
    kind, base, linear = type(model).__name__, heads[0].base, heads[0].linear
    shape = *PROBE_SHAPE, linear.weight.shape[0]
    generator = torch.Generator("cpu").manual_seed(0)
    size = 10 ** (5 * torch.rand(shape, generator=generator, device="cpu") - 2)
    z = _as_head_output(linear, torch.where(torch.rand(shape, generator=generator, device="cpu") < 0.5, size, -size))
    hidden: list[Tensor] = []
    with base.register_forward_hook(lambda module, args, output: hidden.append(output[0])):
        outputs, head_inputs = _run_trial(model, linear, z)
    if not linear.weight.is_meta:
        hidden = [base(input_ids=trial_ids(linear.weight))[0]]
    if not hidden or not head_inputs or not _same(hidden[-1], head_inputs[-1]):
        problem = f"{kind} changes its hidden states between its base model and its head"
        hint = "; if not, load its weights first: on meta only storages can be compared"
        raise ValueError(problem + (hint if linear.weight.is_meta else ""))
    if outputs.logits.shape != z.shape:
        raise ValueError(f"{kind} returns logits {list(outputs.logits.shape)}, but its head returns {list(z.shape)}")
    for head in heads:
        if torch.allclose(head.finish(z), outputs.logits.to(z.dtype), rtol=TOLERANCE[z.dtype], atol=0.0):
            _check_loss(model, head)
            return head
    raise ValueError(f"{kind} does something to its logits that is neither a factor nor a soft cap of its config")


def _check_loss(model: "PreTrainedModel", head: Head) -> None:
    """Raise unless the loss of a model is the mean cross-entropy of its logits with the labels of the next tokens."""
    # The first sequence gets the most likely labels and the second the least likely, and fewer of the first count. So a
    # loss that shifts, weights or smooths differently is far off. An added term is another branch of the graph, or
    # changes the value by more than 1e-5. Under FakeTensorMode only the graph is checked.
    kind, linear = type(model).__name__, head.linear
    shape = *PROBE_SHAPE, linear.weight.shape[0]
    z = _as_head_output(linear, 3 * torch.randn(shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu"))
    finished = head.finish(z)
    labels = torch.stack([finished[0].argmax(-1), finished[1].argmin(-1)]).roll(1, -1)
    labels[0, :4] = labels[1, 5] = IGNORE
    with torch.enable_grad():
        outputs, _ = _run_trial(model, linear, z.requires_grad_(), labels=labels)
    if outputs.loss is None or outputs.logits is None:
        raise ValueError(f"{kind} returns no loss for labels, or no logits beside it")
    aux_loss = _aux_loss(model, outputs) if head.routed else None
    if not isinstance(z, FakeTensor):
        logits, targets = outputs.logits.float().flatten(0, -2), shifted(labels, IGNORE).flatten()
        expected = F.cross_entropy(logits, targets.to(logits.device), ignore_index=IGNORE)
        if aux_loss is not None:
            expected = expected + getattr(model, "router_aux_loss_coef", 0.0) * aux_loss
        if not torch.allclose(outputs.loss.float(), expected, rtol=TOLERANCE[outputs.loss.dtype], atol=0.0):
            raise ValueError(
                f"{kind} has a loss of its own: {outputs.loss:.5g} for logits and labels whose cross-entropy, each "
                f"token with the label of the next, is {expected:.5g}"
            )
    if not _is_chain(outputs.loss, None if aux_loss is None else aux_loss.grad_fn):
        raise ValueError(f"{kind} has a loss of its own: it adds a term to the cross-entropy")


def _aux_loss(model: "PreTrainedModel", outputs: Any) -> Tensor:
    """Return the router's loss. Raises ValueError unless the loss depends on it by `router_aux_loss_coef`."""
    coefficient, aux_loss = getattr(model, "router_aux_loss_coef", None), getattr(outputs, "aux_loss", None)
    if isinstance(aux_loss, Tensor) and aux_loss.requires_grad and coefficient is not None:
        (slope,) = torch.autograd.grad(outputs.loss, [aux_loss], retain_graph=True, allow_unused=True)
        if isinstance(slope, FakeTensor):
            return aux_loss
        if slope is not None and math.isclose(slope.item(), coefficient, rel_tol=1e-2):
            return aux_loss
    raise ValueError(
        f"{type(model).__name__} adds its router's loss to the cross-entropy otherwise than as router_aux_loss_coef "
        "times its output aux_loss"
    )


def _is_chain(loss: Tensor, besides: Node | None = None) -> bool:
    """Return whether the autograd graph of a loss has a single branch, besides one that leads only to a node."""
    node = loss.grad_fn
    while node is not None:
        inputs = _inputs(node)
        if len(inputs) > 1 and besides is not None:
            inputs = [function for function in inputs if not _leads_to(function, besides)]
        if len(inputs) > 1:
            return False
        node = inputs[0] if inputs else None
    return True


def _leads_to(node: Node, target: Node) -> bool:
    while node is not target and len(inputs := _inputs(node)) == 1:
        node = inputs[0]
    return node is target


def _inputs(node: Node) -> list[Node]:
    return [function for function, _ in node.next_functions if function is not None]


def _run_trial(model: "PreTrainedModel", linear: nn.Linear, z: Tensor, **labels: Tensor) -> tuple[Any, list[Tensor]]:
    """Return the outputs of a model whose head returns z, and the inputs of the head."""
    head_inputs: list[Tensor] = []

    def replaced(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(args[0])
        return z

    # With a cache Transformers does not detect packed sequences, which fails on meta.
    cached = linear.weight.is_meta and any(p.name == "use_cache" for p in parameters(model.forward))
    with linear.register_forward_hook(replaced):
        ids = trial_ids(linear.weight)
        return model(input_ids=ids, **labels, **({"use_cache": True} if cached else {})), head_inputs


def _as_head_output(linear: nn.Linear, z: Tensor) -> Tensor:
    return z.to(linear.weight.dtype).to("cpu" if linear.weight.is_meta else linear.weight.device)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors are equal; on meta, whether they share a storage."""
    if a.is_meta:
        return a.shape == b.shape and a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return torch.equal(a, b)


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Return the label of the next token for each token; the last is ignored."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def class_path(module: nn.Module) -> str:
    """Return the full name of a module's class, and whether it is converted, which the name does not tell."""
    owner = type(module)
    return f"{owner.__module__}.{owner.__qualname__}{' in FP8' if isinstance(module, LinearLike) else ''}"


def trial_ids(weight: Tensor) -> Tensor:
    """Return token ids of the trial for an embedding or a head [V, D]."""
    rows, length = PROBE_SHAPE
    ids = torch.arange(rows * length, device=weight.device).remainder(weight.shape[0])
    return ids.view(rows, length)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode in this context; afterwards each module is as before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


M = TypeVar("M", bound=nn.Module)


def check_next_token_loss(model: Any) -> None:
    """Check that the model's own loss for labels and shift_labels y predicts y[:, t] from token t."""
    # It does if a model shifts labels but accepts `shift_labels` instead, or takes shifted labels (Bart). The check
    # reads the gradient at the last token, for which a model that always shifts has no label. On meta and under
    # FakeTensorMode it checks only the arguments.
    kind, weight = type(model).__name__, model.get_input_embeddings().weight
    if not any(p.name == "labels" for p in parameters(model.forward)):
        raise ValueError(f"{kind} has no loss of its own to train on: its forward takes no labels")
    if weight.is_meta or isinstance(weight, FakeTensor):
        return
    ids = trial_ids(weight)
    try:
        with torch.enable_grad(), evaluating(model):
            outputs = model(input_ids=ids, labels=ids.roll(-1, 1), shift_labels=ids.roll(-1, 1))
    except (RuntimeError, IndexError):  # which a batch can cause
        raise
    except Exception as error:  # models raise many types
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        lacks_pad = isinstance(error, TypeError) and getattr(model.config, "pad_token_id", None) is None
        hint = "; it may need config.pad_token_id, which is unset: set it, as to 0" if lacks_pad else ""
        raise ValueError(f"{kind} cannot compute a loss from token ids alone{hint} ({reason})") from error
    if outputs.loss is None:
        raise ValueError(f"{kind} has no loss of its own to train on: it returns none for labels")
    (gradient,) = torch.autograd.grad(outputs.loss, [outputs.logits], allow_unused=True)
    if gradient is not None and not (gradient[:, -1].gather(-1, ids[:, :1]) < 0).all():
        raise ValueError(f"{kind} has a loss that does not predict the token of shift_labels from each token")


def chunked_loss(model: M) -> M:
    """Make a causal language model of Transformers compute its loss without the whole logits, in place.

    `forward` with `labels` (and as in Transformers `shift_labels`, `num_items_in_batch`) then returns `loss` and no
    logits; without labels it is unchanged. `del model.forward` undoes it. Tied, frozen and biased heads work.

    The loss uses the head's weight and not the head's output. If the head has hooks (other than Octavo's, which only
    measure) or its own `forward`, or a batch requests a router's loss (`output_router_logits`) that the config did not,
    the model computes its loss from whole logits as before. Change the head first: `resize_token_embeddings`, PEFT,
    `convert` of the head itself, or a `loss_function` of your own.

    Raises:
        ValueError: As `find_head`; the model is unchanged. From `forward`, if the head, the base model or the loss
            function was replaced since: `del model.forward`, then `chunked_loss(model)` again.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = octavo.nn.causal.chunked_loss(LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape)))
        >>> tokens = torch.arange(16).view(1, 16)
        >>> model(input_ids=tokens, labels=tokens).logits is None
        True
    """
    if isinstance(vars(model).get("forward"), _ChunkedForward):
        return model
    model.forward = _ChunkedForward(model, find_head(model))
    return model


class _ChunkedForward:
    def __init__(self, model: Any, head: Head) -> None:
        self._model, self._head = model, head
        self._original, self._loss_function = model.forward, getattr(model, "loss_function", None)
        self._names = [p.name for p in parameters(self._original) if p.kind is p.POSITIONAL_OR_KEYWORD]
        update_wrapper(self, self._original, updated=())  # callers read its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = dict(zip(self._names, args, strict=False))
        if duplicates := inputs.keys() & kwargs.keys():
            raise TypeError(f"forward() got multiple values for argument {min(duplicates)!r}")
        inputs |= kwargs
        labels, shift_labels = inputs.pop("labels", None), inputs.pop("shift_labels", None)
        if (labels is None and shift_labels is None) or self._needs_whole_logits(inputs):
            return self._original(*args, **kwargs)
        self._check_unchanged()
        return self._chunked(args[len(self._names) :], inputs, labels, shift_labels)

    def _needs_whole_logits(self, inputs: dict[str, Any]) -> bool:
        """Return whether the head must be called, or the model adds a router's loss that `find_head` has not seen."""
        linear = self._model.get_output_embeddings()
        hooks = [] if linear is None else [*linear._forward_pre_hooks.values(), *linear._forward_hooks.values()]
        has_hooks = any((getattr(hook, "__module__", None) or "").partition(".")[0] != "octavo" for hook in hooks)
        has_own_forward = linear is not None and "forward" in vars(linear)
        return has_hooks or has_own_forward or (not self._head.routed and adds_router_loss(self._model, inputs))

    def _check_unchanged(self) -> None:
        model, head = self._model, self._head
        linear = model.get_output_embeddings()
        if linear is not head.linear:
            change = "its output embedding was replaced"
        elif type(linear) is not nn.Linear:
            change = f"its output embedding became a {class_path(linear)}"
        elif model.base_model is not head.base:
            change = "its base model was replaced"
        elif getattr(model, "loss_function", None) != self._loss_function:
            change = "its loss_function was replaced"
        else:
            return
        raise ValueError(
            f"{type(model).__name__}: {change} after chunked_loss; call it last: `del model.forward` and "
            "`chunked_loss(model)`, or leave it at the first for whole logits"
        )

    def _chunked(
        self, args: tuple[Any, ...], inputs: dict[str, Any], labels: Tensor | None, shift_labels: Tensor | None
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        num_items_in_batch, ignore_index = inputs.pop("num_items_in_batch", None), inputs.pop("ignore_index", IGNORE)
        inputs.pop("logits_to_keep", None)
        return_tuple = inputs.pop("return_dict", None) is False
        routed = self._head.routed and adds_router_loss(self._model, inputs)
        if routed:
            outputs, hidden = self._with_router_loss(args, inputs)
        else:
            outputs = self._head.base(*args, **inputs)
            hidden = outputs[0]
        if shift_labels is None:
            assert labels is not None
            shift_labels = shifted(labels, ignore_index)
        loss = linear_cross_entropy(
            hidden, self._head.linear.weight, shift_labels.to(hidden.device), self._head.linear.bias,
            ignore_index=ignore_index, reduction="mean" if num_items_in_batch is None else "sum",
            scale=self._head.scale, softcap=self._head.softcap,
        )  # fmt: skip
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        if routed:
            loss = loss + self._model.router_aux_loss_coef * outputs.aux_loss.to(loss.device)
            result = replace(outputs, loss=loss, logits=None)
        else:  # The cache is `past_key_values` up to Transformers 5.23, and `cache` since.
            names = {field.name for field in fields(CausalLMOutputWithPast)} - {"loss", "logits"}
            result = CausalLMOutputWithPast(loss=loss, **{name: getattr(outputs, name, None) for name in names})
        return result.to_tuple() if return_tuple else result

    def _with_router_loss(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the outputs of the model, `aux_loss` among them, with one token's logits, and its hidden states."""
        hidden: list[Tensor] = []
        thread = threading.get_ident()  # others may run the base model, too

        def keep(module: nn.Module, inputs: object, outputs: Any) -> None:
            if threading.get_ident() == thread:
                hidden.append(outputs[0])

        with self._head.base.register_forward_hook(keep):
            return self._original(*args, **inputs, logits_to_keep=1, return_dict=True), hidden[-1]
