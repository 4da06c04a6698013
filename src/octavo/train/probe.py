"""What a model shows before it is trained: that it runs a batch, what it keeps for backward, that it looks back only.

A model can be built and still not run (head counts that do not divide), and one that sees the tokens it is to predict,
as an encoder does, trains to a loss near zero and has learned nothing. Both are found here, before anything is written.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn import disabled
from octavo.nn.memory_audit import kept_for_backward
from octavo.train.checkpointing import Checkpointing
from octavo.train.config import ConfigError
from octavo.train.heartbeat import from_collective

GRADIENT_SCALE = 1024.0
"""Keeps the gradient of the causality check out of fp16's underflow."""
MAX_LEAK = 1e-3
"""Share of the largest gradient from which the last token's counts as seen; an encoder's is about as large as any."""


@contextmanager
def _model_errors(inputs: Tensor) -> Iterator[None]:
    """What goes wrong inside is the configuration's fault."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if from_collective(error):
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"the model cannot run a batch of {list(inputs.shape)}: {reason}") from None


def saved_bytes_per_token(
    model: nn.Module, checkpointing: Checkpointing, loss: Callable[[Tensor, Tensor], Tensor], batch: tuple[Tensor, ...]
) -> float:
    """Bytes that one forward of `batch` (inputs and targets) keeps for backward, per token.

    Raises ConfigError where the model cannot run it.
    """
    inputs, targets = batch
    with _model_errors(inputs), kept_for_backward(model) as saved, checkpointing.kept_outputs() as outputs:
        value = loss(inputs, targets)
    del value
    return (saved.bytes + outputs.bytes) / inputs.numel()


def check_causal(model: Any, logits: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    """Raises ConfigError where logits depend on a later token.

    Asked of the gradient, which is zero where nothing depends, rather than of the logits of two inputs: these differ
    too where a sum is rounded in another way, or where one FP8 scale serves all tokens. It is the model's matter
    alone, so converted layers compute unconverted.
    """
    embeddings: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        embeddings.append(leaf)
        return leaf

    training = model.training
    handle = model.get_input_embeddings().register_forward_hook(keep)
    model.eval()  # dropout has nothing to do with it
    try:
        with _model_errors(inputs), disabled():
            earlier = logits(inputs)[:, :-1].float().logsumexp(-1).sum()
            (gradient,) = (
                torch.autograd.grad(earlier * GRADIENT_SCALE, embeddings[:1], allow_unused=True)
                if embeddings
                else (None,)
            )
    finally:
        handle.remove()
        model.train(training)
    if gradient is None:
        return
    leak, largest = gradient[:, -1].abs().max(), gradient.abs().max()
    if bool(leak > MAX_LEAK * largest):  # NaN is another matter, and not greater
        raise ConfigError(
            f"{type(model).__name__} is not causal: what it says of a token depends on later ones, so it would be "
            'trained on inputs that hold the answer. Choose a model.type that generates text, as "llama"; of an '
            "encoder, model.config.is_decoder = true may make one"
        )
