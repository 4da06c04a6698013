"""Two runs, one sentence: is the candidate's loss as good as the baseline's, and at what speed and memory?

Everything said is computed from the two `RunResult`s. The loss compared is the mean over the last 10 % of the steps:
the loss of a single step depends on that step's batch. The band is ±1 % of the baseline, both ways, because a loss that
is lower by chance is as little evidence as one that is higher. One pair of runs is one seed: how far two BF16 runs
with different seeds lie apart is not known from it, so the verdict does not claim that a gap is noise or is not;
`octavo compare` does, from several seeds.
"""

import re
from dataclasses import asdict, dataclass
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
    """A prediction of the planner."""

    gain: float  # Speed-up over bf16
    where: str  # Model, GPUs and tokens


@dataclass(frozen=True, kw_only=True)
class PairVerdict:
    """The comparison of a candidate with a baseline; gaps are candidate minus baseline."""

    baseline: str  # baseline, candidate: Labels of the arms, as people read them
    candidate: str
    # `"within"` the band, `"above"` or `"below"` it; `"none"` where the runs cannot be compared, or are of fewer than
    # `FEWEST_STEPS` steps.
    status: Status
    # final_gap, tail_gap: Gap of the last loss, and of the mean over the last 10 % of steps, in nats per token.
    final_gap: float | None = None
    final_gap_percent: float | None = None  # final_gap_percent, tail_gap_percent: The same, in percent of the baseline
    tail_gap: float | None = None
    tail_gap_percent: float | None = None
    speed_ratio: float | None = None  # Candidate's tokens/s over the baseline's
    memory_ratio: float | None = None  # Candidate's bytes saved for backward per token over the baseline's
    state_ratio: float | None = None  # Candidate's bytes of optimizer states per parameter over the baseline's
    held_out_status: Status = "none"  # As `status`, of the loss on held-out data at the end; `"none"` without it, too
    # held_out_gap, held_out_gap_percent: Gap of that loss; None without one of both runs.
    held_out_gap: float | None = None
    held_out_gap_percent: float | None = None
    prediction: PredictedSpeed | None = None  # Predicted speed-up of a larger model on GPUs, if one was made
    sentence: str  # The verdict on the loss in training
    held_out_sentence: str = ""  # The verdict on the held-out loss; empty without one
    notes: tuple[str, ...] = ()  # What else must be known to read it: speed, memory, seeds

    def to_json(self) -> dict[str, Any]:
        """All fields, and the width of the band."""
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
    gap, percent = _gap(a.losses.tail_mean, b.losses.tail_mean)
    final_gap, final_percent = _gap(a.losses.final, b.losses.final)
    status = _status(percent, a.steps)
    return PairVerdict(
        baseline=baseline,
        candidate=candidate,
        status=status,
        final_gap=final_gap,
        final_gap_percent=final_percent,
        tail_gap=gap,
        tail_gap_percent=percent,
        speed_ratio=_ratio(a.tokens_per_s, b.tokens_per_s),
        memory_ratio=_ratio(a.saved_bytes_per_token, b.saved_bytes_per_token),
        state_ratio=_ratio(a.state_bytes_per_parameter, b.state_bytes_per_parameter),
        prediction=prediction,
        sentence=_sentence(
            f"{candidate}'s loss", f"{baseline}'s", "over the last 10 % of the steps", status, a.steps,
            (a.losses.tail_mean, b.losses.tail_mean),
        ),
        **_held_out(a, b),
        notes=tuple(_notes(a, b, prediction)),
    )  # fmt: skip


def _obstacle(a: RunResult, b: RunResult) -> str:
    """Why the two runs cannot be compared; empty if they can."""
    for run in (a, b):
        if run.stopped == "non-finite":
            return (
                f"{arm_name(run.precision)} stopped after {run.steps:,} steps on a loss or gradient that was not finite"
            )
        if run.losses is None:
            return f"{arm_name(run.precision)} has no step with a finite loss"
        if run.losses.tail_mean <= 0:
            return f"{arm_name(run.precision)}'s loss is {run.losses.tail_mean:g}, of which there is no percentage"
    for field, unit in (("steps", "steps"), ("tokens", "tokens")):
        mine, theirs = getattr(a, field), getattr(b, field)
        if mine != theirs:
            return f"{arm_name(a.precision)} trained for {mine:,} {unit} and {arm_name(b.precision)} for {theirs:,}"
    return ""


