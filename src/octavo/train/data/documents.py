"""Read documents as a stream: of each the pieces of its text, to be read before the next one; no piece without text.

No reader holds more than a row (`ROW_LIMIT` at most) or `CHUNK` bytes of a file.
"""

import ast
import glob
import hashlib
import io
import json
import os
import re
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, NamedTuple

from octavo.numerics.suggestions import nearest
from octavo.train.config.run_config import ConfigError, naming
from octavo.train.config.sections import Data, expand
from octavo.train.data.chat import ALPACA, MESSAGES, SHAREGPT, TOOLS, Conversation, conversation_text, messages_of

if TYPE_CHECKING:
    import pyarrow


FILE_KINDS = {".txt", ".jsonl", ".parquet", ".csv", ".tsv", ".json", ".ndjson", ".arrow"}  # Files that hold text
Stream = Iterator[Iterable[str]]
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


def reading(path: str) -> AbstractContextManager[None]:
    """Turn what goes wrong while a file is read into a ConfigError that names it."""
    from pyarrow import ArrowException

    return naming(f"{path} cannot be read", OSError, ArrowException)


def column_identity(config: Data) -> str:
    """The part of a fingerprint that says how to read the content."""
    return f"\0{config.column}" + "\0messages" * (config.format == "messages")


def without_document(config: Data) -> str:
    return f'rows have no {config.format} in field "{config.column}" (missing, null or empty)'


def columns_of(config: Data, names: Collection[str]) -> list[str]:
    """The fields that hold the document in rows with these names. Raises ConfigError if there are none, or two."""
    fields, messages = [config.column], config.format == "messages"
    if messages and config.column not in names:
        if config.column == MESSAGES and SHAREGPT in names:
            fields = [SHAREGPT]
        elif {"instruction", "output"} <= {*names}:
            fields = [name for name in ALPACA if name in names]
    if (count := [*names].count(fields[0])) > 1:
        raise ConfigError(f'"{config.source}" has {count} columns "{fields[0]}": rename all but the one to read')
    if count:
        return fields + [TOOLS] * (messages and TOOLS in names)
    problem = f'"{config.source}" has no field "{config.column}"{nearest(config.column, names)}'
    remedy = f"set data.{config.format}_field"
    if not messages and CONVERSATIONS & set(names):
        remedy += ', or for conversations data.format = "messages"'
    raise NoFieldError(f"{problem} (fields: {', '.join([*names][:50]) or 'none'}): {remedy}")


def document_of(config: Data, where: object, row: Mapping[str, object]) -> str | None:
    """The document of a row; None or "" if it has none. Raises ConfigError, beginning with `where`."""
    messages = config.format == "messages"
    value = messages_of(row, config.column) if messages else row.get(config.column)
    if messages and value is not None:
        value = conversation_text(where, value, row.get(TOOLS))
    if value is None:
        return None
    if not isinstance(value, str):
        hint = '; of conversations? set data.format = "messages"' if isinstance(value, list) else ""
        raise ConfigError(f'{where}: field "{config.column}" is not text but {type(value).__name__}{hint}')
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


def read_documents(blocks: Collection[Block], kind: str, config: Data) -> Stream:
    """The documents of some files, or parts of files, of one kind. Raises ConfigError for bad data."""
    if kind == ".txt":
        yield from (_text(block.path) for block in blocks)
        return
    rows = _json_rows(blocks, config) if kind == ".jsonl" else _table_rows(blocks, kind, config)
    for where, row in rows:
        text = document_of(config, where, row)
        yield [text] if text else []


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


def _json_rows(blocks: Collection[Block], config: Data) -> Iterator[tuple[Line, dict[str, object]]]:
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
        columns_of(config, fields)


def _table_rows(blocks: Collection[Block], kind: str, config: Data) -> Iterator[tuple[str, dict[str, object]]]:
    """The rows of Parquet files, of row groups of them, or of Arrow streams, as `datasets` saves them."""
    import pyarrow
    from pyarrow import parquet

    for path, start, stop in ((block.path, block.start, block.stop) for block in blocks):
        with reading(path):
            if kind == ".arrow":
                stream = pyarrow.ipc.open_stream(pyarrow.memory_map(path))
                fields, row = columns_of(config, stream.schema.names), 0
                batches = (batch.select(fields) for batch in stream)
            else:
                file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK)
                fields = columns_of(config, file.schema_arrow.names)
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


