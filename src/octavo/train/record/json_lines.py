"""Files of one JSON object a line, which are written while a run goes on: how they are read.

A last line without its newline, of a killed process, is left out with a warning. Any other line that is not what was
written raises ValueError with the file, the line and the field.
"""

import warnings
from collections.abc import Iterator
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


def each_record(path: Path, kind: Any, what: str, rise: int | None = None) -> Iterator[Any]:
    """The records in a file one at a time, in order; none without a file. `what`: as "a step"."""
    # `rise`: by how much the steps of two lines differ at least, for which ValueError is raised; None for any order.
    if not path.exists():
        return
    before = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number} is"
            if not line.endswith(b"\n"):
                problem = f"{where} left out: it has no end, as a process leaves it that is killed"
                warnings.warn(problem, RuntimeWarning, stacklevel=3)
                return
            row = read_record(line[:-1], kind, f"{where} not {what}")
            if rise is not None and row.step < before + rise:
                raise ValueError(f"{where} not {what}: step {row.step} comes after step {before}")
            before = before if rise is None else row.step
            yield row


_adapter: Any = cache(TypeAdapter)


def read_record(text: bytes, kind: type[T], problem: str) -> T:
    """One record in JSON. Raises ValueError that begins with `problem` and names the field."""
    try:
        record: T = _adapter(kind).validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{problem}: {first_error(error)}") from None
    return record


def first_error(error: ValidationError) -> str:
    """The first error, as "loss: Input should be a valid number"."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
