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

import numpy as np
import torch

from octavo.nn.causal_head import IGNORE
from octavo.numerics.names import counted_noun
from octavo.train.config.data_section import Data
from octavo.train.data.epochs import EpochOrder
from octavo.train.data.packing import PackedRows
from octavo.train.data.sequences import NoSequencesError, Sequences
from octavo.train.data.token_cache import TokenizedText


class Corpus(Sequences):
    """Tokenized documents of one source, cut into windows."""

    def __init__(
        self, text: TokenizedText, data: Data, *, shuffle: bool,
        chosen: np.ndarray | None = None, fingerprint: str | None = None, which: str = "",
    ) -> None:  # fmt: skip
        length = data.sequence_length
        self.tokenizer, self.files, self.skipped = text.tokenizer, text.files, text.skipped
        self.fingerprint = fingerprint or text.fingerprint
        # folder: The entry of the cache.
        # hashes: A hash of the text of each document of the source: uint64.
        self.hashes, self.folder = text.hashes, text.folder
        self.documents = len(text.ends) if chosen is None else int(chosen.sum())  # Number of documents
        self._ids, self._counts, self._length = text.ids, text.targets, length
        self._share = text.target_count / len(text.ids)
        self._first, self._offsets = _runs(text.ends, chosen)
        self.tokens = int(self._offsets[-1])  # Number of their ids, end tokens included
        self._packed = None if data.packing == "stream" else _pack(text, chosen, data)
        # Number of documents that are longer than a packed row.
        self.cut = 0 if self._packed is None else self._packed.cut
        count = (self.tokens - 1) // length if self._packed is None else len(self._packed)
        # Windows of conversations without a target are left out.
        masked = self._packed is None and self._counts is not None
        self._numbers = np.array([row for row in range(count) if self._learned(row)], np.int64) if masked else None
        self._windows = count if self._numbers is None else len(self._numbers)
        if self._windows < 1:
            raise NoSequencesError(
                f"data.sequence_length = {length} is longer than the data{which}: it has {self.tokens} tokens in "
                f"{self.documents} documents, of which a sequence needs one more than its length"
            )
        self._order = EpochOrder(self._windows, shuffle=shuffle)

    @property
    def windows(self) -> int:
        """Number of windows, or of packed rows."""
        return self._windows

    def row(self, seed: int, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Window k mod n of epoch k div n, permuted."""
        row = self._order.rows(seed, sample, 1)[0]
        if self._packed is not None:
            return self._packed.row(row)
        start = (row if self._numbers is None else int(self._numbers[row])) * self._length
        ids = torch.from_numpy(self._read(start, start + self._length + 1).astype(np.int64))
        targets = ids[1:].clone()
        if self._counts is not None:
            counts = self._read(start + 1, start + self._length + 1, self._counts)
            targets[torch.from_numpy(counts == 0)] = IGNORE
        return ids[:-1].clone(), targets

    def size(self) -> str:
        """Documents, tokens and sequences, in words."""
        targets = "" if self._counts is None else f" ({100 * self._share:.3g} % targets)"
        counts = (counted_noun(self.documents, "document"), f"{counted_noun(self.tokens, 'token')}{targets}")
        return ", ".join((*counts, counted_noun(self.windows, "sequence")))

    def _learned(self, row: int) -> bool:
        return bool(self._read(row * self._length + 1, (row + 1) * self._length + 1, self._counts).any())

    def _read(self, start: int, stop: int, values: np.ndarray | None = None) -> np.ndarray:
        """Ids start … stop of the chosen documents, one after the other, or other values of these ids."""
        values = self._ids if values is None else values
        run = int(np.searchsorted(self._offsets, start, "right")) - 1
        parts = []
        while start < stop:
            end = min(stop, int(self._offsets[run + 1]))
            shift = int(self._first[run] - self._offsets[run])
            parts.append(values[start + shift : end + shift])
            start, run = end, run + 1
        return np.concatenate(parts)


def _pack(text: TokenizedText, chosen: np.ndarray | None, data: Data) -> PackedRows:
    first = np.concatenate([[0], text.ends[:-1]])
    which = slice(None) if chosen is None else chosen
    return PackedRows(
        text.ids, first[which], text.ends[which], data.sequence_length, text.tokenizer.end_id,
        counts=text.targets, packed=data.packing == "documents",
    )  # fmt: skip


def _runs(ends: np.ndarray, chosen: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Runs of neighbouring chosen documents: the first id of each, and how many ids come before it and in all."""
    # int64 [runs] and [runs + 1]. Nothing of the length of `ends` stays in memory.
    if chosen is None:
        return np.zeros(1, np.int64), np.array([0, ends[-1]], np.int64)
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    first = np.concatenate([[0], ends])[edges[::2]]
    lengths = ends[edges[1::2] - 1] - first
    return first, np.concatenate([[0], np.cumsum(lengths)])