# Sources of text: the standard library, files, a folder or a dataset, as a stream of documents with a fingerprint.
#
# `datasets` prepares those of the Hub, and local folders of other formats or with a card (README.md, .huggingface.yaml)
# that says which files are which split. Fingerprints are of the content of files, never of modification times.


STDLIB = "python-stdlib"
DOCSTRINGS = "python-docstrings"
STANDARD = {STDLIB: "text", DOCSTRINGS: "messages"}  # `data.format` of the standard library
DOCSTRINGS_VERSION = b"python-docstrings 1"  # Part of the fingerprint; changes with the conversations of a module
SYSTEM = "You answer questions about Python's standard library."
SUFFIXES = (".txt", ".jsonl", ".parquet")
"""Kinds of files that are read as they are; `datasets` prepares the others of `FILE_KINDS`."""
METADATA = {"config.json", "dataset_info.json", "dataset_infos.json"}  # Names of .json files without data
SAVED = ("dataset_dict.json", "state.json")  # Files that `save_to_disk` writes
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz")
NOT_SOURCE = ("site-packages", "dist-packages", "test", "idle_test", "lib2to3", "turtledemo", "__pycache__")
"""Folders of the standard library to leave out: installed packages, and tests (two thirds of the text)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    fingerprint: str  # Hash of the content
    read: Callable[[Path], Stream]  # Read the documents, with a folder for intermediate files
    skipped_files: str = ""  # A note on ignored files of the folder; empty if there are none
    without_text: str = ""  # The note on documents without text, after their number; empty if they need none
    # Size in bytes and digest of each file by name, to name the one that changed before a resume.
    files: Mapping[str, list[int | str]] = field(default_factory=dict)


class Files(NamedTuple):
    paths: list[str]
    kind: str
    note: str = ""  # On the files of the folder that are left out


def open_source(config: Data, on_bytes_read: OnBytesRead) -> Source:
    """Find the data and fingerprint it. `on_bytes_read` is called with the number of bytes just read."""
    # Raises ConfigError if there is no data, it is not text, or it has no split `data.split`.
    path, name = expand(config.source), config.source.partition(":")[0]
    if expected := STANDARD.get(config.source):
        _check_split(config)
        if config.format != expected:
            raise ConfigError(f'data.source = "{config.source}" has {expected}: set data.format = "{expected}"')
        return _standard_library(config.source, Path(sysconfig.get_paths()["stdlib"]))
    if (files := list_files(config)) is not None:
        return _open_files(config, files, on_bytes_read)
    if path.is_dir() and _is_saved(path):
        return _open_files(config, Files(_saved(config, path), ".arrow"), on_bytes_read)
    if path.is_dir() or expand(name).is_dir():  # "folder:subset"
        return _open_prepared(config, path if path.is_dir() else expand(name), on_bytes_read)
    if path.is_file() or glob.has_magic(config.source):
        kinds = ".txt, .jsonl (both also with .gz or .zst) or .parquet: decompress or convert others"
        raise ConfigError(f'data.source = "{config.source}": files must end in {kinds}')
    if path.is_absolute() or config.source.startswith("."):
        raise ConfigError(f'data.source = "{config.source}" cannot be read: there is no such file or folder')
    return _open_files(config, Files(_load(config, name), ".arrow"), on_bytes_read)


def _check_split(config: Data, splits: Collection[object] = ("train",)) -> None:
    if config.split not in splits:
        names = ", ".join(map(str, splits))
        raise ConfigError(f'"{config.source}" has no split "{config.split}"; it has {names}: set data.split')


def _unchanged(source: str, paths: list[str], read: Callable[[Path], Stream]) -> Callable[[Path], Stream]:
    """`read`, which raises ConfigError at its end if a file is no longer what it was when this was called."""

    def stamps() -> list[tuple[int, int, int]]:
        with reading(source):
            return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, paths)]

    before = stamps()

    def checked(scratch: Path) -> Stream:
        yield from read(scratch)
        if stamps() != before:
            what = f'data.source = "{source}" changed while it was read'
            raise ConfigError(f"{what}: start again once nothing writes to it")

    return checked


def _standard_library(source: str, root: Path) -> Source:
    """The modules of the standard library that are UTF-8, or the conversations about their docstrings."""
    walked = (Path(folder, name) for folder, names in _walk(str(root), skipped=NOT_SOURCE) for name in names)
    paths = {path.relative_to(root).as_posix(): str(path) for path in walked if path.suffix == ".py"}

    def modules() -> Iterator[tuple[str, str]]:
        for name in sorted(paths):
            with reading(paths[name]), suppress(UnicodeDecodeError):
                yield name, Path(paths[name]).read_bytes().decode("utf-8")

    def read(_: Path) -> Stream:
        for name, text in modules():
            for document in [text] if source == STDLIB else _conversations_about(name, text):
                yield [document] if document else []

    reader = _unchanged(source, [*paths.values()], read)
    digest, left_out = hashlib.sha256(b"" if source == STDLIB else DOCSTRINGS_VERSION), len(paths)
    for name, text in modules():
        content, left_out = text.encode(), left_out - 1
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    note = f"{left_out} files of the data were left out: not UTF-8" if left_out else ""
    return Source(fingerprint=digest.hexdigest(), read=reader, skipped_files=note)


def _open_files(config: Data, files: Files, on_bytes_read: OnBytesRead) -> Source:
    kind = files.kind
    blocks = [Block(path) for path in files.paths]
    read = _unchanged(config.source, files.paths, lambda _: read_documents(blocks, kind, config))
    digest = hashlib.sha256(f"{kind}{'' if kind == '.txt' else column_identity(config)}".encode())
    sizes: dict[str, list[int | str]] = {}
    for path in files.paths:
        hash_file(path, digest, on_bytes_read)
        sizes[path] = [os.path.getsize(path), digest.hexdigest()[:16]]  # that of the files up to this one
    return Source(
        fingerprint=digest.hexdigest(), read=read, skipped_files=files.note, files=sizes,
        without_text="files are empty" if kind == ".txt" else without_document(config),
    )  # fmt: skip


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _saved(config: Data, folder: Path) -> list[str]:
    import datasets

    with _preparing(config):
        saved = datasets.load_from_disk(str(folder))
    if not isinstance(saved, datasets.DatasetDict):
        saved = dict.fromkeys(sorted({"train", str(saved.split or "train")}), saved)
    _check_split(config, saved)
    paths = [os.path.abspath(file["filename"]) for file in saved[config.split].cache_files]
    if outside := [path for path in paths if not Path(path).is_relative_to(os.path.abspath(folder))]:
        raise ConfigError(f'data.source = "{config.source}": its file {outside[0]} is not in the folder')
    return paths


def _open_prepared(config: Data, folder: Path, on_bytes_read: OnBytesRead) -> Source:
    """Open a local folder with `datasets`, in the scratch folder: its own cache checks only modification times."""
    subset, files = _subset(config), files_below(folder)
    kinds = _kinds(files)
    if subset is None and not _has_configs(folder) and (len(kinds) != 1 or kinds[0] in SUFFIXES):
        problem = f'data.source = "{config.source}" should hold files of one kind to read'
        remedy = f'name some with a pattern, as "{folder}/**/*{next(iter(kinds), ".txt")}"; compressed files have to be'
        remedy += " decompressed, but for .txt and .jsonl with .gz or .zst"
        raise ConfigError(f"{problem}, and holds {suffix_counts(files)}: {remedy}")
    digest = hashlib.sha256(f"folder\0{subset or ''}\0{config.split}{column_identity(config)}".encode())
    # What a card names may be hidden, so that a look into the folder does not find all that `datasets` reads.
    paths = sorted({*files, *_files_of_card(config, folder)})

    def read(scratch: Path) -> Stream:
        blocks = [Block(path) for path in _load(config, str(folder), cache_dir=str(scratch / "arrow"))]
        return read_documents(blocks, ".arrow", config)

    reader = _unchanged(config.source, paths, read)
    for path in paths:
        if Path(path).suffix not in FILE_KINDS and suffix(path) in FILE_KINDS.union(COMPRESSED):
            raise ConfigError(f"{path} would be left out: decompress it, or let its name end in lower case")
        digest.update(f"{os.path.relpath(path, folder)}\0".encode())
        hash_file(path, digest, on_bytes_read)
    return Source(fingerprint=digest.hexdigest(), read=reader, without_text=without_document(config))


def _kinds(files: list[str]) -> list[str]:
    kinds = {suffix(file) for file in files if os.path.basename(file) not in METADATA}
    return sorted(kinds.intersection(FILE_KINDS))


def _has_configs(folder: Path) -> bool:
    """Whether the card of a data set folder assigns files to subsets or splits."""
    readme = folder / "README.md"
    with reading(str(readme)):
        text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    head, closing, _ = text.partition("\n---")
    return bool(closing) and re.match(r"---\s*\n(.*\n)*?configs:", head) is not None


def _subset(config: Data) -> str | None:
    return None if expand(config.source).is_dir() else config.source.partition(":")[2] or None


def _files_of_card(config: Data, folder: Path) -> list[str]:
    """The files that `_load` reads of a local folder, hidden ones and its card included."""
    # Raises ConfigError if they are not all in the folder, or of another kind. Text would be cut into lines.
    import datasets
    import yaml
    from huggingface_hub import DatasetCard

    readme, card = folder / datasets.config.REPOCARD_FILENAME, folder / datasets.config.REPOYAML_FILENAME
    kinds = FILE_KINDS - {".txt"}
    with _preparing(config), tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
        tables = [DatasetCard.load(readme).data.to_dict()] if readme.is_file() else []
        tables += [yaml.safe_load(card.read_text(encoding="utf-8"))] if card.exists() else []
        configs = str([(table or {}).get("configs") for table in tables])
        if remote := re.search("[^'\" ]*(://|::)[^'\" ]*", configs):  # `datasets` would ask the network for it
            raise ValueError(f"its card names {remote[0]}: the files of a folder must be in it")
        builder = datasets.load_dataset_builder(str(folder), _subset(config), cache_dir=scratch)
        by_split = builder.config.data_files or {}
        names = sorted({os.path.relpath(path, folder.resolve()) for paths in by_split.values() for path in paths})
        for name in names:
            if Path(name).parts[0] == os.pardir:
                raise ValueError(f"its card names {name}, which is not in the folder: move it there")
            if suffix(name) not in kinds:
                raise ValueError(f"its card names {name}: files must end in {', '.join(sorted(kinds))}")
    return [str(folder / name) for name in names] + ([str(card)] if card.exists() else [])


def _load(config: Data, name: str, cache_dir: str | None = None) -> list[str]:
    """The Arrow files of a data set that `datasets` loads. Raises ConfigError if it has no split `data.split`."""
    import datasets

    with _preparing(config):
        splits = datasets.load_dataset(name, _subset(config), cache_dir=cache_dir)
    _check_split(config, splits)
    return [entry["filename"] for entry in splits[config.split].cache_files]


@contextmanager
def _preparing(config: Data) -> Iterator[None]:
    """Around calls of `datasets`: without its progress bars, and with what goes wrong as a ConfigError."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    except Exception as error:  # of no common type: each format and each part of a card fails in its own way
        cause = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        guess = nearest(config.source, [STDLIB])
        raise ConfigError(f'data.source = "{config.source}" cannot be read: {cause}{guess}') from None
    finally:
        if not before:
            enable_progress_bars()


