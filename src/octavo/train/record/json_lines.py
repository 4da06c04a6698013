"""Files of one JSON object a line, which are written while a run goes on: how they are read.

A last line without its newline, of a killed process, is left out with a warning. Any other line that is not what was
written raises ValueError with the file, the line and the field.
"""

import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError


class Stepped(Protocol):
    @property
    def step(self) -> int: ...


T = TypeVar("T")
S = TypeVar("S", bound=Stepped)

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]  # What a run counts


class Record:
    """Base of dataclasses that are read from JSON: their fields and no others, without conversions."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def each_record(path: Path, kind: type[T], what: str) -> Iterator[T]:
    """The records in a file one at a time, in order; none without a file. `what`: as "a step"."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield read_record(line[:-1], kind, f"{path}, line {number} is not {what}")
                continue
            problem = f"{path}, line {number} is left out: it has no end, as a process leaves it that is killed"
            warnings.warn(problem, RuntimeWarning, stacklevel=4)


def read_records(path: Path, kind: type[T], what: str) -> list[T]:
    """Read all records of a file."""
    return list(each_record(path, kind, what))


_adapter: Any = cache(TypeAdapter)


def read_record(text: bytes, kind: type[T], problem: str) -> T:
    """One record in JSON. Raises ValueError that begins with `problem` and names the field."""
    try:
        record: T = _adapter(kind).validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{problem}: {first_error(error)}") from None
    return record


def in_order(path: Path, rows: Iterable[S], what: str, *, repeated: bool = False) -> Iterator[S]:
    """The rows of a file. Raises ValueError where steps do not rise; `repeated`: several may be equal."""
    before = 0
    for number, row in enumerate(rows, 1):
        if row.step < before + (not repeated):
            raise ValueError(f"{path}, line {number} is not {what}: step {row.step} comes after step {before}")
        before = row.step
        yield row


def first_error(error: ValidationError) -> str:
    """The first error, as "loss: Input should be a valid number"."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
