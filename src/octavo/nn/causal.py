"""Make language models of Transformers compute their loss without the whole logits: `chunked_loss`.

    octavo.nn.causal.chunked_loss(model)
    model(input_ids=…, labels=…).loss         # as before; .logits is None
    model(input_ids=…).logits                 # as before

Wraps only the instance's `forward`. Given labels, it runs the base model (`base_model`: everything but the head) and
passes hidden states and the head's weight to `linear_cross_entropy`. `octavo.nn.causal_head` finds how the model
computes its logits and its loss; where it cannot tell, it raises an error and the model stays unchanged. If a router's
loss is part of the loss, the model itself runs, with the logits of one token, for the `aux_loss` that it computes.
"""

import threading
from dataclasses import fields, replace
from functools import update_wrapper
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo.nn.causal_head import (
    IGNORE,
    Head,
    adds_router_loss,
    class_path,
    evaluating,
    find_head,
    is_plain_linear,
    parameters,
    shifted,
    trial_ids,
)
from octavo.nn.loss import linear_cross_entropy
from octavo.runtime.torch_compat import FakeTensor

M = TypeVar("M", bound=nn.Module)


def check_next_token_loss(model: Any) -> None:
    """Check that the model's own loss, `model(input_ids=x, labels=y, shift_labels=y).loss`, predicts y[:, t] from
    x[:, t].
    """
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

    Args:
        model: See `find_head`.

    Returns:
        The same model.

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
    """The forward of a model, with a loss computed from its hidden states."""

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
        elif not is_plain_linear(linear):
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
        outputs, hidden = self._with_router_loss(args, inputs) if routed else self._base_outputs(args, inputs)
        if shift_labels is None:
            assert labels is not None
            shift_labels = shifted(labels, ignore_index)
        loss = linear_cross_entropy(
            hidden,
            self._head.linear.weight,
            shift_labels.to(hidden.device),
            self._head.linear.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            scale=self._head.scale,
            softcap=self._head.softcap,
        )
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        if routed:
            loss = loss + self._model.router_aux_loss_coef * outputs.aux_loss.to(loss.device)
            result = replace(outputs, loss=loss, logits=None)
            return result.to_tuple() if return_tuple else result
        # The cache is `past_key_values` up to Transformers 5.23, and `cache` since.
        names = {field.name for field in fields(CausalLMOutputWithPast)} - {"loss", "logits"}
        result = CausalLMOutputWithPast(loss=loss, **{name: getattr(outputs, name, None) for name in names})
        return result.to_tuple() if return_tuple else result

    def _base_outputs(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the outputs of the base model, and the hidden states among them."""
        outputs = self._head.base(*args, **inputs)
        return outputs, outputs[0]

    def _with_router_loss(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the outputs of the model, `aux_loss` among them, with one token's logits, and its hidden states."""
        hidden: list[Tensor] = []
        thread = threading.get_ident()  # others may run the base model, too

        def keep(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if threading.get_ident() == thread:
                hidden.append(outputs[0])

        handle = self._head.base.register_forward_hook(keep)
        try:
            return self._original(*args, **inputs, logits_to_keep=1, return_dict=True), hidden[-1]
        finally:
            handle.remove()
