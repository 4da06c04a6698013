"""What a comparison found: the verdicts of `octavo.inspect.compare_losses`, joined with speed, memory and time to loss.

The loss of a run is its mean over the last 10 % of the steps; a run that stops on a value that is not finite diverged.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.experiments.curves import Curves, smooth
from octavo.experiments.verdict import held_out_loss
from octavo.inspect.compare import EXIT_CODES, ArmLosses, LossComparison, Outcome, compare_losses, worst
from octavo.inspect.paired_test import CONFIDENCE, MOST_SEEDS
from octavo.train.record.metrics import LOSS, RunResult

STOPPED = 4  # Exit code of a comparison that was stopped before its last run: the same command goes on


@dataclass(frozen=True, kw_only=True)
class ArmRuns:
    name: str
    settings: tuple[str, ...]
    results: Mapping[int, RunResult]  # By seed
    curves: Mapping[int, Curves]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.results)

    @property
    def diverged(self) -> tuple[int, ...]:
        """Seeds whose run stopped on a value that is not finite, or has no finite loss."""
        runs = self.results.items()
        return tuple(seed for seed, result in runs if result.stopped == "non-finite" or result.losses is None)

    def loss(self, seed: int) -> float:
        """NaN of a run that diverged."""
        losses = self.results[seed].losses
        return math.nan if seed in self.diverged or losses is None else losses.tail_mean

    def held_out(self, seed: int) -> float:
        """Last loss on held-out data; NaN of a run that diverged, or without one."""
        loss = held_out_loss(self.results[seed])
        return math.nan if seed in self.diverged or loss is None else loss

    @property
    def has_held_out(self) -> bool:
        """Whether each run that did not diverge has measured a loss on held-out data."""
        return all(seed in self.diverged or LOSS in (run.held_out or {}) for seed, run in self.results.items())


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """What an arm takes to the losses that all arms reach; means are over the seeds."""

    targets: tuple[float, ...]  # Smoothed loss to reach, per seed
    steps: tuple[int, ...]  # Until then, per seed
    tokens: float  # Mean
    seconds: float  # Mean, at the median speed of each run, so that a pause of the machine does not count
    speed: float  # The baseline's seconds over this arm's: at equal loss


@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    losses: ArmLosses
    speed: float | None  # Tokens/s over the baseline's, median runs
    memory: float | None  # Bytes saved for backward per token over the baseline's
    time_to_loss: TimeToLoss | None  # None if an arm diverged on every seed, or reached nothing in common
    notes: tuple[str, ...]  # What else must be known to read it


@dataclass(frozen=True, kw_only=True)
class Comparison:
    losses: LossComparison  # In training
    held_out: LossComparison | None  # On held-out data; None without it
    margin: float | None  # The largest gap in loss that passes, in percent; None for none that was given
    confidence: float  # Of all verdicts together
    loss: float | None  # The baseline's loss, mean over the seeds on which it ended; None if it ended on none
    spread: float | None  # Standard deviation of the baseline's loss over seeds, in percent; None for fewer than two
    time_to_loss: TimeToLoss | None  # Of the baseline
    arms: tuple[ArmVerdict, ...]  # Of the arms but the first
    notes: tuple[str, ...]  # What makes all of it less than it seems
    runs: tuple[ArmRuns, ...]  # What was compared, the baseline first

    @property
    def baseline(self) -> str:
        return self.runs[0].name

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.runs[0].seeds

    @property
    def outcome(self) -> Outcome:
        return worst([verdict.outcome for verdict in (self.losses, self.held_out) if verdict is not None])

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


def compare_arms(
    runs: Sequence[ArmRuns], *, margin: float | None = None, confidence: float = CONFIDENCE, max_seeds: int = MOST_SEEDS
) -> Comparison:
    """Compare the arms `runs[1:]` with `runs[0]`, all of the same seeds and steps."""
    baseline, *others = runs
    have_held_out = all(run.has_held_out for run in runs)
    have_held_out = have_held_out and any(result.held_out for run in runs for result in run.results.values())
    verdicts, held_out = (
        compare_losses(
            [loss(baseline, seed) for seed in baseline.seeds],
            {run.name: [loss(run, seed) for seed in run.seeds] for run in others}, margin=margin, confidence=confidence,
            max_seeds=max_seeds, seeds=baseline.seeds, baseline_name=baseline.name,
        )
        if exists
        else None
        for loss, exists in ((ArmRuns.loss, True), (ArmRuns.held_out, have_held_out))
    )  # fmt: skip
    assert verdicts is not None
    times = times_to_loss(runs)
    arms = tuple(
        ArmVerdict(
            losses=losses, speed=_ratio(baseline, run, lambda result: result.tokens_per_s),
            memory=_ratio(baseline, run, lambda result: result.saved_bytes_per_token), time_to_loss=time,
            notes=(*losses.notes, *_arm_notes(run, losses)),
        )
        for run, losses, time in zip(others, verdicts.arms, times[1:], strict=True)
    )  # fmt: skip
    losses = [baseline.loss(seed) for seed in baseline.seeds if seed not in baseline.diverged]
    return Comparison(
        losses=verdicts, held_out=held_out, margin=margin, confidence=confidence,
        loss=statistics.fmean(losses) if losses else None,
        spread=100 * statistics.stdev(losses) / statistics.fmean(losses) if len(losses) > 1 else None,
        time_to_loss=times[0], arms=arms, notes=tuple(_notes(runs, verdicts)), runs=tuple(runs),
    )  # fmt: skip


def _arm_notes(run: ArmRuns, losses: ArmLosses) -> list[str]:
    notes = []
    if losses.test is not None and not any(losses.test.gaps):
        problem = f"The losses of {run.name} are the baseline's: do its settings change anything?"
        notes.append(f"{problem} precision.recipe, for one, takes precision.level=fp8.")
    if skipped := sum(result.skipped_steps for result in run.results.values()):
        notes.append(f"{run.name} skipped {skipped:,} steps on overflow.")
    return notes


def _ratio(baseline: ArmRuns, arm: ArmRuns, value: Callable[[RunResult], float | None]) -> float | None:
    """The median over the seeds of the arm's value over the baseline's."""
    pairs = [(value(baseline.results[seed]), value(arm.results[seed])) for seed in baseline.seeds]
    ratios = [after / before for before, after in pairs if before and after is not None]
    return statistics.median(ratios) if ratios else None


def times_to_loss(runs: Sequence[ArmRuns]) -> list[TimeToLoss | None]:
    """Time to the losses that all arms reach, on the seeds on which none diverged; None for all where there is none."""
    seeds = [seed for seed in runs[0].seeds if not any(seed in run.diverged for run in runs)]
    if not seeds:
        return [None] * len(runs)
    smoothed = [[smooth(run.curves[seed].loss) for seed in seeds] for run in runs]
    # The lowest loss that all reach on each seed; every curve holds a finite value.
    targets = [max(float(np.nanmin(curve)) for curve in curves) for curves in zip(*smoothed, strict=True)]
    rows: list[tuple[tuple[int, ...], float, float]] = []
    for run, curves in zip(runs, smoothed, strict=True):
        steps, tokens, seconds = [], [], []
        for seed, curve, target in zip(seeds, curves, targets, strict=True):
            taken = int(np.flatnonzero(curve <= target)[0]) + 1
            result = run.results[seed]
            assert result.tokens_per_s is not None
            steps.append(taken)
            tokens.append(result.tokens / result.steps * taken)
            seconds.append(tokens[-1] / result.tokens_per_s)
        rows.append((tuple(steps), statistics.fmean(tokens), statistics.fmean(seconds)))
    return [
        TimeToLoss(targets=tuple(targets), steps=steps, tokens=tokens, seconds=seconds, speed=rows[0][2] / seconds)
        for steps, tokens, seconds in rows
    ]


def _notes(runs: Sequence[ArmRuns], losses: LossComparison) -> list[str]:
    notes = []
    if losses.extended:
        notes.append(losses.extension)
    results = [result for run in runs for result in run.results.values()]
    devices = sorted({result.device for result in results})
    if len(devices) > 1:
        notes.append(f"The runs are of different devices ({', '.join(devices)}): their speeds cannot be compared.")
    elif devices[0].endswith("cpu"):
        notes.append("On a CPU FP8 is emulated: speeds here say nothing about a GPU's.")
    for package in sorted({package for result in results for package in result.versions}):
        versions = sorted({result.versions.get(package, "none") for result in results})
        if len(versions) > 1:
            notes.append(f"The runs are of different versions of {package}: {', '.join(versions)}.")
    if len(runs[0].seeds) == 2:
        notes.append("Two seeds find only large gaps: with a third, gaps a hundredth as large.")
    return notes
