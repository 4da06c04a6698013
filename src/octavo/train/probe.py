"""Checks of a model before training: it runs a batch, and is causal."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn import disabled
from octavo.nn.causal import evaluating
from octavo.runtime.torch_compat import tree_map
from octavo.train.config.run_config import ConfigError
from octavo.train.layout import Inputs
from octavo.train.ranks import from_collective

GRADIENT_SCALE = 1024.0  # Factor that keeps the gradient of the causality check from underflowing in fp16
REMEDY = 'set data.packing = "stream", or choose another model'
MAX_MOVED = 0.05  # Largest difference of a document's logits in two places, in standard deviations; bf16 has 8 bits
MAX_LEAK = 1e-3  # Largest gradient of a token without effect, relative to the largest; in an encoder they are similar


@contextmanager
def model_errors(inputs: Inputs) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if from_collective(error):
            raise
        shapes = tree_map(lambda rows: list(rows.shape), inputs)
        raise ConfigError(f"the model cannot run a batch of {shapes}: {' '.join(str(error).split())}") from None


def check_causal(
    model: nn.Module, logits: Callable[[Tensor], Tensor], inputs: Tensor, *, has_last: bool = True
) -> None:  # fmt: skip
    """Raise ConfigError if logits depend on a later token, or on another document if `inputs` are packed [B,S,2]."""
    # The gradient is zero without a dependency; logits of two inputs differ also by rounding, or by a shared scale.
    # Of ranks that share a sequence, the one that `has_last` of its tokens checks; the others run with it.
    if inputs.dim() == 3:
        _check_documents_apart(model, logits, inputs)
    gradient = _embedding_gradient(model, logits, inputs, slice(None, -1))
    if gradient is not None and has_last and bool(gradient[:, -1].abs().max() > MAX_LEAK * gradient.abs().max()):
        problem = f"{type(model).__name__} is not causal: its output at a token depends on later ones"
        hint = 'model.type that generates text, as "llama"; of an encoder, model.config.is_decoder = true may make one'
        raise ConfigError(f"{problem}, which contain the answer. Choose a {hint}")


def _check_documents_apart(model: nn.Module, logits: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    kind, length = type(model).__name__, inputs.shape[1]
    if length < 4:
        raise ConfigError(f"data.sequence_length = {length} is too short to pack documents: set it to 4 or more")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"{kind} takes no position_ids, by which it would keep packed documents apart: {REMEDY}")
    half = length // 2
    ids = inputs[:, :half, :1]
    document = torch.cat([ids, torch.arange(half, device=ids.device).view(1, half, 1)], -1)
    rest = document[:, : length - 2 * half]  # of odd lengths
    packed = torch.cat([document, document, rest], 1)
    gradient = _embedding_gradient(model, logits, packed, slice(half, 2 * half))
    with model_errors(inputs), evaluating(model), disabled(), torch.no_grad():
        both = logits(packed).float()
    first, second = both[:, :half], both[:, half : 2 * half]
    moved = bool((second - first).square().mean().sqrt() > MAX_MOVED * first.std())
    if moved or (gradient is not None and bool(gradient[:, :half].any())):  # masked attention has no gradient at all
        problem = f"the logits of {kind} for a document depend on the document packed before it"
        raise ConfigError(f"{problem}: it does not mask attention by position_ids; {REMEDY}")


def _embedding_gradient(model: Any, logits: Callable[[Tensor], Tensor], inputs: Tensor, tokens: slice) -> Tensor | None:
    """The gradient of the logits of some tokens in the embeddings [B,S,D]; None without a dependency or embeddings."""
    embeddings: list[Tensor] = []

    def keep(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        embeddings.append(leaf)
        return leaf

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with model_errors(inputs), evaluating(model), disabled():  # without dropout, and unconverted
            value = logits(inputs)[:, tokens].float().logsumexp(-1).sum()
            if not embeddings:
                return None
            (gradient,) = torch.autograd.grad(value * GRADIENT_SCALE, embeddings[:1], allow_unused=True)
            return gradient
    finally:
        handle.remove()
