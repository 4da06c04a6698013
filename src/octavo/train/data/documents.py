"""Read documents as a stream: pieces of text, and None after the last piece of each document.

A document without text is a None with no piece before it, so a reader of the stream can count it. No reader holds more
than a row (`ROW_LIMIT` at most) or `CHUNK` bytes of a file: text files are decoded by chunks, .jsonl is parsed by
lines, Parquet is decoded by pages, and the pages of a memory-mapped Arrow file are dropped after reading.

Readers hash the content. `source.py` reads all content once for its fingerprint and compares every later read with it.
"""

import codecs
import io
import json
import mmap
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from octavo.numerics.names import nearest
from octavo.train.config.run_config import ConfigError

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
BATCH_ROWS = 64
"""Rows of a Parquet file that are decoded at once; dictionary encoding hides how long they are."""
DROP_PAGES_AFTER = 16 << 20
"""Bytes of a memory-mapped file after which its pages are dropped."""
BOM = codecs.BOM_UTF8


def suffix(path: str | Path) -> str:
    """How the name of a file ends, as ".txt", in lower case."""
    return Path(path).suffix.lower()


class HashedFile(io.RawIOBase):
    """A file open for reading, front to back, that adds its size and content to `digest`.

    With `text`, a byte order mark and carriage returns add a mark at the end of the file: earlier versions kept the
    one and converted the others, so the same bytes were other text.
    """

    def __init__(self, path: str, digest: "hashlib._Hash", on_bytes_read: OnBytesRead, *, text: bool = False) -> None:
        self._file = open(path, "rb", buffering=0)
        self._digest, self._on_bytes_read, self._text = digest, on_bytes_read, text
        self._start = True
        self._marks: set[bytes] = set()
        digest.update(f"{os.fstat(self._file.fileno()).st_size}\0".encode())

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`; returns the number of bytes, 0 at the end."""
        size = self._file.readinto(buffer)
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
        start, piece = 0, b"\0"
        while piece:
            piece = file.read(CHUNK) or b""
            if kind in (".txt", ".jsonl"):
                if b"\0" in piece:
                    raise ConfigError(f"{path} is not text: byte {start + piece.index(0)} is NUL")
                pending = len(decoder.getstate()[0])
                try:
                    decoder.decode(piece, final=not piece)
                except UnicodeDecodeError as error:
                    raise ConfigError(
                        f"{path} is not UTF-8 text: byte {start - pending + error.start} ({error.reason}); convert "
                        "it, or leave it out"
                    ) from None
            start += len(piece)


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


def json_lines(
    paths: list[str], field: str, source: str, digest: "hashlib._Hash", on_bytes_read: OnBytesRead
) -> Stream:
    """The text in `field` of each line. Raises ConfigError for a line that is no object, and a field in no row."""
    fields: dict[str, None] = {}
    rows = 0
    for path in paths:
        with reading(path), io.BufferedReader(HashedFile(path, digest, on_bytes_read), CHUNK) as file:
            for number, line in _lines(path, file):
                row = _json_row(path, number, line)
                rows += 1
                if len(fields) < 1000:
                    fields |= dict.fromkeys(row)
                text = row.get(field)
                if text is not None and not isinstance(text, str):
                    raise ConfigError(f'{path}, line {number}: field "{field}" is not text but {type(text).__name__}')
                if text:
                    _check_row(f"{path}, line {number}", text)
                    del line, row
                    yield text
                yield None
    if not rows:
        raise ConfigError(f'data.source = "{source}" is empty: no rows')
    if field not in fields:
        raise no_field(source, field, fields)


def _lines(path: str, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, numbered from 1; LF, CRLF and CR end a line."""
    number = 0
    while line := file.readline(ROW_LIMIT + 2):
        if len(line) > ROW_LIMIT and not line.endswith(b"\n"):
            raise ConfigError(f"{path}, line {number + 1} {_too_long()}")
        if not number:
            line = line.removeprefix(BOM)
        for part in line.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
            number += 1
            if part.strip():
                yield number, part


def _json_row(path: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
        reason = f"is no JSON object but {type(row).__name__}"
    except (ValueError, RecursionError) as error:
        row, reason = None, f"is not JSON ({getattr(error, 'msg', error)})"
    if not isinstance(row, dict):
        raise ConfigError(f"{path} cannot be read: {path}, line {number} {reason}")
    return row


def _check_row(where: str, text: str) -> None:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: the text is not valid Unicode ({error.reason})") from None
    if size > ROW_LIMIT:
        raise ConfigError(f"{where} {_too_long()}")


def _too_long() -> str:
    return (
        f"is longer than {ROW_LIMIT >> 20} MiB: cut it into several rows, or put the text into a .txt file, "
        "which is read in pieces"
    )


def parquet_rows(path: str, field: str, source: str) -> Iterator[list[str | None]]:
    """The text of a Parquet file, some rows at a time. Raises ConfigError if `field` is missing or not text."""
    from pyarrow import parquet

    with reading(path), parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK) as file:
        check_column(source, field, file.schema_arrow)
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
        mean = max(1, size // max(1, file.metadata.num_rows))
        rows = max(1, min(BATCH_ROWS, CHUNK // mean))
        first = 0
        for batch in file.iter_batches(batch_size=rows, columns=[field], use_threads=False):
            yield from _texts(path, first, batch.column(field))
            first += len(batch)


def arrow_rows(path: str, field: str, source: str, on_bytes_read: OnBytesRead) -> Iterator[list[str | None]]:
    """The text of an Arrow stream, as `datasets` saves it, some rows at a time. Raises as `parquet_rows`."""
    import pyarrow

    with reading(path), open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ConfigError(f"{path} cannot be read: it is empty")
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        stream = pyarrow.ipc.open_stream(pyarrow.py_buffer(pages))
        check_column(source, field, stream.schema)
        first = read = 0
        for batch in stream:
            column = batch.column(field)
            for start in range(0, len(column), 1 << 16):
                for texts in _texts(path, first + start, column.slice(start, 1 << 16)):
                    size = sum(len(text) for text in texts if text)
                    yield texts
                    on_bytes_read(size)
                    read += size
                    if read > DROP_PAGES_AFTER and hasattr(pages, "madvise"):
                        pages.madvise(mmap.MADV_DONTNEED)
                        read = 0
            first += len(column)


def _texts(path: str, first: int, column: Any) -> Iterator[list[str | None]]:
    """The rows of an Arrow array, about `CHUNK` bytes at a time."""
    from pyarrow import compute

    column.validate()
    lengths = np.asarray(compute.fill_null(compute.binary_length(column), 0), dtype=np.int64)
    if len(lengths) and (lengths.max() > ROW_LIMIT or lengths.min() < 0):
        raise ConfigError(f"{path}, row {first + int(lengths.argmax())} (from 0) {_too_long()}")
    ends = np.flatnonzero(np.diff(np.cumsum(lengths) // CHUNK)) + 1
    for start, stop in zip([0, *ends], [*ends, len(column)], strict=True):
        rows = column.slice(start, stop - start)
        rows.validate(full=True)  # UTF-8 and every offset: a damaged file would read beyond its memory
        yield rows.to_pylist()


def hashed_rows(groups: Iterator[list[str | None]], lengths: "hashlib._Hash", texts: "hashlib._Hash") -> Stream:
    """Rows as documents. Adds the length of each to one digest and its text to the other, however they are grouped."""
    for group in groups:
        lengths.update(np.array([-1 if text is None else len(text) for text in group], dtype="<i8").tobytes())
        texts.update("".join(text for text in group if text).encode())
        yield from rows_as_documents(group)


def rows_as_documents(group: list[str | None]) -> Stream:
    """Each row a document."""
    for text in group:
        if text:
            yield text
        yield None


def check_column(source: str, field: str, schema: Any) -> None:
    """Raise ConfigError if an Arrow schema has not one column `field`, of strings."""
    import pyarrow

    if field not in schema.names:
        raise no_field(source, field, schema.names)
    if (columns := schema.names.count(field)) > 1:
        raise ConfigError(f'"{source}" has {columns} columns "{field}": rename all but the one to read')
    kind = schema.field(field).type
    if kind not in (pyarrow.string(), pyarrow.large_string()):
        raise ConfigError(f'field "{field}" of "{source}" is not text but {kind}')


def no_field(source: str, field: str, fields: Collection[str]) -> ConfigError:
    """The error for a field that no row has."""
    names = ", ".join(list(fields)[:50]) or "none"
    return ConfigError(
        f'"{source}" has no field "{field}"{nearest(field, fields)} (fields: {names}): set data.text_field'
    )


def no_split(source: str, split: str, splits: Collection[str]) -> ConfigError:
    """The error for a split that a data set does not have."""
    return ConfigError(f'"{source}" has no split "{split}"; it has {", ".join(map(str, splits))}: set data.split')
