"""Output of a comparison: `compare.json`, `report.html`, and the rows of its table."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from octavo._version import __version__
from octavo.experiments.charts import FLAT, Chart, Line, line_chart
from octavo.experiments.compare_verdict import ArmRuns, Comparison, TimeToLoss
from octavo.experiments.curves import Floats, Steps, gap_percent, smooth
from octavo.experiments.page import render
from octavo.experiments.run_report import config_differences
from octavo.inspect.compare import ArmLosses, Verdict, percent, signed
from octavo.train.disk import write_file
from octavo.train.record.metrics import finite

FILES = ("compare.json", "report.html")  # Files in the folder of a comparison, besides its runs
CARDS: dict[Verdict, str] = {  # Style of a verdict on the page
    "indistinguishable": "within", "better": "within", "worse": "above", "inconclusive": "none",
}  # fmt: skip


def write_comparison(comparison: Comparison, settings: Sequence[str], out: Path) -> None:
    runs = comparison.runs
    first, seeds = runs[0].results[comparison.seeds[0]], ", ".join(map(str, comparison.seeds))
    page = render(
        "compare.html.j2", title=f"{' and '.join(run.name for run in runs[1:])} against {comparison.baseline}",
        subtitle=f"{first.parameters:,} parameters · {first.tokens:,} tokens a run · seeds {seeds} · {first.device}",
        comparison=comparison, cards=CARDS, charts=_charts(runs), runs=runs, rows=comparison_rows(comparison),
        differences=config_differences(settings),
        losses=[
            [seed, *("diverged" if seed in run.diverged else f"{run.loss(seed):.4f}" for run in runs)]
            for seed in comparison.seeds
        ],
    )  # fmt: skip
    write_file(out / "report.html", page)
    text = json.dumps(to_json(comparison), indent=2, allow_nan=False)
    write_file(out / "compare.json", text + "\n")


def comparison_rows(comparison: Comparison) -> list[list[str]]:
    """The table: in each row a label and a value per arm, the baseline first."""
    runs, arms, held_out = comparison.runs, comparison.losses.arms, comparison.held_out

    def means(loss: Callable[[ArmRuns, int], float]) -> list[str]:
        of_runs = ([own for seed in run.seeds if np.isfinite(own := loss(run, seed))] for run in runs)
        return [f"{np.mean(losses):.4f}" if losses else "–" for losses in of_runs]

    def ratios(values: Sequence[float | None]) -> list[str]:
        return ["–" if value is None else f"{value:.2f} ×" for value in values]

    times = comparison.times
    target = "" if times[0] is None else f" {np.mean(times[0].targets):.3f}"
    failures = [arms[0].baseline_failed, *(arm.failed for arm in arms)]
    failed = [f"{len(seeds)} of {len(comparison.seeds)}" if seeds else "–" for seeds in failures]
    gaps = [f"{percent(arm.test.detectable(0.9))} %" if arm.test else "–" for arm in arms]
    rows = {
        "mean loss, last 10 % of steps": means(ArmRuns.loss),
        f"above {comparison.baseline}": ["", *(_interval(arm) for arm in arms)],
        "detectable, about 90 % power": ["", *gaps],
        **({"failed": failed} if any(failures) else {}),
        "tokens/s": ratios(comparison.speeds),
        "saved for backward, bytes/token": ratios(comparison.memories),
        f"steps to loss{target}": [f"{np.mean(time.steps):,.0f}" if time else "–" for time in times],
        "tokens to it": [f"{time.tokens:,.0f}" if time else "–" for time in times],
        "seconds to it": [f"{time.seconds:,.1f}" if time else "–" for time in times],
        "speed at equal loss": [f"{time.speed:.2f} ×" if time else "–" for time in times],
        "verdict": ["", *(arm.verdict for arm in arms)],
    }
    if held_out is not None:
        rows |= {
            "held-out loss": means(ArmRuns.held_out),
            f"held-out, above {comparison.baseline}": ["", *(_interval(arm) for arm in held_out.arms)],
            "held-out verdict": ["", *(arm.verdict for arm in held_out.arms)],
        }
    return [[label, *values] for label, values in rows.items()]


def _interval(losses: ArmLosses) -> str:
    if (test := losses.test) is None:
        return "–"
    return f"{signed(test.mean)} % ({signed(test.low)} to {signed(test.high)})"


def to_json(comparison: Comparison) -> dict[str, object]:
    """Everything, with the losses of all runs; `docs/compare.md` explains the keys."""
    arms = [_run_json(run, time) for run, time in zip(comparison.runs, comparison.times, strict=True)]
    ratios = zip(comparison.speeds[1:], comparison.memories[1:], strict=True)
    for arm, losses, (speed, memory) in zip(arms[1:], comparison.losses.arms, ratios, strict=True):
        arm |= losses.to_json() | {"speed_ratio": speed, "memory_ratio": memory}
    return {
        "octavo": __version__, "exit_code": comparison.exit_code, "outcome": comparison.outcome,
        "confidence": comparison.confidence, "margin_percent": comparison.margin,
        "planned_seeds": comparison.losses.planned, "extended": comparison.losses.extended,
        "seeds": list(comparison.seeds), "baseline": comparison.baseline, "baseline_loss": comparison.loss,
        "baseline_spread_percent": comparison.spread,
        "arms": arms, "held_out": None if comparison.held_out is None else comparison.held_out.to_json(),
        "notes": list(comparison.notes),
    }  # fmt: skip


def _run_json(run: ArmRuns, time: TimeToLoss | None) -> dict[str, object]:
    return {
        "name": run.name,
        "settings": list(run.settings),
        "losses": {str(seed): None if seed in run.diverged else run.loss(seed) for seed in run.seeds},
        "held_out_losses": {str(seed): finite(run.held_out(seed)) for seed in run.seeds},
        "steps": {str(seed): result.steps for seed, result in run.results.items()},
        "tokens_per_s": {str(seed): result.tokens_per_s for seed, result in run.results.items()},
        "time_to_loss": None if time is None else vars(time),
    }


def longest(series: Sequence[tuple[Steps, Floats]]) -> tuple[Steps, list[Floats]]:
    """The steps and values of the longest series: a mean over fewer and fewer runs would jump where one stops."""
    most = max(len(steps) for steps, _ in series)
    whole = [(steps, values) for steps, values in series if len(steps) == most]
    return whole[0][0], [values for _, values in whole]


def _charts(runs: Sequence[ArmRuns]) -> list[Chart]:
    """Mean loss of each arm, and its gap to the baseline; shaded, the range of all seeds."""
    lines, gaps = [], []
    for slot, run in enumerate(runs):
        steps, losses = longest([(curve.step, curve.loss) for curve in run.curves.values()])
        if not np.isfinite(mean := np.mean(losses, 0)).any():
            continue
        lines.append(_line(run.name, slot, steps, mean, [smooth(loss) for loss in losses], noisy=True))
        steps, of_seeds = longest([gap_percent(runs[0].curves[seed], own) for seed, own in run.curves.items()])
        smoothed = [smooth(gap) for gap in of_seeds]
        if slot and np.isfinite(smoothed).any():
            gaps.append(_line(run.name, slot, steps, np.mean(smoothed, 0), smoothed, noisy=False))
    shaded = "Mean over seeds; shaded: from the lowest to the highest seed, smoothed."
    charts = [line_chart("Loss", "nats per token", lines, caption=f"Nats per token. {shaded}")] if lines else []
    if gaps:
        caption = f"Percent of {runs[0].name}'s loss at the same step of the same seed. {shaded}"
        charts.append(line_chart(f"Loss above {runs[0].name}", "percent", gaps, caption=caption, height=FLAT, keep=[0]))
    return charts


def _line(label: str, slot: int, steps: Steps, values: Floats, seeds: Sequence[Floats], *, noisy: bool) -> Line:
    low, high = np.min(seeds, 0), np.max(seeds, 0)
    return Line(label=label, slot=slot, x=steps, y=values, noisy=noisy, low=low, high=high)
