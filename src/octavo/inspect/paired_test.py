"""Interval of the mean gap of paired runs, with levels for a look after every seed: the formulas of docs/compare.md."""

import math
import operator
import reprlib
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from octavo.runtime.extras import needs_extras

# Convert losses of any library to floats, check them, and find the unit to which they are rounded.
#
# Rounded losses tie: two gaps that are equal only after rounding have no deviation, and any test would call them
# certain.


FEWEST_BITS = 8  # Significant bits of the coarsest format: bf16
FLOAT_BITS = 53


def losses_of(owner: str, values: object) -> list[float]:
    """Return the values as floats above zero, with NaN for each that is not finite (the run diverged)."""
    losses = [float(number) for number in _numbers(owner, values, "a loss is a number, or nan for a run that diverged")]
    for index, loss in enumerate(losses):
        if loss < sys.float_info.min:
            reason = f"a loss is above zero ({sys.float_info.min:.2g} or more), as gaps are in percent of it"
            raise ValueError(f"{owner} holds {loss} at index {index}: {reason}")
    return [loss if math.isfinite(loss) else math.nan for loss in losses]


def seed_names(values: object, count: int) -> tuple[int, ...]:
    """Return the seeds as a tuple of `count` integers."""
    names = tuple(map(int, _numbers("seeds", values, "a seed is a whole number", Integral)))
    if len(names) != count:
        raise ValueError(f"there are {len(names)} seeds and {count} losses of the baseline: name one seed per loss")
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"seed {duplicates[0]} is named twice: the losses of one seed are one pair; name each once")
    return names


def _numbers(owner: str, values: object, what: str, kind: Any = Real | Decimal) -> list[Any]:
    """Return the numbers of a sequence, an array or a tensor. Raises ValueError with the index of what is none."""
    items = _python(values)
    if isinstance(items, str | bytes | bytearray | Set | Mapping) or not isinstance(items, Iterable):
        raise ValueError(f"{owner} is a list with one number per seed, in order; got {reprlib.repr(values)}")
    numbers = [_python(item) for item in items]
    for index, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, kind):
            raise ValueError(f"{owner} holds {reprlib.repr(number)} at index {index}: {what}")
    return numbers


