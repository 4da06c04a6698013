"""Output of a comparison: `compare.json`, `report.html`, and the rows of its table."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from octavo._version import __version__
from octavo.experiments.charts import FLAT, Chart, Line, line_chart
from octavo.experiments.compare_verdict import ArmRuns, Comparison, TimeToLoss
from octavo.experiments.curves import Curves, Floats, gap_percent, smooth
from octavo.experiments.page import render
from octavo.experiments.run_report import SummaryRow, config_differences
from octavo.inspect.compare import ArmLosses, Verdict, percent, signed
from octavo.train.record.metrics import finite
from octavo.train.record.outputs import check_kind

FILES = ("compare.json", "report.html")  # Files in the folder of a comparison, besides its runs
CARDS: dict[Verdict, str] = {  # Style of a verdict on the page
    "indistinguishable": "within", "better": "within", "worse": "above", "inconclusive": "none",
}  # fmt: skip
COLOURS = 6


def write_comparison(comparison: Comparison, settings: Sequence[str], out: Path) -> None:
    """Write `FILES` into the folder `out`."""
    for name in FILES:
        check_kind(out / name, "a report")
    runs = comparison.runs
    title = f"{' and '.join(run.name for run in runs[1:])} against {comparison.baseline}"
    (out / "report.html").write_text(_page(comparison, settings, title), encoding="utf-8")
    text = json.dumps(to_json(comparison), indent=2, allow_nan=False)
    (out / "compare.json").write_text(text + "\n", encoding="utf-8")


def comparison_rows(comparison: Comparison) -> list[SummaryRow]:
    """The table: a value per arm, the baseline first."""
    runs, arms = comparison.runs, comparison.arms

    def row(label: str, first: str, others: Sequence[str]) -> SummaryRow:
        return SummaryRow(label=label, values=[first, *others])

    def ratios(key: str) -> list[str]:
        return ["–" if (value := getattr(arm, key)) is None else f"{value:.2f} ×" for arm in arms]

    times = [comparison.time_to_loss, *(arm.time_to_loss for arm in arms)]
    target = "" if times[0] is None else f" {np.mean(times[0].targets):.3f}"
    taken = {
        f"steps to loss{target}": [f"{np.mean(time.steps):,.0f}" if time else "–" for time in times],
        "tokens to it": [f"{time.tokens:,.0f}" if time else "–" for time in times],
        "seconds to it": [f"{time.seconds:,.1f}" if time else "–" for time in times],
        "speed at equal loss": [f"{time.speed:.2f} ×" if time else "–" for time in times],
    }
    failures = [arms[0].losses.baseline_failed, *(arm.losses.failed for arm in arms)]
    failed = [f"{len(seeds)} of {len(comparison.seeds)}" if seeds else "–" for seeds in failures]
    means = [_mean([run.loss(seed) for seed in run.seeds if seed not in run.diverged]) for run in runs]
    gaps = [f"{percent(arm.losses.test.detectable(0.9))} %" if arm.losses.test else "–" for arm in arms]
    return [
        SummaryRow(label="mean loss, last 10 % of steps", values=means),
        row(f"above {comparison.baseline}", "", [_interval(arm.losses) for arm in arms]),
        row("detectable, about 90 % power", "", gaps),
        *([row("failed", failed[0], failed[1:])] if any(failures) else []),
        row("tokens/s", "1.00 ×", ratios("speed")),
        row("saved for backward, bytes/token", "1.00 ×", ratios("memory")),
        *(row(label, values[0], values[1:]) for label, values in taken.items()),
        row("verdict", "", [arm.losses.verdict for arm in arms]),
        *_held_out_rows(comparison),
    ]


def _held_out_rows(comparison: Comparison) -> list[SummaryRow]:
    if comparison.held_out is None:
        return []
    arms = comparison.held_out.arms
    means = [_mean([loss for seed in run.seeds if np.isfinite(loss := run.held_out(seed))]) for run in comparison.runs]
    return [
        SummaryRow(label="held-out loss", values=means),
        SummaryRow(label=f"held-out, above {comparison.baseline}", values=["", *(_interval(arm) for arm in arms)]),
        SummaryRow(label="held-out verdict", values=["", *(arm.verdict for arm in arms)]),
    ]


def _mean(losses: Sequence[float]) -> str:
    return f"{np.mean(losses):.4f}" if losses else "–"


def _interval(losses: ArmLosses) -> str:
    if (test := losses.test) is None:
        return "–"
    return f"{signed(test.mean)} % ({signed(test.low)} to {signed(test.high)})"


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, with the losses of all runs; `docs/compare.md` explains the keys."""
    return {
        "octavo": __version__,
        "exit_code": comparison.exit_code,
        "outcome": comparison.outcome,
        "confidence": comparison.confidence,
        "margin_percent": comparison.margin,
        "planned_seeds": comparison.losses.planned,
        "extended": comparison.losses.extended,
        "seeds": list(comparison.seeds),
        "baseline": comparison.baseline,
        "baseline_loss": comparison.loss,
        "baseline_spread_percent": comparison.spread,
        "arms": [
            _run_json(comparison.runs[0]) | {"time_to_loss": _time_json(comparison.time_to_loss)},
            *(
                _run_json(run)
                | {**arm.losses.to_json(), "speed_ratio": arm.speed, "memory_ratio": arm.memory}
                | {"time_to_loss": _time_json(arm.time_to_loss), "notes": list(arm.notes)}
                for run, arm in zip(comparison.runs[1:], comparison.arms, strict=True)
            ),
        ],
        "held_out": None if comparison.held_out is None else comparison.held_out.to_json(),
        "notes": list(comparison.notes),
    }


