"""The plots of docs/performance.md, from result rows. The same rows give the same bytes with the same matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import roofline
from benchmarks.environment import save_figure

Row = dict[str, Any]
COLOURS = {
    "octavo rowwise": "#1b6ca8", "octavo tensorwise": "#5fa8d3", "torchao tensorwise": "#d1792b",
    "torchao rowwise": "#e8b27d", "given tensorwise": "#777777",
}  # fmt: skip


def _figure(width: float = 7.2, height: float = 3.6) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "octavo"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    save_figure(figure, path)
    pyplot.close(figure)


def predicted(path: Path) -> None:
    """Predicted speed-up of a cube over its side, on the devices of the table."""
    figure, axes = _figure()
    sides = [2**exponent for exponent in range(8, 15)]
    for device in roofline.DEVICES.values():
        speed = [device.linear((s, s, s)) / device.linear((s, s, s), "rowwise") for s in sides]
        axes.plot(sides, speed, marker="o", markersize=3, label=device.name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sides, [str(side) for side in sides])
    axes.set_xlabel("M = K = N")
    axes.set_ylabel("predicted speed-up over bf16")
    axes.legend(frameon=False)
    _save(figure, path)


def speedups(rows: Sequence[Row], path: Path) -> None:
    """Measured speed-up of every arm over bf16 eager, by shape."""
    timed = [row for row in rows if row.get("kernel_ms") and row["arm"] in COLOURS]
    base = {row["shape"]: row["kernel_ms"] for row in rows if row["arm"] == "bf16" and row["mode"] == "eager"}
    names = [shape for shape in dict.fromkeys(row["shape"] for row in timed) if shape in base]
    figure, axes = _figure(height=1.2 + 0.42 * len(names))
    arms = list(dict.fromkeys((row["arm"], row["mode"]) for row in timed))
    for index, (arm, mode) in enumerate(arms):
        points = [
            (base[row["shape"]] / row["kernel_ms"], names.index(row["shape"]))
            for row in timed
            if (row["arm"], row["mode"]) == (arm, mode) and row["shape"] in base
        ]
        across, up = zip(*points, strict=True) if points else ((), ())
        offset = (index - len(arms) / 2) / (1.4 * len(arms))
        marker = "o" if mode == "eager" else "D"
        axes.plot(across, [y + offset for y in up], marker, color=COLOURS[arm], markersize=4, label=f"{arm}, {mode}")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over bf16 eager, kernel time, forward + backward")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def bandwidths(rows: Sequence[Row], path: Path) -> None:
    """Share of the measured copy bandwidth that each quantizer reaches at the first matrix."""
    timed = [row for row in rows if row.get("percent") and row["stage"] == "quantize"]
    first = [row for row in timed if row["shape"] == timed[0]["shape"]]
    figure, axes = _figure(height=0.8 + 0.2 * len(first))
    labels = [f"{row['case']}, {row['arm']}" for row in first]
    axes.barh(labels, [row["percent"] for row in first], color="#1b6ca8")
    axes.axvline(85, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"% of measured copy bandwidth, {first[0]['shape']}")
    axes.tick_params(axis="y", labelsize="small")
    _save(figure, path)