def _gap(baseline: float, candidate: float) -> tuple[float, float]:
    gap = candidate - baseline
    return gap, 100 * gap / baseline


def _status(percent: float, steps: int) -> Status:
    if steps < FEWEST_STEPS:
        return "none"
    return "within" if abs(percent) <= BAND_PERCENT else "above" if percent > 0 else "below"


def _held_out(a: RunResult, b: RunResult) -> dict[str, Any]:
    """The fields of a verdict on the held-out losses, where both runs have one, or one that is not finite."""
    losses = held_out_loss(a), held_out_loss(b)
    if all(LOSS in (run.held_out or {}) for run in (a, b)) and None in losses:
        names = " and ".join(arm_name(run.precision) for run in (a, b) if held_out_loss(run) is None)
        status: Status = "above" if losses[1] is None and losses[0] is not None else "none"
        sentence = f"The held-out loss of {names} is not finite at the end."
        return {"held_out_status": status, "held_out_sentence": sentence}
    if losses[0] is None or losses[1] is None or losses[0] <= 0:
        return {}
    gap, percent = _gap(losses[0], losses[1])
    status = _status(percent, a.steps)
    subject = f"{arm_name(b.precision)}'s held-out loss"
    sentence = _sentence(
        subject, f"{arm_name(a.precision)}'s", "at the end", status, a.steps, (losses[0], losses[1])
    )  # fmt: skip
    return {
        "held_out_status": status, "held_out_gap": gap, "held_out_gap_percent": percent, "held_out_sentence": sentence,
    }  # fmt: skip


def held_out_loss(run: RunResult) -> float | None:
    """The last loss of a run on held-out data; None if there is none, or it is not finite."""
    return (run.held_out or {}).get(LOSS)


def _ratio(baseline: float | None, candidate: float | None) -> float | None:
    return candidate / baseline if baseline and candidate is not None else None


def _sentence(
    subject: str, other: str, where: str, status: Status, steps: int, losses: tuple[float, float]
) -> str:  # fmt: skip
    """The verdict in words; `losses`: of the baseline and the candidate."""
    numbers = f"{losses[1]:.4f} against {losses[0]:.4f} nats per token, {_gap(*losses)[1]:+.2f} %"
    if status == "none":
        return (
            f"No verdict: {steps:,} steps are too few, {FEWEST_STEPS} are needed. "
            f"{subject} against {other} so far: {numbers}."
        )
    if status == "within":
        return f"{subject} is within {BAND_PERCENT:g} % of {other} {where}: {numbers}."
    if status == "above":
        return f"{subject} is not within {BAND_PERCENT:g} % of {other} {where}: it is higher, {numbers}."
    return (
        f"{subject} is more than {BAND_PERCENT:g} % below {other} {where}: {numbers}. "
        "One seed does not show that it is better."
    )


def _notes(a: RunResult, b: RunResult, prediction: PredictedSpeed | None) -> list[str]:
    baseline, candidate = arm_name(a.precision), arm_name(b.precision)
    notes = []
    if (memory := _ratio(a.saved_bytes_per_token, b.saved_bytes_per_token)) is not None:
        notes.append(f"{candidate} saves {memory:.2f} × {baseline}'s bytes per token for the backward pass.")
    if (states := _ratio(a.state_bytes_per_parameter, b.state_bytes_per_parameter)) is not None:
        numbers = f"{b.state_bytes_per_parameter:.1f} against {a.state_bytes_per_parameter:.1f} bytes per parameter"
        notes.append(f"{candidate}'s optimizer states take {states:.2f} × {baseline}'s memory: {numbers}.")
    if prediction is not None:
        notes.append(f"Predicted, not measured: {prediction.gain:.2f} × {baseline}'s speed for {prediction.where}.")
    if (speed := _ratio(a.tokens_per_s, b.tokens_per_s)) is not None:
        figure = f"{candidate} ran at {speed:.2f} × {baseline}'s tokens/s"
        if b.device == "cpu":
            notes.append(
                f"{figure}, on a CPU, which has no FP8 matrix units and emulates FP8. "
                "This says nothing about the speed on a GPU."
            )
        else:
            notes.append(f"{figure} on {b.device}.")
    notes += [
        f"{arm_name(run.precision)} skipped {run.skipped_steps:,} of {run.steps:,} steps on overflow."
        for run in (a, b)
        if run.skipped_steps
    ]
    return [*notes, ONE_SEED]
