"""The `octavo` namespace of torch ops.

Ops are functional and have a fake implementation, so FakeTensorMode, `torch.compile(fullgraph=True)` and selective
checkpointing see one opaque call. They have no autograd formula: autograd functions call them below autograd.
`Library.define` avoids the checks that `custom_op` adds to every call.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("octavo", "DEF")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `octavo::<name>` with a schema, an implementation for all devices and a fake implementation."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
