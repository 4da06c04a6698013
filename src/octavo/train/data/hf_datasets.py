"""Data sets that `datasets` prepares: those of the Hub, and local folders in formats that are not read here.

The card of a folder (README.md, or .huggingface.yaml) says which files are which subset and split. A local folder is
read by itself: a card that names a file outside it, or on the network, raises an error. What the card names may be
hidden, so the files to hash are those that `datasets` is going to read, not those that a look into the folder finds.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.numerics.names import nearest
from octavo.train.config.data_section import Data
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import expand
from octavo.train.data.documents import FILE_KINDS, no_split, suffix

STDLIB = "python-stdlib"


def files(config: Data, folder: Path) -> list[str]:
    """The files that `load` reads of a local folder, hidden ones and its card included."""
    # Raises ConfigError if they are not all in the folder, or are of another kind than `documents.FILE_KINDS`.
    import datasets

    card = folder / datasets.config.REPOYAML_FILENAME
    with _readable(config), no_progress_bars(), tempfile.TemporaryDirectory(prefix="octavo-") as scratch:
        _check_card(folder)
        builder = datasets.load_dataset_builder(str(folder), _subset(config), cache_dir=scratch, **_without_code())
        by_split = builder.config.data_files or {}
        names = {os.path.relpath(path, folder.resolve()) for paths in by_split.values() for path in paths}
        for name in sorted(names):
            if Path(name).parts[0] == os.pardir:
                raise ValueError(f"its card names {name}, which is not in the folder: move it there")
            if suffix(name) not in FILE_KINDS:
                raise ValueError(f"its card names {name}: files must end in {', '.join(sorted(FILE_KINDS))}")
    return [str(folder / name) for name in sorted(names)] + ([str(card)] if card.exists() else [])


def load(config: Data, name: str, **options: Any) -> list[str]:
    """The Arrow files of a data set that `datasets` loads, without running code that comes with it."""
    # Raises ConfigError if it cannot be loaded, or has no split `data.split`.
    import datasets

    with _readable(config), no_progress_bars():
        splits = datasets.load_dataset(name, _subset(config), **options, **_without_code())
    if config.split not in splits:
        raise no_split(config.source, config.split, splits)
    if splits[config.split].info.builder_name == "text" and "cache_dir" in options:
        raise ConfigError(
            f'data.source = "{config.source}": the folder\'s card names .txt files, which `datasets` cuts into lines; '
            'give them with a pattern, as "folder/**/*.txt": then each file is a document'
        )
    return [entry["filename"] for entry in splits[config.split].cache_files]


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


def _subset(config: Data) -> str | None:
    return None if expand(config.source).is_dir() else config.source.partition(":")[2] or None


def _without_code() -> dict[str, bool]:
    import datasets

    return {"trust_remote_code": False} if int(datasets.__version__.partition(".")[0]) < 4 else {}  # later: no scripts


def _check_card(folder: Path) -> None:
    """Raise ValueError if the card names an address: `datasets` would ask the network for it."""
    import datasets
    import yaml
    from huggingface_hub import DatasetCard

    readme, card = folder / datasets.config.REPOCARD_FILENAME, folder / datasets.config.REPOYAML_FILENAME
    tables = [DatasetCard.load(readme).data.to_dict()] if readme.is_file() else []
    tables += [yaml.safe_load(card.read_text(encoding="utf-8"))] if card.exists() else []
    for text in _texts([(table or {}).get("configs") for table in tables]):
        if "://" in text or "::" in text:
            raise ValueError(f"its card names {text}: the files of a folder must be in it")


def _texts(value: Any) -> Iterator[str]:
    """All strings of nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
