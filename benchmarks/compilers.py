"""Build libraries in C and C++ that pretend a GPU. Imports no torch, which may come after them."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path


class CannotPretend(RuntimeError):
    """Something is missing that pretends a GPU, or the compiler fails."""


def compiler(variable: str, *names: str) -> str | None:
    names = (os.environ[variable],) if variable in os.environ else names
    return next((path for name in names if (path := shutil.which(name))), None)


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def build(command: str | None, source: Path, library: Path, *options: str) -> None:
    words = [str(command), "-O1", "-shared", "-fPIC", str(source), *options, "-o", str(library)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotPretend(f"{command} cannot build {source.name}: {done.stderr.strip() or done.returncode}")
