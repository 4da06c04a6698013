"""Files of one JSON object a line, which are written while a run goes on: how they are read, whatever is in them.

A last line without its newline is one that a killed process did not finish: it is left out, with a warning. Any other
line that is not what was written raises ValueError with the file, the line and the field. `RecordFollower` reads the
lines that a run adds while it goes on.
"""

import dataclasses
import json
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
"""What a run counts."""


def read_records(path: Path, model: type[BaseModel], what: str) -> list[dict[str, Any]]:
    """Read the objects in a file, in order, each checked by `model`; [] without a file. `what`: as "a step"."""
    if not path.exists():
        return []
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        warnings.warn(
            f"{path}, line {len(lines) + 1} is left out: it has no end, as a process leaves it that is killed",
            RuntimeWarning,
            stacklevel=3,
        )
    return [read_record(line, model, f"{path}, line {number} is not {what}") for number, line in enumerate(lines, 1)]


def read_record(text: bytes, model: type[BaseModel], problem: str) -> dict[str, Any]:
    """One object. Raises ValueError that begins with `problem` and names the field."""
    try:
        model.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{problem}: {first_error(error)}") from None
    fields: dict[str, Any] = json.loads(text)
    return fields


class RecordFollower:
    """Reads a file of records while another process appends to it, or replaces it as a resumed run does."""

    def __init__(self, path: Path, model: type[BaseModel], what: str) -> None:
        self.records: list[dict[str, Any]] = []  # All records so far
        self._path, self._model, self._what = path, model, what
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
            *lines, _ = file.read().split(b"\n")
        before = len(self.records)
        for line in lines:
            problem = f"{self._path}, line {len(self.records) + 1} is not {self._what}"
            self.records.append(read_record(line, self._model, problem))
            self._last, self._before_last = line + b"\n", self._last
            self._offset += len(self._last)
        return before

    @staticmethod
    def _is_at(file: IO[bytes], line: bytes, end: int) -> bool:
        """Whether a line ends there; the file is then at its end."""
        file.seek(end - len(line))
        return file.read(len(line)) == line

    def _restart(self) -> None:
        self.records = []
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


@cache
def record(kind: Any, **special: Any) -> type[BaseModel]:
    """A model of the fields of a dataclass: all of them and no others, without conversions; `special`: other types."""
    # An int is a `NonNegative`. A field with a default may be absent.
    hints = get_type_hints(kind, include_extras=True)
    hints = {name: NonNegative if hint is int else hint for name, hint in hints.items()} | special
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    fields: dict[str, Any] = {
        name: (hint, ... if defaults[name] is dataclasses.MISSING else defaults[name]) for name, hint in hints.items()
    }
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    model: type[BaseModel] = create_model(kind.__name__, __config__=config, **fields)
    return model
