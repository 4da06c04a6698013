"""Exact tail probabilities: Student's t, the noncentral t, and Fisher's exact test.

Student's t is a finite sum for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 4), the noncentral t a
numerical integral over the normal numerator, to 1e-10, and Fisher's test a sum of binomials. SciPy has them too, but is
a dependency of the tests only, which compare with it.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_REACH = 9.0
"""Standard deviations beyond which a normal variable has a probability below 1e-18."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


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
    """The c with P(T > c) = level ≤ 1/2, of Student's t with whole degrees of freedom."""
    return _solve(lambda t: student_inside(t, freedom), 1 - 2 * level)


def student_power(freedom: int, critical: float, noncentrality: float) -> float:
    """P(T' > c) of the noncentral t with whole degrees of freedom, c > 0.

        T' = (Z + δ) / √(V/ν):   P(T' > c) = ∫ φ(z) P(V < ν ((z + δ)/c)²) dz   over z > −δ

    Integrated by Gauss's rule on intervals short enough for some hundred degrees of freedom.
    """
    return float(_powers(freedom, critical, np.array([noncentrality]), 64)[0])


def _powers(freedom: int, critical: float, noncentrality: Floats, pieces: int) -> Floats:
    """`student_power` of many noncentralities [n]."""
    low = np.clip(-noncentrality, -_REACH, _REACH)[:, None]
    edges = low + (_REACH - low) * np.linspace(0, 1, pieces + 1)
    halves = np.diff(edges)[..., None] / 2
    z = edges[:, :-1, None] + halves * (1 + _NODES)
    bound = torch.from_numpy(freedom / 2 * ((z + noncentrality[:, None, None]) / critical) ** 2)
    below = torch.special.gammainc(torch.full_like(bound, freedom / 2), bound).numpy()
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray((density * below * halves * _WEIGHTS).sum((1, 2)))


@cache
def average_noncentrality(freedom: int, level: float, power: float) -> float:
    """Return the δ for which a gap of δ measured standard errors is detected with this probability, on average.

        E[P(T'(δ S) > c)] = power,   S² = V/ν the measured variance over the true one,   c = t(1 − level; ν)

    With the true standard error instead of the measured one (S = 1), the δ of three seeds would be half as large, and
    its true probability 70 % instead of 90 %. Accurate to four digits.
    """
    critical = student_quantile(freedom, level)
    width = 7 / math.sqrt(freedom)
    edges = np.linspace(max(0.0, 1 - width), 1 + width, 3)
    halves = np.diff(edges)[:, None] / 2
    spread = (edges[:-1, None] + halves * (1 + _NODES)).ravel()
    log = (freedom - 1) * np.log(spread) - freedom * (spread**2 - 1) / 2  # log density up to a constant
    weights = np.exp(log - log.max()) * (halves * _WEIGHTS).ravel()
    weights /= weights.sum()
    return _solve(lambda delta: float(weights @ _powers(freedom, critical, delta * spread, 8)), power, 1e-4)


@cache
def fisher(worse: int, base: int, seeds: int) -> float:
    """Return P of `worse` or more of all failures being in one half of 2 × `seeds` equal runs (Fisher's exact test).

    Args:
        worse: Failed runs of the arm.
        base: Failed runs of the baseline.
        seeds: Runs of each.
    """
    failed = worse + base
    ways = sum(math.comb(seeds, k) * math.comb(seeds, failed - k) for k in range(worse, min(seeds, failed) + 1))
    return ways / math.comb(2 * seeds, failed)


def _solve(rising: Callable[[float], float], value: float, tolerance: float = 1e-13) -> float:
    """Return the x ≥ 0 where a rising function takes a value, by bisection to a relative tolerance."""
    low, high = 0.0, 1.0
    while rising(high) < value:
        low, high = high, 2 * high
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high
