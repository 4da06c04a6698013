"""Heat maps of the report: layers down, kind by kind, steps across, one panel per operand, a colour per level.

Long runs and deep models are downsampled to the worst sample of each cell. Levels of SQNR and underflow are fixed, so
that two reports can be compared; those of an amax span its own range.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

from octavo.experiments.charts import COLOUR_LEVELS, Chart, axis, layout, plain
from octavo.inspect.findings import OPERANDS, QUANTILES, OperandStats
from octavo.numerics.suggestions import grouped, pattern

COLUMNS = 48  # Columns of a panel, at most
ROWS = 280  # Rows of a map, at most
LONGEST = 27  # Characters of a label, at most
NAMES = {"x": "x", "w": "w", "dgrad_g": "G for dgrad", "wgrad_g": "G for wgrad"}
BROKEN = COLOUR_LEVELS  # Level of a cell with values that are not finite
GAP = 0.012  # Between panels, as a share of the width
HeatmapGroup = tuple[str, list[list[str]]]  # A kind of layers, and of each line the layers that share it
Cells = list[list[list[OperandStats]]]  # By line and column


@dataclass(frozen=True, kw_only=True)
class Statistic:
    title: str
    caption: str
    unit: str  # Text after a value
    value: Callable[[OperandStats], float]  # Of a row of statistics; NaN where there is none
    # Rising values between levels; None to take eight equal ones over the range of each operand.
    edges: tuple[float, ...] | None
    falling: bool = False  # Whether low values are the bad ones
    hue: str = "bad"  # Colours of the levels
    across: str = "step"  # What the columns are


STATISTICS = (
    Statistic(
        title="SQNR", unit=" dB", value=lambda row: row.sqnr, falling=True,
        edges=(18.0, 20.0, 22.0, 24.0, 26.0, 28.0, 30.0),
        caption="Signal to quantization noise, dB. E4M3 gives about 31, E5M2 about 25, where nothing underflows.",
    ),
    Statistic(
        title="Underflow", unit=" %", value=lambda row: 100 * row.underflow,
        edges=(1e-3, 1e-2, 0.1, 1.0, 5.0, 10.0, 20.0),
        caption="Percent of the values above zero that become zero in FP8.",
    ),
    Statistic(
        title="Largest magnitude", unit="", edges=None, hue="size",
        value=lambda row: math.log2(row.amax) if row.amax > 0 else math.nan,
        caption="Powers of two (log2 of amax); each operand over its own range. Sudden changes are what to look for.",
    ),
)  # fmt: skip

CHANNEL_SCALES = Statistic(
    title="Channel scales", unit="", value=lambda row: row.channel_scales[0], edges=None, hue="size",
    across="percentile", caption="log2 of s, by which channels of X are divided and those of W multiplied, from the "
    "smallest to the largest in the last sample. Outlier channels of X are at the right end, those of W at the left.",
)  # fmt: skip


def heatmaps(rows: Sequence[OperandStats]) -> list[Chart]:
    """The maps of a run's statistics; [] for a run without."""
    if not rows:
        return []
    steps = sorted({row.step for row in rows})
    maps = [_map(statistic, steps, rows) for statistic in STATISTICS]
    # Runs with equalized layers have one more map: quantiles of the last channel scales, with percentiles as steps.
    if last := {row.layer: row for row in rows if row.channel_scales}:
        columns = [round(100 * place / (QUANTILES - 1)) for place in range(QUANTILES)]
        quantiles = [
            replace(row, operand="x", step=column, channel_scales=(scale,), nonfinite=0)
            for row in last.values()
            for column, scale in zip(columns, row.channel_scales, strict=True)
        ]
        maps.append(_map(CHANNEL_SCALES, columns, quantiles))
    return maps


