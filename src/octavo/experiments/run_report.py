"""The report of one run: `report.html`; of a pair also its verdict: `verdict.json`.

Everything is read from what the runs left in their folders, so a report can be written again, later and elsewhere.
"""

import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octavo.experiments.charts import FLAT, SMALL, Chart, Line, line_chart
from octavo.experiments.compare_verdict import BAND_PERCENT, PairVerdict, PredictedSpeed, verdict
from octavo.experiments.curves import gap_percent
from octavo.experiments.logged_run import LoggedRun, read_runs
from octavo.experiments.page import render
from octavo.train.disk import write_file
from octavo.train.record.metrics import LOSS, LOSS_EMA, LOSS_HIGH_PRECISION, RunResult

CHIPS = {
    "within": f"within {BAND_PERCENT:g} %", "above": f"more than {BAND_PERCENT:g} % higher",
    "below": f"more than {BAND_PERCENT:g} % lower", "none": "no verdict",
}  # fmt: skip
ONLY_ON_GPUS = ("MFU", "peak memory")  # Rows that runs on a CPU do not have
NOT_COMPARED = ("run.name", "run.out")  # Settings that differ between any two runs and do not affect the result
HELD_OUT_LOSSES = {  # Metrics on held-out data that are losses, for people; all others are shares
    LOSS: "held-out loss", LOSS_HIGH_PRECISION: "held-out loss in high precision",
    LOSS_EMA: "held-out loss of averaged weights",
}  # fmt: skip


def write_report(runs: list[Path], out: Path, prediction: PredictedSpeed | None = None) -> Path:
    """Write the report of a run, or of a pair, into the folder `out`; return the path of its page."""
    # `prediction`: the speed of the second run's precision on GPUs.
    logged = read_runs(runs)
    pair = verdict(logged[0].result, logged[1].result, prediction) if len(logged) == 2 else None
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "report.html", render("report.html.j2", **page_context(logged, pair)))
    if pair is not None:
        summary = {"verdicts": [pair.to_json()], "runs": [asdict(run.result) for run in logged]}
        write_file(out / "verdict.json", json.dumps(summary, indent=2) + "\n")
    return out / "report.html"


def summary_rows(results: Sequence[RunResult]) -> list[list[str]]:
    """The summary table: in each row a label, a value per run and, of several, how the second differs."""

    def row(label: str, value: Callable[[RunResult], float | None], text: str, compare: str = "") -> list[str]:
        values = [value(result) for result in results]
        cells = [label, *("–" if v is None else text.format(v) for v in values)]
        return cells if len(values) == 1 else [*cells, _difference(values[0], values[1], compare) if compare else ""]

    def held_out(name: str) -> Callable[[RunResult], float | None]:
        return lambda result: (result.held_out or {}).get(name)

    units = results[0].unit
    unit = units.removesuffix("s")
    kinds = dict.fromkeys(HELD_OUT_LOSSES, "gap")
    rows = [
        row(held_out_label(name), held_out(name), _held_out_format(name), kinds.get(name, "points"))
        for name in dict.fromkeys(name for result in results for name in result.held_out or {})
    ]
    rows += [
        row("mean loss, last 10 % of steps", lambda r: r.losses.tail_mean if r.losses else None, "{:.4f}", "gap"),
        row("final loss", lambda r: r.losses.final if r.losses else None, "{:.4f}", "gap"),
        row("first loss", lambda r: r.losses.first if r.losses else None, "{:.4f}", "gap"),
        row(f"{units}/s, median", lambda r: r.tokens_per_s, "{:,.0f}", "ratio"),
        row("MFU, median, of the bf16 peak", lambda r: r.mfu, "{:.1%}", "ratio"),
        row("peak memory of the first GPU, GiB", lambda r: r.peak_memory and r.peak_memory / 2**30, "{:.1f}", "ratio"),
        row(f"saved for backward, bytes/{unit}", lambda r: r.saved_bytes_per_token, "{:,.0f}", "ratio"),
        row("optimizer states, bytes/parameter", lambda r: r.state_bytes_per_parameter, "{:.2f}", "ratio"),
        row("steps", lambda r: r.steps, "{:,}"),
        row(units, lambda r: r.tokens, "{:,}"),
        row("skipped steps", lambda r: r.skipped_steps, "{:,}"),
        row("parameters", lambda r: r.parameters, "{:,}"),
        row("seconds in steps", lambda r: r.wall_s, "{:,.1f}", "ratio"),
    ]
    return [row for row in rows if not (row[0].startswith(ONLY_ON_GPUS) and set(row[1:]) == {"–"})]


