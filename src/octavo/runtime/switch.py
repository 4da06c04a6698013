"""The process-wide switch that decides whether converted modules compute and store in FP8."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo.runtime.torch_compat import constant_in_graphs


class _Switch:
    enabled = True


SWITCH = _Switch()


@contextmanager
def disabled() -> Iterator[None]:
    """Inside the block, converted layers compute in the dtype of their weights: for high-precision evaluation.

    Modules that store activations in FP8 compute and save as before conversion. The switch applies to all threads of
    the process. With activation checkpointing, run the backward inside the block too: backward recomputes the forward,
    which must run in the same precision.

    Examples:
        >>> layer, x = torch.nn.Linear(64, 64), torch.randn(2, 64)
        >>> expected = layer(x)
        >>> layer = octavo.convert(layer)
        >>> with octavo.disabled():
        ...     torch.equal(layer(x), expected)
        True
    """
    before = SWITCH.enabled
    SWITCH.enabled = False
    try:
        yield
    finally:
        SWITCH.enabled = before


def stores() -> bool:
    """Return whether modules store their activations in FP8 now; warns once under torch.compile, where they do not."""
    if torch.compiler.is_compiling():
        return _compiled()
    return SWITCH.enabled


@constant_in_graphs
def _compiled() -> bool:
    warnings.warn(
        "octavo: under torch.compile activations='fp8' has no effect: activations are saved in their own dtype. FP8 "
        "products work; octavo.convert(model) without activations='fp8' avoids this warning",
        stacklevel=2,
    )
    return False
