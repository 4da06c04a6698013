"""Read documents as a stream: pieces of text, and None after the last piece of each document.

A document without text is a None with no piece before it, so a reader of the stream can count it. No reader holds more
than a row (`ROW_LIMIT` at most) or `CHUNK` bytes of a file: text files are decoded by chunks, .jsonl is parsed by
lines, Parquet is decoded by pages, and the pages of a memory-mapped Arrow file are dropped after reading.
"""

import codecs
import io
import json
import mmap
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from octavo.numerics.suggestions import nearest
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Data
from octavo.train.data.chat import ALPACA, MESSAGES, SHAREGPT, TOOLS, conversation_text, messages_of

if TYPE_CHECKING:
    import hashlib

FILE_KINDS = {".txt", ".jsonl", ".parquet", ".csv", ".tsv", ".json", ".ndjson", ".arrow"}  # Files that hold text
Stream = Iterator[str | None]
OnBytesRead = Callable[[int], None]  # Called with the number of bytes just read
CHUNK = 1 << 20  # Bytes read at once
ROW_LIMIT = 32 << 20  # Longest row in UTF-8 bytes: parsing one takes several times its size in memory
BATCH_ROWS = 64  # Rows of a Parquet file that are decoded at once; dictionary encoding hides how long they are
DROP_PAGES_AFTER = 16 << 20  # Bytes of a memory-mapped file after which its pages are dropped
CONVERSATIONS = {"messages", "conversation", "conversations"}  # Usual names of a column with conversations


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
    """Open a file to read it front to back, decompressed."""
    file = open(path, "rb", buffering=CHUNK)
    if not is_compressed(path):
        return file
    from pyarrow import CompressedInputStream

    unpacked: Any = CompressedInputStream(file, "gzip" if path.lower().endswith(".gz") else "zstd")
    return io.BufferedReader(unpacked, CHUNK)


