"""Digests of a checkpoint's files, to detect damaged, missing, added or renamed files before reading them.

digests.json    {"digest": of what follows, "files": {"model.safetensors": …, "shards/__0_0.distcp": …}}
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from octavo.train.config.run_config import ConfigError

DIGESTS = "digests.json"
_blake2b = partial(hashlib.blake2b, digest_size=32)  # hashlib's fastest on CPUs without SHA instructions


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    digests = {}
    for name in names:
        with (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, _blake2b).hexdigest()
    return digests


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of all files of `folder`; `digests`: those computed already."""
    missing = digests_of(folder, files_of(folder) - digests.keys())
    (folder / DIGESTS).write_bytes(_text({**digests, **missing}))


def check_digests(folder: Path, names: Iterable[str] | None = None, *, part: int = 0, parts: int = 1) -> None:
    if damage := find_damage(folder, names, part=part, parts=parts):
        remedy = f". If you changed it on purpose, start a new run from a copy of it without {DIGESTS} (model.path)"
        raise ConfigError(f"{folder} is damaged: {damage}{remedy if damage.endswith(f'({DIGESTS})') else ''}")


def find_damage(folder: Path, names: Iterable[str] | None = None, *, part: int = 0, parts: int = 1) -> str:
    """The first damage of the files of `folder`, or of some of them; "" for none. Looks at each `parts`-th file."""
    expected: dict[str, str] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        content = (folder / DIGESTS).read_bytes()
        files = json.loads(content)["files"]
        expected = files if content == _text(files) else {}
    if not expected:
        return f"{DIGESTS} is not what was written"
    if names is None:
        present = files_of(folder)
        if lacking := sorted(expected.keys() - present):
            return f"{lacking[0]} is missing"
        if added := sorted(present - expected.keys()):
            return f"{added[0]} is not part of it: move what is yours to another folder"
    for name in sorted(expected if names is None else names)[part::parts]:
        try:
            if digests_of(folder, [name])[name] != expected.get(name):
                return f"{name} is not what was written ({DIGESTS})"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def files_of(folder: Path) -> set[str]:
    """Names of files below `folder` with a digest: all but notes (*.md) and hidden files, which nothing here reads."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return {
        path.as_posix()
        for path in paths
        if path.name == ".metadata"
        or not (path.suffix == ".md" or path.name == DIGESTS or any(part.startswith(".") for part in path.parts))
    }


def _text(files: Mapping[str, str]) -> bytes:
    ordered = {name: files[name] for name in sorted(files)}
    digest = _blake2b(json.dumps(ordered).encode()).hexdigest()
    return (json.dumps({"digest": digest, "files": ordered}, indent=1) + "\n").encode()
