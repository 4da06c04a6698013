"""Folders that appear complete or not at all.

A folder is written beside its place under a hidden name, and renamed at the end. After an error, such as a full disk,
nothing is left; after a kill, the hidden folder is, and the place is as it was.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `out` if no error is raised.

    Raises:
        ValueError: If `out` is there and no empty folder, or cannot be written.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ValueError(f"{out} is not a folder: choose another name")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another folder")
    out = out.absolute()
    created = [path for path in out.parents if not path.exists()]
    scratch = out.with_name(f".{out.name}.writing-{uuid.uuid4().hex[:8]}")
    try:
        try:
            scratch.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"the output folder {out} cannot be written: {error.strerror}") from None
        yield scratch
        try:
            scratch.rename(out)
        except OSError as error:
            raise ValueError(f"{out} cannot be made: {error.strerror}") from None
        created = []
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for path in created:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()
