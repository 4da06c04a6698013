"""Sources of text: the source code of the standard library, files, a folder or a dataset, as a stream of documents.

The standard library is the default: every Python installation has it, without a download, and it is the same on all
machines with the same Python. `datasets` loads datasets from the Hub and local folders in other formats; its Arrow
files are read like those of `save_to_disk`. It executes no code of a data folder.

A source has a fingerprint of its content, never of modification times; `corpus.py` keys its cache on it. Every later
read is hashed too, and a difference raises an error.
"""

import glob
import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Data, expand
from octavo.train.data import documents, hf_datasets
from octavo.train.data.documents import OnBytesRead, Stream

STDLIB = hf_datasets.STDLIB
SUFFIXES = (".txt", ".jsonl", ".parquet")
"""Kinds of files read by this module, of `documents.FILE_KINDS`; `datasets` reads the others."""
METADATA = {"config.json", "dataset_info.json", "dataset_infos.json"}
"""Names of .json files without data."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz")
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "turtledemo", "__pycache__"}
"""Folders of the standard library to leave out: installed packages, and tests (two thirds of the text)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Documents of text."""

    fingerprint: str
    """Hash of the content."""
    read: Callable[[Path], Stream]
    """Read the documents, with a folder for intermediate files; may be called several times with one folder."""
    skipped: int = 0
    """Number of files left out because they are not UTF-8 (standard library only; elsewhere an error)."""
    skipped_files: str = ""
    """A note on ignored files of the folder; empty if there are none."""
    without_text: str = ""
    """The note on documents without text, after their number; empty if they need none."""


def open_source(config: Data, on_bytes_read: OnBytesRead) -> Source:
    """Find the data and fingerprint it. `on_bytes_read` is called with the number of bytes just read.

    Raises ConfigError if there is no data, it is not text, or it has no split `data.split`.
    """
    path = expand(config.source)
    if config.source == STDLIB:
        _refuse_split(config, "the standard library has")
        return _standard_library(Path(sysconfig.get_paths()["stdlib"]))
    if path.is_dir():
        return _open_folder(config, path, on_bytes_read)
    suffix = documents.suffix(path)
    if suffix in SUFFIXES:
        _refuse_split(config, "files have")
        return _open_files(config, _matches(config, str(path)), suffix, on_bytes_read)
    if suffix in COMPRESSED:
        raise ConfigError(f'data.source = "{config.source}": compressed files are not read: decompress them first')
    if path.is_file() or glob.has_magic(config.source):
        raise ConfigError(f'data.source = "{config.source}": files must end in {", ".join(SUFFIXES)}')
    folder = expand(config.source.partition(":")[0])
    if folder.is_dir():  # "folder:subset"
        return _open_prepared(config, folder, on_bytes_read)
    if path.is_absolute() or config.source.startswith("."):
        raise ConfigError(f'data.source = "{config.source}" cannot be read: there is no such file or folder')
    return _open_hub(config, on_bytes_read)


def _refuse_split(config: Data, what: str) -> None:
    if config.split != "train":
        raise ConfigError(
            f'data.split = "{config.split}": {what} no splits: leave data.split out, and name the text in data.source'
        )


def _standard_library(root: Path) -> Source:
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(name.as_posix() for name in paths if not NOT_SOURCE.intersection(name.parts))
    skipped = 0

    def texts(digest: "hashlib._Hash") -> Stream:
        nonlocal skipped
        skipped = 0
        for name in names:
            with documents.reading(str(root / name)):
                content = (root / name).read_bytes()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                skipped += 1
                continue
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
            yield from documents.rows_as_documents([text])

    digest = hashlib.sha256()
    for _ in texts(digest):
        pass
    fingerprint = digest.hexdigest()
    return Source(
        fingerprint=fingerprint,
        skipped=skipped,
        read=lambda _: _check_unchanged(STDLIB, fingerprint, hashlib.sha256(), texts),
    )


def _check_unchanged(
    source: str, fingerprint: str, digest: "hashlib._Hash", stream: Callable[["hashlib._Hash"], Stream]
) -> Stream:
    """Yield the documents of `stream`, which updates `digest`. Raises ConfigError if the content has changed."""
    yield from stream(digest)
    if digest.hexdigest() != fingerprint:
        raise ConfigError(f'data.source = "{source}" changed while it was read: start again once nothing writes to it')


def _matches(config: Data, pattern: str) -> list[str]:
    """The files of a glob, sorted. A file reached by several paths through linked folders counts once."""
    paths = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))  # [ ] may be literal
    real = lru_cache(maxsize=None)(os.path.realpath)
    files: dict[tuple[str, str], str] = {}
    for path in paths:
        _check_link(path)
        if os.path.isfile(path):
            files.setdefault((real(os.path.dirname(path)), os.path.basename(path)), path)
    if not files:
        raise ConfigError(f'data.source = "{config.source}" matches no file (relative to {Path.cwd()})')
    return list(files.values())


def _check_link(path: str) -> None:
    if not os.path.exists(path) and os.path.islink(path):
        raise ConfigError(f"{path} cannot be read: it is a link to {os.readlink(path)}, which does not exist")


def _open_files(
    config: Data, paths: list[str], suffix: str, on_bytes_read: OnBytesRead, skipped_files: str = ""
) -> Source:
    column = "" if suffix == ".txt" else f"\0{config.text_field}"
    seed = f"{suffix}{column}".encode()
    digest = hashlib.sha256(seed)
    for path in paths:
        documents.hash_file(path, digest, on_bytes_read, kind=suffix)
    fingerprint = digest.hexdigest()

    def texts(digest: "hashlib._Hash") -> Stream:
        if suffix == ".jsonl":
            yield from documents.json_lines(paths, config.text_field, config.source, digest, on_bytes_read)
            return
        for path in paths:
            if suffix == ".txt":
                yield from documents.text_file(path, digest, on_bytes_read)
                continue
            for group in documents.parquet_rows(path, config.text_field, config.source):
                yield from documents.rows_as_documents(group)
            documents.hash_file(path, digest, on_bytes_read, kind=suffix)

    without_text = "files are empty" if suffix == ".txt" else _rows_without_text(config)
    return Source(
        fingerprint=fingerprint,
        read=lambda _: _check_unchanged(config.source, fingerprint, hashlib.sha256(seed), texts),
        skipped_files=skipped_files,
        without_text=without_text,
    )


def _rows_without_text(config: Data) -> str:
    return f'rows have no text in field "{config.text_field}" (missing, null or empty)'


def _open_folder(config: Data, path: Path, on_bytes_read: OnBytesRead) -> Source:
    """Open a folder of `save_to_disk`, or one whose files are all of one kind."""
    if (path / "dataset_dict.json").is_file():
        splits = _read_manifest(path / "dataset_dict.json", "splits")["splits"]
        if config.split not in splits:
            raise documents.no_split(config.source, config.split, splits)
        return _open_saved(config, path / config.split, on_bytes_read)
    if (path / "state.json").is_file():
        if config.split not in ("train", _read_manifest(path / "state.json", "_data_files").get("_split")):
            _refuse_split(config, "a saved data set that is not a DatasetDict has")
        return _open_saved(config, path, on_bytes_read)
    files = _files_below(path)
    kinds = {documents.suffix(file) for file in files if os.path.basename(file) not in METADATA}
    usable = sorted(kinds.intersection(documents.FILE_KINDS))
    if _has_configs(path / "README.md") or (len(usable) == 1 and usable[0] not in SUFFIXES):
        return _open_prepared(config, path, on_bytes_read)
    if len(usable) != 1:
        kind = next((kind for kind in usable if kind in SUFFIXES), SUFFIXES[0])
        raise ConfigError(
            f'data.source = "{config.source}" {"is a folder of several kinds" if usable else "holds nothing to read"}: '
            f'{_contents(files)}; give files of one kind with a pattern, as "{path}/**/*{kind}", or a folder that '
            "save_to_disk wrote; compressed files have to be decompressed"
        )
    chosen = _files_of_split(config, path, [file for file in files if documents.suffix(file) == usable[0]])
    rest = sorted(set(files) - set(chosen))
    skipped_files = f'{len(rest)} of {len(files)} files in "{config.source}" are left out: {_contents(rest)}'
    return _open_files(config, chosen, usable[0], on_bytes_read, skipped_files if rest else "")


def _contents(files: list[str]) -> str:
    """Counts by suffix, as "3 .csv, 1 .md"."""
    counts = Counter(documents.suffix(file) or "without a suffix" for file in files)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common(20)) or "no files"


def _files_below(folder: Path) -> list[str]:
    """The files below a folder, sorted, without hidden ones; a linked folder is read once."""

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None

    paths: list[str] = []
    visited = set()
    for root, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        if (real := os.path.realpath(root)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        paths += [os.path.join(root, name) for name in names if not name.startswith(".")]
    for path in paths:
        _check_link(path)
    return sorted(path for path in paths if os.path.isfile(path))


def _files_of_split(config: Data, folder: Path, files: list[str]) -> list[str]:
    """The files whose names belong to `data.split`; if no name has a split, all are "train".

    The patterns are those of `datasets`, as "train-00000-of-00002.parquet", "test.jsonl", "validation/a.txt".
    """
    from datasets.data_files import EmptyDatasetError, get_data_patterns, resolve_pattern

    base = glob.escape(str(folder.resolve()))
    real = {os.path.realpath(file): file for file in files}
    splits: dict[str, set[str]] = {}
    with hf_datasets.no_progress_bars():
        try:
            patterns = get_data_patterns(base)
        except EmptyDatasetError:
            patterns = {}
        for split, names in patterns.items():
            paths = set()
            for name in names:
                with suppress(FileNotFoundError):  # one pattern of several
                    paths |= {os.path.realpath(path) for path in resolve_pattern(name, base)}
            if names != ["**"] and (members := paths.intersection(real)):
                splits[str(split)] = {real[path] for path in members}
    splits = splits or {"train": set(files)}
    if config.split not in splits:
        raise documents.no_split(config.source, config.split, splits)
    return [path for path in files if path in splits[config.split]]


def _has_configs(readme: Path) -> bool:
    """Whether the card of a data set folder assigns files to subsets or splits."""
    if not readme.is_file():
        return False
    with documents.reading(str(readme)):
        lines = readme.read_text(encoding="utf-8").splitlines()
    head = lines[1 : lines.index("---", 1)] if lines[:1] == ["---"] and "---" in lines[1:] else []
    return any(line.startswith("configs:") for line in head)


def _read_manifest(path: Path, key: str) -> dict[str, Any]:
    """Read a JSON file of `save_to_disk` whose `key` lists names. Raises ConfigError for any other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = content[key]
        names = [entry if key == "splits" else entry["filename"] for entry in entries]
        if not isinstance(entries, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
            raise ValueError(f"{key} lists something other than names")
        if outside := [name for name in names if key == "splits" and (Path(name).name != name or name == "..")]:
            raise ValueError(f"the split {outside[0]!r} is no folder in it")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: it is not what save_to_disk writes ({error!r})") from None
    return dict(content)


def _open_saved(config: Data, folder: Path, on_bytes_read: OnBytesRead) -> Source:
    """Open a folder of `Dataset.save_to_disk`."""
    entries = _read_manifest(folder / "state.json", "_data_files")["_data_files"]
    paths = [str(folder / os.path.basename(entry["filename"])) for entry in entries]
    return _open_arrow(config, lambda _: paths, on_bytes_read)


def _open_arrow(
    config: Data, prepare: Callable[[Path], list[str]], on_bytes_read: OnBytesRead, fingerprint: str = ""
) -> Source:
    """Open Arrow files, hashed by their rows unless `fingerprint` is set."""

    def texts(lengths: "hashlib._Hash", scratch: Path) -> Stream:
        content = hashlib.sha256()
        for path in prepare(scratch):
            groups = documents.arrow_rows(path, config.text_field, config.source, on_bytes_read)
            yield from documents.hashed_rows(groups, lengths, content)
        lengths.update(content.digest())

    def reread(scratch: Path) -> Stream:
        return _check_unchanged(config.source, fingerprint, hashlib.sha256(), lambda digest: texts(digest, scratch))

    without_text = _rows_without_text(config)
    if fingerprint:
        return Source(
            fingerprint=fingerprint,
            read=lambda scratch: texts(hashlib.sha256(), scratch),
            without_text=without_text,
        )
    digest = hashlib.sha256()
    for _ in texts(digest, Path()):
        pass
    fingerprint = digest.hexdigest()
    return Source(fingerprint=fingerprint, read=reread, without_text=without_text)


def _open_prepared(config: Data, folder: Path, on_bytes_read: OnBytesRead) -> Source:
    """Open a local folder with `datasets`, in the scratch folder: its own cache checks only modification times."""

    def fingerprint() -> str:
        subset = config.source.partition(":")[2] if not expand(config.source).is_dir() else ""
        digest = hashlib.sha256(f"folder\0{subset}\0{config.split}\0{config.text_field}".encode())
        for path in sorted({*_files_below(folder), *hf_datasets.files(config, folder)}):
            if documents.suffix(path) in COMPRESSED:
                raise ConfigError(f"{path} is compressed, and compressed files are not read: decompress it first")
            if documents.suffix(path) in documents.FILE_KINDS and Path(path).suffix not in documents.FILE_KINDS:
                raise ConfigError(f"{path} would be left out: rename it to end in {documents.suffix(path)}")
            digest.update(f"{os.path.relpath(path, folder)}\0".encode())
            documents.hash_file(path, digest, on_bytes_read, kind="")
        return digest.hexdigest()

    fingerprint_before = fingerprint()

    def prepare(scratch: Path) -> list[str]:
        paths = hf_datasets.load(config, str(folder), cache_dir=str(scratch / "arrow"))
        if fingerprint() != fingerprint_before:
            raise ConfigError(f'data.source = "{config.source}" changed while it was read: start again')
        return paths

    return _open_arrow(config, prepare, on_bytes_read, fingerprint_before)


def _open_hub(config: Data, on_bytes_read: OnBytesRead) -> Source:
    paths = hf_datasets.load(config, config.source.partition(":")[0])
    return _open_arrow(config, lambda _: paths, on_bytes_read)
