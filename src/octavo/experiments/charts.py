"""The geometry of the report's charts: data in, coordinates of one SVG viewBox out.

The report draws its own SVG rather than embedding pictures, so that one page is sharp at any size, follows the reader's
light or dark scheme through CSS variables, and shows values under the pointer, with nothing to fetch. Only numbers are
made here; the markup is in `templates/report.html.j2`. Long runs are reduced to the width of the chart: the raw line
keeps each bucket's minimum and maximum, so that a spike stays visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.experiments.curves import Floats, Steps, smooth

BUCKETS = 360
"""Points of a smoothed line, and half the points of a raw one, at most."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """The viewBox of a chart and the plot area inside its margins, in CSS pixels at full size."""

    width: int
    height: int
    left: int = 58
    right: int = 14
    top: int = 12
    bottom: int = 40

    @property
    def inner_width(self) -> int:
        """Width of the plot area."""
        return self.width - self.left - self.right

    @property
    def inner_height(self) -> int:
        """Height of the plot area."""
        return self.height - self.top - self.bottom


LARGE = Box(width=980, height=330)
FLAT = Box(width=980, height=250)
SMALL = Box(width=300, height=190, left=52, right=10, bottom=36)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of a chart.

    Attributes:
        slot: Picks the colour.
        y: Values at the steps `x`; NaN where there is none, finite somewhere.
        noisy: Draw each value light and the running mean strong, rather than each value strong.
        low, high: Edges of a shaded area around `y`, finite where it is; None without one.
    """

    label: str
    slot: int
    x: Steps
    y: Floats
    noisy: bool = True
    low: Floats | None = None
    high: Floats | None = None

    @property
    def strong(self) -> Floats:
        """What is drawn strong: the running mean, or the values themselves."""
        return smooth(self.y) if self.noisy else self.y


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A grid line: where it is in the viewBox, and its text."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A line ready to draw: SVG paths, empty if there is none, and the `[step, value]` pairs the pointer reads."""

    label: str
    slot: int
    raw: str
    smoothed: str
    points: list[list[float]]
    area: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart ready for the template.

    Attributes:
        band: Top and height, in the viewBox, of the shaded band; None without one.
        x_span: First and last step, for the pointer.
    """

    title: str
    unit: str
    caption: str
    traces: list[Trace]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    band: tuple[float, float] | None
    x_span: tuple[float, float]
    box: Box

    @property
    def pointer(self) -> dict[str, Any]:
        """What the page's script needs to show values under the pointer, ready for JSON."""
        return {
            "span": self.x_span,
            "left": self.box.left,
            "inner": self.box.inner_width,
            "width": self.box.width,
            "series": [{"label": t.label, "slot": t.slot, "points": t.points} for t in self.traces],
        }


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers (1, 2, 2.5 or 5 times a power of ten apart) inside [low, high], about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = np.ceil(low / step - 1e-9), np.floor(high / step + 1e-9)
    return [float(step * k) + 0.0 for k in np.arange(first, last + 1)]  # + 0.0 turns -0.0 into 0.0


