"""What integrations report to the loggers of their tool: findings of a `Watch`, and moves of an `Autopilot`."""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from octavo.inspect import Autopilot, Watch
from octavo.inspect.autopilot import FALLBACK_RECIPES
from octavo.numerics.recipe import get_recipe

DEFAULT_EVERY = 50  # Steps between the samples of an autopilot, if none is given


def fallback_recipes() -> tuple[str, ...]:
    """Return the names of recipes to which an autopilot may move layers: on several ranks, none with channel scales."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return tuple(name for name in FALLBACK_RECIPES if ranks == 1 or not get_recipe(name).equalization)


class Monitor:
    """Samples the layers of a model in a tool's training loop."""

    def __init__(self, model: nn.Module, every: int, autopilot: bool, verbose: bool) -> None:
        every = every or DEFAULT_EVERY
        self.autopilot = Autopilot(model, every=every, fallback_recipes=fallback_recipes()) if autopilot else None
        self.watch = Watch(model, every=every) if self.autopilot is None else self.autopilot.watch
        self._verbose = verbose
        self._open: ExitStack | None = None

    @property
    def number(self) -> int:
        """Number of the last step, 1, 2, …"""
        return self.watch.number

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[dict[str, float]]:
        """Run a step, or its first micro-batch, inside; afterwards the yielded dictionary has its metrics."""
        metrics: dict[str, float] = {}
        number = self.number + 1 if number is None else number
        with self.watch.step(number) if self.autopilot is None else self.autopilot.step(number):
            yield metrics
        if self.watch.rows:
            metrics["octavo/findings"] = len(self.watch.findings())
            sqnrs = [row.sqnr for row in self.watch.rows if not math.isnan(row.sqnr)]
            metrics["octavo/lowest_sqnr_db"] = min(sqnrs, default=math.nan)
        if self.autopilot is not None:
            metrics["octavo/moved_layers"] = len({change.layer for change in self.autopilot.changes})
            for change in self.autopilot.last_changes if self._verbose else ():
                print(f"octavo: {change}", file=sys.stderr)

    def begin(self) -> None:
        """Begin a step, unless one is running: for loops that are not Octavo's to wrap."""
        if self._open is None:
            stack = ExitStack()
            self._metrics = stack.enter_context(self.step())
            self._open = stack

    def end(self) -> dict[str, float]:
        """End the step that `begin` began, and return its metrics if it was sampled."""
        if self._open is None:
            return {}
        self._open.close()
        self._open = None
        return self._metrics if self.watch.rows else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last step and the state of the autopilot."""
        return {"step": self.number, "autopilot": None if self.autopilot is None else self.autopilot.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, here with an autopilot or without."""
        self.watch.number = state.get("step", self.number)
        if self.autopilot is not None and state.get("autopilot") is not None:
            self.autopilot.load_state_dict(state["autopilot"])


def monitor_of(model: nn.Module, every: int, autopilot: bool, verbose: bool) -> Monitor | None:
    """Return a `Monitor`, or None if neither samples nor an autopilot are asked for."""
    if every < 0:
        raise ValueError(f"inspect_every is a number of steps, or 0 for none; got {every}")
    return Monitor(model, every, autopilot, verbose) if every or autopilot else None
