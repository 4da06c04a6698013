"""Read documents as a stream: pieces of text, and None after the last piece of each document.

A document without text is a None with no piece before it, so a reader of the stream can count it. No reader holds more
than a row (`ROW_LIMIT` at most) or `CHUNK` bytes of a file: text files are decoded by chunks, .jsonl is parsed by
lines. Parquet and Arrow files are read in `arrow_files.py`.

Readers hash the content. `source.py` reads all content once for its fingerprint and compares every later read with it.
"""

import codecs
import io
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from octavo.numerics.names import nearest
from octavo.train.config.data_section import Data
from octavo.train.config.run_config import ConfigError
from octavo.train.data.chat import ALPACA, MESSAGES, SHAREGPT, conversation_text, messages_of
from octavo.train.data.sequences import NoFieldError, NoSequencesError

if TYPE_CHECKING:
    import hashlib

FILE_KINDS = {".txt", ".jsonl", ".parquet", ".csv", ".tsv", ".json", ".ndjson", ".arrow"}
"""Files that hold text."""
Stream = Iterator[str | None]
OnBytesRead = Callable[[int], None]
"""Called with the number of bytes just read."""
CHUNK = 1 << 20
"""Bytes read at once."""
ROW_LIMIT = 32 << 20
"""Longest row in UTF-8 bytes: parsing one takes several times its size in memory."""
BOM = codecs.BOM_UTF8
CONVERSATIONS = {"messages", "conversation", "conversations"}
"""Usual names of a column with conversations."""


def suffix(path: str | Path) -> str:
    """How the name of a file ends, as ".txt", in lower case; of a compressed text file what it is without that."""
    name = Path(path)
    inner = Path(name.stem).suffix.lower()
    return inner if is_compressed(path) and inner in (".txt", ".jsonl") else name.suffix.lower()


def is_compressed(path: str | Path) -> bool:
    """Whether a file is decompressed while it is read."""
    return Path(path).suffix.lower() in (".gz", ".zst")


