"""Line charts of the reports as Plotly figures.

Long runs are thinned: the raw line keeps each bucket's minimum and maximum, so that a spike stays visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from octavo.experiments.curves import Floats, Steps, smooth
from octavo.numerics.display import shortened

# Colours and fonts of every chart and page, light and dark.
#
# A figure names its colours as CSS variables, `var(--s0)`, which the page's script replaces by the values of the
# reader's scheme. The series are Okabe and Ito's, told apart with any of the common colour blindnesses.


FONT = 'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Noto Sans", sans-serif'
SERIES = 6  # Colours of series: `--s0` to `--s5`, and as fills of areas `--a0` to `--a5`
COLOUR_LEVELS = 8  # Colours of a heat map, evenly spaced: `--bad0` to `--bad7`, or `--size0` to `--size7`
AREA_OPACITY = 0.18


def _scheme(base: dict[str, str], series: Sequence[str], bad: Sequence[str], size: Sequence[str]) -> dict[str, str]:
    areas = ("".join(f"{int(colour[i : i + 2], 16)}, " for i in (1, 3, 5)) for colour in series)
    return {
        **base,
        **{f"s{slot}": colour for slot, colour in enumerate(series)},
        **{f"a{slot}": f"rgba({rgb}{AREA_OPACITY})" for slot, rgb in enumerate(areas)},
        **{f"bad{level}": colour for level, colour in enumerate(bad)},
        **{f"size{level}": colour for level, colour in enumerate(size)},
    }


LIGHT = _scheme(
    {
        "page": "#f5f6f8", "card": "#ffffff", "ink": "#18202b", "soft": "#5a6675", "line": "#e3e7ec",
        "grid": "#e9ecf0", "good": "#0a7d57", "good-bg": "#e3f5ee", "warn": "#a04a00", "warn-bg": "#fdf0e3",
        "band": "rgba(0, 158, 115, 0.11)",
    },
    ("#0072b2", "#d55e00", "#009e73", "#b8558f", "#b57a00", "#3a93c9"),
    ("#fdf3ea", "#f9d7bb", "#f4bb8c", "#ea9a59", "#de7623", "#c85700", "#a24300", "#7c2f00"),
    ("#ecf4fa", "#bddaee", "#8fc1e1", "#5ba4d1", "#2486be", "#0169a5", "#064f7e", "#0a3557"),
)  # fmt: skip
DARK = _scheme(  # Values of the CSS variables in each scheme
    {
        "page": "#0f141a", "card": "#171e26", "ink": "#e6ebf1", "soft": "#93a1b1", "line": "#27313c",
        "grid": "#222b35", "good": "#4cc79b", "good-bg": "#12312a", "warn": "#f2a35e", "warn-bg": "#37260f",
        "band": "rgba(76, 199, 155, 0.12)",
    },
    ("#5ab4ec", "#f58a3c", "#3cc79a", "#e08fc0", "#e6b34a", "#8ecdf5"),
    ("#262422", "#4a3220", "#6e401e", "#9d5926", "#d27633", "#f6964e", "#fbb986", "#ffdcbd"),
    ("#1d2731", "#234057", "#2a597d", "#3979a6", "#4d9cd0", "#6bbcee", "#9fd4f6", "#d3ecfd"),
)  # fmt: skip


def css_variables(scheme: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in scheme.items())


def colour(slot: int, kind: str = "s") -> str:
    """The colour of a series, or with `kind="a"` that of an area; slots repeat after `SERIES`."""
    return f"var(--{kind}{slot % SERIES})"


def axis(title: str = "", **settings: object) -> dict[str, object]:
    """A Plotly axis: a light grid, no line, labels that never leave the figure."""
    soft = {"color": "var(--soft)"}
    return {
        "gridcolor": "var(--grid)", "zeroline": False, "automargin": True, "exponentformat": "e", "ticks": "",
        "separatethousands": True, "tickfont": soft, "nticks": 7,
        "title": {"text": title, "font": soft, "standoff": 10}, **settings,
    }  # fmt: skip


def layout(height: int, **settings: object) -> dict[str, object]:
    """A Plotly layout in the theme's colours and fonts, `height` CSS pixels high; `settings` replace single keys."""
    return {
        "height": height, "paper_bgcolor": "var(--card)", "plot_bgcolor": "var(--card)",
        "font": {"family": FONT, "size": 12, "color": "var(--ink)"},
        "margin": {"l": 56, "r": 14, "t": 8, "b": 44, "pad": 4},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        "hoverlabel": {
            "bgcolor": "var(--card)", "bordercolor": "var(--line)", "namelength": -1,
            "font": {"color": "var(--ink)", "family": FONT},
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--soft)", "activecolor": "var(--ink)"},
        **settings,
    }  # fmt: skip


