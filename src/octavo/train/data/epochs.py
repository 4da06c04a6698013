"""The order in which a run sees its examples, and what its checkpoints record of them, `data.json`.

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


def permutation(count: int, *key: int) -> np.ndarray:
    """A random order of `count` numbers, a function of a key of two integers."""
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)


class EpochOrder:
    """Numbers of examples, a function of (seed, sample): sample k is example k mod n of epoch k div n, permuted."""

    def __init__(self, count: int, *, shuffle: bool) -> None:
        self._count = count
        # The order of the examples in an epoch, by (seed, epoch).
        self.order = lru_cache(maxsize=2)(
            lambda seed, epoch: permutation(count, seed, epoch) if shuffle else np.arange(count)
        )

    def rows(self, seed: int, step: int, size: int) -> list[int]:
        samples = (divmod(sample, self._count) for sample in range(step * size, (step + 1) * size))
        return [int(self.order(seed, epoch)[position]) for epoch, position in samples]


def write_data_state(folder: Path, state: Mapping[str, Any]) -> None:
    (folder / DATA_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def read_data_state(folder: Path) -> dict[str, Any]:
    with naming(f"{folder / DATA_FILE} cannot be read", OSError, ValueError):
        return dict(json.loads((folder / DATA_FILE).read_text(encoding="utf-8")))


def difference(before: Mapping[str, Any], now: Mapping[str, Any], unit: str) -> str:
    """The first difference of two states in words, "" for none: a file that is gone or new, or has other content."""
    # `unit`: what the sizes count. Digests of text files are of all files up to this one.
    files, others = before["files"], now["files"]
    if [*files.values()] != [*others.values()]:  # else in another folder, unchanged
        for name in [*sorted(files.keys() ^ others.keys()), *others]:
            if files.get(name) != others.get(name):
                entries = (files.get(name), others.get(name))
                then, today = (f"{entry[0]:,} {unit}, digest {entry[1]}" if entry else "not there" for entry in entries)
                return f"{name}: then {then}, now {today}"
        for then, today in zip(files, others, strict=True):
            if then != today:
                return f"the order of data.sources: {then} now comes after {today}"
    for key, what in (("tokenizer", "the tokenizer: then digest"), ("weights", "the weights of data.sources: then")):
        old, new = before.get(key), now.get(key)
        if old and old != new:
            return f"{what} {_shown(old)}, now {_shown(new)}"
    return ""


def _shown(value: object) -> str:
    return value[:16] if isinstance(value, str) else str(value)
