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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.train.config.data_section import Data
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import expand
from octavo.train.data import arrow_files, chat, docstrings, documents, hf_datasets
from octavo.train.data.documents import OnBytesRead, Stream, column_of
from octavo.train.data.files import files_below, files_of_split, matches, suffix_counts

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
    files: Mapping[str, list[Any]] = field(default_factory=dict)
    """Size in bytes and digest of each file by name, to name the one that changed before a resume."""
    is_part: bool = False
    """Whether it is a chunk of a streamed source."""
    messages: bool = False
    """Whether documents are conversations (`chat.conversation_text`)."""

    def plain_text(self, scratch: Path) -> Stream:
        """The documents as text, of conversations the contents of the messages."""
        stream = self.read(scratch)
        return chat.contents(stream) if self.messages else stream


def open_source(config: Data, on_bytes_read: OnBytesRead) -> Source:
    """Find the data and fingerprint it. `on_bytes_read` is called with the number of bytes just read."""
    # Raises ConfigError if there is no data, it is not text, or it has no split `data.split`.
    source = _open(config, on_bytes_read)
    return replace(source, messages=config.format == "messages")


def streamed_files(config: Data) -> tuple[list[str], str, str]:
    """The files of a source that is streamed, their kind, and a note on ignored files of the folder."""
    # Raises ConfigError for other sources.
    path = expand(config.source)
    if path.is_dir() and not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        files = files_below(path)
        kinds = {documents.suffix(file) for file in files}.intersection(SUFFIXES)
        if len(kinds) == 1:
            kind = kinds.pop()
            chosen = files_of_split(config, path, _of_kind(files, kind))
            return chosen, kind, _skipped_files(config, files, chosen)
    elif (suffix := documents.suffix(path)) in SUFFIXES:
        _refuse_split(config, "files have")
        return matches(config, str(path)), suffix, ""
    raise ConfigError(
        f'data.source = "{config.source}" cannot be streamed: data.streaming takes files of one kind '
        f"({', '.join(SUFFIXES)}), as a pattern or a folder; leave data.streaming out for other sources"
    )


def _open(config: Data, on_bytes_read: OnBytesRead) -> Source:
    path = expand(config.source)
    if config.source in (STDLIB, docstrings.SOURCE):
        _refuse_split(config, "the standard library has")
        expected = "text" if config.source == STDLIB else "messages"
        if config.format != expected:
            raise ConfigError(f'data.source = "{config.source}" has {expected}: set data.format = "{expected}"')
        return _standard_library(config.source, Path(sysconfig.get_paths()["stdlib"]))
    if path.is_dir():
        return _open_folder(config, path, on_bytes_read)
    suffix = documents.suffix(path)
    if suffix in SUFFIXES:
        _refuse_split(config, "files have")
        return _open_files(config, matches(config, str(path)), suffix, on_bytes_read)
    if suffix in COMPRESSED:
        raise ConfigError(
            f'data.source = "{config.source}": of compressed files only .txt and .jsonl with .gz or .zst are read: '
            "decompress the others first"
        )
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


