"""Imports: errors that name the command which installs what is missing, and names that are imported on first use."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

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


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package, given the public names of each module, as {"numerics.spec": ["ROW"]}."""
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"octavo.{homes[name]}"), name)
        return vars(sys.modules[package]).setdefault(name, value)

    return get


def lazy_function(path: str) -> Callable[..., Any]:
    """Return a function that imports another one, given as `"octavo.module:name"`, when it is called."""
    module, _, name = path.partition(":")

    def call(*arguments: object, **options: object) -> Any:
        return getattr(import_module(module), name)(*arguments, **options)

    return call
