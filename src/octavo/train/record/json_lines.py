"""Files of one JSON object a line, which are written while a run goes on: how they are read.

A last line without its newline, of a killed process, is left out with a warning. Any other line that is not what was
written raises ValueError with the file, the line and the field.
"""

import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Generic, TypeVar

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


class RecordFollower(Generic[T]):
    """Reads a file of records while another process appends to it, or replaces it as a resumed run does."""

    # `records`: a list, or what has its `append`, `pop`, `clear` and length.

    def __init__(self, path: Path, kind: type[T], what: str, *, records: Any = None) -> None:
        self.records: Any = [] if records is None else records  # All records so far
        self._path, self._kind, self._what = path, kind, what
        self._last, self._before_last, self._offset = b"", b"", 0

    def poll(self) -> int:
        """Read the complete lines that are new; return how many of the records before this call are still there."""
        # A line without its end is left for later. If the last line that was read is no longer in its place, a run has
        # completed it, or, if that before it is not either, the file is another one, and is read from its beginning.
        # Raises ValueError for a line that is not a record, at each call.
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._restart()
            return 0
        with file:
            if not self._is_at(file, self._last, self._offset):
                if self._before_last and self._is_at(file, self._before_last, self._offset - len(self._last)):
                    self.records.pop()
                    self._offset -= len(self._last)
                    self._last, self._before_last = self._before_last, b""
                else:
                    self._restart()
                file.seek(self._offset)
            before = len(self.records)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                problem = f"{self._path}, line {len(self.records) + 1} is not {self._what}"
                self.records.append(read_record(line, self._kind, problem))
                self._last, self._before_last = line, self._last
                self._offset += len(line)
        return before

    @staticmethod
    def _is_at(file: IO[bytes], line: bytes, end: int) -> bool:
        """Whether a line ends there; the file is then at its end."""
        file.seek(end - len(line))
        return file.read(len(line)) == line

    def _restart(self) -> None:
        self.records.clear()
        self._last, self._before_last, self._offset = b"", b"", 0


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
