"""Heat maps of the report: layers down, steps across, one panel per operand, a colour per level.

Layers of one kind are adjacent (all down projections, then all gate projections), in the order of their blocks, and
share one label: 60 blocks stay legible, and growth with depth is visible. Each level is one SVG path, a run of equal
cells one rectangle, in one hue whose opacity is the severity, so it reads on light and dark pages. A `<title>` per
layer and panel is the tooltip. Long runs and deep models are downsampled; each cell shows its worst sample.

Levels of SQNR and underflow are fixed, so that two reports can be compared; those of an amax span its own range.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from octavo.inspect.stats import OPERANDS, OperandStats
from octavo.numerics.names import pattern

COLUMNS = 48
"""Columns of a panel, at most."""
ROWS = 280
"""Rows of a map, at most."""
WIDTH, LEFT, TOP, GAP, BELOW = 980, 190, 26, 14, 24
LONGEST = 27
"""Characters of a label, at most."""
LEVELS = 8
NAMES = {"x": "x", "w": "w", "dgrad_g": "G for dgrad", "wgrad_g": "G for wgrad"}
NOTHING, BROKEN = -1, LEVELS
"""Levels of a cell that was not sampled, and of one with values that are not finite."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a map shows.

    Attributes:
        title: Its name.
        caption: One sentence.
        unit: Text after a value.
        value: Of a row of statistics; NaN where there is none.
        worst: Which of several values counts.
        edges: Rising values between levels; None to take eight equal ones over the range of each operand.
        falling: Whether low values are the bad ones.
        slot: Colour.
    """

    title: str
    caption: str
    unit: str
    value: Callable[[OperandStats], float]
    worst: Callable[[Sequence[float]], float]
    edges: tuple[float, ...] | None
    falling: bool = False
    slot: int = 1


def _log_amax(row: OperandStats) -> float:
    return math.log2(row.amax) if row.amax > 0 else math.nan


FIGURES = (
    Figure(
        title="SQNR", unit=" dB", value=lambda row: row.sqnr, worst=min, falling=True,
        edges=(18.0, 20.0, 22.0, 24.0, 26.0, 28.0, 30.0),
        caption="Signal to quantization noise, dB. E4M3 gives about 31, E5M2 about 25, where nothing underflows.",
    ),
    Figure(
        title="Underflow", unit=" %", value=lambda row: 100 * row.underflow, worst=max,
        edges=(1e-3, 1e-2, 0.1, 1.0, 5.0, 10.0, 20.0),
        caption="Percent of the values above zero that become zero in FP8.",
    ),
    Figure(
        title="Largest magnitude", unit="", value=_log_amax, worst=max, edges=None, slot=0,
        caption="Powers of two (log2 of amax); each operand over its own range. Sudden changes are what to look for.",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One operand: where it is, its paths by level, a hit area per layer, its ticks and its legend."""

    title: str
    left: float
    width: float
    paths: list[tuple[int, str]]
    hits: list[tuple[float, float, str]]
    ticks: list[tuple[float, str]]
    legend: list[tuple[int, str]]


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A map ready for the template.

    Attributes:
        labels: (top, height, text) of layers of one kind.
        legends: Of all panels, or of each by name, where each has a range of its own.
    """

    title: str
    caption: str
    slot: int
    width: int
    height: float
    bottom: float
    left: int
    labels: list[tuple[float, float, str]]
    panels: list[Panel]
    legends: list[tuple[str, list[tuple[int, str]]]]


def heatmaps(rows: Sequence[OperandStats]) -> list[Heatmap]:
    """The maps of a run's statistics; [] for a run without."""
    if not rows:
        return []
    steps = sorted({row.step for row in rows})
    groups = _groups(list(dict.fromkeys(row.layer for row in rows)))
    by_operand: dict[tuple[str, str], list[OperandStats]] = {}
    for row in rows:
        by_operand.setdefault((row.layer, row.operand), []).append(row)
    return [_map(figure, steps, groups, by_operand) for figure in FIGURES]


