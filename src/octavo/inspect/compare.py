"""Paired comparison of training runs: how far apart two arms end, and whether so many seeds can tell.

Runs of one seed share initial weights, data and order, so what is compared is the gap within a seed; how far seeds lie
apart, usually ten times as much, drops out. What is left in a gap beside the effect of the arm is chaos: training
amplifies any difference in rounding, also between two ways to add up the same gradient. Nobody knows its size before
the runs, so it is estimated from the gaps themselves, which is Student's problem:

    gap of seed k    g_k = 100 (L_k − B_k) / B̄                 L, B: losses of arm and baseline; B̄ = Σ B_k / n
    mean, deviation  ḡ = Σ g_k / n,   s² = Σ (g_k − ḡ)² / (n − 1)
    interval         ḡ ± c s/√n,      c = t(1 − α/2; n − 1),  α = (1 − confidence) / arms      (Bonferroni)
    verdict          worse: the interval lies above 0; better: below; else indistinguishable
    power            P(T' > c),  T' noncentral t with n − 1 degrees of freedom and noncentrality Δ√n/s
    detectable       the Δ whose power is 80 % or 90 %

"Indistinguishable" is worth what was detectable, so that is always said beside it. Assumed: gaps of different seeds are
independent and roughly normal; `docs/compare.md` has the rates that were measured. Rejected: percent of each seed's own
loss, which brings the spread of the seeds back in; sign-flip permutations, which cannot fall below p = 2^(1 − n); and a
variance pooled over arms, which is theirs only if all are equally noisy.

All tails are exact: Student's is a finite sum for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 4), the
noncentral one an integral over the normal numerator, taken numerically to 1e-10.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

Status = Literal["indistinguishable", "worse", "better"]

CONFIDENCE = 0.95
"""Of the intervals of all arms together."""
MOST_SEEDS = 100
"""Where `seeds_for` stops looking."""
_REACH = 9.0
"""Beyond so many standard deviations a normal variable has less than 1e-18."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """What n seeds say of one arm.

    Attributes:
        gaps: Loss of the arm above the baseline's, one per seed, in percent of the baseline's mean loss.
        mean: Their mean.
        deviation: Their standard deviation, of n − 1 degrees of freedom.
        half_width: The interval is mean ± this.
        p: Probability of a mean so far from zero, on either side, where there is no effect; not corrected for `arms`.
        confidence: That the intervals of all arms cover, together.
        arms: How many arms are compared with the baseline.
    """

    gaps: tuple[float, ...]
    mean: float
    deviation: float
    half_width: float
    p: float
    confidence: float
    arms: int

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width

    @property
    def status(self) -> Status:
        """On which side of zero the interval lies, if on one."""
        if self.low > 0:
            return "worse"
        return "better" if self.high < 0 else "indistinguishable"

    def detectable(self, power: float) -> float:
        """Smallest true gap, in percent, that is called worse with this probability, if the noise is as it was here."""
        return _noncentrality(len(self.gaps) - 1, self._level, power) * self.deviation / math.sqrt(len(self.gaps))

    def seeds_for(self, gap: float, power: float) -> int | None:
        """Seeds that call a true gap of so many percent worse with this probability; None where `MOST_SEEDS` do not."""
        if gap <= 0:
            raise ValueError(f"the gap to be found is above zero; got {gap:g}")

        def enough(seeds: int) -> bool:
            return _noncentrality(seeds - 1, self._level, power) * self.deviation <= gap * math.sqrt(seeds)

        if not enough(MOST_SEEDS):
            return None
        low, high = 1, MOST_SEEDS  # what is detectable falls with every seed
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    @property
    def _level(self) -> float:
        return _level(self.confidence, self.arms)


def paired_test(
    baseline: Sequence[float], candidate: Sequence[float], *, confidence: float = CONFIDENCE, arms: int = 1
) -> PairedTest:
    """Compare the losses of an arm with the baseline's of the same seeds.

    Args:
        baseline: Losses of the baseline, one per seed, finite and above zero.
        candidate: Losses of the arm, in the same order of seeds.
        confidence: Of the intervals of all arms together, between 0 and 1.
        arms: How many arms are compared with this baseline.

    Raises:
        ValueError: Fewer than two seeds, unequal numbers, a loss that is not positive and finite, or a confidence
            outside (0, 1).
    """
    if len(baseline) != len(candidate) or len(baseline) < 2:
        raise ValueError(
            f"a paired test takes two seeds or more, the same for both arms; got {len(baseline)} and {len(candidate)}: "
            "one seed says nothing of the noise"
        )
    if not all(math.isfinite(loss) and loss > 0 for loss in (*baseline, *candidate)):
        raise ValueError(f"losses are positive and finite; got {list(baseline)} and {list(candidate)}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies between 0 and 1, as {CONFIDENCE}; got {confidence:g}")
    whole = statistics.fmean(baseline)
    gaps = tuple(100 * (loss - base) / whole for base, loss in zip(baseline, candidate, strict=True))
    seeds, mean, deviation = len(gaps), statistics.fmean(gaps), statistics.stdev(gaps)
    error = deviation / math.sqrt(seeds)
    if error > 0:
        p = 1 - student_inside(abs(mean) / error, seeds - 1)
    else:
        p = 1.0 if mean == 0 else 0.0
    return PairedTest(
        gaps=gaps,
        mean=mean,
        deviation=deviation,
        half_width=student_quantile(seeds - 1, _level(confidence, arms)) * error,
        p=p,
        confidence=confidence,
        arms=arms,
    )


def student_inside(t: float, freedom: int) -> float:
    """P(|T| ≤ t) of Student's t, t ≥ 0, with whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def student_quantile(freedom: int, level: float) -> float:
    """The c with P(|T| > c) = level, of Student's t with whole degrees of freedom."""
    return _solve(lambda t: student_inside(t, freedom), 1 - level)


