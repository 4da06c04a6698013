"""The `octavo` namespace of torch ops, and the one way to define an op in it.

Ops are functional, have no autograd formula (the autograd function of a linear calls them below autograd) and a fake
implementation each, so that FakeTensorMode, `torch.compile(fullgraph=True)` and selective checkpointing see them as one
opaque call. `Library.define` is used rather than `custom_op`, which wraps every call in checks of its own.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("octavo", "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `octavo::<name>` from its schema, its implementation for every device, and its shape function."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
