"""A run read from its folder, for the pages that show it."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.experiments.charts import Chart
from octavo.experiments.curves import Curves
from octavo.experiments.heatmap import heatmaps
from octavo.experiments.verdict import arm_name
from octavo.inspect.findings import Finding
from octavo.inspect.stats import OperandStats
from octavo.train.record.metrics import LAYERS_FILE, RunResult, RunSetup, StepMetrics, read_events, read_metrics
from octavo.train.record.statistics import all_findings, limits_of, read_statistics

SAMPLES_SHOWN = 50  # Steps whose samples a page shows


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that differ only in the numbers in their names and were treated alike."""

    pattern: str
    count: int
    precision: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What the model wrote after a step."""

    step: int
    texts: list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run read from its folder; `label` is unique in the report, `slot` picks its colour."""

    label: str
    slot: int
    result: RunResult
    curves: Curves
    config: str
    layers: list[LayerGroup]
    statistics: list[OperandStats]
    findings: list[Finding]
    events: list[dict[str, Any]]
    setup: RunSetup | None = None
    samples: list[Samples] = field(default_factory=list)

    @property
    def heatmaps(self) -> list[Chart]:
        """FP8 statistics of the operands, over layers and steps."""
        return heatmaps(self.statistics)


def read_runs(folders: list[Path]) -> list[LoggedRun]:
    """Read finished runs. Raises ValueError for a folder without one, and a damaged file."""
    results = [RunResult.read(folder) for folder in folders]
    logged = []
    for slot, (folder, result, label) in enumerate(zip(folders, results, _labels(folders, results), strict=True)):
        statistics, rows = read_statistics(folder), read_metrics(folder, result.steps)
        logged.append(
            LoggedRun(
                label=label,
                slot=slot % 6,
                result=result,
                curves=Curves.of(rows),
                config=(folder / "config.toml").read_text(encoding="utf-8"),
                layers=read_layers(folder),
                statistics=statistics,
                findings=all_findings(statistics, limits_of(folder)),
                events=read_events(folder),
                setup=RunSetup.read(folder),
                samples=samples_of(rows),
            )
        )
    return logged


def _labels(folders: Sequence[Path], results: Sequence[RunResult]) -> list[str]:
    """A unique label per run: its arm; else with its name; else with its folder."""
    arms = [arm_name(result.precision) for result in results]
    named = [f"{result.name} ({arm})" for result, arm in zip(results, arms, strict=True)]
    labels = []
    for folder, arm, name in zip(folders, arms, named, strict=True):
        if len(arms) > 1 and arms.count(arm) == 1:
            labels.append(arm)
        else:
            labels.append(name if named.count(name) == 1 else f"{folder.resolve().name} ({arm})")
    return labels


def samples_of(rows: Sequence[StepMetrics]) -> list[Samples]:
    """The last `SAMPLES_SHOWN` samples of a run, the newest first."""
    samples = [Samples(step=row.step, texts=row.samples) for row in reversed(rows) if row.samples]
    return samples[:SAMPLES_SHOWN]


def read_layers(folder: Path) -> list[LayerGroup]:
    """The rows of `octavo.report`, with the layers of repeated blocks merged."""
    path = folder / LAYERS_FILE
    try:
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        groups = Counter((re.sub(r"\d+", "*", row["name"]), row["recipe"], row["reason"]) for row in rows)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the list of a run's layers: {error!r}") from None
    return [
        LayerGroup(
            pattern=name or "the model", count=count, precision=f"FP8 {recipe}" if recipe else "high precision",
            reason=reason,
        )
        for (name, recipe, reason), count in groups.items()
    ]  # fmt: skip
