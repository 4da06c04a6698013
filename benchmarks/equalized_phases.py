"""Layers that equalize channels, timed by phase: few of their passes measure channels (`octavo.nn.equalized`).

    dense phase       the first `interval` passes, which measure in passes 0, 1, 2, 4, 8, …
    steady state      later passes: one in `interval` measures, and the next one computes the channel scales from that

Timed as they come, passes would be those of the dense phase. So a benchmark that times such layers holds them in passes
that measure nothing (`hold_steady`), and times by itself what a measurement adds to them (`phases`). Compiled layers
have no phases: they compute the channel scales in every pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from benchmarks.session import Row
from benchmarks.timing import Run
from octavo.nn.equalized import Equalizer, equalized_layers, equalizer_of


def hold_steady(model: nn.Module, runs: Sequence[Run]) -> list[Run]:
    """Return runs, each one pass of a model or some, of which the first always is a pass that measures nothing."""
    return [_from_pass(model, 1, run) for run in runs]


def phases(
    model: nn.Module, runs: Sequence[Run], steady_ms: float | None, time: Callable[[Sequence[Run]], float | None]
) -> Row:
    """Return what passes of a model cost beside those that measure nothing, in fields of a row.

    Args:
        model: The model.
        runs: Passes of it, each forward and backward.
        steady_ms: The wall time of a pass that measures nothing; None in a rehearsal.
        time: Returns the mean wall time of runs in ms; None in a rehearsal.

    Returns:
        `measurement_ms`, what one measurement adds to the pass that takes it and the next one together; `dense_ms` and
        `amortized_ms`, the mean time of a pass in the dense phase and after it. {} for a model that measures nothing.
    """
    equalizers = _equalizers(model)
    if not equalizers:
        return {}
    every = equalizers[0].every
    measuring, quiet = (time([_from_pass(model, first, _twice(run)) for run in runs]) for first in (0, 1))
    if measuring is None or quiet is None or steady_ms is None:
        return {"interval": every}
    measurement = measuring - quiet
    dense = sum(index & (index - 1) == 0 for index in range(every))
    return {
        "interval": every,
        "measurement_ms": round(measurement, 5),
        "dense_ms": round(steady_ms + measurement * dense / every, 5),
        "amortized_ms": round(steady_ms + measurement / every, 5),
    }


def _equalizers(model: nn.Module) -> list[Equalizer]:
    return [equalizer_of(layer) for _, layer in equalized_layers(model)]


def _from_pass(model: nn.Module, first: int, run: Run) -> Run:
    """Return a run that begins `first` passes after one that measures, in the steady state."""
    equalizers = _equalizers(model)

    def from_pass() -> Any:
        for equalizer in equalizers:
            equalizer.advance(equalizer.every + first)
        return run()

    return from_pass if equalizers else run


def _twice(run: Run) -> Run:
    return lambda: (run(), run())
