"""Text to batches: the windows of each step, and the part of the documents that is held out.

The tokenized documents (`token_cache.py`), each followed by the end-of-document token, form one stream of ids. Window i
is the `sequence_length + 1` ids from i · sequence_length. Inputs are all but its last id, targets all but its first.
Every id except the first is a target once; a rest shorter than a window is not used. Attention crosses document
borders inside a window, as usual in pretraining; not with `data.packing = "documents"` (`packing.py`).

The batch of a step is a function of (seed, step): sample k of the run is window k mod n of epoch k div n, and a
counter-based generator keyed on (seed, epoch) permutes the windows of an epoch. So the loader has no state to save, and
a resumed run reads the same batches as an uninterrupted one.

With `[eval]` and no source of its own, the documents with the smallest hashes of their text are held out, in a stream
of their own. The choice depends on nothing but the texts, so it is the same for all seeds, and identical documents are
on the same side.
"""

import hashlib
from functools import lru_cache

import numpy as np
import torch

from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Data, EvalConfig, Model, expand
from octavo.train.data.packing import PackedRows
from octavo.train.data.token_cache import ReadProgress, TokenizedText, open_tokens
from octavo.train.data.tokenizer import load_tokenizer
from octavo.train.record.metrics import Progress


class Corpus:
    """Tokenized text, cut into windows.

    Args:
        text: The documents.
        data: How to cut them into windows.
        shuffle: Whether to permute the windows anew in each epoch.
        chosen: Which documents: bool [documents]; None for all of them.
        fingerprint: Hash of content, tokenizer and choice; None for that of `text`.

    Attributes:
        tokenizer: The tokenizer of the ids.
        fingerprint: Hash of the content, the tokenizer, and what is held out of it.
        skipped: Number of files left out because they are not UTF-8.
        documents: Number of documents.
        tokens: Number of their ids, end tokens included.
        windows: Number of windows, or of packed rows.
        held_out: What the run is evaluated on, if anything.

    Raises:
        ConfigError: If there is no window.
    """

    def __init__(
        self, text: TokenizedText, data: Data, *, shuffle: bool,
        chosen: np.ndarray | None = None, fingerprint: str | None = None, which: str = "",
    ) -> None:  # fmt: skip
        length = data.sequence_length
        self.tokenizer = text.tokenizer
        self.fingerprint = fingerprint or text.fingerprint
        self.skipped = text.skipped
        self.held_out: Corpus | None = None
        self.documents = len(text.ends) if chosen is None else int(chosen.sum())
        self._ids, self._length, self._shuffle = text.ids, length, shuffle
        self._first, self._offsets = _runs(text.ends, chosen)
        self.tokens = int(self._offsets[-1])
        self._packed = None if data.packing == "stream" else _pack(text, chosen, length)
        self.windows = (self.tokens - 1) // length if self._packed is None else len(self._packed)
        if self.windows < 1:
            raise ConfigError(
                f"data.sequence_length = {length} is longer than the data{which}: it has {self.tokens} tokens in "
                f"{self.documents} documents, of which a sequence needs one more than its length"
            )
        self._order = lru_cache(maxsize=2)(self._permutation)

    def batch(self, seed: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of step 0, 1, …: two int64 tensors of shape (size, sequence_length).

        Packed inputs have the shape (size, sequence_length, 2): ids and positions; targets of -100 do not count.
        """
        rows, packed = [], []
        for sample in range(step * size, (step + 1) * size):
            epoch, position = divmod(sample, self.windows)
            row = int(self._order(seed, epoch)[position])
            if self._packed is not None:
                packed.append(self._packed.row(row))
                continue
            start = row * self._length
            rows.append(self._read(start, start + self._length + 1))
        if packed:
            inputs, targets = zip(*packed, strict=True)
            return torch.stack(inputs), torch.stack(targets)
        ids = torch.from_numpy(np.stack(rows))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def size(self) -> str:
        """Documents, tokens and sequences, in words."""
        return f"{self.documents:,} documents, {self.tokens:,} tokens, {self.windows:,} sequences"

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Ids start … stop of the chosen documents, one after the other: int64."""
        run = int(np.searchsorted(self._offsets, start, "right")) - 1
        parts = []
        while start < stop:
            end = min(stop, int(self._offsets[run + 1]))
            shift = int(self._first[run] - self._offsets[run])
            parts.append(self._ids[start + shift : end + shift])
            start, run = end, run + 1
        return np.concatenate(parts).astype(np.int64)

    def _permutation(self, seed: int, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.windows)
        return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(self.windows)


def load_corpus(data: Data, model: Model, progress: Progress, evaluation: EvalConfig | None = None) -> Corpus:
    """Tokenize the data of a run, or open it in the cache; `evaluation`: what to hold out, or to evaluate on.

    The tokenizer is that of `data.tokenizer`, else of the checkpoint at `model.path`, else trained on the data.

    Raises ConfigError for unusable data.
    """
    meter = ReadProgress(progress)
    folder = data.tokenizer or model.path
    text = open_tokens(data, meter, progress, None if folder is None else load_tokenizer(expand(folder)))
    if evaluation is None:
        return Corpus(text, data, shuffle=data.shuffle)
    if evaluation.has_own_data:
        changes = {"source": evaluation.source or data.source, "split": evaluation.split or "train"}
        other = open_tokens(data.model_copy(update=changes), meter, progress, text.tokenizer)
        corpus = Corpus(text, data, shuffle=data.shuffle)
        corpus.held_out = Corpus(other, data, shuffle=True, which=f" to evaluate on, {changes['source']}")
        if shared := int(np.isin(other.hashes, text.hashes).sum()):
            progress.note(
                f"{shared} of the {len(other.ends)} documents to evaluate on are also trained on: the held-out loss is "
                "lower for it"
            )
        return corpus
    held_out, fraction = _held_out(text, evaluation), evaluation.share
    identity = hashlib.sha256(f"{text.fingerprint}\0held out {fraction!r}".encode()).hexdigest()
    corpus = Corpus(
        text, data, shuffle=data.shuffle, chosen=~held_out, fingerprint=identity, which=" without what is held out"
    )
    corpus.held_out = Corpus(
        text, data, shuffle=True, chosen=held_out, fingerprint=identity,
        which=f" that is held out (eval.fraction = {fraction:g})",
    )  # fmt: skip
    return corpus


def _held_out(text: TokenizedText, evaluation: EvalConfig) -> np.ndarray:
    """Which documents are held out: bool [documents]. Raises ConfigError if none would be left."""
    count = max(1, round(evaluation.share * len(text.hashes)))
    mask: np.ndarray = text.hashes <= np.partition(text.hashes, count - 1)[count - 1]
    if mask.all():
        raise ConfigError(
            f"eval.fraction = {evaluation.share:g} holds out all {len(mask)} documents, of which "
            f"{len(np.unique(text.hashes))} are different: lower it, or give other data as eval.source"
        )
    return mask


def _pack(text: TokenizedText, chosen: np.ndarray | None, length: int) -> PackedRows:
    first = np.concatenate([[0], text.ends[:-1]])
    which = slice(None) if chosen is None else chosen
    return PackedRows(text.ids, first[which], text.ends[which], length, text.tokenizer.end_id)


def _runs(ends: np.ndarray, chosen: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Runs of neighbouring chosen documents: the first id of each, and how many ids come before it and in all.

    int64 [runs] and [runs + 1]. Nothing of the length of `ends` stays in memory.
    """
    if chosen is None:
        return np.zeros(1, np.int64), np.array([0, ends[-1]], np.int64)
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    first = np.concatenate([[0], ends])[edges[::2]]
    lengths = ends[edges[1::2] - 1] - first
    return first, np.concatenate([[0], np.cumsum(lengths)])
