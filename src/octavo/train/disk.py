"""Durable writes and the lock of an output folder.

A rename may reach the disk before the content, so the content is synced first. A lock ends with its process.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix: two runs in one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # Error numbers of file systems without locks
TRIES = 3  # How often a run tries to lock its folder, which `octavo watch` may be looking at


def sync(folder: Path) -> None:
    """Sync the files of `folder` and its subfolders, and their names, to disk."""
    for path in (*folder.rglob("*"), folder):
        sync_entry(path)


def sync_entry(path: Path) -> None:
    """Sync the content of one file, or the names in one folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, text: str) -> None:
    """Write a file atomically. An existing file or link is replaced, never written through."""
    temporary = path.with_name(f".{path.name}.tmp")
    with names_file(path):
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Name the file in an OSError without one, as a write to a full disk raises it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def output_folder(out: Path) -> Iterator[None]:
    """Make the folder `out` and lock it. Folders created here are removed if they stay empty."""
    from octavo.train.config.run_config import ConfigError  # imports torch, which `octavo watch` does without

    # Raises ConfigError if `out` cannot be written or another process holds the lock.
    created = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for _ in range(TRIES - 1):
            with suppress(BlockingIOError):  # `is_locked` may hold it
                descriptor = lock(out / LOCK)
                break
            time.sleep(0.05)
        else:
            descriptor = lock(out / LOCK)
    except BlockingIOError:
        what = f"another process is training into {out}"
        raise ConfigError(f"{what}: wait for it, or choose another folder (--out)") from None
    except OSError as error:
        raise ConfigError(f"the output folder {out} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        (out / LOCK).unlink(missing_ok=True)  # before the release, so that a waiting process sees it is gone
        os.close(descriptor)
        for path in created:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()


def lock(path: Path) -> int:
    """Lock a file, created if missing, and return its descriptor; remove the file before closing the descriptor."""
    # Raises BlockingIOError if another process holds the lock.
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if fcntl is None or os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
        except OSError as error:
            if error.errno in WITHOUT_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder removed the file between our open and lock: try a new one


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a file; None where that cannot be known. Holds the lock for an instant."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        if fcntl is None:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False
