"""`loss.png`: loss curves over steps and, for two runs, the gap in percent below them.

Drawn through matplotlib's object API on the Agg canvas: no pyplot, no global figure list, no display. Colours are
Okabe and Ito's, told apart by people with any of the common colour blindnesses and in greyscale by their lightness.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.experiments.curves import Curves, gap_percent, smooth, smoothing_window
from octavo.experiments.verdict import BAND_PERCENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, MUTED, GRID = "#1f2933", "#5f6b7a", "#e3e7ec"


def write_loss_png(runs: Sequence[tuple[str, Curves]], path: Path, *, title: str) -> None:
    """Draw `(label, curves)` of one run or several into `path`, 1600 pixels wide; the first is the baseline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    compared = len(runs) > 1
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(10, 6.6 if compared else 4.8), dpi=160, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if compared else 1, 1, sharex=True, squeeze=False, height_ratios=[2.4, 1][: 1 + compared])
    window = smoothing_window(len(runs[0][1].step))
    _curves(axes[0, 0], runs)
    axes[0, 0].set_ylabel("loss [nats per token]")
    if compared:
        _gaps(axes[1, 0], runs)
        axes[1, 0].set_ylabel(f"loss above\n{runs[0][0]} [%]")
    axes[-1, 0].set_xlabel("optimizer step")
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)
    axes[0, 0].set_title(
        f"strong: mean over {window} steps; light: each step" if window > 1 else "each step",
        loc="left",
        fontsize=9,
        color=MUTED,
    )
    figure.savefig(path)


def _curves(axes: "Axes", runs: Sequence[tuple[str, Curves]]) -> None:
    strong = []
    for index, ((label, curves), colour) in enumerate(zip(runs, _colours(len(runs)), strict=True)):
        under = index == 0 and len(runs) > 1  # a wide baseline stays visible below a candidate that follows it
        axes.plot(curves.step, curves.loss, color=colour, alpha=0.25, linewidth=0.9)
        strong += axes.plot(
            curves.step,
            smooth(curves.loss),
            color=colour,
            linewidth=5.0 if under else 1.7,
            alpha=0.5 if under else 1.0,
            label=label,
        )
    _plain(axes)
    axes.legend(handles=strong, frameon=False, loc="upper right", fontsize=10, labelcolor=INK)


def _gaps(axes: "Axes", runs: Sequence[tuple[str, Curves]]) -> None:
    baseline = runs[0][1]
    reach = 1.3 * BAND_PERCENT
    axes.axhspan(-BAND_PERCENT, BAND_PERCENT, color="#009E73", alpha=0.12, linewidth=0)
    axes.axhline(0, color=MUTED, linewidth=0.9)
    for (_, curves), colour in list(zip(runs, _colours(len(runs)), strict=True))[1:]:
        steps, gap = gap_percent(baseline, curves)
        axes.plot(steps, gap, color=colour, alpha=0.25, linewidth=0.9)
        axes.plot(steps, smooth(gap), color=colour, linewidth=2.0)
        finite = np.abs(gap[np.isfinite(gap)])
        if len(finite):
            reach = max(reach, 1.1 * float(np.quantile(finite, 0.98)))
    axes.set_ylim(-reach, reach)
    _plain(axes)
    axes.annotate(
        f"±{BAND_PERCENT:g} %",
        xy=(1, BAND_PERCENT),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color="#00694d",
    )


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _plain(axes: Any) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
