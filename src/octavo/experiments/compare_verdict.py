"""What a comparison found: the verdicts of `octavo.inspect.compare_losses`, joined with speed, memory and time to loss.

The loss of a run is its mean over the last 10 % of the steps; a run that stops on a value that is not finite diverged.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from octavo.experiments.curves import Curves, smooth
from octavo.inspect.compare import EXIT_CODES, ArmLosses, LossComparison, Outcome, compare_losses, worst
from octavo.inspect.paired_test import CONFIDENCE, MOST_SEEDS
from octavo.train.record.metrics import LOSS, RunResult

# Two runs, one sentence: is the candidate's loss as good as the baseline's, and at what speed and memory?
#
# The band is ±1 % of the baseline, both ways: a loss that is lower by chance is as little evidence as one that is
# higher. One seed does not tell whether a gap is noise; `octavo compare` does, from several.


Status = Literal["within", "above", "below", "none"]

BAND_PERCENT = 1.0
FEWEST_STEPS = 100  # Steps below which a loss says nothing about where training ends
ONE_SEED = (
    "One seed is one seed: how far apart two seeds of the same arm would lie was not measured, "
    "so the gap is not compared with seed noise."
)


@dataclass(frozen=True, kw_only=True)
class PredictedSpeed:
    gain: float  # Speed-up over bf16
    where: str  # Model, GPUs and tokens


@dataclass(frozen=True, kw_only=True)
class PairVerdict:
    """The comparison of a candidate with a baseline; gaps are candidate minus baseline."""

    baseline: str  # Label of the arm
    candidate: str
    status: Status  # Where the loss lies to the band; `"none"` for runs that cannot be compared, or are too short
    final_gap: float | None = None  # Of the last loss, in nats per token
    final_gap_percent: float | None = None  # In percent of the baseline
    tail_gap: float | None = None  # Of the mean over the last 10 % of steps
    tail_gap_percent: float | None = None
    speed_ratio: float | None = None  # Candidate's tokens/s over the baseline's
    memory_ratio: float | None = None  # Candidate's bytes saved for backward per token over the baseline's
    state_ratio: float | None = None  # Candidate's bytes of optimizer states per parameter over the baseline's
    held_out_status: Status = "none"  # As `status`, of the loss on held-out data at the end; `"none"` without it, too
    held_out_gap: float | None = None
    held_out_gap_percent: float | None = None
    prediction: PredictedSpeed | None = None  # Predicted speed-up of a larger model on GPUs, if one was made
    sentence: str  # On the loss in training
    held_out_sentence: str = ""  # On the held-out loss; empty without one
    notes: tuple[str, ...] = ()  # Speed, memory, seeds

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "band_percent": BAND_PERCENT}


def arm_name(arm: str) -> str:
    """The arm of a run for people: `"BF16"` for `"bf16"`, `"FP8+activations rowwise"` for that in lower case."""
    found = re.match(r"(bf16|fp8|O1)?([^ ]*)(.*)", arm, re.DOTALL)
    assert found is not None  # each part may be empty
    matmul, more, rest = found.groups()
    return {"bf16": "BF16", "fp8": "FP8", "O1": "FP8", None: ""}[matmul] + more + rest


def verdict(a: RunResult, b: RunResult, prediction: PredictedSpeed | None = None) -> PairVerdict:
    """Compare run `b`, the candidate, with run `a`, the baseline; `prediction` is of the candidate's precision."""
    baseline, candidate = arm_name(a.precision), arm_name(b.precision)
    obstacle = _obstacle(a, b)
    if obstacle or a.losses is None or b.losses is None:
        return PairVerdict(baseline=baseline, candidate=candidate, status="none", sentence=f"No verdict: {obstacle}.")
    status, gap, percent, sentence = _judge(
        f"{candidate}'s loss", f"{baseline}'s", "over the last 10 % of the steps", a.steps,
        a.losses.tail_mean, b.losses.tail_mean,
    )  # fmt: skip
    final_gap = b.losses.final - a.losses.final
    pair = PairVerdict(
        baseline=baseline, candidate=candidate, status=status, final_gap=final_gap,
        final_gap_percent=100 * final_gap / a.losses.final, tail_gap=gap, tail_gap_percent=percent,
        speed_ratio=_ratio_of(a.tokens_per_s, b.tokens_per_s), prediction=prediction, sentence=sentence,
        memory_ratio=_ratio_of(a.saved_bytes_per_token, b.saved_bytes_per_token),
        state_ratio=_ratio_of(a.state_bytes_per_parameter, b.state_bytes_per_parameter), **_held_out(a, b),
    )  # fmt: skip
    return replace(pair, notes=tuple(_pair_notes(a, b, pair)))


