"""Quantiles of Student's t, the power of its test, and Fisher's exact test. The t distributions are SciPy's."""

import math
from functools import cache

import numpy as np

from octavo.runtime.extras import needs_extras

_LARGEST_SHIFT = 1e4
"""Noncentrality beyond which the normal numerator no longer matters (1e-8), and SciPy's noncentral t overflows."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


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