def held_out_label(name: str) -> str:
    return HELD_OUT_LOSSES.get(name, f"{name}, held-out")


def held_out_text(name: str, value: float | None) -> str:
    return "not finite" if value is None else _held_out_format(name).format(value)


def _held_out_format(name: str) -> str:
    return "{:.4f}" if name in HELD_OUT_LOSSES else "{:.2%}"


def _difference(first: float | None, second: float | None, kind: str) -> str:
    if first is None or second is None or not first:
        return "–"
    if kind == "points":
        return f"{100 * (second - first):+.2f} points"
    if kind == "ratio":
        return f"{second / first:.2f} ×"
    return f"{second - first:+.4f}  ({100 * (second - first) / first:+.2f} %)"


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

    small_chart = partial(chart, height=SMALL, keep=[0])

    unit = runs[0].result.unit
    per = f"nats per {unit.removesuffix('s')}"
    large = chart("Loss", per, lines("loss"), caption=f"{per.capitalize()}. Strong: running mean; light: each step.")
    if len(runs) > 1:
        baseline = runs[0]
        gaps = [(run, *gap_percent(baseline.curves, run.curves)) for run in runs[1:]]
        large += chart(
            f"Loss above {baseline.label}", "percent",
            [Line(label=run.label, slot=run.slot, x=x, y=y) for run, x, y in gaps],
            caption=f"Percent of {baseline.label}'s loss at the same step. Shaded: ±{BAND_PERCENT:g} %.", height=FLAT,
            band=BAND_PERCENT,
        )  # fmt: skip
    # Without the steps in which nothing was measured, which would leave gaps.
    held_out = [(line, np.isfinite(line.y)) for line in lines("held_out", noisy=False)]
    measured = [replace(line, x=line.x[mask], y=line.y[mask]) for line, mask in held_out]
    large += chart("Held-out loss", per, measured, height=FLAT, keep=[0])
    small = small_chart(f"{unit.capitalize()} per second", f"{unit}/s", lines("tokens_per_s"))
    small += small_chart("Gradient norm", "L2 norm before clipping", lines("grad_norm"))
    small += small_chart("Learning rate", "learning rate", lines("lr", noisy=False))
    small += small_chart("MFU", "percent", lines("mfu"), caption="Percent of the bf16 peak.")
    memory, caption = lines("peak_memory", noisy=False), "GiB of tensors on the first GPU"
    expected = runs[0].setup.expected if len(runs) == 1 and runs[0].setup else None
    if expected is not None and expected.memory is not None:
        predicted = np.full(len(memory[0].x), expected.memory / 2**30)
        memory.insert(0, Line(label="predicted", slot=1, x=memory[0].x, y=predicted, noisy=False))
        caption += "; orange: predicted"
    small += small_chart("Peak memory", "GiB", memory, caption=f"{caption}.")
    return {"large": large, "small": small}


def page_context(runs: Sequence[LoggedRun], pair: PairVerdict | None = None) -> dict[str, object]:
    """What `report.html.j2` shows of a run, or of a pair."""
    first, setup = runs[0].result, runs[0].setup
    title = runs[0].label if pair is None else f"{runs[1].label} against {runs[0].label}"
    steps = setup.steps if setup is not None else first.steps
    size = f"{first.parameters:,} parameters · {first.tokens:,} {first.unit}"
    stopped = "" if first.stopped == "done" or len(runs) > 1 else f" · stopped at step {first.steps:,} of {steps:,}"
    packages = sorted({package for run in runs for package in run.result.versions})
    versions = [[run.result.versions.get(package, "–") for package in packages] for run in runs]
    return {
        "title": title, "subtitle": f"{first.name} · {size} · {first.device}{stopped}", "pair": pair,
        "chips": CHIPS, "tiles": _run_tiles(runs[0]) if pair is None else _pair_tiles(pair),
        "charts": run_charts(runs), "runs": runs, "rows": summary_rows([run.result for run in runs]),
        "differences": config_differences([run.config for run in runs]), "packages": packages,
        "environment": [[run.label, run.result.device, *own] for run, own in zip(runs, versions, strict=True)],
    }  # fmt: skip


