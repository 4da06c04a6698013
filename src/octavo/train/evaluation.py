"""Evaluation on held-out data, as trained and, where layers compute in FP8, in high precision: what FP8 costs.

It leaves no trace: evaluation mode without gradients keeps amax histories and channel scales, statistics look at steps
only, each step seeds its own random numbers, and FSDP's parameters are sharded again.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from octavo.nn.causal import IGNORE, evaluating
from octavo.parallel.pipeline_model import Pipeline
from octavo.runtime.switch import disabled
from octavo.runtime.torch_compat import tree_map
from octavo.train.layout import RankLayout, counted
from octavo.train.ranks import Ranks
from octavo.train.record.metrics import LOSS, LOSS_HIGH_PRECISION, finite
from octavo.train.tasks.task import HeldOut, Task

ROWS_SEED = 0  # Seed of the order of held-out rows: the same ones in every run


class Patience:
    """Counts measurements since the lowest held-out loss; a resume counts those of `metrics.jsonl` again."""

    def __init__(self, patience: int, losses: Iterable[float | None] = ()) -> None:
        self.patience, self.best, self.since = patience, math.inf, 0
        for loss in losses:
            self.note(loss)

    @property
    def over(self) -> bool:
        return 0 < self.patience <= self.since

    def note(self, loss: float | None) -> None:
        is_best = loss is not None and loss < self.best
        self.best, self.since = (loss, 0) if loss is not None and is_best else (self.best, self.since + 1)

    def __str__(self) -> str:
        lowest = f"below {self.best:.4f}" if self.best < math.inf else "finite"
        return f"the held-out loss has not been {lowest} in {self.since} measurements (eval.patience)"


def evaluate(
    task: Task, model: nn.Module, layout: RankLayout, ranks: Ranks, loss: Callable[[Tensor, Tensor], Tensor],
    *, fp8: bool,
    between: Callable[..., None] = lambda *_: None,
) -> dict[str, float | None]:  # fmt: skip
    """The metrics on held-out data by name, on every rank; {} if there is none. None for one that is not finite."""
    metrics: dict[str, float | None] = {}

    def forward(*arguments: object, **named: object) -> Any:
        between()
        return layout.forward(*arguments, **named)

    with without_trace(model, layout.pipeline):
        metrics |= {name: finite(value) for name, value in task.evaluate(forward, ranks.device).items()}
        if (data := task.held_out) is not None:
            pipeline = layout.pipeline
            mean_loss = partial(_mean_loss, task, data, layout, ranks, pipeline.losses if pipeline else loss)
            metrics[LOSS] = finite(mean_loss(partial(between, "evaluating")))
            if fp8:
                with disabled():
                    metrics[LOSS_HIGH_PRECISION] = finite(mean_loss(partial(between, "evaluating in high precision")))
    return metrics


@contextmanager
def without_trace(model: nn.Module, pipeline: Pipeline | None = None) -> Iterator[None]:
    """Run forwards of a model, or of its stages, in this context that leave no trace in its training."""
    try:
        with evaluating(model), torch.no_grad():
            yield
    finally:
        for module in chain(model.modules(), pipeline.parts.values() if pipeline is not None else ()):
            if isinstance(module, FSDPModule):
                module.reshard()


def _mean_loss(
    task: Task, data: HeldOut, layout: RankLayout, ranks: Ranks, loss: Callable[[Tensor, Tensor], Tensor | None],
    between: Callable[[int, int], None],
) -> float:  # fmt: skip
    config = task.config
    assert config.eval is not None
    rows = min(data.windows, config.eval.batches * config.optim.batch)
    parts = config.optim.micro_batches if layout.pipeline is not None else 1  # which go through it together
    size = config.optim.batch // config.optim.micro_batches * parts
    total, count = (torch.zeros((), dtype=torch.float64, device=ranks.device) for _ in range(2))
    for number in range(batches := -(-rows // size)):
        between(number, batches)
        inputs, targets = data.batch(ROWS_SEED, number, size)
        targets[rows - number * size :] = IGNORE  # all ranks run as many forwards
        inputs = layout.own_tokens(tree_map(lambda part: layout.own_rows(part).to(ranks.device), inputs))
        targets = layout.own_labels(layout.own_rows(targets)).to(ranks.device)
        sizes, chunks = zip(*(counted(part, uneven=True) for part in targets.chunk(parts)), strict=True)
        if (losses := loss(inputs, torch.cat(chunks))) is None:
            continue  # the head is on other ranks
        weights = torch.tensor(sizes, dtype=torch.float64, device=ranks.device)
        total += (losses.double().view(-1) * weights).sum()
        count += weights.sum()
    total, count = ranks.all_reduce(total, count)
    return (total / count).item()
