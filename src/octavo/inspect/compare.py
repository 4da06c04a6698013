"""Verdicts on the losses of paired runs, and the gap that is detectable: the rules of docs/compare.md."""

import math
import reprlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.inspect.paired_test import (
    CONFIDENCE,
    MOST_SEEDS,
    PairedTest,
    Rule,
    check_limits,
    fisher,
    losses_of,
    paired_test,
    seed_names,
    with_others,
)

Verdict = Literal["worse", "better", "indistinguishable", "inconclusive"]
Outcome = Literal["pass", "fail", "inconclusive"]

EXIT_CODES: dict[Outcome, int] = {"pass": 0, "inconclusive": 3, "fail": 1}
"""Exit codes of `octavo compare`, the best first; 2 is a user error."""
BLOW_UP = 2.0  # Multiple of the baseline's loss above which a run has blown up


@dataclass(frozen=True, kw_only=True)
class ArmLosses:
    name: str  # Name of the arm
    verdict: Verdict  # "inconclusive" if the arm is neither shown to be worse nor passes
    outcome: Outcome  # Result for CI: with a margin, a worse arm passes if it is shown to be within the margin
    test: PairedTest | None  # The test of the pairs in which neither run failed; None for fewer than two
    seeds: tuple[int, ...]  # Seeds of these pairs
    failed: tuple[int, ...]  # Seeds on which the arm diverged or ended above twice the baseline's median loss
    baseline_failed: tuple[int, ...]  # Seeds on which the baseline did
    seeds_needed: int | None  # Predicted seeds for a conclusive verdict; None if it is conclusive, or for more than 40
    sentence: str  # The verdict in words
    notes: tuple[str, ...]  # Further explanation

    def to_json(self) -> dict[str, Any]:
        """Return all but the name, with numbers of the test if there is one. `docs/compare.md` explains the keys."""
        numbers: dict[str, Any] = {}
        if (test := self.test) is not None:
            numbers = {
                "gap_percent": test.mean, "low_percent": test.low, "high_percent": test.high,
                "deviation_percent": test.deviation, "rounding_percent": test.rounding,
                "gaps_percent": dict(zip(map(str, self.seeds), test.gaps, strict=True)), "separated": test.separated,
                "detectable_percent": {f"{power:g}": test.detectable(power) for power in (0.8, 0.9)},
            }  # fmt: skip
        return {
            "verdict": self.verdict, "outcome": self.outcome, **numbers, "failed_seeds": list(self.failed),
            "baseline_failed_seeds": list(self.baseline_failed), "seeds_needed": self.seeds_needed,
            "sentence": self.sentence, "notes": list(self.notes),
        }  # fmt: skip


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    return max(outcomes, key=list(EXIT_CODES).index)


@dataclass(frozen=True, kw_only=True)
class LossComparison:
    arms: tuple[ArmLosses, ...]  # Verdicts in the order of the arms
    planned: int  # Planned maximum of seeds
    extended: bool  # Whether there are more seeds than planned

    @property
    def extension(self) -> str:
        return (
            f"Extended beyond its planned maximum of {self.planned} seeds: judged at the levels of a plan of "
            f"{MOST_SEEDS}, so an arm that is no worse is called worse up to twice as often."
        )

    @property
    def outcome(self) -> Outcome:
        return worst([arm.outcome for arm in self.arms])

    @property
    def exit_code(self) -> int:
        """Exit code of `octavo compare`: 0 all pass, 1 one fails, 3 inconclusive."""
        return EXIT_CODES[self.outcome]

    def to_json(self) -> dict[str, Any]:
        """Return what `octavo compare --losses FILE --json` prints for one object."""
        return {
            "exit_code": self.exit_code, "planned_seeds": self.planned, "extended": self.extended,
            "arms": {arm.name: arm.to_json() for arm in self.arms}, "notes": [self.extension] if self.extended else [],
        }  # fmt: skip