def list_files(config: Data) -> Files | None:
    """The files of a pattern, or of a folder of one kind; None for sources that are not read file by file."""
    path = expand(config.source)
    if not path.is_dir():
        if (kind := suffix(path)) not in SUFFIXES:
            return None
        _check_split(config)
        found = Files(matches(config, str(path)), kind)
    else:
        files = files_below(path)
        kinds = _kinds(files)
        if _is_saved(path) or len(kinds) != 1 or kinds[0] not in SUFFIXES or _has_configs(path):
            return None
        chosen = [file for file in files if suffix(file) == kinds[0]]
        # Compressed files only where there are no others, of which they may be copies.
        chosen = [file for file in chosen if not is_compressed(file)] or chosen
        chosen = _files_of_split(config, path, chosen)
        rest = sorted(set(files) - set(chosen))
        note = f'{len(rest)} of {len(files)} files in "{config.source}" are left out: {suffix_counts(rest)}'
        found = Files(chosen, kinds[0], note if rest else "")
    if config.format == "messages" and found.kind == ".txt":
        raise ConfigError(f'data.source = "{config.source}": .txt files have no messages: give .jsonl or .parquet')
    return found


def matches(config: Data, pattern: str) -> list[str]:
    """The files of a glob, sorted. A file reached by several paths through linked folders counts once."""
    paths = [pattern] if Path(pattern).is_file() else sorted(_expand(pattern))  # [ ] may be literal
    files: dict[tuple[str, str], str] = {}
    for path in paths:
        _check_link(path)
        if os.path.isfile(path):
            files.setdefault((os.path.realpath(os.path.dirname(path)), os.path.basename(path)), path)
    if not files:
        raise ConfigError(f'data.source = "{config.source}" matches no file (relative to {Path.cwd()})')
    return list(files.values())


