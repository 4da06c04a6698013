"""Where text comes from: the standard library's own source, files, or a dataset; always as numbered documents.

The standard library is the default because every Python installation carries it: no download, and the same on every
machine with the same Python. Files and datasets go through `datasets`, whose Arrow tables are memory-mapped, so
that a corpus larger than memory is read a piece at a time.

A source knows a fingerprint of its content before any of it is parsed: `data.py` keys its cache on it.
"""

import codecs
import glob
import hashlib
import itertools
import json
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.numerics.names import nearest
from octavo.train.config import ConfigError
from octavo.train.sections import Data

STDLIB = "python-stdlib"
SUFFIXES = (".txt", ".jsonl", ".parquet")
ROWS_FOR_FIELDS = 100
"""Rows of a .jsonl that are asked for the names of their fields."""
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "turtledemo", "__pycache__"}
"""Folders of the standard library left out: what is installed beside it, and tests (two thirds of the text)."""


@dataclass(frozen=True)
class Source:
    """Documents of text."""

    fingerprint: str
    """Hash of the content."""
    skipped: int
    """Files left out because they are not UTF-8 (standard library only; elsewhere that is an error)."""
    load: Callable[[Path], Any]
    """Given a folder for intermediate files, returns a sized sequence of str or None that takes slices."""


class Column:
    """One column of a dataset as a sequence that reads what it is asked for, no more."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset.select_columns([name])
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: int | slice) -> Any:
        return self._dataset[rows][self._name]


def open_source(config: Data) -> Source:
    """Finds the data and fingerprints it. Raises ConfigError where there is none or it is not text."""
    if config.source == STDLIB:
        return _standard_library(Path(sysconfig.get_paths()["stdlib"]))
    suffix = Path(config.source).suffix
    path = Path(config.source).expanduser()
    if suffix in SUFFIXES and not path.is_dir():
        return _files(config, str(path), suffix)
    if path.is_file() or glob.has_magic(config.source):
        raise ConfigError(f'data.source = "{config.source}": files must end in {", ".join(SUFFIXES)}')
    return _dataset(config)


def _standard_library(root: Path) -> Source:
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(name.as_posix() for name in found if not NOT_SOURCE.intersection(name.parts))
    digest = hashlib.sha256()
    texts, skipped = [], 0
    for name in names:
        content = (root / name).read_bytes()
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError:
            skipped += 1
            continue
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return Source(digest.hexdigest(), skipped, lambda _: texts)


def _files(config: Data, pattern: str, suffix: str) -> Source:
    literal = Path(pattern).is_file()  # a name with [ ] in it may be just that
    paths = (
        [pattern] if literal else sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    )
    if not paths:
        raise ConfigError(f'data.source = "{config.source}" matches no file (seen from {Path.cwd()})')
    column = "" if suffix == ".txt" else f"\0{config.text_field}"
    digest = hashlib.sha256(f"{suffix}{column}".encode())
    for path in paths:
        _hash_file(path, digest, text=suffix != ".parquet")

    def load(scratch: Path) -> Any:
        # `datasets` reads the names as patterns again, so what is special in them has to be escaped.
        options: dict[str, Any] = {"data_files": [glob.escape(path) for path in paths], "cache_dir": str(scratch)}
        if suffix == ".txt":
            return Column(_load_dataset(config, "text", sample_by="document", split="train", **options), "text")
        if suffix == ".jsonl":
            return _json_lines(config, paths, scratch)
        return _column(config, _load_dataset(config, "parquet", split="train", **options))

    return Source(digest.hexdigest(), 0, load)


def _json_lines(config: Data, paths: list[str], scratch: Path) -> Column:
    """The text of each line. Only that column is read: the rest of a row may differ from the next."""
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetsError

    field = config.text_field
    fields: dict[str, None] = {}
    for row in itertools.islice(_json_rows(config, paths), ROWS_FOR_FIELDS):
        fields |= dict.fromkeys(row)
    if not fields:
        raise ConfigError(f'data.source = "{config.source}" is empty: no rows')
    _check_field(config, fields)

    def texts() -> Iterator[dict[str, str | None]]:
        for row in _json_rows(config, paths):
            text = row.get(field)
            if not isinstance(text, str | None):
                raise ConfigError(f'field "{field}" of "{config.source}" is not text but {type(text).__name__}')
            yield {field: text}

    features = Features({field: Value("large_string")})
    try:
        with _no_progress_bars():
            dataset = Dataset.from_generator(texts, features=features, cache_dir=str(scratch))
    except DatasetsError as error:
        raise ConfigError(str(error.__cause__ or error)) from None
    return Column(dataset, field)


def _json_rows(config: Data, paths: list[str]) -> Iterator[dict[str, Any]]:
    for path in paths:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    row, reason = None, f"is not JSON ({error.msg})"
                else:
                    reason = f"is no JSON object but {type(row).__name__}"
                if not isinstance(row, dict):
                    raise ConfigError(f'data.source = "{config.source}" cannot be read: {path}, line {number} {reason}')
                yield row


def _hash_file(path: str, digest: "hashlib._Hash", *, text: bool) -> None:
    """Adds a file's content to `digest`; where it should be text, checks on the way that it is UTF-8 without NULs."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        size = Path(path).stat().st_size
        digest.update(f"{size}\0".encode())
        with open(path, "rb") as file:
            for start in itertools.count(0, 1 << 20):
                piece = file.read(1 << 20)
                digest.update(piece)
                if text and b"\0" in piece:
                    raise ConfigError(f"{path} is not text: byte {start + piece.index(0)} is NUL")
                if text:
                    decoder.decode(piece, final=not piece)
                if not piece:
                    return
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason}): convert it, or leave it out") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _dataset(config: Data) -> Source:
    path = Path(config.source).expanduser()
    if (path / "state.json").exists():
        from datasets import load_from_disk

        dataset = load_from_disk(str(path))
        if isinstance(dataset, dict):
            dataset = _split(config, dataset)
    else:
        name, _, subset = config.source.partition(":")
        name = str(path) if path.exists() else name
        dataset = _split(config, _load_dataset(config, name, subset or None))
    column = _column(config, dataset)
    digest = hashlib.sha256(f"{dataset._fingerprint}\0{config.text_field}".encode())
    return Source(digest.hexdigest(), 0, lambda _: column)


def _split(config: Data, splits: Any) -> Any:
    if config.split not in splits:
        raise ConfigError(
            f'"{config.source}" has no split "{config.split}"; it has {", ".join(splits)}: set data.split'
        )
    return splits[config.split]


def _load_dataset(config: Data, name: str, *arguments: Any, **options: Any) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    try:
        with _no_progress_bars():
            return load_dataset(name, *arguments, **options)
    except (DatasetsError, ArrowException, OSError, ValueError) as error:
        cause = error.__cause__ or error
        guess = nearest(config.source, [STDLIB])
        raise ConfigError(f'data.source = "{config.source}" cannot be read: {cause}{guess}') from None


def _column(config: Data, dataset: Any) -> Column:
    fields = dataset.features
    _check_field(config, fields)
    kind = getattr(fields[config.text_field], "dtype", "")
    if kind not in ("string", "large_string"):
        raise ConfigError(f'field "{config.text_field}" of "{config.source}" is not text but {kind or "nested"}')
    return Column(dataset, config.text_field)


def _check_field(config: Data, fields: Collection[str]) -> None:
    if config.text_field not in fields:
        known = ", ".join(fields) or "none"
        raise ConfigError(
            f'"{config.source}" has no field "{config.text_field}"{nearest(config.text_field, fields)} '
            f"(fields: {known}): set data.text_field"
        )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()