def plain(text: str, length: int = 44) -> str:
    """`text` as Plotly draws it literally, shortened to `length`: Plotly reads `<b>` and `&lt;` as HTML."""
    return shortened(text, length).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


BUCKETS = 1000  # Points of a smoothed line, and half the points of a raw one, at most
LARGE, FLAT, SMALL = 340, 270, 220  # Heights of charts, in CSS pixels
INTEGER_TICKS = 8  # Below so many steps, ticks are one step apart: no fractions between them


@dataclass(frozen=True, kw_only=True)
class Line:
    label: str
    slot: int  # Picks the colour
    x: Steps
    y: Floats  # Values at the steps `x`; what is not finite leaves a gap
    noisy: bool = True  # Draw each value light and the running mean strong, rather than each value strong
    low: Floats | None = None  # low, high: Edges of a shaded area around `y`; None without one
    high: Floats | None = None

    @cached_property
    def strong(self) -> Floats:
        """What is drawn strong: the running mean, or the values themselves."""
        return smooth(self.y) if self.noisy else self.y


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    unit: str  # Unit of the values, for screen readers
    figure: dict[str, Any]  # `data` and `layout` of plotly.js, with colours as CSS variables
    caption: str = ""  # A sentence under the title
    # Range of the y axis in powers of ten if it may become logarithmic; None if not.
    log_range: tuple[float, float] | None = None
    # Legends of a heat map: a title, or "", and its entries, each a "colour", as a CSS variable, and its "text".
    keys: list[tuple[str, list[dict[str, str]]]] = field(default_factory=list)

    @property
    def json(self) -> dict[str, Any]:
        """What the page's script needs."""
        return {**self.figure, "title": self.title, "log": self.log_range}


def line_chart(
    title: str, unit: str, lines: Sequence[Line], *, caption: str = "", height: int = LARGE, keep: Sequence[float] = (),
    band: float | None = None,
) -> Chart:  # fmt: skip
    """A chart of series over steps; `keep`: values that stay in view, `band`: half the height of a shaded band."""
    low, high = _y_range(lines, keep if band is None else [*keep, -1.3 * band, 1.3 * band])
    steps = np.concatenate([np.zeros(0), *(line.x for line in lines)])
    first, last = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
    margin = 0.01 * (last - first) or 0.5
    x_axis = axis(
        range=[first - margin, last + margin], tickformat=",d", title="optimizer step", showgrid=False,
        hoverformat=",d", unifiedhovertitle={"text": "step %{x:,d}"},
        nticks=4 if height == SMALL else 7, **({"dtick": 1} if last - first < INTEGER_TICKS else {}),
    )  # fmt: skip
    y_axis = axis(range=[low, high], zeroline=low < 0 < high, zerolinecolor="var(--soft)", zerolinewidth=1)
    shaded = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "fillcolor": "var(--band)", "layer": "below"}
    shapes = [] if band is None else [shaded | {"y0": -band, "y1": band, "line": {"width": 0}}]
    data = [trace for index, line in enumerate(lines) for trace in _traces(line, index, len(lines))]
    placed = layout(
        height, xaxis=x_axis, yaxis=y_axis, shapes=shapes, hovermode="x unified", showlegend=height != SMALL
    )  # fmt: skip
    return Chart(
        title=title, unit=unit, caption=caption, figure={"data": data, "layout": placed},
        log_range=_log_range(lines) if band is None else None,
    )  # fmt: skip


