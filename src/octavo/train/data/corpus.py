"""Text to batches: the sequences of each step.

The tokenized documents (`token_cache.py`), each followed by the end-of-document token, form one stream of ids. Window i
is the `sequence_length + 1` ids from i · sequence_length; inputs are all but its last id, targets all but its first. A
rest shorter than a window is not used. With `data.packing = "documents"` whole documents are packed into sequences:

    row          a b c … | x y … | (rest)
    position     0 1 2 …   0 1 …   0 1 …       restarts with each document; Transformers masks attention by it
    target       b c … .   y … .   ignored

A longer document is cut into pieces, each with the last id of the piece before it as its first input. Pieces are packed
by best fit, longest first (arXiv 2404.10830). Of conversations a piece without any target is left out.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.nn.causal import IGNORE
from octavo.numerics.suggestions import counted_noun
from octavo.train.config.sections import Data
from octavo.train.data.documents import NoSequencesError
from octavo.train.data.epochs import EpochOrder
from octavo.train.data.token_cache import TokenizedText
from octavo.train.data.tokenizer import TextTokenizer

STATE = ("files", "chunks")  # The keys of `Sequences.state`: each a table, which sources have entries of their own in


class Sequences(ABC):
    """Sequences to train or to evaluate on. The sequence of a sample is a function of (seed, number of the sample)."""

    tokenizer: TextTokenizer  # The tokenizer of the ids
    fingerprint: str  # Hash of the content, the tokenizer, and what is held out of it
    # Size and digest of the files of the data by name, to name the one that changed before a resume.
    files: Mapping[str, list[int | str]]
    held_out: "Sequences | None" = None  # What the run is evaluated on, if anything
    documents: int | None = None  # Number of documents; None if it is not known before the run
    tokens: int | None = None  # Number of their tokens, likewise

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of step 0, 1, …: two int64 tensors of shape (size, sequence_length)."""
        # Packed inputs have the shape (size, sequence_length, 2): ids and positions; targets of -100 do not count.
        rows = [self.row(seed, sample) for sample in range(step * size, (step + 1) * size)]
        inputs, targets = (torch.stack(parts) for parts in zip(*rows, strict=True))
        if inputs.dim() == 3:
            counts = (inputs[..., 1] == 0).sum(1).sort(descending=True).values.cumsum(0)
            for number, count in enumerate(counts.tolist(), 1):
                self.most_documents[number] = max(self.most_documents[number], count)
        return inputs, targets

    @cached_property
    def most_documents(self) -> Counter[int]:
        """The most documents in 1, 2, … packed rows of a batch so far: a bound that needs nothing of the device."""
        return Counter()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the files, and what a resume would have to find out again."""
        return {"files": dict(self.files)}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
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


class Corpus(Sequences):
    def __init__(
        self, text: TokenizedText, data: Data, *, shuffle: bool,
        chosen: np.ndarray | None = None, fingerprint: str | None = None, which: str = "",
    ) -> None:  # fmt: skip
        length = data.sequence_length
        self.tokenizer, self.files, self.fingerprint = text.tokenizer, text.files, fingerprint or text.fingerprint
        # hashes: Of the text of each document of the source: uint64. folder: The entry of the cache.
        self.hashes, self.folder = text.hashes, text.folder
        self.documents = len(text.ends) if chosen is None else int(chosen.sum())  # Number of documents
        self._ids, self._counts, self._length = text.ids, text.targets, length
        self._share = text.target_count / len(text.ids)
        self._first, self._offsets = _runs(text.ends, chosen)
        self.tokens = int(self._offsets[-1])  # Number of their ids, end tokens included
        self.cut = 0  # Number of documents that are longer than a packed row
        self._packed = None
        self._numbers: Sequence[int] | np.ndarray = range((self.tokens - 1) // length)  # Windows to take
        if data.packing != "stream":
            first, own = np.concatenate([[0], text.ends[:-1]]), slice(None) if chosen is None else chosen
            self._packed = PackedRows(
                text.ids, first[own], text.ends[own], length, text.tokenizer.end_id, counts=text.targets,
                packed=data.packing == "documents",
            )  # fmt: skip
            self.cut, self._numbers = self._packed.cut, range(len(self._packed))
        elif (counts := text.targets) is not None:  # of conversations only those with a target
            bounds = ((row * length + 1, (row + 1) * length + 1) for row in self._numbers)
            learned = (self._read(start, stop, counts).any() for start, stop in bounds)
            self._numbers = np.flatnonzero(np.fromiter(learned, bool))
        if not len(self._numbers):
            size = f"{self.tokens} tokens in {self.documents} documents"
            problem = f"data.sequence_length = {length} is longer than the data{which}: it has {size}"
            raise NoSequencesError(f"{problem}, of which a sequence needs one more than its length")
        self._order = EpochOrder(len(self._numbers), shuffle=shuffle)

    @property
    def windows(self) -> int:
        return len(self._numbers)

    def row(self, seed: int, sample: int) -> tuple[Tensor, Tensor]:
        row = int(self._numbers[self._order.rows(seed, sample, 1)[0]])
        if self._packed is not None:
            return self._packed.row(row)
        start = row * self._length
        ids = torch.from_numpy(self._read(start, start + self._length + 1, self._ids).astype(np.int64))
        targets = ids[1:].clone()
        if self._counts is not None:
            counts = self._read(start + 1, start + self._length + 1, self._counts)
            targets[torch.from_numpy(counts == 0)] = IGNORE
        return ids[:-1].clone(), targets

    def size(self) -> str:
        targets = "" if self._counts is None else f" ({100 * self._share:.3g} % targets)"
        counts = (counted_noun(self.documents, "document"), f"{counted_noun(self.tokens, 'token')}{targets}")
        return ", ".join((*counts, counted_noun(self.windows, "sequence")))

    def _read(self, start: int, stop: int, values: np.ndarray) -> np.ndarray:
        run = int(np.searchsorted(self._offsets, start, "right")) - 1
        parts = []
        while start < stop:
            end = min(stop, int(self._offsets[run + 1]))
            shift = int(self._first[run] - self._offsets[run])
            parts.append(values[start + shift : end + shift])
            start, run = end, run + 1
        return np.concatenate(parts)


def _runs(ends: np.ndarray, chosen: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Runs of neighbouring chosen documents: the first id of each, and how many ids come before it and in all."""
    # int64 [runs] and [runs + 1]. Nothing of the length of `ends` stays in memory.
    if chosen is None:
        return np.zeros(1, np.int64), np.array([0, ends[-1]], np.int64)
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    first = np.concatenate([[0], ends])[edges[::2]]
    lengths = ends[edges[1::2] - 1] - first
    return first, np.concatenate([[0], np.cumsum(lengths)])


