"""Read documents as a stream: pieces of text, and None after the last piece of each document, alone if it has no text.

No reader holds more than a row (`ROW_LIMIT` at most) or `CHUNK` bytes of a file.
"""

import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from octavo.numerics.suggestions import nearest
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Data
from octavo.train.data.chat import ALPACA, MESSAGES, SHAREGPT, TOOLS, conversation_text, messages_of

if TYPE_CHECKING:
    import hashlib

    import pyarrow

FILE_KINDS = {".txt", ".jsonl", ".parquet", ".csv", ".tsv", ".json", ".ndjson", ".arrow"}  # Files that hold text
Stream = Iterator[str | None]
OnBytesRead = Callable[[int], None]  # Called with the number of bytes just read
CHUNK = 1 << 20  # Bytes read at once
ROW_LIMIT = 32 << 20  # Longest row in UTF-8 bytes: parsing one takes several times its size in memory
BATCH_ROWS = 64  # Rows of a Parquet file that are decoded at once; dictionary encoding hides how long they are
CONVERSATIONS = {"messages", "conversation", "conversations"}  # Usual names of a column with conversations
NO_TEXT = re.compile("[\0\udc80-\udcff]")  # NUL, and bytes that are not UTF-8 as "surrogateescape" reads them


class NoSequencesError(ConfigError):
    """Data without a sequence."""


class NoFieldError(NoSequencesError):
    """Rows of which none has the field to read."""


@dataclass(frozen=True)
class Block:
    """A part of a file, or all of it: bytes of .jsonl, row groups of .parquet."""

    path: str
    start: int = 0
    stop: int | None = None
    size: int = 0  # Bytes of text, uncompressed


def suffix(path: str | Path) -> str:
    """How the name of a file ends, as ".txt", in lower case; of a compressed text file what it is without that."""
    name = Path(path)
    inner = Path(name.stem).suffix.lower()
    return inner if is_compressed(path) and inner in (".txt", ".jsonl") else name.suffix.lower()


def is_compressed(path: str | Path) -> bool:
    return Path(path).suffix.lower() in (".gz", ".zst")


def _open(path: str) -> IO[bytes]:
    file = open(path, "rb", buffering=CHUNK)
    if not is_compressed(path):
        return file
    from pyarrow import CompressedInputStream

    return io.BufferedReader(CompressedInputStream(file, "gzip" if path.lower().endswith(".gz") else "zstd"), CHUNK)