def compare_losses(
    baseline: Sequence[float], arms: Mapping[str, Sequence[float]], *, margin: float | None = None,
    confidence: float = CONFIDENCE, max_seeds: int = MOST_SEEDS, seeds: Sequence[int] | None = None,
    baseline_name: str = "the baseline",
) -> LossComparison:  # fmt: skip
    """Compare the losses of arms with a baseline's on the same seeds, from any trainer.

    Args:
        baseline: A loss per seed, above zero, as a sequence, an array or a tensor; NaN or infinity for a run that
            diverged. The test detects and allows for rounding of losses (3.02, whole numbers, bf16).
        arms: Name → losses on the same seeds, in the same order.
        margin: The largest gap that passes, in percent; None for `LIMIT`, and then any arm shown to be worse fails.
        confidence: Confidence of all verdicts together, from 0.5 to below 1.
        max_seeds: Planned maximum, 2 to 40. You may look at the verdict after every seed up to it.
        seeds: Distinct names of the seeds for messages, one per loss; default 1, 2, ….
        baseline_name: Name of the baseline in messages.

    Raises:
        ValueError: For fewer than two seeds, no arm, other lengths, no losses, unfit seeds, or a limit out of range.

    Examples:
        >>> from octavo.inspect import compare_losses
        >>> comparison = compare_losses([3.00, 3.02, 2.98], {"damaged": [3.01, 3.03, 9.0]})
        >>> comparison.exit_code, comparison.arms[0].verdict
        (1, 'worse')
    """
    check_limits(margin, confidence, max_seeds)
    base = losses_of("the baseline", baseline)
    if len(base) < 2:
        raise ValueError(
            f"a comparison takes two seeds or more; the baseline has {len(base)}. One seed cannot tell an effect from "
            "the noise of training: give the losses of more seeds"
        )
    names = tuple(range(1, len(base) + 1)) if seeds is None else seed_names(seeds, len(base))
    if not isinstance(arms, Mapping) or not all(isinstance(name, str) for name in arms):
        raise ValueError('arms are a mapping of names to losses, as {"fp8": [3.01, 3.02]}; got ' + reprlib.repr(arms))
    if not arms:
        raise ValueError("a comparison takes an arm or more beside the baseline; got none: add one to arms")
    rule = Rule(margin=margin, confidence=confidence, arms=len(arms), planned=int(max_seeds))
    all_pairs = []
    for name, values in arms.items():
        losses = losses_of(f"arm {name!r}", values)
        if len(losses) != len(base):
            raise ValueError(
                f"arm {name!r} has {len(losses)} losses and the baseline {len(base)}: give one per seed, in the same "
                "order, and nan for a run that diverged"
            )
        all_pairs.append(_Pairs(baseline=baseline_name, arm=name, seeds=names, base=base, losses=losses))
    tests = with_others([pairs.test(rule) for pairs in all_pairs], len(base) - len(all_pairs[0].failed(base)))
    verdicts = tuple(_arm_verdict(pairs, rule, test) for pairs, test in zip(all_pairs, tests, strict=True))
    return LossComparison(arms=verdicts, planned=rule.planned, extended=len(base) > rule.planned)


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """The losses of an arm and of the baseline, NaN where a run diverged."""

    baseline: str
    arm: str
    seeds: tuple[int, ...]
    base: list[float]
    losses: list[float]

    @property
    def median(self) -> float:
        """Lower median of the baseline's finite losses; infinite if there is none."""
        finite = [loss for loss in self.base if loss == loss]
        return statistics.median_low(finite) if finite else math.inf

    def failed(self, losses: list[float]) -> tuple[int, ...]:
        """Return indices of the runs that diverged, or ended above twice the baseline's median."""
        return tuple(k for k, loss in enumerate(losses) if not loss <= BLOW_UP * self.median)

    @property
    def ended(self) -> tuple[int, ...]:
        failed = {*self.failed(self.losses), *self.failed(self.base)}
        return tuple(k for k in range(len(self.seeds)) if k not in failed)

    def test(self, rule: Rule) -> PairedTest | None:
        """Test the pairs that ended; None for fewer than two."""
        if len(self.ended) < 2:
            return None
        base, losses = ([values[k] for k in self.ended] for values in (self.base, self.losses))
        return paired_test(base, losses, rule)

    def blow_up(self) -> tuple[int, float] | None:
        """Return the arm's run with the highest loss and its multiple of the baseline, if it is a blow-up."""
        if self.failed(self.base):
            return None
        pairs = zip(self.base, self.losses, strict=True)
        multiples = [loss / min(base, self.median) if loss == loss else 0.0 for base, loss in pairs]
        highest = max(range(len(multiples)), key=multiples.__getitem__)
        distance = math.sqrt(2) * statistics.stdev(math.log(loss) for loss in self.base)
        if multiples[highest] <= BLOW_UP or math.log(multiples[highest]) <= 5 * distance:  # of two baseline seeds
            return None
        return highest, multiples[highest]

    def names(self, indices: Sequence[int]) -> str:
        """Return for example "seeds 1, 3"."""
        return f"seed{'s' if len(indices) > 1 else ''} {', '.join(str(self.seeds[k]) for k in indices)}"


def _arm_verdict(pairs: _Pairs, rule: Rule, test: PairedTest | None) -> ArmLosses:
    failed, base_failed = pairs.failed(pairs.losses), pairs.failed(pairs.base)
    damage = _damage(pairs, rule, len(failed), len(base_failed))
    outcome: Outcome = "inconclusive"
    verdict: Verdict = "worse" if damage or (test is not None and test.low > 0) else "inconclusive"
    if damage or (test is not None and test.low > (rule.margin or 0)):
        outcome = "fail"
    elif test is not None and test.high <= rule.limit and len(failed) <= len(base_failed):
        outcome = "pass"
        if verdict != "worse":
            verdict = "better" if test.high < 0 else "indistinguishable"
    needed = _seeds_needed(pairs, rule, test, len(failed), len(base_failed)) if outcome == "inconclusive" else None
    notes = [
        f"{name} failed (diverged, or ended above twice the baseline's loss) on {pairs.names(runs)}."
        for name, runs in ((pairs.arm, failed), (pairs.baseline, base_failed))
        if runs
    ]
    if not damage and len(failed) > len(base_failed):
        p = fisher(len(failed), len(base_failed), len(pairs.seeds))
        notes.append(f"Two arms that fail equally often differ so much, in this direction, with probability {p:.2g}.")
    if test is not None and test.separated:
        above = f"alone or with other arms, above {pairs.baseline} and all remaining arms without failures"
        notes.append(f"Shown by separation: it is on every seed, {above}. The lower bound is that of this arm alone.")
    return ArmLosses(
        name=pairs.arm, verdict=verdict, outcome=outcome, test=test,
        seeds=tuple(pairs.seeds[k] for k in pairs.ended) if test else (), failed=tuple(pairs.seeds[k] for k in failed),
        baseline_failed=tuple(pairs.seeds[k] for k in base_failed), seeds_needed=needed,
        sentence=damage or _sentence(pairs, verdict, test), notes=(*notes, *_notes(rule, outcome, test, needed)),
    )  # fmt: skip


