"""Sources of text: the source code of the standard library, files, a folder or a dataset, as a stream of documents.

The standard library is the default: every Python installation has it, without a download, and it is the same on all
machines with the same Python. `datasets` prepares datasets of the Hub, and local folders of other formats or with a
card (README.md, or .huggingface.yaml) that says which files are which subset and split. It executes no code of a data
folder, and a card that names a file outside of its folder, or on the network, raises an error.

A source has a fingerprint of the content of its files, never of modification times; the cache of tokens is keyed on it.
A file that changes between its fingerprint and the end of reading raises an error.

Conversations about the standard library, from its docstrings: embedded data for fine-tuning, without a download.

    system      You answer questions about Python's standard library.
    user        What does `json.dumps` do?
    assistant   Serialize ``obj`` to a JSON formatted ``str``.
    user        How is it called?
    assistant   json.dumps(obj, *, skipkeys=False, …)

Modules are parsed, never imported.
"""

import ast
import glob
import hashlib
import json
import os
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

from octavo.numerics.suggestions import nearest
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Data, expand
from octavo.train.data import chat, documents
from octavo.train.data.documents import FILE_KINDS, Block, Column, OnBytesRead, Stream, read_documents

STDLIB = "python-stdlib"
DOCSTRINGS = "python-docstrings"
DOCSTRINGS_VERSION = b"python-docstrings 1"  # Part of the fingerprint; changes with the conversations of a module
SYSTEM = "You answer questions about Python's standard library."
SUFFIXES = (".txt", ".jsonl", ".parquet")
"""Kinds of files that are read as they are; `datasets` prepares the others of `documents.FILE_KINDS`."""
METADATA = {"config.json", "dataset_info.json", "dataset_infos.json"}  # Names of .json files without data
SAVED = ("dataset_dict.json", "state.json")  # Files that `save_to_disk` writes
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz")
NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "turtledemo", "__pycache__"}
"""Folders of the standard library to leave out: installed packages, and tests (two thirds of the text)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    fingerprint: str  # Hash of the content
    read: Callable[[Path], Stream]  # Read the documents, with a folder for intermediate files
    skipped: int = 0  # Files left out because they are not UTF-8 (standard library only; elsewhere an error)
    skipped_files: str = ""  # A note on ignored files of the folder; empty if there are none
    without_text: str = ""  # The note on documents without text, after their number; empty if they need none
    # Size in bytes and digest of each file by name, to name the one that changed before a resume.
    files: Mapping[str, list[Any]] = field(default_factory=dict)
    is_part: bool = False  # Whether it is a chunk of a streamed source
    messages: bool = False  # Whether documents are conversations (`chat.conversation_text`)

    def plain_text(self, scratch: Path) -> Stream:
        """The documents as text, of conversations the contents of the messages."""
        stream = self.read(scratch)
        return chat.contents(stream) if self.messages else stream


class Files(NamedTuple):
    """Files of one kind that are read as they are."""

    paths: list[str]
    kind: str
    note: str = ""  # On the files of the folder that are left out


def open_source(config: Data, on_bytes_read: OnBytesRead) -> Source:
    """Find the data and fingerprint it. `on_bytes_read` is called with the number of bytes just read."""
    # Raises ConfigError if there is no data, it is not text, or it has no split `data.split`.
    return replace(_open(config, on_bytes_read), messages=config.format == "messages")


def _open(config: Data, on_bytes_read: OnBytesRead) -> Source:
    path = expand(config.source)
    if config.source in (STDLIB, DOCSTRINGS):
        _refuse_split(config, "the standard library has")
        expected = "text" if config.source == STDLIB else "messages"
        if config.format != expected:
            raise ConfigError(f'data.source = "{config.source}" has {expected}: set data.format = "{expected}"')
        return _standard_library(config.source, Path(sysconfig.get_paths()["stdlib"]))
    if (files := list_files(config)) is not None:
        return _open_files(config, files, on_bytes_read)
    if path.is_dir():
        return _open_folder(config, path, on_bytes_read)
    if documents.suffix(path) in COMPRESSED:
        problem = f'data.source = "{config.source}": of compressed files only .txt and .jsonl with .gz or .zst are read'
        raise ConfigError(f"{problem}: decompress the others first")
    if path.is_file() or glob.has_magic(config.source):
        raise ConfigError(f'data.source = "{config.source}": files must end in {", ".join(SUFFIXES)}')
    folder = expand(config.source.partition(":")[0])
    if folder.is_dir():  # "folder:subset"
        return _open_prepared(config, folder, on_bytes_read)
    if path.is_absolute() or config.source.startswith("."):
        raise ConfigError(f'data.source = "{config.source}" cannot be read: there is no such file or folder')
    return _open_files(config, Files(_load(config, config.source.partition(":")[0]), ".arrow"), on_bytes_read)


def _refuse_split(config: Data, what: str) -> None:
    if config.split != "train":
        raise ConfigError(
            f'data.split = "{config.split}": {what} no splits: leave data.split out, and name the text in data.source'
        )


def _no_split(source: str, split: str, splits: Collection[str]) -> ConfigError:
    return ConfigError(f'"{source}" has no split "{split}"; it has {", ".join(map(str, splits))}: set data.split')


def _unchanged(source: str, paths: list[str], read: Callable[[Path], Stream]) -> Callable[[Path], Stream]:
    """`read`, which raises ConfigError at its end if a file is no longer what it was when this was called."""

    def stamp(path: str) -> tuple[int, int, int]:
        with documents.reading(path):
            stat = os.stat(path)
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    before = list(map(stamp, paths))

    def checked(scratch: Path) -> Stream:
        yield from read(scratch)
        if list(map(stamp, paths)) != before:
            what = f'data.source = "{source}" changed while it was read'
            raise ConfigError(f"{what}: start again once nothing writes to it")

    return checked


def _standard_library(source: str, root: Path) -> Source:
    """The modules of the standard library, or the conversations about their docstrings."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - NOT_SOURCE  # site-packages may have many times as many files
        names += [Path(folder, file).relative_to(root).as_posix() for file in files if file.endswith(".py")]
    names.sort()

    def modules() -> Iterator[tuple[str, str]]:
        for name in names:
            with documents.reading(str(root / name)), suppress(UnicodeDecodeError):
                yield name, (root / name).read_bytes().decode("utf-8")

    def read(_: Path) -> Stream:
        for name, text in modules():
            rows: list[str | None] = [text] if source == STDLIB else _conversations_about(name, text)
            yield from documents.rows_as_documents(rows)

    reader = _unchanged(source, [str(root / name) for name in names], read)
    digest, count = hashlib.sha256(b"" if source == STDLIB else DOCSTRINGS_VERSION), 0
    for name, text in modules():
        content, count = text.encode(), count + 1
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return Source(fingerprint=digest.hexdigest(), skipped=len(names) - count, read=reader)


