"""Progress: what a run tells while it goes on."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from octavo.train.config.run_config import TrainConfig
from octavo.train.record.metrics import RunResult, RunSetup, StepMetrics


class Progress(Protocol):
    """Receives the progress of a run; the CLI draws a progress bar with it."""

    def stage(self, text: str) -> None:
        """A preparation has begun, as "training the tokenizer"."""

    def start(self, config: TrainConfig, first_step: int, setup: RunSetup) -> None:
        """Training begins; `first_step` steps were finished before (0 unless resumed)."""

    def step(self, row: StepMetrics) -> None:
        """A step has finished (or was skipped)."""

    def note(self, text: str) -> None:
        """A message for the user, as for a skipped step."""

    def finish(self, result: RunResult) -> None:
        """The run has ended and `run.json` is written."""


class NullProgress:
    """A `Progress` that shows nothing."""

    def stage(self, *_: Any) -> None:
        """Nothing."""

    start = step = note = finish = stage


class DeferredErrors(NullProgress):
    """A `Progress` that holds back the first error of another one, until all ranks can raise it."""

    def __init__(self, progress: Progress) -> None:
        self.error: Exception | None = None  # The first error
        for name in ("stage", "start", "step", "note", "finish"):
            setattr(self, name, partial(self._call, getattr(progress, name)))

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception as error:  # of any kind: it is the user's code
            self.error = self.error or error


def raise_deferred(progress: Progress) -> None:
    """Raise the error that a `DeferredErrors` holds back, if any; nothing for another `Progress`."""
    if isinstance(progress, DeferredErrors) and progress.error is not None:
        raise progress.error