def _python(value: Any) -> Any:
    """Convert an array or a tensor to Python numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def resolution(losses: list[float]) -> float:
    """Return the unit to which losses were rounded, in decimal or in binary digits, whichever is larger."""
    # Digits are counted from the first of the largest loss: 0.01 for 3.0 and 3.02, 2⁻⁶ for numbers of bf16 from 2 to 4.
    # Decimals are the shortest of the smallest float format: 3.02 of fp32 has two places.
    largest, values = max(losses), np.array(losses)
    with np.errstate(over="ignore", under="ignore"):
        kinds = (np.float16, np.float32, np.float64)
        values = next(few for kind in kinds if ((few := values.astype(kind)) == values).all())
    numbers = {loss: Decimal(str(value).removesuffix(".0")) for loss, value in zip(losses, values, strict=True)}
    digits = max(number.adjusted() - int(number.as_tuple().exponent) for number in numbers.values())
    decimal = 10.0 ** (numbers[largest].adjusted() - digits)
    exact, printed = (_spacing(losses, digit) for digit in (0.0, decimal))
    if printed < 2 * decimal:  # any decimal is close to such a number
        printed = decimal
    return max(decimal, exact, printed)


def _spacing(losses: list[float], digit: float) -> float:
    """Return the spacing, at the largest loss, of the coarsest binary format that holds all losses to half a digit."""

    def has(bits: int, loss: float) -> bool:  # at most so many bits, up to half a decimal digit and fp32 rounding
        mantissa, exponent = math.frexp(loss)
        scaled = math.ldexp(mantissa, bits)
        return bits == FLOAT_BITS or abs(scaled - round(scaled)) <= math.ldexp(digit / 2, bits - exponent) * 1.01

    bits = next(bits for bits in range(FEWEST_BITS, FLOAT_BITS + 1) if all(has(bits, loss) for loss in losses))
    return math.ldexp(1.0, math.frexp(max(losses))[1] - bits)


CONFIDENCE = 0.95  # Confidence of all verdicts together
MOST_SEEDS = 40  # Largest planned maximum of seeds: the levels below are for looks at 2 to this many seeds
SIGNIFICANCE_LEVELS = (0.001, 0.008, 0.005, 0.0015)
"""One-sided levels α of 2, 3, 4, and 5 pairs or more, at 95 % and for one arm."""
FAILURE_LEVEL = 0.005  # Level of Fisher's test, at 95 % and for one arm
LIMIT = 2.0  # Default margin, in percent
TOTAL_ALPHA = 0.025  # Total level of a plan; a plan of few seeds adds what remains to its last look
SEPARATED_FROM = 3  # Fewest pairs for separation: two find an arm hardly more often, and equal arms separate too easily
_LARGEST_SHIFT = 1e4
"""Noncentrality beyond which the normal numerator no longer matters (1e-8), and SciPy's noncentral t overflows."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the verdicts on all arms share."""

    margin: float | None = None  # Largest gap that passes, in percent; None for `LIMIT`
    confidence: float = CONFIDENCE  # Of the verdicts on all arms together
    arms: int = 1  # Number of arms compared with the baseline
    planned: int = MOST_SEEDS  # Planned maximum of seeds

    @property
    def limit(self) -> float:
        """Gap in percent up to which an arm passes."""
        return LIMIT if self.margin is None else self.margin

    @property
    def factor(self) -> float:
        """Factor of the levels for a confidence other than 95 %."""
        return (1 - self.confidence) / (1 - CONFIDENCE)

    def level(self, pairs: int) -> float:
        """One-sided level of one arm, without what a small plan adds."""
        return SIGNIFICANCE_LEVELS[min(pairs, 5) - 2] * self.factor

    def shared_level(self, pairs: int) -> float:
        return level_of(pairs, self.planned) * self.factor / self.arms

    def fails_more(self, failed: int, base_failed: int, seeds: int) -> bool:
        """Return whether the arm has significantly more failed runs than the baseline."""
        level = self.factor / self.arms * (1 + 1e-9)
        # If all n runs of the arm fail and none of the baseline, which equal arms do with probability ≤ 4⁻ⁿ: 4⁻³.
        all_failed = failed == seeds and not base_failed and 4.0**-seeds <= 4.0**-3 * level
        return all_failed or fisher(failed, base_failed, seeds) <= FAILURE_LEVEL * level


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """The test of one arm, from n pairs of runs that did not fail."""

    gaps: tuple[float, ...]  # Loss above the baseline's, one per pair, in percent of the baseline's mean loss
    mean: float  # Their mean
    deviation: float  # Their standard deviation, of n − 1 degrees of freedom, with the rounding of the losses
    rule: Rule
    rounding: float = 0.0  # The unit to which the losses are rounded, in percent
    # Gaps of the other arms on the same seeds, in percent; None if the arm does not take part in separation.
    others: tuple[tuple[float, ...], ...] | None = None

    @property
    def low(self) -> float:
        """Lower bound of the gap, in percent: of all arms together or, if `separated`, of this arm alone."""
        return self._low(len(self.gaps), self._floor(self.gaps))

    @property
    def separated(self) -> bool:
        """Whether `low` follows from separation."""
        return self.low > self._low(len(self.gaps), -math.inf)

    @property
    def high(self) -> float:
        """Upper bound of the gap, in percent."""
        return self._high(len(self.gaps))

    def detectable(self, power: float) -> float:
        """Return the true gap, in percent, that this number of pairs calls worse with about this probability."""
        # The probability is an average over the measured deviation.
        pairs = len(self.gaps)
        gap, alone = (
            average_noncentrality(pairs - 1, level, power) * self.deviation / math.sqrt(pairs)
            for level in (self.rule.shared_level(pairs), self.rule.level(pairs))
        )
        if pairs < SEPARATED_FROM or alone >= gap or not self._separates(gap):
            return gap
        if self._separates(alone):
            return alone
        for _ in range(20):  # the smallest gap that separates the arm: more power never needs a smaller one
            middle = (alone + gap) / 2
            alone, gap = (alone, middle) if self._separates(middle) else (middle, gap)
        return gap

    def _separates(self, gap: float) -> bool:
        return self._floor([x - self.mean + gap for x in self.gaps]) > 0

    def pairs_to_decide(self, above: float, limit: float) -> int | None:
        """Return the pairs for `low` > above or `high` ≤ limit, if gaps stay alike; None for over `MOST_SEEDS`."""
        floor = self._floor(self.gaps)
        for pairs in range(len(self.gaps) + 1, MOST_SEEDS + 1):
            if self._low(pairs, floor) > above or self._high(pairs) <= limit:
                return pairs
        return None

    def _low(self, pairs: int, floor: float) -> float:
        shared, alone = (
            self.mean - student_quantile(pairs - 1, level) / math.sqrt(pairs) * self.deviation
            for level in (self.rule.shared_level(pairs), self.rule.level(pairs))
        )
        alone = min(alone, floor)
        return max(shared, alone) if alone > 0 and pairs >= SEPARATED_FROM else shared

    def _floor(self, gaps: Sequence[float]) -> float:
        return -math.inf if self.others is None else floor_of(gaps, self.others)

    def _high(self, pairs: int) -> float:
        """Not corrected for the number of arms: a comparison passes only if all arms pass."""
        width = student_quantile(pairs - 1, self.rule.level(pairs) / 3) / math.sqrt(pairs) + 1 + 10 / (pairs + 1)
        return self.mean + width * self.deviation + self.rounding


