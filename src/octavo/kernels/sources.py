"""Functions generated from source, for what the host does in every step: calls and branches of Python cost it most.

Source is built of lines; the objects that it names lie in a dictionary of constants, the globals of the function.
"""

from collections.abc import Callable, Iterable
from typing import Any


class Name(str):
    """A name in generated source, in the place of a value."""


def source_of(value: Any, constants: dict[str, Any]) -> str:
    """Return Python source of a value that may hold names; other objects in it are added to `constants`."""
    if isinstance(value, Name):
        return value
    if isinstance(value, tuple):
        return f"({''.join(source_of(item, constants) + ', ' for item in value)})"
    if value is None or type(value) in (bool, int):
        return repr(value)
    name = f"constant{len(constants)}"
    constants[name] = value
    return name


def function_of(parameters: str, lines: Iterable[str], constants: dict[str, Any]) -> Callable[..., Any]:
    """Return the function of these parameters and lines."""
    exec("\n ".join([f"def run({parameters}):", *lines]), constants)
    run: Callable[..., Any] = constants["run"]
    return run