def _open_files(config: Data, files: Files, on_bytes_read: OnBytesRead) -> Source:
    column, kind = Column.of(config), files.kind
    if column.messages and kind == ".txt":
        raise ConfigError(f'data.source = "{config.source}": .txt files have no messages: give .jsonl or .parquet')
    blocks = [Block(path) for path in files.paths]
    read = _unchanged(config.source, files.paths, lambda _: read_documents(blocks, kind, column))
    digest = hashlib.sha256(f"{kind}{'' if kind == '.txt' else column.identity}".encode())
    sizes: dict[str, list[Any]] = {}
    for path in files.paths:
        documents.hash_file(path, digest, on_bytes_read, kind=kind)
        sizes[path] = [os.path.getsize(path), digest.hexdigest()[:16]]  # that of the files up to this one
    return Source(
        fingerprint=digest.hexdigest(), read=read, skipped_files=files.note, files=sizes,
        without_text="files are empty" if kind == ".txt" else column.note,
    )  # fmt: skip


def _open_folder(config: Data, path: Path, on_bytes_read: OnBytesRead) -> Source:
    """Open a folder of `save_to_disk`, or one that `datasets` prepares."""
    if any((path / name).is_file() for name in SAVED):
        import datasets

        with _readable(config), no_progress_bars():
            saved = datasets.load_from_disk(str(path))
        names = saved if isinstance(saved, datasets.DatasetDict) else ()
        if outside := [name for name in names if name in ("", "..") or name != PurePath(name).name]:
            raise ConfigError(f'data.source = "{config.source}": its split {outside[0]!r} is no folder in it')
        if isinstance(saved, datasets.DatasetDict):
            if config.split not in saved:
                raise _no_split(config.source, config.split, saved)
            saved = saved[config.split]
        elif config.split not in ("train", str(saved.split)):
            _refuse_split(config, "a saved data set that is not a DatasetDict has")
        return _open_files(config, Files([file["filename"] for file in saved.cache_files], ".arrow"), on_bytes_read)
    files = files_below(path)
    kinds = _kinds(files)
    if _has_configs(path / "README.md") or (len(kinds) == 1 and kinds[0] not in SUFFIXES):
        return _open_prepared(config, path, on_bytes_read)
    kind = next((kind for kind in kinds if kind in SUFFIXES), SUFFIXES[0])
    raise ConfigError(
        f'data.source = "{config.source}" {"is a folder of several kinds" if kinds else "holds nothing to read"}: '
        f'{suffix_counts(files)}; give files of one kind with a pattern, as "{path}/**/*{kind}", or a folder that '
        "save_to_disk wrote; compressed files have to be decompressed, but for .txt and .jsonl with .gz or .zst"
    )