class HashedFile(io.RawIOBase):
    """A file open for reading, front to back, that adds its size and content to `digest`.

    With `text`, a byte order mark and carriage returns add a mark at the end of the file: earlier versions kept the
    one and converted the others, so the same bytes were other text.
    """

    def __init__(self, path: str, digest: "hashlib._Hash", on_bytes_read: OnBytesRead, *, text: bool = False) -> None:
        self._file: Any = open(path, "rb", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        if is_compressed(path):
            from pyarrow import CompressedInputStream

            self._file = CompressedInputStream(self._file, "gzip" if path.lower().endswith(".gz") else "zstd")
        self._digest, self._on_bytes_read, self._text = digest, on_bytes_read, text
        self._start = True
        self._marks: set[bytes] = set()
        digest.update(f"{size}\0".encode())

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`; returns the number of bytes, 0 at the end."""
        size: int = self._file.readinto(buffer)
        piece = bytes(buffer[:size])
        self._on_bytes_read(size)
        self._digest.update(piece)
        if self._text and self._start and piece.startswith(BOM):
            self._marks.add(b"bom")
        if self._text and b"\r" in piece:
            self._marks.add(b"cr")
        if not piece:
            self._digest.update(b"".join(sorted(self._marks)))
            self._marks.clear()
        self._start = False
        return size

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def hash_file(path: str, digest: "hashlib._Hash", on_bytes_read: OnBytesRead, *, kind: str) -> None:
    """Add a file's content to `digest`. Raises ConfigError for a .txt or .jsonl that is not UTF-8 or has NULs."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with reading(path), HashedFile(path, digest, on_bytes_read, text=kind == ".txt") as file:
        start, line, piece = 0, 1, b"\0"
        while piece:
            piece = file.read(CHUNK) or b""
            if kind in (".txt", ".jsonl"):
                if not start and piece.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise ConfigError(f"{path} is UTF-16 text: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
                if b"\0" in piece:
                    line += piece.count(b"\n", 0, piece.index(0))
                    raise ConfigError(f"{path} is not text: byte {start + piece.index(0)} is NUL (line {line})")
                pending = len(decoder.getstate()[0])
                try:
                    decoder.decode(piece, final=not piece)
                except UnicodeDecodeError as error:
                    line += piece.count(b"\n", 0, max(0, error.start - pending))
                    raise ConfigError(
                        f"{path} is not UTF-8 text: byte {start - pending + error.start} in line {line} "
                        f"({error.reason}); convert it, or leave it out"
                    ) from None
            start += len(piece)
            line += piece.count(b"\n")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what goes wrong while a file is read into a ConfigError that names it."""
    from pyarrow import ArrowException

    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except ArrowException as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason})") from None


def text_file(path: str, digest: "hashlib._Hash", on_bytes_read: OnBytesRead) -> Stream:
    """A text file as one document, line ends as they are, without a byte order mark."""
    with reading(path), io.BufferedReader(HashedFile(path, digest, on_bytes_read, text=True), CHUNK) as raw:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        piece = b"\0"
        while piece:
            piece = raw.read(CHUNK)
            if text := decoder.decode(piece, final=not piece):
                yield text
    yield None


@dataclass(frozen=True)
class Column:
    """The column of a source that holds its documents."""

    source: str
    """The source, for error messages."""
    name: str
    """Name of the column."""
    messages: bool
    """Whether it holds conversations (`chat.conversation_text`), not text."""

    @property
    def setting(self) -> str:
        """The setting with its name."""
        return "data.messages_field" if self.messages else "data.text_field"

    @property
    def identity(self) -> str:
        """The part of a fingerprint that says how to read the content."""
        return f"\0{self.name}" + "\0messages" * self.messages

    def fields(self, names: Collection[str]) -> list[str]:
        """The fields that hold the document in rows with these names."""
        if not self.messages or self.name in names:
            return [self.name]
        if self.name == MESSAGES and SHAREGPT in names:
            return [SHAREGPT]
        return [name for name in ALPACA if name in names] if {"instruction", "output"} <= {*names} else [self.name]

    def text(self, where: object, row: dict[str, Any]) -> str | None:
        """The document of a row; None or "" if it has none. Raises ConfigError, beginning with `where`."""
        value = messages_of(row, self.name) if self.messages else row.get(self.name)
        if self.messages and value is not None:
            if row.get("tools"):
                raise ConfigError(f'{where}: "tools" are not rendered by Octavo: remove the field')
            value = conversation_text(where, value)
        if value is not None and not isinstance(value, str):
            hint = '; of conversations? set data.format = "messages"' if isinstance(value, list) else ""
            raise ConfigError(f'{where}: field "{self.name}" is not text but {type(value).__name__}{hint}')
        if value:
            _check_row(where, value)
        return value


def column_of(config: Data) -> Column:
    """The column that `[data]` names."""
    messages = config.format == "messages"
    return Column(config.source, config.messages_field if messages else config.text_field, messages)


@dataclass(frozen=True)
class Line:
    """A line of a file, for error messages."""

    path: str
    number: int
    """Counted from 1, at byte `start`."""
    start: int = 0
    """Where the lines before it were not read."""

    def __str__(self) -> str:
        with reading(self.path), open(self.path, "rb") as file:
            skipped, left = 0, self.start
            while left and (piece := file.read(min(left, CHUNK))):
                skipped, left = skipped + piece.count(b"\n"), left - len(piece)
        return f"{self.path}, line {skipped + self.number}"


def json_lines(paths: list[str], column: Column, digest: "hashlib._Hash", on_bytes_read: OnBytesRead) -> Stream:
    """The document of each line of some files. Raises ConfigError as `json_documents`."""

    def lines() -> Iterator[tuple[Line, bytes]]:
        for path in paths:
            with reading(path), io.BufferedReader(HashedFile(path, digest, on_bytes_read), CHUNK) as file:
                yield from _lines(path, file)

    return json_documents(lines(), column)


def lines_between(path: str, start: int, stop: int) -> Iterator[tuple[Line, bytes]]:
    """The lines of a file that begin at the bytes start … stop."""
    with reading(path), open(path, "rb", buffering=CHUNK) as file:
        if start:
            file.seek(start - 1)
            while (rest := file.readline(CHUNK)) and not rest.endswith(b"\n"):
                pass
        yield from _lines(path, file, file.tell(), stop)


def json_documents(lines: Iterator[tuple[Line, bytes]], column: Column) -> Stream:
    """The document of each line. Raises ConfigError for a line that is no object, and a field in no row."""
    fields: dict[str, None] = {}
    rows = 0
    for where, line in lines:
        row = _json_row(where, line)
        rows += 1
        if len(fields) < 1000:
            fields |= dict.fromkeys(row)
        if text := column.text(where, row):
            del line, row
            yield text
        yield None
    if not rows:
        raise NoSequencesError(f'data.source = "{column.source}" is empty: no rows')
    if not {*column.fields(fields)} <= fields.keys():
        raise no_field(column, fields)


def _lines(path: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[tuple[Line, bytes]]:
    """Lines from `start`, where the file is, to those that begin before `stop`, without blank ones."""
    # LF, CRLF and CR end a line.
    number, position = 0, start
    while (stop is None or position < stop) and (line := file.readline(ROW_LIMIT + 2)):
        if len(line) > ROW_LIMIT and not line.endswith(b"\n"):
            raise ConfigError(f"{Line(path, number + 1, start)} {too_long()}")
        position += len(line)
        if not number and not start:
            line = line.removeprefix(BOM)
        for part in line.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
            number += 1
            if part.strip():
                yield Line(path, number, start), part


def _json_row(where: Line, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
        reason = f"is no JSON object but {type(row).__name__}"
    except (ValueError, RecursionError) as error:
        row, reason = None, f"is not JSON ({getattr(error, 'msg', error)})"
    if not isinstance(row, dict):
        raise ConfigError(f"{where.path} cannot be read: {where} {reason}")
    return row


def _check_row(where: object, text: str) -> None:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: the text is not valid Unicode ({error.reason})") from None
    if size > ROW_LIMIT:
        raise ConfigError(f"{where} {too_long()}")


def too_long() -> str:
    """The end of an error message about a row."""
    return (
        f"is longer than {ROW_LIMIT >> 20} MiB: cut it into several rows, or put the text into a .txt file, "
        "which is read in pieces"
    )


def rows_as_documents(group: list[str | None]) -> Stream:
    """Each row a document."""
    for text in group:
        if text:
            yield text
        yield None


def no_field(column: Column, fields: Collection[str]) -> NoFieldError:
    """The error for a field that no row has."""
    names = ", ".join(list(fields)[:50]) or "none"
    talks = CONVERSATIONS & set(fields) if not column.messages else ()
    return NoFieldError(
        f'"{column.source}" has no field "{column.name}"{nearest(column.name, fields)} (fields: {names}): set '
        f"{column.setting}" + (', or for conversations data.format = "messages"' if talks else "")
    )


def no_split(source: str, split: str, splits: Collection[str]) -> ConfigError:
    """The error for a split that a data set does not have."""
    return ConfigError(f'"{source}" has no split "{split}"; it has {", ".join(map(str, splits))}: set data.split')