def draw(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    caption: str = "",
    box: Box = LARGE,
    keep: Sequence[float] = (),
    band: float | None = None,
) -> Chart:
    """Lay out one chart.

    Args:
        title: What is drawn.
        unit: The unit of the y axis.
        lines: The series, drawn in this order.
        caption: One sentence under the title.
        box: Size and margins.
        keep: Values the y axis must reach, such as zero.
        band: Shade ±band around zero and keep it in view.
    """
    x_low = float(min(line.x[0] for line in lines))
    x_high = float(max(line.x[-1] for line in lines))
    if x_high == x_low:
        x_high = x_low + 1
    y_low, y_high = _y_range(lines, keep if band is None else [*keep, -1.3 * band, 1.3 * band])

    def to_x(x: Steps | float) -> Floats:
        return np.asarray(box.left + box.inner_width * (np.asarray(x, float) - x_low) / (x_high - x_low))

    def to_y(y: Floats | float) -> Floats:
        return np.asarray(box.top + box.inner_height * (y_high - np.asarray(y, float)) / (y_high - y_low))

    traces = []
    for line in lines:
        strong = line.strong
        raw, even = _extremes(line.y), _evenly(len(line.x))
        traces.append(
            Trace(
                label=line.label,
                slot=line.slot,
                raw=_path(to_x(line.x[raw]), to_y(line.y[raw])) if line.noisy else "",
                smoothed=_path(to_x(line.x[even]), to_y(strong[even])),
                points=[[int(line.x[i]), float(f"{strong[i]:.6g}")] for i in even if np.isfinite(strong[i])],
                area=_area(to_x(line.x[even]), to_y(line.low[even]), to_y(line.high[even]))
                if line.low is not None and line.high is not None
                else "",
            )
        )
    x_ticks = [value for value in nice_ticks(x_low, x_high, box.width // 100) if value == round(value)]
    y_ticks = nice_ticks(y_low, y_high, box.height // 45)
    return Chart(
        title=title,
        unit=unit,
        caption=caption,
        traces=traces,
        x_ticks=[Tick(at=float(to_x(value)), text=f"{value:,.0f}") for value in x_ticks],
        y_ticks=[Tick(at=float(to_y(value)), text=_tick_text(value, y_high - y_low)) for value in y_ticks],
        band=None if band is None else (float(to_y(band)), float(to_y(-band) - to_y(band))),
        x_span=(x_low, x_high),
        box=box,
    )


def _y_range(lines: Sequence[Line], keep: Sequence[float]) -> tuple[float, float]:
    """The y axis: all strong values, all but the outermost percent of the raw ones, and `keep`, with a margin."""
    seen: list[Floats] = [np.asarray(keep, float)]
    for line in lines:
        strong = line.strong
        seen += [np.quantile(line.y[np.isfinite(line.y)], [0.01, 0.99]), strong[np.isfinite(strong)]]
        seen += [edge[np.isfinite(edge)] for edge in (line.low, line.high) if edge is not None]
    values = np.concatenate(seen)
    low, high = float(values.min()), float(values.max())
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low if low == 0 else low - margin, high + margin


def _evenly(count: int) -> Steps:
    """At most BUCKETS indices, evenly spread, first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, BUCKETS)).round().astype(np.int64))


def _extremes(y: Floats) -> Steps:
    """Indices that keep every bucket's minimum and maximum, in order."""
    if len(y) <= 2 * BUCKETS:
        return np.arange(len(y))
    indices = {0, len(y) - 1}
    for bucket in np.array_split(np.arange(len(y)), BUCKETS):
        finite = bucket[np.isfinite(y[bucket])]
        if len(finite):
            indices |= {int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])}
    return np.array(sorted(indices))


def _path(x: Floats, y: Floats) -> str:
    """An SVG path through the points; it is lifted over what is not finite."""
    commands, down = [], False
    for px, py in zip(x, y, strict=True):
        if np.isfinite(py):
            commands.append(f"{'L' if down else 'M'}{px:.1f} {py:.1f}")
        down = bool(np.isfinite(py))
    return "".join(commands)


def _area(x: Floats, low: Floats, high: Floats) -> str:
    """An SVG path around the points between two edges; what is not finite is left out."""
    inside = np.isfinite(low) & np.isfinite(high)
    upper = [f"{px:.1f} {py:.1f}" for px, py in zip(x[inside], high[inside], strict=True)]
    lower = [f"{px:.1f} {py:.1f}" for px, py in zip(x[inside], low[inside], strict=True)]
    return f"M{'L'.join([*upper, *reversed(lower)])}Z" if upper else ""


def _tick_text(value: float, span: float) -> str:
    """A tick's text: thousands separated, very small numbers in powers of ten, no trailing zeros."""
    if span < 1e-2:
        return f"{value:.0e}".replace("e-0", "e-") if value else "0"
    return f"{value:,.10g}" if span < 1000 else f"{value:,.0f}"
