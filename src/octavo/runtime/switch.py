"""The process-wide switch that decides whether converted modules compute and store in FP8."""

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.runtime.torch_compat import is_exporting


class _Switch:
    def __init__(self) -> None:
        self.off: list[None] = []
        """An entry for each block of `disabled` that runs now: in threads they overlap and end in any order. Adding and
        removing one is atomic, and Dynamo traces it, which it does not do with a lock."""
        self.stored = False
        """Whether any module of this process was ever converted to store its activations in FP8."""


SWITCH = _Switch()


@contextmanager
def disabled() -> Iterator[None]:
    """Inside the block, converted layers compute in the dtype of their weights: for high-precision evaluation.

    Modules that store activations in FP8 compute and save as before conversion. The switch applies to all threads of
    the process, until the last of several overlapping blocks ends. With activation checkpointing, run the backward
    inside the block too: backward recomputes the forward, which must run in the same precision.

    Examples:
        >>> layer, x = torch.nn.Linear(64, 64), torch.randn(2, 64)
        >>> expected = layer(x)
        >>> layer = octavo.convert(layer)
        >>> with octavo.disabled():
        ...     torch.equal(layer(x), expected)
        True
    """
    SWITCH.off.append(None)
    try:
        yield
    finally:
        SWITCH.off.pop()


def stores() -> bool:
    """Return whether modules store their activations in FP8 now; not under torch.export, which has no backward."""
    return not SWITCH.off and not is_exporting()


def stores_in_graphs() -> bool:
    """Return whether a graph that torch.compile traces may have modules that store in FP8."""
    return SWITCH.stored and stores()