def _traces(line: Line, index: int, count: int) -> list[dict[str, Any]]:
    """The area, the raw values and the strong line of a series; they share an entry of the legend."""
    strong, name = line.strong, plain(line.label)
    shared = {"type": "scatter", "legendgroup": str(index), "name": name}
    silent = {**shared, "hoverinfo": "skip", "showlegend": False}
    # At most `BUCKETS` indices, evenly spread, first and last among them.
    even = np.unique(np.linspace(0, len(line.x) - 1, min(len(line.x), BUCKETS)).round().astype(np.int64))
    traces = []
    if line.low is not None and line.high is not None:
        inside = even[np.isfinite(line.low[even]) & np.isfinite(line.high[even])]
        around = np.concatenate([inside, inside[::-1]])
        edges = np.concatenate([line.high[inside], line.low[inside[::-1]]])
        area = {"fill": "toself", "fillcolor": colour(line.slot, "a"), "line": {"width": 0}, "mode": "lines"}
        traces.append({**silent, **area, "x": line.x[around].tolist(), "y": numbers(edges)})
    if line.noisy:
        raw = _extremes(line.y)
        drawn = {"mode": "lines", "opacity": 0.3, "line": {"color": colour(line.slot), "width": 1}}
        traces.append({**silent, **drawn, "x": line.x[raw].tolist(), "y": numbers(line.y[raw])})
    under = index == line.slot == 0 and count > 1
    values = strong[even]
    trace = {
        **shared, "x": line.x[even].tolist(), "y": numbers(values), "mode": "lines", "opacity": 0.5 if under else 1,
        "line": {"color": colour(line.slot), "width": 5 if under else 2},
        "hovertemplate": "%{y:.5~g}" + (" (step: %{customdata:.5~g})" if line.noisy else ""),
    }  # fmt: skip
    if line.noisy:
        trace["customdata"] = numbers(line.y[even])
    around = np.pad(np.isfinite(values), 1)
    lonely = around[1:-1] & ~(around[:-2] | around[2:])
    if lonely.any():  # a line has no length there
        trace |= {"mode": "lines+markers", "marker": {"size": np.where(lonely, 7, 0).tolist(), "opacity": 1}}
    return [*traces, trace]


def numbers(values: Floats) -> list[float | None]:
    """Values with six digits, which no screen shows more of; None where they are not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def _y_range(lines: Sequence[Line], keep: Sequence[float]) -> tuple[float, float]:
    """The y axis: all strong values, all but the outermost percent of the raw ones, and `keep`, with a margin."""
    parts: list[Floats] = [np.asarray(keep, float)]
    for line in lines:
        raw = _finite(line.y)
        parts += [np.quantile(raw, [0.01, 0.99]) if len(raw) else raw]
        parts += [_finite(values) for values in (line.strong, line.low, line.high) if values is not None]
    values = np.concatenate(parts)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low if low == 0 else low - margin, high + margin


def _log_range(lines: Sequence[Line]) -> tuple[float, float] | None:
    """The y axis in powers of ten: of all strong values; None if one is negative or none is positive."""
    values = np.concatenate([np.zeros(0), *(_finite(line.strong) for line in lines)])
    if not (values > 0).any() or (values < 0).any():
        return None
    low, high = np.log10(values[values > 0].min()), np.log10(values.max())
    margin = 0.06 * (high - low) or 0.05
    return float(low - margin), float(high + margin)


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _extremes(y: Floats) -> Steps:
    """Indices that keep every bucket's minimum and maximum, in order."""
    if len(y) <= 2 * BUCKETS:
        return np.arange(len(y))
    indices = {0, len(y) - 1}
    for bucket in np.array_split(np.arange(len(y)), BUCKETS):
        if len(finite := bucket[np.isfinite(y[bucket])]):
            indices |= {int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])}
    return np.array(sorted(indices))