def _groups(layers: list[str]) -> list[tuple[str, list[list[str]]]]:
    """Kinds of layers, and of each the layers that share a row."""
    kinds: dict[str, list[str]] = {}
    for layer in layers:
        kinds.setdefault(pattern(layer), []).append(layer)
    together = -(-len(layers) // ROWS)
    short = [kind.rsplit("#.", 1)[-1] for kind in kinds]
    names = short if len(set(short)) == len(short) else list(kinds)
    return [
        (
            name if len(name) <= LONGEST else "…" + name[1 - LONGEST :],
            [members[i : i + together] for i in range(0, len(members), together)],
        )
        for name, members in zip(names, kinds.values(), strict=True)
    ]


def _map(
    figure: Figure,
    steps: list[int],
    groups: list[tuple[str, list[list[str]]]],
    by_operand: dict[tuple[str, str], list[OperandStats]],
) -> Heatmap:
    count = sum(len(members) for _, members in groups)
    height = min(16.0, max(4.0, 420 / count))
    gap = 6.0
    tops, labels, top = [], [], float(TOP)
    for kind, members in groups:
        labels.append((top, height * len(members), kind))
        for _ in members:
            tops.append(top)
            top += height
        top += gap
    lines = [members for _, rows in groups for members in rows]
    operands = [operand for operand in OPERANDS if any(key[1] == operand for key in by_operand)]
    width = (WIDTH - LEFT - GAP * (len(operands) - 1)) / len(operands)
    panels = [
        _panel(figure, operand, LEFT + number * (width + GAP), width, steps, lines, tops, height, by_operand)
        for number, operand in enumerate(operands)
    ]
    own = figure.edges is None
    legends = [(panel.title if own else "", panel.legend) for panel in (panels if own else panels[:1])]
    return Heatmap(
        title=figure.title, caption=figure.caption, slot=figure.slot, width=WIDTH, height=top - gap + BELOW,
        bottom=top - gap, left=LEFT, labels=labels, panels=panels, legends=legends,
    )  # fmt: skip


def _panel(
    figure: Figure, operand: str, left: float, width: float, steps: list[int], lines: list[list[str]],
    tops: list[float], height: float, by_operand: dict[tuple[str, str], list[OperandStats]],
) -> Panel:  # fmt: skip
    columns = min(len(steps), COLUMNS)
    column_of = {step: number * columns // len(steps) for number, step in enumerate(steps)}
    cells: list[list[list[OperandStats]]] = []
    for members in lines:
        cells.append([[] for _ in range(columns)])
        for row in (row for layer in members for row in by_operand.get((layer, operand), ())):
            cells[-1][column_of[row.step]].append(row)
    edges = figure.edges or _equal([figure.value(row) for line in cells for cell in line for row in cell])
    levels = [[_level(figure, cell, edges) for cell in line] for line in cells]
    step_width = width / columns
    hits = [
        (top, height, _tooltip(figure, operand, [row for cell in line for row in cell]))
        for top, line in zip(tops, cells, strict=True)
        if any(line)
    ]
    shown = sorted({0, columns - 1})
    firsts = {column: step for step, column in reversed(column_of.items())}
    return Panel(
        title=NAMES[operand],
        left=left,
        width=width,
        paths=_paths(levels, left, tops, step_width, height),
        hits=hits,
        ticks=[(left + (column + 0.5) * step_width, f"{firsts[column]:,}") for column in shown],
        legend=_legend(figure, edges),
    )


def _level(figure: Figure, cell: Sequence[OperandStats], edges: Sequence[float]) -> int:
    """How bad a cell is: 0 to 7, `BROKEN` or `NOTHING`."""
    if any(row.nonfinite for row in cell):
        return BROKEN
    values = [value for row in cell if not math.isnan(value := figure.value(row))]
    if not values:
        return NOTHING
    above = sum(figure.worst(values) >= edge for edge in edges)
    return LEVELS - 1 - above if figure.falling else above


def _equal(values: Sequence[float]) -> tuple[float, ...]:
    """Edges of eight equal levels."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    size = max((high - low) / LEVELS, 0.25)
    return tuple(low + size * number for number in range(1, LEVELS))


def _paths(
    levels: list[list[int]], left: float, tops: list[float], step_width: float, height: float
) -> list[tuple[int, str]]:
    """One path per level, of rectangles."""
    drawn: dict[int, list[str]] = {}
    for top, line in zip(tops, levels, strict=True):
        start = 0
        for level, run in groupby(line):
            length = len(list(run))
            if level != NOTHING:
                x, w = left + start * step_width, length * step_width
                drawn.setdefault(level, []).append(f"M{x:.1f} {top:.1f}h{w:.1f}v{height:.1f}h-{w:.1f}z")
            start += length
    return [(level, "".join(parts)) for level, parts in sorted(drawn.items())]


def _tooltip(figure: Figure, operand: str, rows: Sequence[OperandStats]) -> str:
    """Return the tooltip of a layer: its worst sample."""
    broken = [row for row in rows if row.nonfinite]
    if broken:
        return f"{broken[0].layer} {operand}: {broken[0].nonfinite} values NaN or infinite at step {broken[0].step:,}"
    valid = [row for row in rows if not math.isnan(figure.value(row))]
    if not valid:
        return f"{rows[0].layer} {operand}: nothing above zero"
    value = figure.worst([figure.value(row) for row in valid])
    row = next(row for row in valid if figure.value(row) == value)
    return f"{row.layer} {operand}: {value:.4g}{figure.unit} at step {row.step:,}"


def _legend(figure: Figure, edges: Sequence[float]) -> list[tuple[int, str]]:
    """The levels, the best one first, each with its values."""
    bounds = [-math.inf, *edges, math.inf]
    texts = []
    for low, high in pairwise(bounds):
        texts.append(f"< {high:.3g}" if low == -math.inf else f"≥ {low:.3g}")
    if figure.falling:
        texts.reverse()
    return list(enumerate(texts))
