"""Sequences of tokens: what a run takes its batches from, one source or several."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.train.config.run_config import ConfigError
from octavo.train.data.tokenizer import TextTokenizer

STATE = ("files", "chunks")
"""The keys of `Sequences.state`: each a table, which sources have entries of their own in."""


class NoSequencesError(ConfigError):
    """Data without a sequence."""


class NoFieldError(NoSequencesError):
    """Rows of which none has the field to read."""


class Sequences(ABC):
    """Sequences to train or to evaluate on. The sequence of a sample is a function of (seed, number of the sample)."""

    tokenizer: TextTokenizer  # The tokenizer of the ids
    fingerprint: str  # Hash of the content, the tokenizer, and what is held out of it
    # Size and digest of the files of the data by name, to name the one that changed before a resume.
    files: Mapping[str, list[Any]]
    skipped: int = 0  # Number of files left out because they are not UTF-8
    held_out: "Sequences | None" = None  # What the run is evaluated on, if anything
    documents: int | None = None  # Number of documents; None if it is not known before the run
    tokens: int | None = None  # Number of their tokens, likewise

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of step 0, 1, …: two int64 tensors of shape (size, sequence_length)."""
        # Packed inputs have the shape (size, sequence_length, 2): ids and positions; targets of -100 do not count.
        rows = [self.row(seed, sample) for sample in range(step * size, (step + 1) * size)]
        inputs, targets = zip(*rows, strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the files, and what a resume would have to find out again."""
        return {"files": dict(self.files)}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take over `state`. Raises ConfigError if it is not of this data."""

    @property
    @abstractmethod
    def windows(self) -> int:
        """Number of sequences."""

    @abstractmethod
    def row(self, seed: int, sample: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of sample 0, 1, … of a run."""

    @abstractmethod
    def size(self) -> str:
        """Documents, tokens and sequences, in words."""

    def summary(self, samples: int) -> str:
        """The size, and what a run of `samples` sequences takes of it, in words."""
        return f"{self.size()}, of which the run takes {samples / self.windows:.3g} epochs"

    def repeats(self, samples: int, batch: int) -> str:
        """How a run of `samples` sequences repeats the data; "" if it does not."""
        if (epochs := samples / self.windows) <= 1:
            return ""
        steps = f"{self.windows // batch:,}" if self.windows >= batch else f"{self.windows / batch:.2g}"
        return f"{samples // batch:,} steps take {epochs:.3g} epochs of {steps} steps"
