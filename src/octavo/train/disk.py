"""Files that a power cut or another process may meet: what is synced before it is published, and whose folder it is.

A folder is published by renaming it; a rename may reach the disk before the content does, so the content is synced
first. A run holds a lock in its output folder for as long as it lasts; the system drops it with the process, however
that ends, so no lock is ever stale.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.train.config import ConfigError

try:
    import fcntl
except ImportError:  # not a Unix: two runs in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What file systems that keep no locks answer."""


def sync(folder: Path) -> None:
    """Waits until the files of `folder`, which has no subfolders, and their names are on disk."""
    for path in (*folder.iterdir(), folder):
        sync_entry(path)


def sync_entry(path: Path) -> None:
    """Waits until the content of one file, or the names in one folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, text: str) -> None:
    """Writes a file whole or not at all. What is there, a link for one, is replaced and never written through."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def apply_umask(folder: Path) -> None:
    """Gives the files of `folder` the mode that the umask asks for: some libraries write with a mode of their own."""
    probe = folder / ".mode"
    probe.touch()
    for path in folder.iterdir():
        if path.is_file():
            shutil.copymode(probe, path)
    probe.unlink()


@contextmanager
def output_folder(out: Path) -> Iterator[None]:
    """Makes the folder `out` and locks it. One that was made here and is left without a file is removed again.

    Raises ConfigError where `out` cannot be written, or another process holds it.
    """
    created = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = lock(out / LOCK)
    except BlockingIOError:
        raise ConfigError(
            f"another process is training into {out}: wait for it, or choose another folder (--out)"
        ) from None
    except OSError as error:
        raise ConfigError(f"the output folder {out} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        (out / LOCK).unlink(missing_ok=True)  # while it is still held: who waits for this one sees that it is gone
        os.close(descriptor)
        for path in created:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()


def lock(path: Path) -> int:
    """A descriptor that holds a lock file, made where it is missing; remove the file before closing the descriptor.

    Raises BlockingIOError where another process holds it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if fcntl is None or _is_open_file(path, descriptor):
                return descriptor
        except OSError as error:
            if error.errno in WITHOUT_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed the file between our opening and locking it: what we hold is no file


def _is_open_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
