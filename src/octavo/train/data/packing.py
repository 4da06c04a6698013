"""Packing: documents into sequences, so that attention stays inside each document (`data.packing = "documents"`).

    row          a b c … | x y … | (rest)
    position     0 1 2 …   0 1 …   0 1 …       restarts with each document; Transformers masks attention by it
    target       b c … .   y … .   ignored

A document of n ids, its end token included, has n - 1 targets. One with more targets than a sequence is cut into pieces
of that many, each with the last id of the piece before it as its first input; nothing is left out. Pieces are packed by
best fit, longest first (arXiv 2404.10830), and rows are in the order of their first pieces. This takes about two
microseconds and 24 bytes per document, at each start. With `data.packing = "none"` each piece has a row of its own.

Of conversations some ids are no targets. A piece without any target is left out.
"""

import numpy as np
import torch

from octavo.nn.causal_head import IGNORE


class PackedRows:
    """The rows of some documents."""

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

    def row(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
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