def _kinds(files: list[str]) -> list[str]:
    kinds = {documents.suffix(file) for file in files if os.path.basename(file) not in METADATA}
    return sorted(kinds.intersection(FILE_KINDS))


def _has_configs(readme: Path) -> bool:
    """Whether the card of a data set folder assigns files to subsets or splits."""
    if not readme.is_file():
        return False
    with documents.reading(str(readme)):
        lines = readme.read_text(encoding="utf-8").splitlines()
    head = lines[1 : lines.index("---", 1)] if lines[:1] == ["---"] and "---" in lines[1:] else []
    return any(line.startswith("configs:") for line in head)


def _open_prepared(config: Data, folder: Path, on_bytes_read: OnBytesRead) -> Source:
    """Open a local folder with `datasets`, in the scratch folder: its own cache checks only modification times."""
    column = Column.of(config)
    digest = hashlib.sha256(f"folder\0{_subset(config) or ''}\0{config.split}{column.identity}".encode())
    # What a card names may be hidden, so that a look into the folder does not find all that `datasets` reads.
    paths = sorted({*files_below(folder), *_files_of_card(config, folder)})

    def read(scratch: Path) -> Stream:
        blocks = [Block(path) for path in _load(config, str(folder), cache_dir=str(scratch / "arrow"))]
        return read_documents(blocks, ".arrow", column)

    reader = _unchanged(config.source, paths, read)
    for path in paths:
        if Path(path).suffix.lower() in COMPRESSED:
            raise ConfigError(f"{path} is compressed, and compressed files are not read: decompress it first")
        if documents.suffix(path) in FILE_KINDS and Path(path).suffix not in FILE_KINDS:
            raise ConfigError(f"{path} would be left out: rename it to end in {documents.suffix(path)}")
        digest.update(f"{os.path.relpath(path, folder)}\0".encode())
        documents.hash_file(path, digest, on_bytes_read, kind="")
    return Source(fingerprint=digest.hexdigest(), read=reader, without_text=column.note)


def _subset(config: Data) -> str | None:
    return None if expand(config.source).is_dir() else config.source.partition(":")[2] or None


def _files_of_card(config: Data, folder: Path) -> list[str]:
    """The files that `_load` reads of a local folder, hidden ones and its card included."""
    # Raises ConfigError if they are not all in the folder, or are of another kind than `FILE_KINDS`.
    import datasets
    import yaml
    from huggingface_hub import DatasetCard

    readme, card = folder / datasets.config.REPOCARD_FILENAME, folder / datasets.config.REPOYAML_FILENAME
    with _readable(config), no_progress_bars(), tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
        tables = [DatasetCard.load(readme).data.to_dict()] if readme.is_file() else []
        tables += [yaml.safe_load(card.read_text(encoding="utf-8"))] if card.exists() else []
        for text in _texts([(table or {}).get("configs") for table in tables]):
            if "://" in text or "::" in text:  # `datasets` would ask the network for it
                raise ValueError(f"its card names {text}: the files of a folder must be in it")
        builder = datasets.load_dataset_builder(str(folder), _subset(config), cache_dir=scratch, **_without_code())
        by_split = builder.config.data_files or {}
        names = sorted({os.path.relpath(path, folder.resolve()) for paths in by_split.values() for path in paths})
        for name in names:
            if Path(name).parts[0] == os.pardir:
                raise ValueError(f"its card names {name}, which is not in the folder: move it there")
            if documents.suffix(name) not in FILE_KINDS:
                raise ValueError(f"its card names {name}: files must end in {', '.join(sorted(FILE_KINDS))}")
    return [str(folder / name) for name in names] + ([str(card)] if card.exists() else [])