def _expand(pattern: str) -> Iterator[str]:
    """The paths of a glob with `**`; a linked folder is read once, so links back to a folder above end."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    at = parts.index("**")
    rest = parts[at + 1 :] or ("*",)
    for start in glob.glob(os.path.join(*parts[:at])) if at else [""]:
        for folder, _ in _walk(start or ".", skipped=(".",)):
            folder = os.path.relpath(folder) if not start else folder
            yield from _expand(os.path.join(*([] if folder == "." else [glob.escape(folder)]), *rest))


def _walk(folder: str, *, skipped: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """The folders below a folder with their files' names; each once, by the first of several paths."""
    # `skipped`: beginnings of names of folders to leave out.

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None

    visited = set()
    for root, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        if (real := os.path.realpath(root)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(skipped))
        yield root, names


def _check_link(path: str) -> None:
    if not os.path.exists(path) and os.path.islink(path):
        raise ConfigError(f"{path} cannot be read: it is a link to {os.readlink(path)}, which does not exist")


def suffix_counts(files: list[str]) -> str:
    """Counts by suffix, as "3 .csv, 1 .md"."""
    counts = Counter(Path(file).suffix.lower() or "without a suffix" for file in files)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common(20)) or "no files"


def files_below(folder: Path) -> list[str]:
    """The files below a folder, sorted, without hidden ones; a linked folder is read once."""
    walked = _walk(str(folder), skipped=(".", "__"))
    paths = sorted(os.path.join(root, name) for root, names in walked for name in names if not name.startswith("."))
    for path in paths:
        _check_link(path)
    return [path for path in paths if os.path.isfile(path)]


