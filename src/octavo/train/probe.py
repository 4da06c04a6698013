"""Checks of a model before training: it runs a batch, is causal, and saves so many bytes for backward.

Some models can be built but not run (head counts that do not divide). A model that attends to the tokens it predicts,
such as an encoder, reaches a loss near zero and learns nothing. These checks raise errors before any file is written.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn import disabled
from octavo.nn.memory_audit import saved_for_backward
from octavo.train.activation_checkpointing import Checkpointing
from octavo.train.config.run_config import ConfigError
from octavo.train.heartbeat import from_collective

GRADIENT_SCALE = 1024.0
"""Factor that keeps the gradient of the causality check from underflowing in fp16."""
MAX_LEAK = 1e-3
"""Largest gradient of the last token in a causal model, relative to the largest; in an encoder they are similar."""


@contextmanager
def _model_errors(inputs: Any) -> Iterator[None]:
    """Turn errors of the model into a ConfigError."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if from_collective(error):
            raise
        reason = " ".join(str(error).split())
        shapes = {name: list(rows.shape) for name, rows in inputs.items()} if isinstance(inputs, Mapping) else \
            list(inputs.shape)  # fmt: skip
        raise ConfigError(f"the model cannot run a batch of {shapes}: {reason}") from None


def saved_bytes_per_token(
    model: nn.Module, checkpointing: Checkpointing, loss: Callable[[Any, Tensor], Tensor],
    batch: tuple[Any, Tensor], tokens: int,
) -> float:  # fmt: skip
    """Bytes that one forward of `batch` (inputs and targets) saves for backward, for each of its `tokens`.

    Raises ConfigError if the model cannot run it.
    """
    inputs, targets = batch
    with _model_errors(inputs), saved_for_backward(model) as saved, checkpointing.saved_outputs() as outputs:
        value = loss(inputs, targets)
    del value
    return (saved.bytes + outputs.bytes) / tokens


def check_causal(
    model: Any, logits: Callable[[Tensor], Tensor], inputs: Tensor, *, has_last: bool = True
) -> None:  # fmt: skip
    """Raise ConfigError if logits depend on a later token.

    The check uses the gradient, which is zero without a dependency. Comparing the logits of two inputs would not do:
    these differ also by rounding, or by an FP8 scale shared by all tokens. Converted layers run unconverted, because
    only the model matters. Of ranks that share a sequence, the one that `has_last` of its tokens checks; the others run
    with it.
    """
    embeddings: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        embeddings.append(leaf)
        return leaf

    training = model.training
    handle = model.get_input_embeddings().register_forward_hook(keep)
    model.eval()  # without dropout
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
    if gradient is None or not has_last:
        return
    leak, largest = gradient[:, -1].abs().max(), gradient.abs().max()
    if bool(leak > MAX_LEAK * largest):  # False for NaN
        raise ConfigError(
            f"{type(model).__name__} is not causal: its output at a token depends on later ones, so it would be "
            'trained on inputs that contain the answer. Choose a model.type that generates text, as "llama"; of an '
            "encoder, model.config.is_decoder = true may make one"
        )
