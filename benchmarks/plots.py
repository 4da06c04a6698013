"""The plots of docs/performance.md, from result rows: Plotly figures in the theme of the reports."""

from collections.abc import Sequence
from typing import Any

from benchmarks import roofline
from benchmarks.figures import Figure, figure
from octavo.experiments.theme import axis, colour, plain

Row = dict[str, Any]
COLOURS = {
    "octavo rowwise": colour(0), "octavo tensorwise": colour(5), "torchao tensorwise": colour(1),
    "torchao rowwise": colour(4), "given tensorwise": "var(--soft)",
}  # fmt: skip
REFERENCE = {"type": "line", "line": {"color": "var(--soft)", "width": 1, "dash": "dash"}, "layer": "below"}


def predicted() -> Figure:
    """Predicted speed-up of a cube over its side, on the devices of the table."""
    sides = [2**exponent for exponent in range(8, 15)]
    data = []
    for slot, device in enumerate(roofline.DEVICES.values()):
        speed = [roofline.linear(device, (s, s, s)) / roofline.linear(device, (s, s, s), "rowwise") for s in sides]
        line = {"mode": "lines+markers", "line": {"color": colour(slot), "width": 2}, "marker": {"size": 6}}
        data.append({"type": "scatter", "x": sides, "y": speed, "name": device.name, **line})
    line = {**REFERENCE, "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    return figure(
        data, 380, shapes=[line], margin={"l": 64, "r": 24, "t": 40, "b": 56, "pad": 4},
        xaxis=axis(type="log", tickvals=sides, ticktext=[f"{side:,}" for side in sides], title="M = K = N"),
        yaxis=axis(title="predicted speed-up over bf16", ticksuffix=" ×", dtick=0.2, tickformat=".1f"),
    )  # fmt: skip


def speedups(rows: Sequence[Row]) -> Figure:
    """Measured speed-up of every arm over bf16 eager, by shape."""
    timed = [row for row in rows if row.get("kernel_ms") and row["arm"] in COLOURS]
    base = {row["shape"]: row["kernel_ms"] for row in rows if row["arm"] == "bf16" and row["mode"] == "eager"}
    names = [shape for shape in dict.fromkeys(row["shape"] for row in timed) if shape in base]
    arms = list(dict.fromkeys((row["arm"], row["mode"]) for row in timed))
    data = []
    for index, (arm, mode) in enumerate(arms):
        of_arm = [row for row in timed if (row["arm"], row["mode"]) == (arm, mode) and row["shape"] in base]
        offset = (index - len(arms) / 2) / (1.4 * len(arms))
        marker = {"color": COLOURS[arm], "size": 8, "symbol": "circle" if mode == "eager" else "diamond"}
        data.append(
            {"type": "scatter", "mode": "markers", "marker": marker, "name": f"{arm}, {mode}",
             "x": [base[row["shape"]] / row["kernel_ms"] for row in of_arm],
             "y": [names.index(row["shape"]) + offset for row in of_arm]}
        )  # fmt: skip
    line = {**REFERENCE, "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1}
    places = {"tickvals": list(range(len(names))), "ticktext": [plain(name) for name in names]}
    return figure(
        data, 150 + 42 * len(names), shapes=[line], margin={"l": 64, "r": 24, "t": 64, "b": 56, "pad": 4},
        xaxis=axis(title="speed-up over bf16 eager, kernel time, forward + backward", ticksuffix=" ×"),
        yaxis=axis(**places, range=[len(names) - 0.5, -0.5]),
    )  # fmt: skip


def bandwidths(rows: Sequence[Row]) -> Figure:
    """Share of the measured copy bandwidth that each quantizer reaches at the first matrix."""
    timed = [row for row in rows if row.get("percent") and row["stage"] == "quantize"]
    first = [row for row in timed if row["shape"] == timed[0]["shape"]]
    labels = [plain(f"{row['case']}, {row['arm']}") for row in first]
    bars = {"type": "bar", "orientation": "h", "marker": {"color": colour(0)}}
    line = {**REFERENCE, "layer": "above", "yref": "paper", "x0": 85, "x1": 85, "y0": 0, "y1": 1}
    return figure(
        [{**bars, "x": [row["percent"] for row in first], "y": labels}], 90 + 20 * len(first), shapes=[line],
        xaxis=axis(title=f"% of measured copy bandwidth, {first[0]['shape']}"),
        yaxis=axis(autorange="reversed", showgrid=False, nticks=0),
    )  # fmt: skip
