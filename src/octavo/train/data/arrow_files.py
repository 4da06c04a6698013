"""Read the documents of Parquet and Arrow files, some rows at a time.

Parquet is decoded by pages, and the pages of a memory-mapped Arrow file are dropped after reading.
"""

import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.train.config.run_config import ConfigError
from octavo.train.data import documents
from octavo.train.data.documents import (
    CHUNK,
    Column,
    OnBytesRead,
    Stream,
    no_field,
    reading,
    rows_as_documents,
    too_long,
)

if TYPE_CHECKING:
    import hashlib

BATCH_ROWS = 64
"""Rows of a Parquet file that are decoded at once; dictionary encoding hides how long they are."""
DROP_PAGES_AFTER = 16 << 20
"""Bytes of a memory-mapped file after which its pages are dropped."""


def parquet_rows(path: str, column: Column, groups: list[int] | None = None) -> Iterator[list[str | None]]:
    """The documents of a Parquet file, or of some row groups of it, some rows at a time."""
    # Raises ConfigError if the column is missing or holds something else.
    from pyarrow import parquet

    with reading(path), parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK) as file:
        fields = check_column(column, file.schema_arrow)
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
        mean = max(1, size // max(1, file.metadata.num_rows))
        rows = max(1, min(BATCH_ROWS, CHUNK // mean))
        first = sum(file.metadata.row_group(i).num_rows for i in range(groups[0] if groups else 0))
        for batch in file.iter_batches(batch_size=rows, row_groups=groups, columns=fields, use_threads=False):
            yield from _documents(path, first, batch, column, fields)
            first += len(batch)


def arrow_rows(path: str, column: Column, on_bytes_read: OnBytesRead) -> Iterator[list[str | None]]:
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
                for texts in _documents(path, first + start, batch.slice(start, 1 << 16), column, fields):
                    size = sum(len(text) for text in texts if text)
                    yield texts
                    on_bytes_read(size)
                    read += size
                    if read > DROP_PAGES_AFTER and hasattr(pages, "madvise"):
                        pages.madvise(mmap.MADV_DONTNEED)
                        read = 0
            first += len(batch)


def _documents(path: str, first: int, batch: Any, column: Column, fields: list[str]) -> Iterator[list[str | None]]:
    """The documents of some rows of a table."""
    if not column.messages:
        yield from _texts(path, first, batch.column(column.name))
        return
    rows = batch.select(fields)
    for start in range(0, len(rows), BATCH_ROWS):
        part = rows.slice(start, BATCH_ROWS)
        part.validate(full=True)
        yield [
            column.text(f"{path}, row {first + start + number} (from 0)", row)
            for number, row in enumerate(part.to_pylist())
        ]


def _texts(path: str, first: int, column: Any) -> Iterator[list[str | None]]:
    """The rows of an Arrow array, about `CHUNK` bytes at a time."""
    from pyarrow import compute

    column.validate()
    lengths = np.asarray(compute.fill_null(compute.binary_length(column), 0), dtype=np.int64)
    if len(lengths) and (lengths.max() > documents.ROW_LIMIT or lengths.min() < 0):
        raise ConfigError(f"{path}, row {first + int(lengths.argmax())} (from 0) {too_long()}")
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


def check_column(column: Column, schema: Any) -> list[str]:
    """The fields of a document in an Arrow schema."""
    # Raises ConfigError if it has not one such column, of strings or of lists of messages.
    import pyarrow

    fields, source = column.fields(schema.names), column.source
    field = fields[0]
    if field not in schema.names:
        raise no_field(column, schema.names)
    if (columns := schema.names.count(field)) > 1:
        raise ConfigError(f'"{source}" has {columns} columns "{field}": rename all but the one to read')
    kind = schema.field(field).type
    if column.messages:
        if "tools" in schema.names:
            raise ConfigError(f'"{source}" has a column "tools", which Octavo does not render: remove it')
        types = pyarrow.types
        is_list = types.is_list(kind) or types.is_large_list(kind)
        if len(fields) == 1 and not (is_list and types.is_struct(kind.value_type)):
            raise ConfigError(f'field "{field}" of "{source}" is no list of messages but {kind}')
    elif kind not in (pyarrow.string(), pyarrow.large_string()):
        raise ConfigError(f'field "{field}" of "{source}" is not text but {kind}')
    return fields
