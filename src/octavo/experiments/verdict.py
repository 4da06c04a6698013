"""Two runs, one sentence: is the candidate's loss as good as the baseline's, and at what speed and memory?

The band is ±1 % of the baseline, both ways: a loss that is lower by chance is as little evidence as one that is higher.
One seed does not tell whether a gap is noise; `octavo compare` does, from several.
"""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from octavo.train.record.metrics import LOSS, RunResult

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
        speed_ratio=_ratio(a.tokens_per_s, b.tokens_per_s), prediction=prediction, sentence=sentence,
        memory_ratio=_ratio(a.saved_bytes_per_token, b.saved_bytes_per_token),
        state_ratio=_ratio(a.state_bytes_per_parameter, b.state_bytes_per_parameter), **_held_out(a, b),
    )  # fmt: skip
    return replace(pair, notes=tuple(_notes(a, b, pair)))


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


def _ratio(baseline: float | None, candidate: float | None) -> float | None:
    return candidate / baseline if baseline and candidate is not None else None


def _notes(a: RunResult, b: RunResult, pair: PairVerdict) -> list[str]:
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
