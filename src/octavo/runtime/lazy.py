"""Names that are imported on first use, so that one module of a package does not cost all of them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


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
