"""Which files a source is: those of a glob, those below a folder, those of a split."""

import glob
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from octavo.train.config.data_section import Data
from octavo.train.config.run_config import ConfigError
from octavo.train.data import hf_datasets
from octavo.train.data.documents import no_split


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


def files_of_split(config: Data, folder: Path, files: list[str]) -> list[str]:
    """The files whose names belong to `data.split`; if no name has a split, all are "train"."""
    # The patterns are those of `datasets`, as "train-00000-of-00002.parquet", "test.jsonl", "validation/a.txt".
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
        raise no_split(config.source, config.split, splits)
    return [path for path in files if path in splits[config.split]]