def _tile(value: float | None, text: str, label: str) -> dict[str, str]:
    return {"value": "–" if value is None else text.format(value), "label": label}


def _pair_tiles(pair: PairVerdict) -> list[dict[str, str]]:
    """The figures of a candidate beside its baseline."""
    tiles = [_tile(pair.tail_gap_percent, "{:+.2f} %", "loss gap, mean of the last 10 % of steps")]
    if pair.held_out_sentence:
        tiles.append(_tile(pair.held_out_gap_percent, "{:+.2f} %", "gap of the held-out loss"))
    ratio, speed = pair.speed_ratio, f"{pair.baseline}'s tokens/s"
    if pair.prediction is not None:
        ratio = pair.prediction.gain
        speed = f"{pair.baseline}'s speed, predicted, not measured: {pair.prediction.where}"
    return [
        *tiles,
        _tile(pair.memory_ratio, "{:.2f} ×", f"{pair.baseline}'s bytes saved for backward"),
        _tile(pair.state_ratio, "{:.2f} ×", f"{pair.baseline}'s bytes of optimizer states"),
        _tile(ratio, "{:.2f} ×", speed),
    ]


def _run_tiles(run: LoggedRun) -> list[dict[str, str]]:
    """The figures of one run, beside those that were predicted."""
    result, setup, last = run.result, run.setup, run.recent[-1] if run.recent else None
    expected, data = (setup.expected, setup.data) if setup is not None else (None, None)
    tiles = [_tile(v, _held_out_format(name), held_out_label(name)) for name, v in (result.held_out or {}).items()]
    loss = result.losses.tail_mean if result.losses is not None else None
    tiles.append(_tile(loss, "{:.4f}", "mean loss, last 10 % of steps"))
    speed = f", {expected.tokens_per_s:,.0f} predicted" if expected is not None and expected.tokens_per_s else ""
    tiles.append(_tile(result.tokens_per_s, "{:,.0f}", f"{result.unit}/s, median{speed}"))
    if result.mfu is not None:
        fp8 = ""
        if expected is not None and expected.fp8_flops:
            fp8 = f"; {result.mfu * expected.bf16_flops / expected.fp8_flops:.1%} of the FP8 peak"
        tiles.append(_tile(result.mfu, "{:.1%}", f"MFU, of the bf16 peak{fp8}"))
    if result.peak_memory is not None:
        memory = f", {expected.memory / 2**30:.1f} predicted" if expected is not None and expected.memory else ""
        tiles.append(_tile(result.peak_memory / 2**30, "{:.1f} GiB", f"peak memory{memory}"))
    per_unit = f"saved for backward, bytes/{result.unit.removesuffix('s')}"
    tiles.append(_tile(result.saved_bytes_per_token, "{:,.0f}", per_unit))
    if last is not None:
        norm = math.nan if last.grad_norm is None else last.grad_norm
        tiles.append(_tile(norm, "{:.3g}" if math.isfinite(norm) else "not finite", "gradient norm before clipping"))
    if last is not None and last.epoch is not None and data is not None:
        size = f"{data.rows:,} rows"
        if data.documents is not None and data.tokens is not None:
            size = f"{data.tokens:,} in {data.documents:,} documents"
        tiles.append(_tile(last.epoch, "{:.3g}", f"epochs: {last.tokens:,} {result.unit}; the data has {size}"))
    return tiles


def config_differences(configs: Sequence[str]) -> list[list[str]]:
    """The settings that differ between configs: in each row a key and each run's value."""
    if len(configs) == 1:
        return []
    from octavo.train.config.run_config import flat  # imports torch

    settings = [dict(flat("", tomllib.loads(config))) for config in configs]
    keys = dict.fromkeys(key for own in settings for key in own if key not in NOT_COMPARED)
    return [
        [key, *(str(own.get(key, "not set")) for own in settings)]
        for key in keys
        if any(own.get(key) != settings[0].get(key) for own in settings)
    ]
