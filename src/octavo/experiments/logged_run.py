"""A run read from its folder, for the pages that show it."""

import json
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from octavo.experiments.charts import Chart
from octavo.experiments.compare_verdict import arm_name
from octavo.experiments.curves import Curves
from octavo.experiments.heatmap import heatmaps
from octavo.inspect.findings import Finding, OperandStats
from octavo.train.record import metrics as records
from octavo.train.record.metrics import RunResult, RunSetup, StepMetrics, StepTotals

SAMPLES_SHOWN = 50  # Steps whose samples a page shows
RECENT = 50  # Last steps, whose speed tells the time that is left


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run read from its folder; `slot` picks its colour."""

    label: str
    slot: int
    result: RunResult
    curves: Curves
    totals: StepTotals
    recent: list[StepMetrics]  # The last `RECENT` steps
    samples: list[StepMetrics]  # The last steps after which the model wrote samples, the newest first
    config: str
    layers: list[list[str]]
    statistics: list[OperandStats]
    findings: list[Finding]
    events: list[dict[str, object]]
    setup: RunSetup | None

    @cached_property
    def heatmaps(self) -> list[Chart]:
        return heatmaps(self.statistics)


def read_runs(folders: list[Path]) -> list[LoggedRun]:
    """Read finished runs. Raises ValueError for a folder without one, and a damaged file."""
    results = [RunResult.read(folder) for folder in folders]
    runs = [read_run(folder, result, slot) for slot, (folder, result) in enumerate(zip(folders, results, strict=True))]
    return runs if len(runs) == 1 else [replace(run, label=arm_name(run.result.precision)) for run in runs]


def read_run(folder: Path, result: RunResult, slot: int = 0) -> LoggedRun:
    """Read the run of a summary as far as it got; of its steps, of which there may be millions, the numbers alone."""
    label, config = f"{result.name} ({arm_name(result.precision)})", folder / records.CONFIG_FILE
    statistics, totals = records.read_statistics(folder), StepTotals()
    recent: deque[StepMetrics] = deque(maxlen=RECENT)
    samples: deque[StepMetrics] = deque(maxlen=SAMPLES_SHOWN)

    def steps() -> Iterator[StepMetrics]:
        for row in records.each_step(folder, result.steps):
            totals.add(row)
            recent.append(row)
            if row.samples:
                samples.appendleft(row)
            yield row

    return LoggedRun(
        label=label, slot=slot, result=result, curves=Curves.of(steps()), totals=totals, recent=list(recent),
        samples=list(samples), layers=read_layers(folder), config=config.read_text(encoding="utf-8"),
        statistics=statistics, events=records.read_events(folder), setup=RunSetup.read(folder),
        # The limits import torch, which a page without statistics does without.
        findings=records.all_findings(statistics, records.limits_of(folder)) if statistics else [],
    )  # fmt: skip


def read_layers(folder: Path) -> list[list[str]]:
    """The rows of `octavo.report` with the layers of repeated blocks merged: pattern, count, precision, reason."""
    path = folder / records.LAYERS_FILE
    try:
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        groups = Counter((re.sub(r"\d+", "*", row["name"]), row["recipe"], row["reason"]) for row in rows)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the list of a run's layers: {error!r}") from None
    return [
        [name or "the model", str(count), f"FP8 {recipe}" if recipe else "high precision", reason]
        for (name, recipe, reason), count in groups.items()
    ]