def _standard_library(source: str, root: Path) -> Source:
    """The modules of the standard library, or the conversations about their docstrings."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - NOT_SOURCE  # site-packages may have many times as many files
        names += [Path(folder, file).relative_to(root).as_posix() for file in files if file.endswith(".py")]
    names.sort()
    skipped = 0

    def texts(digest: "hashlib._Hash", parse: bool = True) -> Stream:
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
            if source == STDLIB:
                yield from documents.rows_as_documents([text])
            elif parse:
                yield from documents.rows_as_documents(docstrings.conversations(name, text))

    seed = b"" if source == STDLIB else docstrings.VERSION
    digest = hashlib.sha256(seed)
    for _ in texts(digest, parse=False):
        pass
    fingerprint = digest.hexdigest()
    return Source(
        fingerprint=fingerprint,
        skipped=skipped,
        read=lambda _: _check_unchanged(source, fingerprint, hashlib.sha256(seed), texts),
    )


def _check_unchanged(
    source: str, fingerprint: str, digest: "hashlib._Hash", stream: Callable[["hashlib._Hash"], Stream]
) -> Stream:
    """Yield the documents of `stream`, which updates `digest`. Raises ConfigError if the content has changed."""
    yield from stream(digest)
    if digest.hexdigest() != fingerprint:
        raise ConfigError(f'data.source = "{source}" changed while it was read: start again once nothing writes to it')


def _open_files(
    config: Data, paths: list[str], suffix: str, on_bytes_read: OnBytesRead, skipped_files: str = ""
) -> Source:
    column = column_of(config)
    if column.messages and suffix == ".txt":
        raise ConfigError(f'data.source = "{config.source}": .txt files have no messages: give .jsonl or .parquet')
    seed = f"{suffix}{'' if suffix == '.txt' else column.identity}".encode()
    digest = hashlib.sha256(seed)
    files: dict[str, list[Any]] = {}
    for path in paths:
        documents.hash_file(path, digest, on_bytes_read, kind=suffix)
        files[path] = [os.path.getsize(path), digest.hexdigest()[:16]]  # that of the files up to this one
    fingerprint = digest.hexdigest()

    def texts(digest: "hashlib._Hash") -> Stream:
        if suffix == ".jsonl":
            yield from documents.json_lines(paths, column, digest, on_bytes_read)
            return
        for path in paths:
            if suffix == ".txt":
                yield from documents.text_file(path, digest, on_bytes_read)
                continue
            for group in arrow_files.parquet_rows(path, column):
                yield from documents.rows_as_documents(group)
            documents.hash_file(path, digest, on_bytes_read, kind=suffix)

    without_text = "files are empty" if suffix == ".txt" else _rows_without_text(config)
    return Source(
        fingerprint=fingerprint,
        read=lambda _: _check_unchanged(config.source, fingerprint, hashlib.sha256(seed), texts),
        skipped_files=skipped_files,
        without_text=without_text,
        files=files,
    )


def _rows_without_text(config: Data) -> str:
    column = column_of(config)
    what = "messages" if column.messages else "text"
    return f'rows have no {what} in field "{column.name}" (missing, null or empty)'


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
    files = files_below(path)
    kinds = {documents.suffix(file) for file in files if os.path.basename(file) not in METADATA}
    usable = sorted(kinds.intersection(documents.FILE_KINDS))
    if _has_configs(path / "README.md") or (len(usable) == 1 and usable[0] not in SUFFIXES):
        return _open_prepared(config, path, on_bytes_read)
    if len(usable) != 1:
        kind = next((kind for kind in usable if kind in SUFFIXES), SUFFIXES[0])
        raise ConfigError(
            f'data.source = "{config.source}" {"is a folder of several kinds" if usable else "holds nothing to read"}: '
            f'{suffix_counts(files)}; give files of one kind with a pattern, as "{path}/**/*{kind}", or a folder that '
            "save_to_disk wrote; compressed files have to be decompressed, but for .txt and .jsonl with .gz or .zst"
        )
    chosen = files_of_split(config, path, _of_kind(files, usable[0]))
    return _open_files(config, chosen, usable[0], on_bytes_read, _skipped_files(config, files, chosen))


def _of_kind(files: list[str], kind: str) -> list[str]:
    """The files of a kind; compressed ones only where there are no others, of which they may be copies."""
    chosen = [file for file in files if documents.suffix(file) == kind]
    return [file for file in chosen if not documents.is_compressed(file)] or chosen


def _skipped_files(config: Data, files: list[str], chosen: list[str]) -> str:
    """A note on the files of a folder that are not read; empty if there are none."""
    rest = sorted(set(files) - set(chosen))
    if not rest:
        return ""
    return f'{len(rest)} of {len(files)} files in "{config.source}" are left out: {suffix_counts(rest)}'


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
            groups = arrow_files.arrow_rows(path, column_of(config), on_bytes_read)
            yield from arrow_files.hashed_rows(groups, lengths, content)
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
        digest = hashlib.sha256(f"folder\0{subset}\0{config.split}{column_of(config).identity}".encode())
        for path in sorted({*files_below(folder), *hf_datasets.files(config, folder)}):
            if Path(path).suffix.lower() in COMPRESSED:
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