class PackedRows:
    def __init__(
        self, ids: np.ndarray, first: np.ndarray, ends: np.ndarray, length: int, fill: int,
        *, counts: np.ndarray | None = None, packed: bool = True,
    ) -> None:  # fmt: skip
        self._ids, self._length, self._fill, self._counts = ids, length, fill, counts
        targets = ends - first - 1
        pieces = -(-targets // length)
        self.cut = int((pieces > 1).sum())  # Number of documents that are longer than a row
        document = np.repeat(np.arange(len(first)), pieces)
        number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = first[document] + number * length
        sizes = np.minimum(targets[document] - number * length, length)
        if counts is not None:
            rows = zip(starts.tolist(), sizes.tolist(), strict=True)
            learned = np.array([counts[start + 1 : start + size + 1].any() for start, size in rows], bool)
            starts, sizes = starts[learned], sizes[learned]
        row = best_fit(sizes, length) if packed else np.arange(len(sizes))
        order = np.argsort(row, kind="stable")
        self._starts, self._sizes = starts[order], sizes[order]
        self._rows = np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))

    def __len__(self) -> int:
        return len(self._rows) - 1

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids and positions, int64 [length, 2], and targets, int64 [length], of one row."""
        length = self._length
        inputs = np.stack([np.full(length, self._fill), np.arange(length)], 1)
        targets = np.full(length, IGNORE)
        at = 0
        for piece in range(self._rows[index], self._rows[index + 1]):
            start, size = int(self._starts[piece]), int(self._sizes[piece])
            ids = self._ids[start : start + size + 1].astype(np.int64)
            inputs[at : at + size, 0] = ids[:-1]
            targets[at : at + size] = ids[1:]
            if self._counts is not None:
                targets[at : at + size][self._counts[start + 1 : start + size + 1] == 0] = IGNORE
            inputs[at : at + size, 1] = np.arange(size)
            at += size
        inputs[at:, 1] = np.arange(length - at)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """The row of each piece: int64 [pieces]. Rows are numbered in the order of their first pieces."""
    row = np.empty(len(sizes), np.int64)
    spaces: list[list[int]] = [[] for _ in range(length + 1)]  # rows with so much space left
    has_rows = 0  # bit s: whether spaces[s] has a row
    rows = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        if fitting := has_rows >> size:
            space = size + (fitting & -fitting).bit_length() - 1
            chosen = spaces[space].pop()
            if not spaces[space]:
                has_rows ^= 1 << space
        else:
            space, chosen, rows = length, rows, rows + 1
        row[piece] = chosen
        if left := space - size:
            spaces[left].append(chosen)
            has_rows |= 1 << left
    _, begins = np.unique(row, return_index=True)
    rank = np.empty(rows, np.int64)
    rank[np.argsort(begins, kind="stable")] = np.arange(rows)
    return rank[row]
