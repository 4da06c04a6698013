"""Folders that appear complete or not at all: written under a hidden name, and renamed at the end.

An empty folder that is there, which may be a mount point or a working directory, stays: its content is moved up.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, whose content becomes that of `out` if no error is raised."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ValueError(f"{out} is not a folder: choose another name")
    is_there = out.exists()
    if is_there and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another folder")
    target = out.absolute()
    created = [path for path in target.parents if not path.exists()]
    name = f".writing-{uuid.uuid4().hex[:8]}"
    scratch = target / name if is_there else target.with_name(f"{name}-{target.name}")
    try:
        try:
            scratch.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"the output folder {out} cannot be written: {error.strerror}") from None
        yield scratch
        apply_umask(scratch)
        try:
            for path in scratch.iterdir() if is_there else ():
                path.rename(target / path.name)
            if not is_there:
                scratch.rename(target)
        except OSError as error:
            raise ValueError(f"{out} cannot be made: {error.strerror}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for path in created:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()


def apply_umask(folder: Path) -> None:
    """Give the files of `folder` the mode of the umask; some libraries write with another mode."""
    probe = folder / ".mode"
    probe.touch()
    for path in folder.iterdir():
        if path.is_file():
            shutil.copymode(probe, path)
    probe.unlink()
