"""The `octavo` namespace of torch ops.

Ops are functional and have a fake implementation, so FakeTensorMode and selective checkpointing see one opaque call.
They have no autograd formula: autograd functions call them below autograd. `Library.define` avoids the checks that
`custom_op` adds to every call.

`torch.compile` fuses PyTorch operations but nothing into an opaque call, and such a call runs Python in every step. So
an op may have a *decomposition* into PyTorch operations with the same results, bit for bit. AOTAutograd traces it in
place of the op. Eager calls, FakeTensorMode and `torch.export` keep the op.
"""

from collections.abc import Callable
from typing import Any

import torch

from octavo.runtime.torch_compat import FakeTensor, FunctionalTensor, FunctionalTensorMode

_LIBRARY = torch.library.Library("octavo", "DEF")

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}
"""What torch.compile traces in place of an op, by the op's name. Returns NotImplemented to keep the op."""


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], decompose: Callable[..., Any] | None = None
) -> None:
    """Define `octavo::<name>`.

    Args:
        schema: Name, arguments and results.
        run: Implementation for all devices.
        fake: Computes the results' metadata.
        decompose: See `DECOMPOSITIONS`.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    if decompose is not None:
        DECOMPOSITIONS[name] = decompose
        torch.library.register_torch_dispatch(f"octavo::{name}", FunctionalTensorMode, _traced, lib=_LIBRARY)


def _traced(mode: Any, op: Any, types: tuple[type, ...], args: Any, kwargs: Any) -> Any:
    """Call an op while AOTAutograd or `torch.export` makes a graph functional."""
    if not all(t in _PLAIN or issubclass(t, FakeTensor) for t in types):
        return NotImplemented  # a tensor subclass calls the op again with what it wraps
    decompose = DECOMPOSITIONS.get(op.name().removeprefix("octavo::"))
    if decompose is not None and not torch.compiler.is_exporting():
        with mode:
            results = decompose(*args, **kwargs)
        if results is not NotImplemented:
            return results
    return mode.__torch_dispatch__(op, types, args, kwargs)


_PLAIN = (torch.Tensor, torch.nn.Parameter, FunctionalTensor)
