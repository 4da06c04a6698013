"""The order in which a run sees its examples, and what its checkpoints record of them, `data.json`.

Sample k of a run is example k mod n of epoch k div n, permuted anew in each epoch. A checkpoint names the data of its
run, so that a resume can say what has changed:

    {"files": {"a.txt": [1683, "0bda9ce0…"]}, "chunks": {…}, "tokenizer": "…", "held_out": "…", "weights": [3.0, 1.0]}

`files` has a size and a digest of each file of text, or of each class of images; the rest is there where it applies.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from octavo.train.config.run_config import naming

DATA_FILE = "data.json"


class EpochOrder:
    """Numbers of the examples of each batch, a function of (seed, step)."""

    def __init__(self, count: int, *, shuffle: bool) -> None:
        self._count, self._shuffle = count, shuffle
        self._order = lru_cache(maxsize=2)(self._permutation)

    def rows(self, seed: int, step: int, size: int) -> list[int]:
        """The numbers of the `size` examples of step 0, 1, …"""
        samples = (divmod(sample, self._count) for sample in range(step * size, (step + 1) * size))
        return [int(self._order(seed, epoch)[position]) for epoch, position in samples]

    def _permutation(self, seed: int, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._count)
        return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(self._count)


def write_data_state(folder: Path, state: Mapping[str, Any]) -> None:
    (folder / DATA_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def read_data_state(folder: Path) -> dict[str, Any]:
    """Read what `write_data_state` wrote. Raises ConfigError if it cannot be read."""
    with naming(f"{folder / DATA_FILE} cannot be read", OSError, ValueError):
        return dict(json.loads((folder / DATA_FILE).read_text(encoding="utf-8")))


def difference(before: Mapping[str, Any], now: Mapping[str, Any], unit: str) -> str:
    """The first difference of two states in words, "" for none: a file that is gone or new, or has other content."""
    # `unit`: what the sizes count. Digests of text files are of all files up to this one.
    files, others = before["files"], now["files"]
    moved = [*files.values()] == [*others.values()]  # to another folder, unchanged
    for name in [] if moved else [*sorted(files.keys() ^ others.keys()), *others]:
        if files.get(name) != others.get(name):
            entries = (files.get(name), others.get(name))
            then, today = (f"{entry[0]:,} {unit}, digest {entry[1]}" if entry else "not there" for entry in entries)
            return f"{name}: then {then}, now {today}"
    for then, today in [] if moved else zip(files, others, strict=True):
        if then != today:
            return f"the order of data.sources: {then} now comes after {today}"
    for key, what in (("tokenizer", "the tokenizer: then digest "), ("weights", "the weights of data.sources: then ")):
        if before.get(key) and before[key] != now.get(key):
            return f"{what}{_shown(before[key])}, now {_shown(now.get(key))}"
    return ""


def _shown(value: Any) -> str:
    return value[:16] if isinstance(value, str) else str(value)