def _groups(layers: list[str]) -> list[HeatmapGroup]:
    kinds = grouped((pattern(layer), layer) for layer in layers)
    together = -(-len(layers) // ROWS)
    short = [kind.rsplit("#.", 1)[-1] for kind in kinds]
    names = short if len(set(short)) == len(short) else list(kinds)
    shared = [[members[i : i + together] for i in range(0, len(members), together)] for members in kinds.values()]
    return [(plain(name, LONGEST), lines) for name, lines in zip(names, shared, strict=True)]


def _map(statistic: Statistic, steps: list[int], rows: Sequence[OperandStats]) -> Chart:
    groups = _groups(list(dict.fromkeys(row.layer for row in rows)))
    lines: list[list[str]] = []  # of each line the layers; none between groups
    places = []
    for _, members in groups:
        lines += [[]] if lines else []
        places.append(len(lines) + (len(members) - 1) / 2)
        lines += members
    columns = min(len(steps), COLUMNS)
    column_of = {step: number * columns // len(steps) for number, step in enumerate(steps)}
    line_of = {layer: number for number, layers in enumerate(lines) for layer in layers}
    panels: defaultdict[str, Cells] = defaultdict(lambda: [[[] for _ in range(columns)] for _ in lines])
    for row in rows:
        panels[row.operand][line_of[row.layer]][column_of[row.step]].append(row)
    operands = [operand for operand in OPERANDS if operand in panels]
    width = (1 - GAP * (len(operands) - 1)) / len(operands)
    data, annotations, keys = [], [], []
    axes: dict[str, Any] = {}
    for number, operand in enumerate(operands):
        name = str(number + 1) if number else ""
        edges = statistic.edges or _equal_levels([statistic.value(row) for row in rows if row.operand == operand])
        data.append(_trace(statistic, operand, name, panels[operand], edges))
        annotations += [
            _text(name, f"<b>{NAMES[operand]}</b>", 0, top=True),
            _text(name, f"{steps[0]:,}", 0),
            *([_text(name, f"{steps[-1]:,}", 1)] if len(steps) > 1 else []),
        ]
        left = number * (width + GAP)
        axes[f"xaxis{name}"] = axis(
            anchor=f"y{name}", domain=[left, left + width], showgrid=False, range=[-0.5, columns - 0.5],
            showticklabels=False, **({"matches": "x"} if number else {}),
        )  # fmt: skip
        axes[f"yaxis{name}"] = axis(
            anchor=f"x{name}", showgrid=False, range=[len(lines) - 0.5, -0.5], tickvals=places,
            ticktext=[kind for kind, _ in groups], showticklabels=number == 0, **({"matches": "y"} if number else {}),
        )  # fmt: skip
        keys.append((NAMES[operand] if statistic.edges is None else "", _keys(statistic, edges)))
    tall = max(len(lines) * min(16.0, max(4.0, 420 / len(lines))), 16.0 * len(groups))
    margin = {"l": 60, "r": 8, "t": 24, "b": 28, "pad": 4}
    return Chart(
        title=statistic.title,
        unit=f"{statistic.unit.strip() or 'log2'} by layer and {statistic.across}, one panel per operand",
        caption=statistic.caption,
        figure={
            "data": data,
            "layout": layout(
                round(tall) + margin["t"] + margin["b"], annotations=annotations, margin=margin, hovermode="closest",
                **axes,
            ),
        },
        keys=keys if statistic.edges is None else keys[:1],
    )  # fmt: skip


def _text(name: str, text: str, side: int, *, top: bool = False) -> dict[str, Any]:
    """An annotation at the left (0) or right (1) end of a panel: a title on top, or a step below."""
    return {
        "text": text, "xref": f"x{name} domain", "yref": f"y{name} domain", "showarrow": False,
        "x": side, "xanchor": "right" if side else "left", "y": int(top), "yanchor": "bottom" if top else "top",
        "font": {"color": "var(--ink)" if top else "var(--soft)"},
    }  # fmt: skip


def _trace(statistic: Statistic, operand: str, name: str, cells: Cells, edges: Sequence[float]) -> dict[str, object]:
    shades = [f"var(--{statistic.hue}{level})" for level in range(COLOUR_LEVELS)] + ["var(--ink)"]
    scale = [[place / (COLOUR_LEVELS + 1), shade] for n, shade in enumerate(shades) for place in (n, n + 1)]
    shown = [[_cell(statistic, cell, edges) for cell in line] for line in cells]
    text = f"%{{customdata[0]}}<br>{NAMES[operand]}: <b>%{{customdata[1]}}</b> at {statistic.across} "
    return {
        "type": "heatmap", "xaxis": f"x{name}", "yaxis": f"y{name}", "name": NAMES[operand],
        "z": [[level for level, _ in line] for line in shown],
        "zmin": -0.5, "zmax": COLOUR_LEVELS + 0.5, "colorscale": scale, "showscale": False, "hoverongaps": False,
        "customdata": [[worst for _, worst in line] for line in shown],
        "hovertemplate": text + "%{customdata[2]:,}<extra></extra>",
    }  # fmt: skip


def _cell(
    statistic: Statistic, samples: Sequence[OperandStats], edges: Sequence[float]
) -> tuple[int | None, list[str | int] | None]:
    """How bad a cell is, 0 to 7 or `BROKEN`, and layer, value and step of its worst sample; None without a value."""
    if broken := [row for row in samples if row.nonfinite]:
        row = broken[0]
        return BROKEN, [plain(row.layer, 90), f"{row.nonfinite:,} values NaN or infinite", row.step]
    values = [(value, row) for row in samples if not math.isnan(value := statistic.value(row))]
    if not values:
        return None, None
    value, row = sorted(values, key=itemgetter(0), reverse=not statistic.falling)[0]
    above = bisect_right(edges, value)
    level = COLOUR_LEVELS - 1 - above if statistic.falling else above
    return level, [plain(row.layer, 90), f"{value:.4g}{statistic.unit}", row.step]


def _equal_levels(values: Sequence[float]) -> tuple[float, ...]:
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    size = max((high - low) / COLOUR_LEVELS, 0.25)
    return tuple(low + size * number for number in range(1, COLOUR_LEVELS))


def _keys(statistic: Statistic, edges: Sequence[float]) -> list[dict[str, str]]:
    """The levels, the best one first, each with its values."""
    bounds = [-math.inf, *edges, math.inf]
    texts = [f"< {high:.3g}" if low == -math.inf else f"≥ {low:.3g}" for low, high in pairwise(bounds)]
    if statistic.falling:
        texts.reverse()
    keys = [{"colour": f"var(--{statistic.hue}{level})", "text": text} for level, text in enumerate(texts)]
    return [*keys, {"colour": "var(--ink)", "text": "not finite"}]
