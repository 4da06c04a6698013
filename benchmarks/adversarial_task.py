"""The task of the adversarial benchmark, its models, and how they are trained.

All models predict the next byte of Python's own standard library from the bytes before it, as the neural language
model of Bengio et al. (JMLR 2003) does: a task with a floor that bf16 and FP8 share, so that a gap in the loss is one
of precision. No layer goes around the linears: what their FP8 forms lose is lost. The heads stay in bf16, as
`octavo.convert` leaves heads.
"""

import argparse
import difflib
import doctest
import functools
import inspect
import math
import pickletools
import tarfile
import typing
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.inspect import OperandStats

SOURCES = (argparse, typing, inspect, difflib, functools, tarfile, doctest, pickletools)
"""Modules whose source is the text."""
BYTES, CONTEXT, WIDTH = 128, 8, 256
"""Values of a byte (ASCII), bytes before the one to predict, and features: two blocks of 128."""
TOKENS = 256
"""Examples of a batch."""
WARMUP, LAST_RATE = 20, 0.1
"""Steps over which the learning rate rises, and the share of it at which it ends."""


@functools.cache
def text() -> Tensor:
    """The text, int64 [bytes]."""
    source = b"".join(Path(module.__file__ or "").read_bytes() for module in SOURCES)
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long().remainder(BYTES)


def batch(seed: int, step: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Contexts int64 [tokens, CONTEXT], the latest byte first, and what follows them [tokens]; of seed and step alone.

    Examples are drawn from all of the text, and each is met about once.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    at = torch.randint(CONTEXT, len(text()), (tokens,), generator=generator)
    return torch.stack([text()[at - 1 - back] for back in range(CONTEXT)], 1), text()[at]


class Norm(nn.Module):
    """RMSNorm over the last dimension, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[…, WIDTH] → the same, float32."""
        x = x.float()
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Embedding(nn.Embedding):
    """The embeddings of a context side by side: int64 [tokens, CONTEXT] → [tokens, WIDTH]; a table per position."""

    def __init__(self) -> None:
        super().__init__(CONTEXT * BYTES, WIDTH // CONTEXT)

    def forward(self, context: Tensor) -> Tensor:
        """Side by side."""
        return super().forward(context + BYTES * torch.arange(CONTEXT)).flatten(1)


def linear(inputs: int, outputs: int, active: int | None = None) -> nn.Linear:
    """A linear that keeps the variance of its input, of which so many features are active."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=(active or inputs) ** -0.5)
    return made


class Gated(nn.Module):
    """Embedding → norm → SwiGLU → norm → head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = Embedding(), Norm()
        self.gate, self.up, self.down = (linear(WIDTH, WIDTH) for _ in range(3))
        self.final, self.head = Norm(), linear(WIDTH, BYTES)

    def forward(self, context: Tensor) -> Tensor:
        """Contexts → logits [tokens, BYTES]."""
        x = self.norm(self.embed(context))
        return self.head(self.final(self.down(F.silu(self.gate(x)) * self.up(x))))


class Squared(nn.Module):
    """Residual blocks with squared ReLU (Primer, arXiv 2109.08668) and no norm but the last one."""

    blocks = 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding()
        self.up = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(self.blocks))
        self.down = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(self.blocks))
        self.final, self.head = Norm(), linear(WIDTH, BYTES)

    def forward(self, context: Tensor) -> Tensor:
        """Contexts → logits [tokens, BYTES]."""
        x, first = self.embed(context), True
        for up, down in zip(self.up, self.down, strict=True):
            y = down(F.relu(up(x)).square())
            x, first = y if first else x + y, False
        return self.head(self.final(x))