def _obstacle(a: RunResult, b: RunResult) -> str:
    """Why the two runs cannot be compared; empty if they can."""
    for run in (a, b):
        name = arm_name(run.precision)
        if run.stopped == "non-finite":
            return f"{name} stopped after {run.steps:,} steps on a loss or gradient that was not finite"
        if run.losses is None:
            return f"{name} has no step with a finite loss"
        if run.losses.tail_mean <= 0:
            return f"{name}'s loss is {run.losses.tail_mean:g}, of which there is no percentage"
    for unit in ("steps", "tokens"):
        mine, theirs = getattr(a, unit), getattr(b, unit)
        if mine != theirs:
            return f"{arm_name(a.precision)} trained for {mine:,} {unit} and {arm_name(b.precision)} for {theirs:,}"
    return ""


def _judge(
    subject: str, other: str, where: str, steps: int, baseline: float, candidate: float
) -> tuple[Status, float, float, str]:
    """The status of two losses, their gap, the same in percent, and the verdict in words."""
    gap = candidate - baseline
    percent = 100 * gap / baseline
    numbers = f"{candidate:.4f} against {baseline:.4f} nats per token, {percent:+.2f} %"
    if steps < FEWEST_STEPS:
        few = f"No verdict: {steps:,} steps are too few, {FEWEST_STEPS} are needed."
        return "none", gap, percent, f"{few} {subject} against {other} so far: {numbers}."
    band = f"{BAND_PERCENT:g} %"
    if abs(percent) <= BAND_PERCENT:
        return "within", gap, percent, f"{subject} is within {band} of {other} {where}: {numbers}."
    if percent > 0:
        return "above", gap, percent, f"{subject} is not within {band} of {other} {where}: it is higher, {numbers}."
    sentence = f"{subject} is more than {band} below {other} {where}: {numbers}."
    return "below", gap, percent, f"{sentence} One seed does not show that it is better."


def _held_out(a: RunResult, b: RunResult) -> dict[str, Any]:
    """The fields of a verdict on the held-out losses, where both runs have one, or one that is not finite."""
    first, second = held_out_loss(a), held_out_loss(b)
    if all(LOSS in (run.held_out or {}) for run in (a, b)) and (first is None or second is None):
        names = " and ".join(arm_name(run.precision) for run in (a, b) if held_out_loss(run) is None)
        sentence = f"The held-out loss of {names} is not finite at the end."
        return {"held_out_status": "none" if first is None else "above", "held_out_sentence": sentence}
    if first is None or second is None or first <= 0:
        return {}
    subject, other = f"{arm_name(b.precision)}'s held-out loss", f"{arm_name(a.precision)}'s"
    judged = _judge(subject, other, "at the end", a.steps, first, second)
    fields = ("held_out_status", "held_out_gap", "held_out_gap_percent", "held_out_sentence")
    return dict(zip(fields, judged, strict=True))


def held_out_loss(run: RunResult) -> float | None:
    """The last loss of a run on held-out data; None if there is none, or it is not finite."""
    return (run.held_out or {}).get(LOSS)


