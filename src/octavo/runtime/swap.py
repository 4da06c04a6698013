"""Swap the classes of modules, all of them or none.

The class and the attributes are written past `__setattr__` and properties of the module's class, which may refuse.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

_CONTAINERS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
"""Attributes in which a module holds parameters, buffers, children and hooks."""


def become(module: nn.Module, owner: type[nn.Module], **attributes: Any) -> None:
    """Make a module, whose forward was not replaced, one of another class, and set attributes."""
    vars(module).update(attributes)
    vars(module).pop("forward", None)  # that of the class before, which would hide that of the new one
    object.__setattr__(module, "__class__", owner)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward of a module was replaced on the instance. The bound method of its class, which accelerate
    leaves there when it takes its hooks off, is no other.
    """
    own = vars(module).get("forward")
    plain = isinstance(own, MethodType) and own.__self__ is module and own.__func__ is type(module).forward
    return "forward" in vars(module) and not plain


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Where anything is raised inside, Ctrl-C included, put back the modules of a model as they were: their classes,
    attributes, parameters, buffers, children and hooks. Values of tensors, and what attributes refer to, are not
    copied.
    """
    before = []
    for module in model.modules():
        attributes = dict(vars(module))
        held = {name: dict(attributes[name]) for name in _CONTAINERS if isinstance(attributes.get(name), dict)}
        before.append((module, type(module), attributes, held))
    try:
        yield
    except BaseException:
        for module, owner, attributes, held in before:
            object.__setattr__(module, "__class__", owner)
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
            for name, contents in held.items():
                now[name].clear()
                now[name].update(contents)
        raise