def _run_json(run: ArmRuns) -> dict[str, Any]:
    return {
        "name": run.name,
        "settings": list(run.settings),
        "losses": {str(seed): None if seed in run.diverged else run.loss(seed) for seed in run.seeds},
        "held_out_losses": {str(seed): finite(run.held_out(seed)) for seed in run.seeds},
        "steps": {str(seed): result.steps for seed, result in zip(run.seeds, run.results, strict=True)},
        "tokens_per_s": {str(s): result.tokens_per_s for s, result in zip(run.seeds, run.results, strict=True)},
    }


def _time_json(time: TimeToLoss | None) -> dict[str, Any] | None:
    return None if time is None else {**vars(time), "targets": list(time.targets), "steps": list(time.steps)}


def _page(comparison: Comparison, settings: Sequence[str], title: str) -> str:
    runs = comparison.runs
    first = runs[0].results[0]
    seeds = ", ".join(map(str, comparison.seeds))
    return render(
        "compare.html.j2",
        title=title,
        subtitle=f"{first.parameters:,} parameters · {first.tokens:,} tokens a run · seeds {seeds} · {first.device}",
        comparison=comparison,
        cards=CARDS,
        charts=_charts(runs),
        runs=runs,
        slots={run.name: slot % COLOURS for slot, run in enumerate(runs)},
        rows=comparison_rows(comparison),
        losses=[
            (seed, ["diverged" if seed in run.diverged else f"{run.loss(seed):.4f}" for run in runs])
            for seed in comparison.seeds
        ],
        differences=config_differences(settings),
    )


def mean_curves(curves: Sequence[Curves]) -> Curves | None:
    """The mean over seeds of each series, of the runs that are as long as the longest; None if none has a step."""
    whole = _longest(curves)
    if not len(whole[0].step):
        return None
    series = {f.name: np.mean([getattr(curve, f.name) for curve in whole], 0) for f in fields(Curves)}
    return Curves(**series | {"step": whole[0].step})


def _longest(curves: Sequence[Curves]) -> list[Curves]:
    """Runs that ended, where one did: a mean over fewer and fewer runs would jump where one stops."""
    longest = max(len(curve.step) for curve in curves)
    return [curve for curve in curves if len(curve.step) == longest]


def _charts(runs: Sequence[ArmRuns]) -> list[Chart]:
    """Mean loss of each arm, and its gap to the baseline; shaded, the range of all seeds."""
    lines, gaps = [], []
    for slot, run in enumerate(runs):
        mean = mean_curves(run.curves)
        if mean is None or not np.isfinite(mean.loss).any():
            continue
        smoothed = [smooth(curve.loss) for curve in _longest(run.curves)]
        lines.append(_line(run.name, slot, mean.step, mean.loss, smoothed, noisy=True))
        pairs = [gap_percent(base, own) for base, own in zip(runs[0].curves, run.curves, strict=True)]
        longest = max(len(steps) for steps, _ in pairs)
        whole = [smooth(gap) for steps, gap in pairs if len(steps) == longest]
        if slot and np.isfinite(whole).any():
            steps = next(steps for steps, _ in pairs if len(steps) == longest)
            gaps.append(_line(run.name, slot, steps, np.mean(whole, 0), whole, noisy=False))
    shaded = "Mean over seeds; shaded: from the lowest to the highest seed, smoothed."
    charts = [line_chart("Loss", "nats per token", lines, caption=f"Nats per token. {shaded}")] if lines else []
    if gaps:
        caption = f"Percent of {runs[0].name}'s loss at the same step of the same seed. {shaded}"
        charts.append(line_chart(f"Loss above {runs[0].name}", "percent", gaps, caption=caption, height=FLAT, keep=[0]))
    return charts


def _line(label: str, slot: int, steps: Any, values: Floats, seeds: Sequence[Floats], *, noisy: bool) -> Line:
    low, high = np.min(seeds, 0), np.max(seeds, 0)
    return Line(label=label, slot=slot % COLOURS, x=steps, y=values, noisy=noisy, low=low, high=high)