def _ratio_of(baseline: float | None, candidate: float | None) -> float | None:
    return candidate / baseline if baseline and candidate is not None else None


def _pair_notes(a: RunResult, b: RunResult, pair: PairVerdict) -> list[str]:
    baseline, candidate, notes = pair.baseline, pair.candidate, []
    if pair.memory_ratio is not None:
        notes.append(f"{candidate} saves {pair.memory_ratio:.2f} × {baseline}'s bytes per token for the backward pass.")
    if pair.state_ratio is not None:
        numbers = f"{b.state_bytes_per_parameter:.1f} against {a.state_bytes_per_parameter:.1f} bytes per parameter"
        notes.append(f"{candidate}'s optimizer states take {pair.state_ratio:.2f} × {baseline}'s memory: {numbers}.")
    if (predicted := pair.prediction) is not None:
        notes.append(f"Predicted, not measured: {predicted.gain:.2f} × {baseline}'s speed for {predicted.where}.")
    if pair.speed_ratio is not None:
        figure = f"{candidate} ran at {pair.speed_ratio:.2f} × {baseline}'s tokens/s"
        on_cpu = "on a CPU, which has no FP8 matrix units and emulates FP8. This says nothing about the speed on a GPU"
        notes.append(f"{figure}, {on_cpu}." if b.device == "cpu" else f"{figure} on {b.device}.")
    notes += [
        f"{arm_name(run.precision)} skipped {run.skipped_steps:,} of {run.steps:,} steps on overflow."
        for run in (a, b)
        if run.skipped_steps
    ]
    return [*notes, ONE_SEED]


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
class Comparison:
    losses: LossComparison  # In training; the notes of an arm are on its runs, too
    held_out: LossComparison | None  # On held-out data; None without it
    margin: float | None  # The largest gap in loss that passes, in percent; None for none that was given
    confidence: float  # Of all verdicts together
    loss: float | None  # The baseline's loss, mean over the seeds on which it ended; None if it ended on none
    spread: float | None  # Standard deviation of the baseline's loss over seeds, in percent; None for fewer than two
    runs: tuple[ArmRuns, ...]  # What was compared, the baseline first
    times: tuple[TimeToLoss | None, ...]  # By run; None if one diverged on every seed, or all reached nothing in common
    speeds: tuple[float | None, ...]  # By run, tokens/s over the baseline's, median of the seeds
    memories: tuple[float | None, ...]  # By run, bytes saved for backward per token over the baseline's
    notes: tuple[str, ...]  # Caveats

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
    in_training, held_out = (
        compare_losses(
            [loss(baseline, seed) for seed in baseline.seeds],
            {run.name: [loss(run, seed) for seed in run.seeds] for run in others}, margin=margin, confidence=confidence,
            max_seeds=max_seeds, seeds=baseline.seeds, baseline_name=baseline.name,
        )
        if exists
        else None
        for loss, exists in ((ArmRuns.loss, True), (ArmRuns.held_out, have_held_out))
    )  # fmt: skip
    assert in_training is not None
    arms = zip(others, in_training.arms, strict=True)
    noted = tuple(replace(arm, notes=(*arm.notes, *_arm_notes(run, arm))) for run, arm in arms)
    losses = [baseline.loss(seed) for seed in baseline.seeds if seed not in baseline.diverged]
    return Comparison(
        losses=replace(in_training, arms=noted), held_out=held_out, margin=margin, confidence=confidence,
        loss=statistics.fmean(losses) if losses else None,
        spread=100 * statistics.stdev(losses) / statistics.fmean(losses) if len(losses) > 1 else None,
        runs=tuple(runs), times=tuple(times_to_loss(runs)),
        speeds=tuple(_ratio(baseline, run, lambda result: result.tokens_per_s) for run in runs),
        memories=tuple(_ratio(baseline, run, lambda result: result.saved_bytes_per_token) for run in runs),
        notes=tuple(_notes(runs, in_training)),
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