def _damage(pairs: _Pairs, rule: Rule, failed: int, base_failed: int) -> str:
    """Return a sentence on a blow-up or failures that make the arm worse; empty if there are none."""
    arm, base, seeds = pairs.arm, pairs.baseline, len(pairs.seeds)
    if (highest := pairs.blow_up()) is not None:
        where, multiple = highest
        loss = f"ended at {pairs.losses[where]:.4g}, {multiple:.3g} times the loss of {base}"
        return f"{arm} is worse than {base}: {pairs.names([where])} {loss}."
    if rule.fails_more(failed, base_failed, seeds):
        return f"{arm} is worse than {base}: it failed on {failed} of {seeds} seeds, {base} on {base_failed}."
    return ""


def _seeds_needed(pairs: _Pairs, rule: Rule, test: PairedTest | None, failed: int, base_failed: int) -> int | None:
    """Return the seeds for a conclusive verdict at these failure rates and gaps; None for over 40."""
    seeds = len(pairs.seeds)
    if failed > base_failed:
        for more in range(seeds + 1, MOST_SEEDS + 1):
            if rule.fails_more(round(failed * more / seeds), round(base_failed * more / seeds), more):
                return more
        return None
    if test is None or (ended := test.pairs_to_decide(rule.margin or 0, rule.limit)) is None:
        return None
    needed = math.ceil(ended * seeds / len(test.gaps))
    return needed if needed <= MOST_SEEDS else None


def _sentence(pairs: _Pairs, verdict: Verdict, test: PairedTest | None) -> str:
    arm, base = pairs.arm, pairs.baseline
    if test is None:
        return f"Inconclusive: fewer than two pairs of runs of {arm} and {base} ended."
    interval = f"({signed(test.low)} to {signed(test.high)} %)"
    if verdict in ("worse", "better"):
        return f"{arm} is {verdict} than {base} by {percent(abs(test.mean))} % of the loss {interval}."
    if not any(test.gaps):
        same = f"not a digit of the losses differs{' where both ended' if verdict == 'inconclusive' else ''}"
        return f"{'Inconclusive' if verdict == 'inconclusive' else f'{arm} is indistinguishable from {base}'}: {same}."
    gap = f"{signed(test.mean)} % of the loss {interval}"
    detectable = f"A loss {percent(test.detectable(0.9))} % worse would be detected with about 90 % probability."
    if verdict == "inconclusive":
        return f"Inconclusive: {arm} is at {gap} beside {base}. {detectable}"
    return f"{arm} is indistinguishable from {base}: {gap}. {detectable}"


def _notes(rule: Rule, outcome: Outcome, test: PairedTest | None, needed: int | None) -> list[str]:
    notes = []
    if test is not None and any(test.gaps):
        notes.append(
            f"Between seeds the gap varies by {percent(test.deviation)} % (standard deviation). A loss "
            f"{percent(test.detectable(0.8))} % worse would be detected with about 80 % probability."
        )
    margin = "what passes without a margin" if rule.margin is None else "the margin"
    if outcome == "pass":
        notes.append(f"It is shown to be no more than {rule.limit:g} % worse ({margin}).")
    elif outcome == "fail" and rule.margin is not None and test is not None and test.low > rule.margin:
        notes.append(f"That is more than {rule.margin:g} % ({margin}).")
    elif outcome == "inconclusive":
        worse = "worse" if rule.margin is None else "more"
        stay = "If gaps and failures stay as they are"
        decide = f"about {needed} seeds decide" if needed else f"no number of seeds up to {MOST_SEEDS} decides"
        if test is not None and test.rounding > test.deviation:  # more of the deviation is rounding than noise
            notes.append(f"The losses have few digits, which hides up to {percent(test.rounding)} %: give more digits.")
        notes.append(
            f"It is shown neither to be {worse}, nor to be at most {rule.limit:g} % worse ({margin}). {stay}, {decide}."
        )
    return notes


def percent(value: float) -> str:
    """Format with two decimals, two digits for small values, or three for large ones."""
    if abs(value) >= 1000:
        return f"{value:.3g}"
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{percent(abs(value))}"
