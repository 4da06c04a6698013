"""Files of one JSON object a line, which are written while a run goes on: how they are read.

A last line without its newline, of a killed process, is left out with a warning. Any other line that is not what was
written raises ValueError with the file, the line and the field.
"""

import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]  # What a run counts


class Record:
    """Base of dataclasses that are read from JSON: their fields and no others, without conversions."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def read_records(path: Path, kind: type[T], what: str) -> list[T]:
    """Read the records in a file, in order; [] without a file. `what`: as "a step"."""
    if not path.exists():
        return []
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        problem = f"{path}, line {len(lines) + 1} is left out: it has no end, as a process leaves it that is killed"
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
    return [read_record(line, kind, f"{path}, line {number} is not {what}") for number, line in enumerate(lines, 1)]


_adapter: Any = cache(TypeAdapter)


def read_record(text: bytes, kind: type[T], problem: str) -> T:
    """One record in JSON. Raises ValueError that begins with `problem` and names the field."""
    try:
        record: T = _adapter(kind).validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{problem}: {first_error(error)}") from None
    return record


def check_order(path: Path, steps: Iterable[int], what: str, *, repeated: bool = False) -> None:
    """Raise ValueError if the steps of a file do not rise from line to line; `repeated`: several may be equal."""
    before = 0
    for number, step in enumerate(steps, 1):
        if step < before + (not repeated):
            raise ValueError(f"{path}, line {number} is not {what}: step {step} comes after step {before}")
        before = step


def first_error(error: ValidationError) -> str:
    """The first error, as "loss: Input should be a valid number"."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
