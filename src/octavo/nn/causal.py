"""chunked_loss: language models of Transformers whose loss is computed without the whole logits.

    octavo.nn.causal.chunked_loss(model)
    model(input_ids=…, labels=…).loss         # as before; .logits is None
    model(input_ids=…).logits                 # as before

Only the instance's `forward` is wrapped. Given labels, it runs the base model (`base_model`: everything but the head)
and hands its hidden states and the head's weight to `linear_cross_entropy`. What a model does to its logits besides, a
factor (Cohere, Granite) or a soft cap (Gemma), is not looked up by the model's name: candidates come from the numbers
in its config, and one is taken only if it makes, of the head's input, the logits that the model computes on a few
tokens. A model that no candidate explains is refused, with the reason, and left as it was.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from octavo.nn.loss import linear_cross_entropy

M = TypeVar("M", bound=nn.Module)

PROBE_TOKENS = 8
"""Length of the sequence on which a model's logits are compared with those of its parts."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """How a model makes logits: softcap(scale · linear(base(inputs))).

    Attributes:
        base: Returns hidden states [..., D] first.
        linear: The vocabulary head, [V, D].
        scale: Factor of the logits.
        softcap: Bound of the logits, or None.
    """

    base: nn.Module
    linear: nn.Linear
    scale: float
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, as the model computes them."""
        z: Tensor = self.linear(hidden) * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def find_head(model: Any) -> Head:
    """Find out how a causal language model makes its logits.

    Args:
        model: A `transformers` model with a language model head, on any device. For one that holds no numbers (on meta,
            under FakeTensorMode) there are no logits to compare with: what the config suggests is taken for true.

    Raises:
        ValueError: Where the loss cannot be computed from the model's hidden states and its head's weight; says why.
    """
    kind = type(model).__name__
    getter = getattr(model, "get_output_embeddings", None)
    linear, base = getter() if callable(getter) else None, getattr(model, "base_model", model)
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        what = "no output embedding" if linear is None else f"an output embedding of type {type(linear).__name__}"
        raise ValueError(f"{kind} has {what}: the chunked loss multiplies with the weight of a plain nn.Linear")
    if base is model:
        raise ValueError(f"{kind} has no base model beside its head")
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise ValueError(f"{kind} adds a loss of its router to that of its logits (config.output_router_logits)")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{kind} makes its decoder's inputs from the labels")
    heads = [Head(base=base, linear=linear, scale=s, softcap=c) for s, c in _candidates(config)]
    if linear.weight.is_meta or isinstance(linear.weight, FakeTensor):
        return heads[-1]
    hidden, head_input, logits = _probe(model, base, linear)
    if head_input is None or not torch.equal(hidden, head_input):
        raise ValueError(f"{kind} changes its hidden states between its base model and its head")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[linear.weight.dtype]
    with torch.no_grad():
        for head in heads:
            expected = head.logits(hidden)
            if bool((expected - logits).abs().max() <= tolerance * logits.abs().max()):
                return head
    raise ValueError(f"{kind} does something to its logits that is neither a factor nor a soft cap of its config")


def chunked_loss(model: M) -> M:
    """Make a causal language model of Transformers compute its loss without the whole logits, in place.

    `forward` with `labels` (and as in Transformers `shift_labels`, `num_items_in_batch`) then returns `loss` and no
    logits; without labels it is as before. `del model.forward` undoes it. Tied, frozen and biased heads keep working.

    Args:
        model: See `find_head`.

    Returns:
        The same model.

    Raises:
        ValueError: As `find_head`; the model is left as it was.
    """
    if isinstance(vars(model).get("forward"), _ChunkedForward):
        return model
    model.forward = _ChunkedForward(model.forward, find_head(model))
    return model


class _ChunkedForward:
    """The forward of a model, with the loss taken from its hidden states."""

    def __init__(self, whole: Any, head: Head) -> None:
        self._whole, self._head = whole, head
        self.__signature__ = inspect.signature(whole)  # what asks which arguments the model takes gets its answer

    def __call__(
        self,
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> Any:
        if labels is None and shift_labels is None:
            return self._whole(*args, **kwargs)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        kwargs.pop("logits_to_keep", None)
        wants_tuple = kwargs.pop("return_dict", None) is False
        outputs = self._head.base(*args, **kwargs)
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = linear_cross_entropy(
            outputs[0],
            self._head.linear.weight,
            shift_labels.to(outputs[0].device),
            self._head.linear.bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            scale=self._head.scale,
            softcap=self._head.softcap,
        )
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        result = CausalLMOutputWithPast(
            loss=loss,
            past_key_values=getattr(outputs, "past_key_values", None),
            hidden_states=getattr(outputs, "hidden_states", None),
            attentions=getattr(outputs, "attentions", None),
        )
        return result.to_tuple() if wants_tuple else result


def _candidates(config: Any) -> list[tuple[float, float | None]]:
    """Factors and soft caps that the numbers of a config suggest; (1, None) first, all of them last."""
    numbers = {
        name: float(value)
        for name, value in config.to_dict().items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value
    }
    factors = [v for name, v in numbers.items() if ("logit" in name and "scal" in name) or "head_multiplier" in name]
    caps = [v for name, v in numbers.items() if "softcap" in name and not name.startswith("attn")]
    scales = [1.0, *(f for v in factors for f in (1 / v, v))]
    return [(scale, cap) for cap in (None, *caps) for scale in scales]


def _probe(model: Any, base: nn.Module, linear: nn.Linear) -> tuple[Tensor, Tensor | None, Tensor]:
    """Hidden states that the base returns, what the head is called with, and the logits, for a few tokens."""
    seen: list[Tensor] = []
    handle = linear.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    vocabulary = linear.weight.shape[0]
    ids = torch.arange(PROBE_TOKENS, device=linear.weight.device).remainder(vocabulary).unsqueeze(0)
    try:
        with torch.no_grad(), _evaluating(model):
            logits: Tensor = model(input_ids=ids).logits
            hidden: Tensor = base(input_ids=ids)[0]
    finally:
        handle.remove()
    return hidden, seen[0] if seen else None, logits


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
