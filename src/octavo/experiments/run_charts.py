"""The charts of runs over their steps: of a report, and of a live page."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.experiments.charts import FLAT, SMALL, Chart, Line, line_chart
from octavo.experiments.curves import gap_percent
from octavo.experiments.logged_run import LoggedRun
from octavo.experiments.verdict import BAND_PERCENT

MEMORY_CAPTION = ("GiB of tensors on the first GPU.", "GiB of tensors on the first GPU; orange: predicted.")
"""Without and with a prediction."""


def run_charts(runs: Sequence[LoggedRun]) -> dict[str, list[Chart]]:
    """Loss and gap large; speed, gradient norm and the like small. A chart without any value is left out."""

    def lines(column: str, noisy: bool = True) -> list[Line]:
        return [
            Line(label=run.label, slot=run.slot, x=run.curves.step, y=getattr(run.curves, column), noisy=noisy)
            for run in runs
        ]

    def chart(title: str, unit: str, series: list[Line], **layout: Any) -> list[Chart]:
        drawn = [line for line in series if np.isfinite(line.y).any()]
        return [line_chart(title, unit, drawn, **layout)] if drawn else []

    unit = runs[0].result.unit
    per = f"nats per {unit.removesuffix('s')}"
    large = chart(
        "Loss", per, lines("loss"), caption=f"{per.capitalize()}. Strong: running mean; light: each step."
    )  # fmt: skip
    if len(runs) > 1:
        baseline = runs[0]
        gaps = [(run, *gap_percent(baseline.curves, run.curves)) for run in runs[1:]]
        large += chart(
            f"Loss above {baseline.label}",
            "percent",
            [Line(label=run.label, slot=run.slot, x=x, y=y) for run, x, y in gaps],
            caption=f"Percent of {baseline.label}'s loss at the same step. Shaded: ±{BAND_PERCENT:g} %.",
            height=FLAT,
            band=BAND_PERCENT,
        )
    large += chart("Held-out loss", per, _measured(lines("held_out", noisy=False)), height=FLAT, keep=[0])
    small = chart(f"{unit.capitalize()} per second", f"{unit}/s", lines("tokens_per_s"), height=SMALL, keep=[0])
    small += chart("Gradient norm", "L2 norm before clipping", lines("grad_norm"), height=SMALL, keep=[0])
    small += chart("Learning rate", "learning rate", lines("lr", noisy=False), height=SMALL, keep=[0])
    small += chart("MFU", "percent", lines("mfu"), caption="Percent of the bf16 peak.", height=SMALL, keep=[0])
    memory = lines("peak_memory", noisy=False)
    expected = runs[0].setup.expected if len(runs) == 1 and runs[0].setup else None
    if expected is not None and expected.memory is not None:
        predicted = np.full(len(memory[0].x), expected.memory / 2**30)
        memory.insert(0, Line(label="predicted", slot=1, x=memory[0].x, y=predicted, noisy=False))
    caption = MEMORY_CAPTION[len(memory) > len(runs)]
    small += chart("Peak memory", "GiB", memory, caption=caption, height=SMALL, keep=[0])
    return {"large": large, "small": small}


def _measured(lines: Sequence[Line]) -> list[Line]:
    """Lines without the steps in which nothing was measured."""
    return [replace(line, x=line.x[mask], y=line.y[mask]) for line in lines if (mask := np.isfinite(line.y)).any()]