def _files_of_split(config: Data, folder: Path, files: list[str]) -> list[str]:
    """The files whose names belong to `data.split`; if no name has a split, all are "train"."""
    # The patterns are those of `datasets`, as "train-00000-of-00002.parquet", "test.jsonl", "validation/a.txt".
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    base, real = glob.escape(str(folder.resolve())), {os.path.realpath(file): file for file in files}
    splits: dict[str, set[str]] = {}
    with _preparing(config), suppress(EmptyDatasetError):
        patterns = {split: names for split, names in get_data_patterns(base).items() if names != ["**"]}
        for split, paths in DataFilesDict.from_patterns(patterns, base).items():
            if members := {real[path] for path in map(os.path.realpath, paths) if path in real}:
                splits[str(split)] = members
    splits = splits or {"train": set(files)}
    _check_split(config, splits)
    return [path for path in files if path in splits[config.split]]


def _conversations_about(name: str, text: str) -> list[Conversation]:
    """The conversations about a module at the path `name`: parsed, never imported."""
    module = ".".join(PurePosixPath(name).with_suffix("").parts).removesuffix(".__init__")
    if any(part.startswith("_") for part in module.split(".")):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    talks = (messages for node in tree.body for messages in _conversations_of(module, node))
    return [Conversation(json.dumps(messages, ensure_ascii=False)) for messages in talks]


def _conversations_of(prefix: str, node: ast.stmt) -> Iterator[list[dict[str, str]]]:
    """The conversations about a function or a class and its methods: what it does, and how it is called."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return
    name = f"{prefix}.{node.name}"
    if text := ast.get_docstring(node):
        turns = [(f"What does `{name}` do?", " ".join(text.split("\n\n")[0].split()))]
        if isinstance(node, ast.FunctionDef):
            turns.append(("How is it called?", f"{name}({ast.unparse(node.args)})"))
        messages = [{"role": "system", "content": SYSTEM}]
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield messages
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            yield from _conversations_of(name, inner)
