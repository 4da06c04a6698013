"""Losses of any trainer in a JSON file, for `octavo compare --losses`."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from octavo.train.record.json_lines import Record, read_record

SHAPE = 'write {"baseline": [a loss per seed], "arms": {"name": [a loss per seed]}}, or a list of such objects'
# NaN, Infinity, null and "nan" mean that the run diverged.
Loss = Annotated[
    float,
    Field(allow_inf_nan=True),
    BeforeValidator(lambda value: math.nan if value is None or str(value).lower() == "nan" else value),
]


@dataclass(frozen=True)
class LossTable(Record):
    baseline: list[Loss]
    arms: dict[str, list[Loss]]


LossTables = Annotated[list[LossTable], Field(min_length=1)]


def read_losses(path: Path) -> list[LossTable]:
    """Read one table or a list of them. Raises ValueError for anything else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--losses {path} cannot be read: {error.strerror}. Give a JSON file: {SHAPE}") from None
    try:
        json.loads(content, object_pairs_hook=_check_names)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}. Give a JSON file: {SHAPE}") from None
    if not content.lstrip().startswith(b"["):
        content = b"[%b]" % content
    tables: list[LossTable] = read_record(content, LossTables, f"{path} cannot be read: {SHAPE}")
    return tables


def _check_names(pairs: list[tuple[str, object]]) -> None:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]!r} is given twice in one object")