class OneHot(nn.Module):
    """The two latest bytes, one-hot → linear → ReLU → linear → norm → head."""

    context = 2

    def __init__(self) -> None:
        super().__init__()
        self.stem = linear(BYTES * self.context, WIDTH, active=self.context)
        self.mid, self.final, self.head = linear(WIDTH, WIDTH), Norm(), linear(WIDTH, BYTES)

    def forward(self, context: Tensor) -> Tensor:
        """Contexts → logits [tokens, BYTES]."""
        x = F.one_hot(context[:, : self.context], BYTES).flatten(1).float()
        return self.head(self.final(self.mid(F.relu(self.stem(x)))))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model in a state that is hard on FP8, and how it is trained."""

    name: str
    build: Callable[[int, float], nn.Module]
    """Model of a seed and a strength; its docstring says why it breaks, and where that is known from."""
    strength: float = 1.0
    """How hard it is made for FP8, in the unit of the case."""
    others: tuple[float, ...] = ()
    """Other strengths that are measured, to show where it begins."""
    unit: str = ""
    """What the strength is."""
    steps: int = 120
    learning_rate: float = 2e-3
    slow: dict[str, float] | None = None
    """Learning rates of parameters whose names begin so, where they differ."""
    epsilon: float = 1e-8
    """Adam's, far below the gradients."""
    loss_scale: float = 1.0
    """Factor of the loss in backward."""
    weights: Callable[[Tensor, float], Tensor] | None = None
    """Weights in the loss of backward, [tokens], of contexts and strength. The loss that is reported has none."""
    after_step: Callable[[nn.Module, int, int, float], None] | None = None
    """Called with the model, the step just taken (1, 2, …), how many there are, and the strength."""
    first: int = 0
    """Batches that were seen before."""
    breaks: tuple[str, ...] = ()
    """Recipes that end more than 3 % above bf16 on every seed."""
    holds: tuple[str, ...] = ()
    """Recipes that end within 1 % of bf16 on every seed."""

    @property
    def why(self) -> str:
        """The docstring of `build`, as one paragraph."""
        return " ".join((inspect.getdoc(self.build) or "").split())


class Stepper(Protocol):
    """What an arm does around the steps of a model."""

    moved: Sequence[Any]
    """Layers moved in the step just taken."""
    moves: Sequence[Any]
    """All of them."""
    should_repeat: bool
    """Whether the step is to be taken again."""
    rows: Sequence[OperandStats]
    """Statistics of the step just taken, where it was sampled."""
    autocast: bool
    """Whether products that are not in FP8 are in bf16, rather than in fp32."""
    retakes: bool
    """Whether a step that is to be taken again is."""

    def step(self, number: int, *, force: bool) -> AbstractContextManager[None]:
        """Inside: a forward and its backward, sampled if `force`."""


class Unwatched:
    """Nothing around a step."""

    moved, moves, rows, should_repeat = (), (), (), False

    def __init__(self, *, autocast: bool = True, retakes: bool = False) -> None:
        self.autocast, self.retakes = autocast, retakes

    def step(self, number: int, *, force: bool) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


def losses(
    case: Case, model: nn.Module, seed: int, stepper: Stepper | None = None, tokens: int = TOKENS
) -> list[float]:
    """Train a model as a case says: fp32 parameters, bf16 under autocast, AdamW. Losses of the steps, nats per byte.

    Ends where the loss is not finite.
    """
    stepper = stepper or Unwatched()
    optimizer = torch.optim.AdamW(
        _groups(case, model), betas=(0.9, 0.95), weight_decay=0.0, eps=case.epsilon, foreach=False
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    step_losses: list[float] = []
    for step in range(1, case.steps + 1):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, step / WARMUP) * max(LAST_RATE, 1 - (step - 1) / case.steps)
        context, target = batch(seed, case.first + step, tokens)
        while True:
            with stepper.step(step, force=step == case.steps):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=stepper.autocast):
                    logits = model(context)
                loss = F.cross_entropy(logits.float(), target, reduction="none")
                weighted = loss if case.weights is None else loss * case.weights(context, case.strength)
                (weighted.mean() * case.loss_scale).backward()
            if not (stepper.should_repeat and stepper.retakes):
                break
            optimizer.zero_grad()
        step_losses.append(loss.mean().item())
        if not math.isfinite(step_losses[-1]):
            break
        optimizer.step()
        optimizer.zero_grad()
        if case.after_step is not None:
            case.after_step(model, step, case.steps, case.strength)
    return step_losses


def _groups(case: Case, model: nn.Module) -> list[dict[str, Any]]:
    slow = case.slow or {}
    groups: dict[float, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        rate = next((rate for start, rate in slow.items() if name.startswith(start)), case.learning_rate)
        groups.setdefault(rate, []).append(param)
    return [{"params": params, "lr": rate} for rate, params in groups.items()]