def check_limits(margin: float | None, confidence: float, max_seeds: int) -> None:
    """Raise ValueError if a margin, confidence or planned maximum is out of range."""
    if margin is not None and not 0 < margin < 100:
        raise ValueError(f"the margin is a loss gap in percent, above 0 and below 100; got {margin}")
    if not 0.5 <= confidence < 1:
        raise ValueError(f"the confidence is 50 % or more and below 100 %; got {100 * confidence:g} %")
    if not 2 <= operator.index(max_seeds) <= MOST_SEEDS:
        raise ValueError(f"the planned maximum is 2 to {MOST_SEEDS} seeds; got {max_seeds}")


def level_of(pairs: int, planned: int) -> float:
    """Return the one-sided level for a number of pairs, at 95 % and for one arm."""
    level = SIGNIFICANCE_LEVELS[min(pairs, 5) - 2]
    if pairs != planned:
        return level
    return level + max(0.0, TOTAL_ALPHA - sum(SIGNIFICANCE_LEVELS[min(k, 5) - 2] for k in range(2, planned + 1)))


def floor_of(gaps: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """Return `floor` of docs/compare.md: the smallest gap in the set of arms that `low` separates."""
    rest, lowest = list(others), list(gaps)
    while joining := [other for other in rest if any(gap >= low for gap, low in zip(other, lowest, strict=True))]:
        rest = [other for other in rest if all(gap < low for gap, low in zip(other, lowest, strict=True))]
        lowest = [min(seed) for seed in zip(lowest, *joining, strict=True)]
    return min(lowest)


def paired_test(baseline: Sequence[float], losses: Sequence[float], rule: Rule) -> PairedTest:
    """Test two or more pairs; losses are finite and above zero."""
    unit = statistics.median_low(baseline)  # sums of ratios do not overflow
    whole = statistics.fmean(loss / unit for loss in baseline)
    gaps = tuple(100 * (loss / unit - base / unit) / whole for base, loss in zip(baseline, losses, strict=True))
    rounding = 100 * (resolution([*baseline, *losses]) / unit) / whole
    return PairedTest(
        gaps=gaps, mean=statistics.fmean(gaps), deviation=math.hypot(statistics.stdev(gaps), rounding / math.sqrt(6)),
        rule=rule, rounding=rounding,
    )  # fmt: skip


def with_others(tests: Sequence[PairedTest | None], pairs: int) -> list[PairedTest | None]:
    """Return the tests of all arms; those without a failure, i.e. with so many pairs, take part in separation."""
    joined = list(tests)
    whole = {arm: test for arm, test in enumerate(tests) if test is not None and len(test.gaps) == pairs}
    for arm, test in whole.items():
        joined[arm] = replace(test, others=tuple(other.gaps for number, other in whole.items() if number != arm))
    return joined


@cache
def student_quantile(freedom: int, level: float) -> float:
    """The c with P(T > c) = level of Student's t."""
    with needs_extras("a comparison of losses"):
        from scipy import stats

    return float(stats.t.isf(level, freedom))


@cache
def average_noncentrality(freedom: int, level: float, power: float) -> float:
    """Return the δ for which a gap of δ measured standard errors is detected with this probability, on average."""
    # E[P(T'(δ S) > c)] = power, S² = V/ν the measured variance over the true one, c = t(1 − level; ν)
    # T' is the noncentral t. With the true standard error instead of the measured one (S = 1), the δ of three seeds
    # would be half as large, and its true probability 70 % instead of 90 %. Accurate to four digits.
    critical = student_quantile(freedom, level)
    with needs_extras("a comparison of losses"):
        from scipy import optimize, stats

    width = 7 / math.sqrt(freedom)
    edges = np.linspace(max(0.0, 1 - width), 1 + width, 3)
    halves = np.diff(edges)[:, None] / 2
    spread = (edges[:-1, None] + halves * (1 + _NODES)).ravel()
    log = (freedom - 1) * np.log(spread) - freedom * (spread**2 - 1) / 2  # log density up to a constant
    weights = np.exp(log - log.max()) * (halves * _WEIGHTS).ravel()
    weights /= weights.sum()

    def excess(delta: float) -> float:
        shift = delta * spread
        detected = stats.nct.sf(critical, freedom, np.minimum(shift, _LARGEST_SHIFT))
        without_numerator = stats.chi2.cdf(freedom * (shift / critical) ** 2, freedom)
        return float(weights @ np.where(shift < _LARGEST_SHIFT, detected, without_numerator)) - power

    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, rtol=1e-10))


@cache
def fisher(worse: int, base: int, seeds: int) -> float:
    """Return P of `worse` or more of all failures being in one half of 2 × `seeds` equal runs (Fisher's exact test)."""
    failed = worse + base
    ways = sum(math.comb(seeds, k) * math.comb(seeds, failed - k) for k in range(worse, min(seeds, failed) + 1))
    return ways / math.comb(2 * seeds, failed)
