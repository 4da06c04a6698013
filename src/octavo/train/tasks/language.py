"""Language: the next token of text, with any causal language model of Transformers."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.planner.fake import unpacked_sequences
from octavo.train.checkpoint.kinds import LANGUAGE
from octavo.train.config.run_config import TrainConfig
from octavo.train.data.corpus import Sequences
from octavo.train.data.epochs import read_data_state
from octavo.train.data.load import load_corpus
from octavo.train.model import build_model
from octavo.train.packed_attention import document_offsets, documents, is_varlen
from octavo.train.record.metrics import DataSize
from octavo.train.record.progress import Progress
from octavo.train.tasks.task import Forward, TextTask


class Language(TextTask):
    """Predict the next token; the data are `Sequences`. The loss is the model's own, with router and z-losses."""

    kind = LANGUAGE
    causal = True
    file_unit = "bytes"

    def __init__(self, config: TrainConfig, data: object) -> None:
        super().__init__(config, data)
        self._arguments: dict[str, Any] = {}
        self._varlen = False

    @classmethod
    def load(cls, config: TrainConfig, progress: Progress) -> Sequences:
        return load_corpus(config.data, config.model, progress, config.eval)

    @property
    def held_out(self) -> Sequences | None:
        return getattr(self.data, "held_out", None)

    def build(self, *, weights: bool = True) -> Any:
        return build_model(self.config, self.data.tokenizer, weights=weights)

    def empty_batch(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        shape = size, self.config.data.sequence_length
        ids, targets = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        if self.config.data.packing != "stream":
            return torch.stack([ids, torch.arange(shape[1], device=device).expand(shape)], -1), targets
        return ids, targets

    def data_size(self) -> DataSize:
        return DataSize(rows=self.data.windows, documents=self.data.documents, tokens=self.data.tokens)

    def data_summary(self) -> str:
        held_out = f"; held out: {self.held_out.size()}" if self.held_out is not None else ""
        return f"data: {self.data.summary(self._samples)}{held_out}"

    def data_warning(self) -> str:
        repeats = self.data.repeats(self._samples, self.config.optim.batch)
        return f"the data repeats: {repeats}; compare the loss with that on held-out text ([eval])" if repeats else ""

    @property
    def _samples(self) -> int:
        return self.config.run.steps * self.config.optim.batch

    @property
    def uneven(self) -> bool:
        return self.config.data.masks_targets

    def prepare(self, model: nn.Module, loss: str) -> str:
        note = super().prepare(model, loss)
        self.adapt(model)
        return note

    def adapt(self, model: nn.Module) -> None:
        """Learn whether it has a cache to leave out, and variable-length attention."""
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._arguments = {"use_cache": False} if takes_cache else {}
        self._varlen = is_varlen(model)

    def loss(self, forward: Forward, inputs: Tensor, targets: Tensor, **arguments: Tensor) -> Tensor:
        packed = inputs.dim() == 3 or bool(arguments)
        arguments = self._arguments | arguments
        with self._documents(inputs) if packed else unpacked_sequences():
            loss: Tensor = forward(**_named(inputs), labels=targets, shift_labels=targets, **arguments).loss
        return loss

    def logits(self, forward: Forward, inputs: Tensor, **arguments: Tensor) -> Tensor:
        with self._documents(inputs):
            logits: Tensor = forward(**_named(inputs), **(self._arguments | arguments)).logits
        return logits

    def _documents(self, inputs: Tensor) -> AbstractContextManager[None]:
        """Around a forward: where documents start, for variable-length attention."""
        if not self._varlen or inputs.dim() == 2:
            return nullcontext()
        rows, parts = inputs.shape[0], (self.data, self.held_out)
        most = max(getattr(part, "most_documents", {}).get(rows, rows) for part in parts)
        return documents(document_offsets(inputs[..., 1], most))

    def count(self, inputs: Tensor, targets: Tensor) -> int:
        """The tokens of the inputs: a rank may have the labels of some of them."""
        return inputs.shape[0] * inputs.shape[1]

    def data_state(self) -> dict[str, Any]:
        """Also what sources keep, the weights of a mixture, and the text to evaluate on."""
        state: dict[str, Any] = super().data_state() | self.data.state()
        if weights := [part.weight for part in self.config.data.sources]:
            state["weights"] = weights
        return state | ({"held_out": self.held_out.fingerprint} if self.held_out is not None else {})

    def load_state(self, folder: Path) -> str:
        state = read_data_state(folder)
        self.data.load_state(state)
        if self.held_out is None or state.get("held_out") in (None, self.held_out.fingerprint):
            return ""
        return "the text to evaluate on has changed since: held-out losses before and after this resume do not compare"


def _named(inputs: Tensor) -> dict[str, Tensor]:
    """The arguments of a model for ids [B,S], or for ids and positions [B,S,2]."""
    if inputs.dim() == 2:
        return {"input_ids": inputs}
    ids, positions = inputs.unbind(-1)
    return {"input_ids": ids.contiguous(), "position_ids": positions.contiguous()}
