"""The interface of a task: data, model, loss and metrics of a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from octavo.train.checkpoint.kinds import ModelKind
from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.config.sections import hub_folder
from octavo.train.data.epochs import write_data_state
from octavo.train.data.tokenizer import load_tokenizer
from octavo.train.disk import write_file
from octavo.train.layout import Inputs
from octavo.train.model import prepare_loss
from octavo.train.record.loggers import TOKENIZER_FILE
from octavo.train.record.metrics import DataSize
from octavo.train.record.progress import NullProgress, Progress

Forward = Callable[..., Any]  # A model, or what wraps it


class Data(Protocol):
    """The data of a run: batches that are a function of (seed, step)."""

    fingerprint: str
    """Hash of the content."""

    @property
    def files(self) -> Mapping[str, list[int | str]]:
        """Size and digest of each part of the data by name, to name the one that changed before a resume."""

    def batch(self, seed: int, step: int, size: int) -> tuple[Inputs, Tensor]:
        """Inputs and targets of step 0, 1, …: tensors of `size` rows; inputs may be several, by name."""


class HeldOut(Data, Protocol):
    """Held-out data, in rows like those of `Data`, always the same."""

    @property
    def windows(self) -> int:
        """Number of rows."""


class Task(ABC):
    """What a run learns: its data, model, loss and metrics."""

    kind: ClassVar[ModelKind]  # The models that can learn it
    unit: ClassVar[str] = "tokens"  # What the targets are, as "tokens"
    causal: ClassVar[bool] = False  # Whether the model must not see later tokens
    file_unit: ClassVar[str] = "examples"  # What the sizes in `Data.files` count

    def __init__(self, config: TrainConfig, data: object) -> None:
        self.config = config
        self.data: Any = data

    @classmethod
    @abstractmethod
    def load(cls, config: TrainConfig, progress: Progress) -> Data:
        """Read the data. Raises ConfigError for unusable data."""

    @classmethod
    def stand_in(cls, config: TrainConfig) -> Any:
        """Data as far as `build` and `empty_batch` need it, for a plan."""
        return cls.load(config, NullProgress())

    @abstractmethod
    def build(self, *, weights: bool = True) -> Any:
        """Build the model on the CPU, in training mode; `weights`: whether to read those at `model.path`."""
        # Raises ConfigError if it does not fit the data.

    @abstractmethod
    def empty_batch(self, size: int, device: torch.device) -> tuple[Inputs, Tensor]:
        """Inputs and targets of zeros, of `size` rows."""

    @abstractmethod
    def loss(self, forward: Forward, inputs: Inputs, targets: Tensor, **arguments: Tensor) -> Tensor:
        """The loss of a micro-batch: a scalar, the mean over its targets, in fp32."""

    def prepare(self, model: nn.Module, loss: str) -> str:
        """Make a model compute the loss "chunked" or "whole"; returns a note for the user, or ""."""
        # Raises ConfigError for a model that cannot learn the task.
        return ""

    def adapt(self, model: nn.Module) -> None:  # noqa: B027
        """Learn from a model how `loss` and `logits` call it, as `prepare` does; the model stays as it is."""

    def logits(self, forward: Forward, inputs: Inputs, **arguments: Tensor) -> Tensor:
        """The logits of a batch, for the check that a `causal` model is causal."""
        raise NotImplementedError(f"{type(self).__name__} has no causal model")

    def count(self, inputs: Inputs, targets: Tensor) -> int:
        """How many of `unit` a batch has."""
        return targets.numel()

    def positions(self, model: nn.Module) -> int:
        """Positions of the model for each row of a batch, to estimate the costs of its layers."""
        return self.config.data.sequence_length

    def evaluate(self, forward: Forward, device: torch.device) -> dict[str, float]:
        """Metrics on the held-out part of the data by name; {} if it has none. The model is in evaluation mode."""
        return {}

    def data_size(self) -> DataSize | None:
        """The size of the data that is trained on; None where it is not counted."""
        return None

    def data_summary(self) -> str:
        """The size of the data and what the run takes of it, in a line; "" for nothing."""
        return ""

    def data_warning(self) -> str:
        """A note if the run repeats its data; else ""."""
        return ""

    @property
    def uneven(self) -> bool:
        """Whether some targets are `octavo.nn.causal.IGNORE`, so that the trainer weighs micro-batches and ranks."""
        return False

    @property
    def held_out(self) -> HeldOut | None:
        """Data on which the run measures its loss, or None."""
        return None

    def data_state(self) -> dict[str, Any]:
        """What a checkpoint records of the data."""
        return {"files": dict(self.data.files)}

    def save(self, folder: Path) -> None:
        """Write what a checkpoint needs besides the model: the state of the data, and more, as a tokenizer."""
        write_data_state(folder, self.data_state())

    def load_state(self, folder: Path) -> str:
        """Read what `save` wrote into a checkpoint, as far as `build` does not; returns a note for the user, or ""."""
        return ""

    def describe(self, out: Path) -> None:  # noqa: B027
        """Write what describes the data into the output folder of a run."""


class TextTask(Task):
    """What tasks with a tokenizer share."""

    @classmethod
    def stand_in(cls, config: TrainConfig) -> Any:
        """The vocabulary, which may still have to be trained."""
        tokenizer: object = SimpleNamespace(size=config.data.vocab_size, end_id=0)  # as if it were trained
        if config.data.tokenizer is not None:
            tokenizer = load_tokenizer(hub_folder(config.data.tokenizer))
        elif config.model.path is not None:
            with suppress(ConfigError):  # a run needs it, but a plan of a config.json alone does not
                tokenizer = load_tokenizer(hub_folder(config.model.path))
        return SimpleNamespace(tokenizer=tokenizer)

    def prepare(self, model: nn.Module, loss: str) -> str:
        return prepare_loss(model, loss)

    def data_state(self) -> dict[str, Any]:
        return super().data_state() | {"tokenizer": self.data.tokenizer.fingerprint}

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.data.tokenizer.save(folder)

    def describe(self, out: Path) -> None:
        write_file(out / TOKENIZER_FILE, self.data.tokenizer.backend.to_str(pretty=True))