def _texts(value: Any) -> Iterator[str]:
    """All strings of nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _load(config: Data, name: str, **options: Any) -> list[str]:
    """The Arrow files of a data set that `datasets` loads. Raises ConfigError if it has no split `data.split`."""
    import datasets

    with _readable(config), no_progress_bars():
        splits = datasets.load_dataset(name, _subset(config), **options, **_without_code())
    if config.split not in splits:
        raise _no_split(config.source, config.split, splits)
    if splits[config.split].info.builder_name == "text" and "cache_dir" in options:
        raise ConfigError(
            f'data.source = "{config.source}": the folder\'s card names .txt files, which `datasets` cuts into lines; '
            'give them with a pattern, as "folder/**/*.txt": then each file is a document'
        )
    return [entry["filename"] for entry in splits[config.split].cache_files]


def _without_code() -> dict[str, bool]:
    import datasets

    return {"trust_remote_code": False} if int(datasets.__version__.partition(".")[0]) < 4 else {}  # later: no scripts


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep `datasets` from drawing its own."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


@contextmanager
def _readable(config: Data) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of no common type: each format and each part of a card fails in its own way
        cause = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        guess = nearest(config.source, [STDLIB])
        raise ConfigError(f'data.source = "{config.source}" cannot be read: {cause}{guess}') from None


def list_files(config: Data) -> Files | None:
    """The files of a pattern, or of a folder of one kind; None for sources that are not read file by file."""
    path = expand(config.source)
    if not path.is_dir():
        if (kind := documents.suffix(path)) not in SUFFIXES:
            return None
        _refuse_split(config, "files have")
        return Files(matches(config, str(path)), kind)
    if any((path / name).is_file() for name in SAVED):
        return None
    files = files_below(path)
    kinds = _kinds(files)
    if len(kinds) != 1 or kinds[0] not in SUFFIXES or _has_configs(path / "README.md"):
        return None
    chosen = [file for file in files if documents.suffix(file) == kinds[0]]
    # Compressed files only where there are no others, of which they may be copies.
    chosen = [file for file in chosen if not documents.is_compressed(file)] or chosen
    chosen = _files_of_split(config, path, chosen)
    rest = sorted(set(files) - set(chosen))
    note = f'{len(rest)} of {len(files)} files in "{config.source}" are left out: {suffix_counts(rest)}'
    return Files(chosen, kinds[0], note if rest else "")


def matches(config: Data, pattern: str) -> list[str]:
    """The files of a glob, sorted. A file reached by several paths through linked folders counts once."""
    paths = [pattern] if Path(pattern).is_file() else sorted(_expand(pattern))  # [ ] may be literal
    real = lru_cache(maxsize=None)(os.path.realpath)
    files: dict[tuple[str, str], str] = {}
    for path in paths:
        _check_link(path)
        if os.path.isfile(path):
            files.setdefault((real(os.path.dirname(path)), os.path.basename(path)), path)
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
    paths: list[str] = []
    for root, names in _walk(str(folder), skipped=(".", "__")):
        paths += [os.path.join(root, name) for name in names if not name.startswith(".")]
    for path in paths:
        _check_link(path)
    return sorted(path for path in paths if os.path.isfile(path))


def _files_of_split(config: Data, folder: Path, files: list[str]) -> list[str]:
    """The files whose names belong to `data.split`; if no name has a split, all are "train"."""
    # The patterns are those of `datasets`, as "train-00000-of-00002.parquet", "test.jsonl", "validation/a.txt".
    from datasets.data_files import EmptyDatasetError, get_data_patterns, resolve_pattern

    base = glob.escape(str(folder.resolve()))
    real = {os.path.realpath(file): file for file in files}
    splits: dict[str, set[str]] = {}
    with no_progress_bars():
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
        raise _no_split(config.source, config.split, splits)
    return [path for path in files if path in splits[config.split]]


def _conversations_about(name: str, text: str) -> list[str | None]:
    """The conversations about a module at the path `name`, as `chat.conversation_text` writes them."""
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
    return [json.dumps(messages, ensure_ascii=False) for messages in talks]


def _conversations_of(prefix: str, node: ast.stmt) -> Iterator[list[dict[str, str]]]:
    """The conversations about a function or a class and its methods."""
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