def hash_file(path: str, digest: "hashlib._Hash", on_bytes_read: OnBytesRead, *, kind: str) -> None:
    """Add a file's content to `digest`. Raises ConfigError for a .txt or .jsonl that is not UTF-8 or has NULs."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with reading(path), _open(path) as file:
        digest.update(f"{os.path.getsize(path)}\0".encode())
        start, line, piece = 0, 1, b"\0"
        while piece:
            piece = file.read(CHUNK)
            digest.update(piece)
            on_bytes_read(len(piece))
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
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason})") from None


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
        """What rows without a document lack."""
        what = "messages" if self.messages else "text"
        return f'rows have no {what} in field "{self.name}" (missing, null or empty)'

    def fields(self, names: Collection[str]) -> list[str]:
        """The fields that hold the document in rows with these names."""
        if not self.messages:
            return [self.name]
        fields = [self.name]
        if self.name not in names and self.name == MESSAGES and SHAREGPT in names:
            fields = [SHAREGPT]
        elif self.name not in names and {"instruction", "output"} <= {*names}:
            fields = [name for name in ALPACA if name in names]
        return fields + [TOOLS] * (TOOLS in names)

    def text(self, where: object, row: dict[str, Any]) -> str | None:
        """The document of a row; None or "" if it has none. Raises ConfigError, beginning with `where`."""
        value = messages_of(row, self.name) if self.messages else row.get(self.name)
        if self.messages and value is not None:
            value = conversation_text(where, value, row.get(TOOLS))
        if value is not None and not isinstance(value, str):
            hint = '; of conversations? set data.format = "messages"' if isinstance(value, list) else ""
            raise ConfigError(f'{where}: field "{self.name}" is not text but {type(value).__name__}{hint}')
        try:
            size = len((value or "").encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: the text is not valid Unicode ({error.reason})") from None
        if size > ROW_LIMIT:
            raise ConfigError(f"{where} {_too_long()}")
        return value

    def missing(self, fields: Collection[str]) -> NoFieldError:
        names = ", ".join(list(fields)[:50]) or "none"
        talks = CONVERSATIONS & set(fields) if not self.messages else ()
        return NoFieldError(
            f'"{self.source}" has no field "{self.name}"{nearest(self.name, fields)} (fields: {names}): set '
            f"data.{'messages' if self.messages else 'text'}_field"
            + (', or for conversations data.format = "messages"' if talks else "")
        )


def read_documents(blocks: Collection[Block], kind: str, column: Column) -> Stream:
    """The documents of some files, or parts of files, of one kind. Raises ConfigError for bad data."""
    if kind == ".jsonl":
        yield from _json_documents(blocks, column)
        return
    for block in blocks:
        if kind == ".txt":
            # A file is one document, with its line ends as they are and without a byte order mark.
            with reading(block.path), io.TextIOWrapper(_open(block.path), encoding="utf-8-sig", newline="") as file:
                while text := file.read(CHUNK):
                    yield text
            yield None
            continue
        for rows in parquet_rows(block, column) if kind == ".parquet" else _arrow_rows(block.path, column):
            yield from rows_as_documents(rows)


def rows_as_documents(rows: list[str | None]) -> Stream:
    for text in rows:
        if text:
            yield text
        yield None


@dataclass(frozen=True)
class Line:
    """A line of a file, for error messages."""

    path: str
    number: int  # Counted from 1, at byte `start`
    start: int = 0  # Where the lines before it were not read

    def __str__(self) -> str:
        with reading(self.path), open(self.path, "rb") as file:
            skipped, left = 0, self.start
            while left and (piece := file.read(min(left, CHUNK))):
                skipped, left = skipped + piece.count(b"\n"), left - len(piece)
        return f"{self.path}, line {skipped + self.number}"


def lines_of(block: Block) -> Iterator[tuple[Line, bytes]]:
    """The lines that begin in a part of a file, without blank ones; LF, CRLF and CR end a line."""
    path, number = block.path, 0
    with reading(path), _open(path) as file:
        if block.start:
            file.seek(block.start - 1)
            while (rest := file.readline(CHUNK)) and not rest.endswith(b"\n"):
                pass
        position = start = file.tell() if block.start else 0
        while (block.stop is None or position < block.stop) and (line := file.readline(ROW_LIMIT + 2)):
            if len(line) > ROW_LIMIT and not line.endswith(b"\n"):
                raise ConfigError(f"{Line(path, number + 1, start)} {_too_long()}")
            position += len(line)
            if not number and not start:
                line = line.removeprefix(codecs.BOM_UTF8)
            for part in line.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                number += 1
                if part.strip():
                    yield Line(path, number, start), part


def _json_documents(blocks: Collection[Block], column: Column) -> Stream:
    """The document of each line. Raises ConfigError for a line that is no object, and a field in no row."""
    fields: dict[str, None] = {}
    empty = True
    for where, line in (item for block in blocks for item in lines_of(block)):
        try:
            row = json.loads(line.decode("utf-8"))
            reason = f"is no JSON object but {type(row).__name__}"
        except (ValueError, RecursionError) as error:
            row, reason = None, f"is not JSON ({getattr(error, 'msg', error)})"
        if not isinstance(row, dict):
            raise ConfigError(f"{where.path} cannot be read: {where} {reason}")
        empty = False
        if len(fields) < 1000:
            fields |= dict.fromkeys(row)
        if text := column.text(where, row):
            del line, row  # of which the memory is needed for the tokens
            yield text
        yield None
    if empty:
        raise NoSequencesError(f'data.source = "{column.source}" is empty: no rows')
    if not {*column.fields(fields)} <= fields.keys():
        raise column.missing(fields)


def _too_long() -> str:
    problem = f"is longer than {ROW_LIMIT >> 20} MiB"
    return f"{problem}: cut it into several rows, or put the text into a .txt file, which is read in pieces"


def parquet_rows(block: Block, column: Column) -> Iterator[list[str | None]]:
    """The documents of a Parquet file, or of some row groups of it, some rows at a time."""
    # Raises ConfigError if the column is missing or holds something else.
    from pyarrow import parquet

    with reading(block.path), parquet.ParquetFile(block.path, pre_buffer=False, buffer_size=CHUNK) as file:
        fields = check_column(column, file.schema_arrow)
        metadata = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        mean = max(1, sum(group.total_byte_size for group in metadata) // max(1, file.metadata.num_rows))
        size = max(1, min(BATCH_ROWS, CHUNK // mean))
        groups = list(range(block.start, len(metadata) if block.stop is None else block.stop))
        first = sum(group.num_rows for group in metadata[: block.start])
        for batch in file.iter_batches(batch_size=size, row_groups=groups, columns=fields, use_threads=False):
            yield from _row_texts(block.path, first, batch, column, fields)
            first += len(batch)


def _arrow_rows(path: str, column: Column) -> Iterator[list[str | None]]:
    """The documents of an Arrow stream, as `datasets` saves it, some rows at a time. Raises as `parquet_rows`."""
    import pyarrow

    with reading(path), open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ConfigError(f"{path} cannot be read: it is empty")
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        stream = pyarrow.ipc.open_stream(pyarrow.py_buffer(pages))
        fields = check_column(column, stream.schema)
        first = read = 0
        for batch in stream:
            for start in range(0, len(batch), 1 << 16):
                for rows in _row_texts(path, first + start, batch.slice(start, 1 << 16), column, fields):
                    yield rows
                    read += sum(len(text) for text in rows if text)
                    if read > DROP_PAGES_AFTER and hasattr(pages, "madvise"):
                        pages.madvise(mmap.MADV_DONTNEED)
                        read = 0
            first += len(batch)


def _row_texts(path: str, first: int, batch: Any, column: Column, fields: list[str]) -> Iterator[list[str | None]]:
    """The documents of some rows of a table, which begin at row `first` of the file."""
    from pyarrow import compute

    if column.messages:
        for start in range(0, len(batch), BATCH_ROWS):
            part = batch.select(fields).slice(start, BATCH_ROWS)
            part.validate(full=True)
            rows = enumerate(map(_without_nulls, part.to_pylist()), first + start)
            yield [column.text(f"{path}, row {number} (from 0)", row) for number, row in rows]
        return
    texts = batch.column(column.name)
    texts.validate()
    lengths = np.asarray(compute.fill_null(compute.binary_length(texts), 0), dtype=np.int64)
    if len(lengths) and (lengths.max() > ROW_LIMIT or lengths.min() < 0):
        raise ConfigError(f"{path}, row {first + int(lengths.argmax())} (from 0) {_too_long()}")
    # About `CHUNK` bytes of text at a time.
    ends = np.flatnonzero(np.diff(np.cumsum(lengths) // CHUNK)) + 1
    for start, stop in zip([0, *ends], [*ends, len(texts)], strict=True):
        part = texts.slice(start, stop - start)
        part.validate(full=True)  # UTF-8 and every offset: a damaged file would read beyond its memory
        yield part.to_pylist()


def _without_nulls(value: Any) -> Any:
    """A row of a table without null fields: structs have the fields of all rows."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def check_column(column: Column, schema: Any) -> list[str]:
    """The fields of a document in an Arrow schema."""
    # Raises ConfigError if it has not one such column, of strings or of lists of messages.
    import pyarrow

    fields, source = column.fields(schema.names), column.source
    field = fields[0]
    if field not in schema.names:
        raise column.missing(schema.names)
    if (columns := schema.names.count(field)) > 1:
        raise ConfigError(f'"{source}" has {columns} columns "{field}": rename all but the one to read')
    kind = schema.field(field).type
    if column.messages:
        types, text = pyarrow.types, (pyarrow.string(), pyarrow.large_string())
        item = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else None
        content = item or kind  # messages as JSON are text, or an extension type of it
        if not (item and types.is_struct(item)) and getattr(content, "storage_type", content) not in text:
            raise ConfigError(f'field "{field}" of "{source}" is no list of messages but {kind}')
    elif kind not in (pyarrow.string(), pyarrow.large_string()):
        raise ConfigError(f'field "{field}" of "{source}" is not text but {kind}')
    return fields