def hash_file(path: str, digest: "hashlib._Hash", on_bytes_read: OnBytesRead) -> None:
    with reading(path), _open(path) as file:
        digest.update(f"{os.path.getsize(path)}\0".encode())
        while piece := file.read(CHUNK):
            digest.update(piece)
            on_bytes_read(len(piece))


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what goes wrong while a file is read into a ConfigError that names it."""
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


@dataclass(frozen=True)
class Column:
    source: str  # The source, for error messages
    name: str  # Name of the column
    messages: bool  # Whether it holds conversations (`chat.conversation_text`), not text

    @classmethod
    def of(cls, config: Data) -> "Column":
        messages = config.format == "messages"
        return cls(config.source, config.messages_field if messages else config.text_field, messages)

    @property
    def identity(self) -> str:
        """The part of a fingerprint that says how to read the content."""
        return f"\0{self.name}" + "\0messages" * self.messages

    @property
    def note(self) -> str:
        what = "messages" if self.messages else "text"
        return f'rows have no {what} in field "{self.name}" (missing, null or empty)'

    def fields(self, names: Collection[str]) -> list[str]:
        """The fields that hold the document in rows with these names. Raises ConfigError if there are none, or two."""
        fields = [self.name]
        if self.messages and self.name not in names:
            if self.name == MESSAGES and SHAREGPT in names:
                fields = [SHAREGPT]
            elif {"instruction", "output"} <= {*names}:
                fields = [name for name in ALPACA if name in names]
        if (count := [*names].count(fields[0])) > 1:
            raise ConfigError(f'"{self.source}" has {count} columns "{fields[0]}": rename all but the one to read')
        if count:
            return fields + [TOOLS] * (self.messages and TOOLS in names)
        problem = f'"{self.source}" has no field "{self.name}"{nearest(self.name, names)}'
        remedy = f"set data.{'messages' if self.messages else 'text'}_field"
        if not self.messages and CONVERSATIONS & set(names):
            remedy += ', or for conversations data.format = "messages"'
        raise NoFieldError(f"{problem} (fields: {', '.join([*names][:50]) or 'none'}): {remedy}")

    def text(self, where: object, row: Mapping[str, object]) -> str | None:
        """The document of a row; None or "" if it has none. Raises ConfigError, beginning with `where`."""
        value = messages_of(row, self.name) if self.messages else row.get(self.name)
        if self.messages and value is not None:
            value = conversation_text(where, value, row.get(TOOLS))
        if value is None:
            return None
        if not isinstance(value, str):
            hint = '; of conversations? set data.format = "messages"' if isinstance(value, list) else ""
            raise ConfigError(f'{where}: field "{self.name}" is not text but {type(value).__name__}{hint}')
        try:
            size = len(value.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: the text is not valid Unicode ({error.reason})") from None
        if size > ROW_LIMIT:
            raise _too_long(where)
        return value


def _too_long(where: object) -> ConfigError:
    remedy = "cut it into several rows, or put the text into a .txt file, which is read in pieces"
    return ConfigError(f"{where} is longer than {ROW_LIMIT >> 20} MiB: {remedy}")


def read_documents(blocks: Collection[Block], kind: str, column: Column) -> Stream:
    """The documents of some files, or parts of files, of one kind. Raises ConfigError for bad data."""
    if kind == ".txt":
        for block in blocks:
            yield from _text(block.path)
            yield None
        return
    rows = _json_rows(blocks, column) if kind == ".jsonl" else _table_rows(blocks, kind, column)
    for where, row in rows:
        if text := column.text(where, row):
            yield text
        yield None


def _text(path: str) -> Iterator[str]:
    """The text of a file by chunks, with its line ends as they are and without a byte order mark."""
    line = 1
    with (
        reading(path),
        io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        while text := file.read(CHUNK):
            if ("\0" in text or not text.isascii()) and (bad := NO_TEXT.search(text)):  # the search is slower
                line += text.count("\n", 0, bad.start())
                problem = f"{path} is not UTF-8 text: line {line} has a byte {ord(bad[0]) & 0xFF:#04x}"
                raise ConfigError(f"{problem}; convert it (UTF-16: iconv -f UTF-16 -t UTF-8), or leave it out")
            line += text.count("\n")
            yield text


@dataclass(frozen=True)
class Line:
    """A line of a file, for error messages; it is counted when one is written."""

    path: str
    start: int  # Bytes before it

    def __str__(self) -> str:
        number, left = 1, self.start
        with reading(self.path), _open(self.path) as file:
            while left and (piece := file.read(min(left, CHUNK))):
                number, left = number + piece.count(b"\n"), left - len(piece)
        return f"{self.path}, line {number}"


def lines_of(block: Block) -> Iterator[tuple[Line, bytes]]:
    """The lines that begin in a part of a file, without blank ones."""
    with reading(block.path), _open(block.path) as file:
        start = block.start
        if start:
            file.seek(start - 1)
            while (rest := file.readline(CHUNK)) and not rest.endswith(b"\n"):
                pass
            start = file.tell()
        while (block.stop is None or start < block.stop) and (line := file.readline(ROW_LIMIT + 2)):
            where = Line(block.path, start)
            if len(line) > ROW_LIMIT and not line.endswith(b"\n"):
                raise _too_long(where)
            start += len(line)
            if line.strip():
                yield where, line


def _json_rows(blocks: Collection[Block], column: Column) -> Iterator[tuple[Line, dict[str, object]]]:
    """The row of each line. Raises ConfigError for a line that is no object, and a field in no row."""
    fields: dict[str, None] = {}
    for where, line in (item for block in blocks for item in lines_of(block)):
        try:
            row = json.loads(line.decode("utf-8-sig"))
            reason = f"is no JSON object but {type(row).__name__}"
        except (ValueError, RecursionError) as error:
            row, reason = None, f"is not JSON ({getattr(error, 'msg', error)})"
        if not isinstance(row, dict):
            raise ConfigError(f"{where.path} cannot be read: {where} {reason}")
        if len(fields) < 1000:
            fields |= dict.fromkeys(row)
        del line  # of which the memory is needed for the tokens
        yield where, row
    if fields:
        column.fields(fields)


def _table_rows(blocks: Collection[Block], kind: str, column: Column) -> Iterator[tuple[str, dict[str, object]]]:
    """The rows of Parquet files, of row groups of them, or of Arrow streams, as `datasets` saves them."""
    import pyarrow
    from pyarrow import parquet

    for path, start, stop in ((block.path, block.start, block.stop) for block in blocks):
        with reading(path):
            if kind == ".arrow":
                stream = pyarrow.ipc.open_stream(pyarrow.memory_map(path))
                fields, row = column.fields(stream.schema.names), 0
                batches = (batch.select(fields) for batch in stream)
            else:
                file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK)
                fields = column.fields(file.schema_arrow.names)
                groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
                row = sum(group.num_rows for group in groups[:start])
                size = max(1, CHUNK * file.metadata.num_rows // max(1, sum(group.total_byte_size for group in groups)))
                batches = file.iter_batches(
                    batch_size=min(BATCH_ROWS, size), row_groups=range(len(groups))[start:stop], columns=fields,
                    use_threads=False,
                )  # fmt: skip
            for part in (part for batch in batches for part in _parts(batch)):
                if part.nbytes > ROW_LIMIT:
                    raise _too_long(f"{path}, row {row} (from 0)")
                part.validate(full=True)  # UTF-8 and every offset: a damaged file would read beyond its memory
                for values in part.to_pylist():
                    yield f"{path}, row {row} (from 0)", {key: _without_nulls(value) for key, value in values.items()}
                    row += 1


def _parts(batch: "pyarrow.RecordBatch") -> Iterator["pyarrow.RecordBatch"]:
    """Parts of a batch of at most `CHUNK` bytes, or of one row."""
    batch.validate()
    if batch.nbytes > CHUNK and len(batch) > 1:
        half = len(batch) // 2
        yield from _parts(batch.slice(0, half))
        yield from _parts(batch.slice(half))
    else:
        yield batch


def _without_nulls(value: object) -> object:
    """A value of a table without null fields: structs have the fields of all rows."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
