"""Whether converted modules compute, and store, in FP8: one switch for the process."""

from collections.abc import Iterator
from contextlib import contextmanager


class _Switch:
    enabled = True


SWITCH = _Switch()


@contextmanager
def disabled() -> Iterator[None]:
    """Inside the block, converted layers compute in the dtype of their weights: for high-precision evaluation.

    What stores its activations in FP8 computes as it did before it was converted. Holds for the whole process, all
    threads. Do the backward of what was computed inside before leaving it, where activation checkpointing would compute
    it again.
    """
    before = SWITCH.enabled
    SWITCH.enabled = False
    try:
        yield
    finally:
        SWITCH.enabled = before