def student_power(freedom: int, critical: float, noncentrality: float) -> float:
    """P(T' > c) of the noncentral t with whole degrees of freedom, c > 0.

        T' = (Z + δ) / √(V/ν):   P(T' > c) = ∫ φ(z) P(V < ν ((z + δ)/c)²) dz   over z > −δ

    Integrated by Gauss's rule on pieces short enough for some hundred degrees of freedom.
    """
    low = max(-noncentrality, -_REACH)
    if low >= _REACH:
        return 0.0
    edges = np.linspace(low, _REACH, 65)
    halves = np.diff(edges)[:, None] / 2
    z = edges[:-1, None] + halves * (1 + _NODES)
    bound = torch.from_numpy(freedom / 2 * ((z + noncentrality) / critical) ** 2)
    below = torch.special.gammainc(torch.full_like(bound, freedom / 2), bound).numpy()
    return float((np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * below * halves * _WEIGHTS).sum())


def _level(confidence: float, arms: int) -> float:
    return (1 - confidence) / arms


@cache
def _noncentrality(freedom: int, level: float, power: float) -> float:
    """The noncentrality with which an effect is found with this probability."""
    critical = student_quantile(freedom, level)
    return _solve(lambda delta: student_power(freedom, critical, delta), power)


def _solve(rising: Callable[[float], float], value: float) -> float:
    """The x ≥ 0 where a rising function takes a value: doubling, then halving down to 1e-13 of it."""
    low, high = 0.0, 1.0
    while rising(high) < value:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


def common_target(curves: Iterable[NDArray[np.float64]]) -> float:
    """The lowest loss that all curves reach; each holds a finite value."""
    return max(float(np.nanmin(curve)) for curve in curves)


def steps_to(curve: NDArray[np.float64], target: float) -> int | None:
    """Steps, 1, 2, …, until a curve [steps] is first at or below a loss; None where it never is."""
    reached = np.flatnonzero(curve <= target)
    return int(reached[0]) + 1 if len(reached) else None
