"""Progress: what a run tells while it goes on."""

from typing import Protocol

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

    def stage(self, *_: object) -> None: ...

    start = step = note = finish = stage
