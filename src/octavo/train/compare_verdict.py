"""What a comparison found: a verdict per arm, and what CI makes of it.

The loss of a run is its mean over the last 10 % of the steps. The verdict is `octavo.inspect.compare.paired_test`'s; an
arm that stops on a value that is not finite, on a seed where the baseline does not, is "diverged", whatever its other
seeds say. Seeds on which the baseline itself diverged are left out, and said.

Without a margin, an arm fails that is shown to be worse. With one, an arm passes that is shown to be no more than the
margin worse, fails that is shown to be more, and is undecided where the interval holds the margin: more seeds decide.

Time to loss: the lowest smoothed loss that all arms reach on a seed, and the steps, tokens and seconds each takes to
get there; seconds at the run's median speed, so that a pause of the machine does not count. Their ratio is the speed at
equal capability: an arm that computes a step in half the time but takes twice the steps gains nothing.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.inspect.compare import PairedTest, common_target, paired_test, steps_to
from octavo.train.curves import Curves, smooth
from octavo.train.metrics import RunResult

Status = Literal["indistinguishable", "worse", "better", "diverged", "none"]
Outcome = Literal["pass", "fail", "undecided"]

EXIT_CODES: dict[Outcome, int] = {"pass": 0, "fail": 1, "undecided": 3}
"""Of `octavo compare`; 2 is a mistake of the user."""
STOPPED = 4
"""Exit code of a comparison that was stopped before its last run: the same command goes on."""
POWERS = (0.8, 0.9)
"""Of the gaps that are said to be detectable."""


@dataclass(frozen=True, kw_only=True)
class ArmRuns:
    """What the runs of an arm left, one of each per seed."""

    name: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    results: tuple[RunResult, ...]
    curves: tuple[Curves, ...]

    @property
    def diverged(self) -> tuple[int, ...]:
        """Seeds whose run stopped on a value that is not finite, or has no finite loss."""
        pairs = zip(self.seeds, self.results, strict=True)
        return tuple(seed for seed, result in pairs if result.stopped == "non-finite" or result.losses is None)

    def loss(self, seed: int) -> float:
        """Mean loss over the last 10 % of the steps, of a seed that did not diverge."""
        losses = self.results[self.seeds.index(seed)].losses
        assert losses is not None
        return losses.tail_mean


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """What an arm takes to the losses that all arms reach, one per seed: means over the seeds.

    Attributes:
        targets: Smoothed loss to reach, per seed.
        steps: Until then, per seed.
        tokens: Mean over the seeds.
        seconds: Mean over the seeds, at the median speed of each run.
        speed: The baseline's seconds over this arm's: at equal loss.
    """

    targets: tuple[float, ...]
    steps: tuple[int, ...]
    tokens: float
    seconds: float
    speed: float


@dataclass(frozen=True, kw_only=True)
class ArmVerdict:
    """One arm beside the baseline.

    Attributes:
        name: Of the arm.
        status: Of the loss; "none" where fewer than two pairs of runs ended.
        outcome: What CI makes of it.
        test: The numbers; None where fewer than two pairs of runs ended.
        seeds: Of the pairs in `test`.
        diverged: Seeds on which the arm stopped on a value that is not finite, and the baseline did not.
        speed: Tokens/s over the baseline's, median runs.
        memory: Bytes kept for backward per token over the baseline's.
        time_to_loss: None where an arm diverged on every seed, or reached nothing in common.
        sentence: The verdict on the loss.
        notes: What else must be known to read it.
    """

    name: str
    status: Status
    outcome: Outcome
    test: PairedTest | None
    seeds: tuple[int, ...]
    diverged: tuple[int, ...]
    speed: float | None
    memory: float | None
    time_to_loss: TimeToLoss | None
    sentence: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All arms beside the first.

    Attributes:
        margin: The largest gap in loss that passes, in percent; None for none that can be shown.
        confidence: Of the intervals of all arms together.
        loss: The baseline's loss, mean over the seeds on which it ended; None where it ended on none.
        spread: Standard deviation of the baseline's loss over seeds, in percent; None for fewer than two.
        time_to_loss: Of the baseline.
        arms: Of the arms but the first.
        notes: What makes all of it less than it seems.
        runs: What was compared, the baseline first.
    """

    margin: float | None
    confidence: float
    loss: float | None
    spread: float | None
    time_to_loss: TimeToLoss | None
    arms: tuple[ArmVerdict, ...]
    notes: tuple[str, ...]
    runs: tuple[ArmRuns, ...]

    @property
    def baseline(self) -> str:
        """Name of the first arm."""
        return self.runs[0].name

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the runs of each arm."""
        return self.runs[0].seeds

    @property
    def outcome(self) -> Outcome:
        """Fail where an arm fails, else undecided where one is, else pass."""
        outcomes = {arm.outcome for arm in self.arms}
        return "fail" if "fail" in outcomes else "undecided" if "undecided" in outcomes else "pass"

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return EXIT_CODES[self.outcome]


def judge(runs: Sequence[ArmRuns], *, margin: float | None = None, confidence: float = 0.95) -> Comparison:
    """Compare the arms `runs[1:]` with `runs[0]`, all of the same seeds and steps."""
    baseline, *others = runs
    times = times_to_loss(runs)
    arms = tuple(
        _verdict(baseline, arm, time, len(others), margin, confidence)
        for arm, time in zip(others, times[1:], strict=True)
    )
    losses = [baseline.loss(seed) for seed in baseline.seeds if seed not in baseline.diverged]
    return Comparison(
        margin=margin,
        confidence=confidence,
        loss=statistics.fmean(losses) if losses else None,
        spread=100 * statistics.stdev(losses) / statistics.fmean(losses) if len(losses) > 1 else None,
        time_to_loss=times[0],
        arms=arms,
        notes=tuple(_notes(runs)),
        runs=tuple(runs),
    )


def _verdict(
    baseline: ArmRuns, arm: ArmRuns, time: TimeToLoss | None, arms: int, margin: float | None, confidence: float
) -> ArmVerdict:
    diverged = tuple(seed for seed in arm.diverged if seed not in baseline.diverged)
    seeds = tuple(seed for seed in arm.seeds if seed not in {*arm.diverged, *baseline.diverged})
    test = None
    if len(seeds) > 1:
        before, after = ([run.loss(seed) for seed in seeds] for run in (baseline, arm))
        test = paired_test(before, after, confidence=confidence, arms=arms)
    status: Status = "diverged" if diverged else test.status if test else "none"
    return ArmVerdict(
        name=arm.name,
        status=status,
        outcome=_outcome(status, test, margin),
        test=test,
        seeds=seeds if test else (),
        diverged=diverged,
        speed=_ratio(baseline, arm, lambda result: result.tokens_per_s),
        memory=_ratio(baseline, arm, lambda result: result.kept_bytes_per_token),
        time_to_loss=time,
        sentence=_sentence(baseline, arm, status, test, diverged),
        notes=tuple(_arm_notes(baseline, arm, status, test, margin)),
    )


def _outcome(status: Status, test: PairedTest | None, margin: float | None) -> Outcome:
    if status == "diverged":
        return "fail"
    if test is None:
        return "undecided"
    if margin is None:
        return "fail" if status == "worse" else "pass"
    if test.low > margin:
        return "fail"
    return "pass" if test.high <= margin else "undecided"


def _sentence(
    baseline: ArmRuns, arm: ArmRuns, status: Status, test: PairedTest | None, diverged: tuple[int, ...]
) -> str:
    if status == "diverged":
        where = _seeds(diverged)
        return f"{arm.name} diverged on {where} of {len(arm.seeds)} in all, where {baseline.name} did not."
    if test is None:
        return f"No verdict on {arm.name}: fewer than two pairs of runs ended, for {baseline.name} diverged as well."
    gap = f"{percent(abs(test.mean))} ± {percent(test.half_width)} %"
    if status != "indistinguishable":
        return f"{arm.name} is {status} than {baseline.name} by {gap} of the loss."
    if not any(test.gaps):
        return f"{arm.name} is indistinguishable from {baseline.name}: not a digit of the losses differs."
    return (
        f"{arm.name} is indistinguishable from {baseline.name}: {'-' if test.mean < 0 else '+'}"
        f"{percent(abs(test.mean))} ± {percent(test.half_width)} % of the loss. "
        f"To be {percent(test.detectable(0.9))} % worse would have been found with 90 % probability."
    )


def _arm_notes(
    baseline: ArmRuns, arm: ArmRuns, status: Status, test: PairedTest | None, margin: float | None
) -> list[str]:
    notes = []
    if both := set(arm.diverged) & set(baseline.diverged):
        notes.append(f"{arm.name} and {baseline.name} both diverged on {_seeds(sorted(both))}.")
    alone = tuple(seed for seed in baseline.diverged if seed not in arm.diverged)
    if alone:
        notes.append(f"{baseline.name} diverged on {_seeds(alone)}, where {arm.name} did not.")
    if test is not None and not any(test.gaps):
        notes.append(
            f"The losses of {arm.name} are those of {baseline.name}: do its settings change anything? "
            "precision.recipe, for one, takes precision.level=O1."
        )
    elif test is not None:
        notes.append(
            f"Between seeds the gap varies by {percent(test.deviation)} % (standard deviation), p = {test.p:.2g}. A "
            f"gap of {percent(test.detectable(0.8))} % would have been found with 80 % probability, "
            f"{percent(test.detectable(0.9))} % with 90 %."
        )
    if margin is not None and test is not None and status != "diverged":
        notes.append(_against_margin(test, margin))
    skipped = sum(result.skipped_steps for result in arm.results)
    if skipped:
        notes.append(f"{arm.name} skipped {skipped:,} steps on overflow.")
    return notes


def _against_margin(test: PairedTest, margin: float) -> str:
    if test.low > margin:
        return f"That is more than the margin of {margin:g} %."
    if test.high <= margin:
        return f"It is no more than the margin of {margin:g} % worse."
    text = f"Whether it is more than the margin of {margin:g} % worse is undecided"
    room = margin - test.mean
    seeds = test.seeds_for(room, 0.8) if room > 0 else None
    if seeds is None or seeds <= len(test.gaps):
        return f"{text}: take more seeds."
    return f"{text}: if the gap is what it seems, {seeds} seeds would show with 80 % probability that it is not."


def percent(value: float) -> str:
    """Two decimals, or two digits of what is smaller."""
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _ratio(baseline: ArmRuns, arm: ArmRuns, value: Callable[[RunResult], float | None]) -> float | None:
    """The median over the seeds of the arm's value over the baseline's."""
    pairs = [(value(b), value(a)) for b, a in zip(baseline.results, arm.results, strict=True)]
    ratios = [after / before for before, after in pairs if before and after is not None]
    return statistics.median(ratios) if ratios else None


def times_to_loss(runs: Sequence[ArmRuns]) -> list[TimeToLoss | None]:
    """Time to the losses that all arms reach, on the seeds on which none diverged; None for all where there is none."""
    seeds = [seed for seed in runs[0].seeds if not any(seed in run.diverged for run in runs)]
    if not seeds:
        return [None] * len(runs)
    index = [runs[0].seeds.index(seed) for seed in seeds]
    smoothed = [[smooth(run.curves[i].loss) for i in index] for run in runs]
    targets = [common_target(curves) for curves in zip(*smoothed, strict=True)]
    rows: list[tuple[tuple[int, ...], float, float]] = []
    for run, curves in zip(runs, smoothed, strict=True):
        steps, tokens, seconds = [], [], []
        for i, curve, target in zip(index, curves, targets, strict=True):
            taken = steps_to(curve, target)
            result = run.results[i]
            assert taken is not None and result.tokens_per_s is not None
            steps.append(taken)
            tokens.append(result.tokens / result.steps * taken)
            seconds.append(tokens[-1] / result.tokens_per_s)
        rows.append((tuple(steps), statistics.fmean(tokens), statistics.fmean(seconds)))
    return [
        TimeToLoss(targets=tuple(targets), steps=steps, tokens=tokens, seconds=seconds, speed=rows[0][2] / seconds)
        for steps, tokens, seconds in rows
    ]


def _notes(runs: Sequence[ArmRuns]) -> list[str]:
    notes = []
    results = [result for run in runs for result in run.results]
    devices = sorted({result.device for result in results})
    if len(devices) > 1:
        notes.append(f"The runs are of different devices ({', '.join(devices)}): their speeds cannot be compared.")
    elif devices[0].endswith("cpu"):
        notes.append("On a CPU FP8 is computed exactly but emulated: speeds here say nothing about a GPU's.")
    for package in sorted({package for result in results for package in result.versions}):
        versions = sorted({result.versions.get(package, "none") for result in results})
        if len(versions) > 1:
            notes.append(f"The runs are of different versions of {package}: {', '.join(versions)}.")
    if len(runs[0].seeds) == 2:
        notes.append("Two seeds find only large gaps: with a third, gaps a quarter as large.")
    return notes
