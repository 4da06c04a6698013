"""Import errors that name the command which installs what is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

INSTALL = "pip install 'octavo[train]'"


@contextmanager
def needs_extras(what: str, install: str = INSTALL) -> Iterator[None]:
    """Import optional dependencies in this context."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing(error, what, install), name=error.name) from error


def missing(error: ModuleNotFoundError, what: str, install: str = INSTALL) -> str:
    """Return the message of an error with the install command, once."""
    return str(error) if install in str(error) else f"{error}, which {what} needs: {install}"
