"""Colours and fonts of every chart and page, light and dark.

A figure names its colours as CSS variables, `var(--s0)`, which the page's script replaces by the values of the reader's
scheme. The series are Okabe and Ito's, told apart with any of the common colour blindnesses.
"""

from collections.abc import Sequence

import numpy as np

from octavo.numerics.display import shortened

FONT = 'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Noto Sans", sans-serif'
SERIES = 6  # Colours of series: `--s0` to `--s5`, and as fills of areas `--a0` to `--a5`
COLOUR_LEVELS = 8  # Colours of a heat map: `--bad0` to `--bad7`, or `--size0` to `--size7`
AREA_OPACITY = 0.18


def _mix(stops: Sequence[str]) -> list[str]:
    """`COLOUR_LEVELS` colours evenly spaced between the stops of a ramp, as #rrggbb."""
    channels = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops]).T
    places = np.linspace(0, len(stops) - 1, COLOUR_LEVELS)
    mixed = [np.interp(places, range(len(stops)), channel) for channel in channels]
    return ["#" + "".join(f"{round(value):02x}" for value in colour) for colour in zip(*mixed, strict=True)]


def _scheme(base: dict[str, str], series: Sequence[str], bad: Sequence[str], size: Sequence[str]) -> dict[str, str]:
    areas = ("".join(f"{int(colour[i : i + 2], 16)}, " for i in (1, 3, 5)) for colour in series)
    return {
        **base,
        **{f"s{slot}": colour for slot, colour in enumerate(series)},
        **{f"a{slot}": f"rgba({rgb}{AREA_OPACITY})" for slot, rgb in enumerate(areas)},
        **{f"bad{level}": colour for level, colour in enumerate(_mix(bad))},
        **{f"size{level}": colour for level, colour in enumerate(_mix(size))},
    }


LIGHT = _scheme(
    {
        "page": "#f5f6f8", "card": "#ffffff", "ink": "#18202b", "soft": "#5a6675", "line": "#e3e7ec",
        "grid": "#e9ecf0", "good": "#0a7d57", "good-bg": "#e3f5ee", "warn": "#a04a00", "warn-bg": "#fdf0e3",
        "band": "rgba(0, 158, 115, 0.11)",
    },
    ("#0072b2", "#d55e00", "#009e73", "#b8558f", "#b57a00", "#3a93c9"),
    ("#fdf3ea", "#f3b27c", "#d55e00", "#7c2f00"),
    ("#ecf4fa", "#7fb8dd", "#0072b2", "#0a3557"),
)  # fmt: skip
DARK = _scheme(  # Values of the CSS variables in each scheme
    {
        "page": "#0f141a", "card": "#171e26", "ink": "#e6ebf1", "soft": "#93a1b1", "line": "#27313c",
        "grid": "#222b35", "good": "#4cc79b", "good-bg": "#12312a", "warn": "#f2a35e", "warn-bg": "#37260f",
        "band": "rgba(76, 199, 155, 0.12)",
    },
    ("#5ab4ec", "#f58a3c", "#3cc79a", "#e08fc0", "#e6b34a", "#8ecdf5"),
    ("#262422", "#7a451d", "#f58a3c", "#ffdcbd"),
    ("#1d2731", "#2c618a", "#5ab4ec", "#d3ecfd"),
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
