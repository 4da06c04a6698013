"""Simulate how often a verdict of `octavo compare` is wrong; the tables are in docs/compare.md.

Arms are drawn by the thousand, seed by seed up to 40, and judged after every seed as by someone who stops as soon as it
is decided: an error counts where any look makes it. Gaps are drawn in units of their own standard deviation, or of the
normal noise of quiet seeds where there are rare instabilities. The rules are applied to whole arrays here, with the
levels of `octavo.inspect`; `tests/test_benchmarks_compare_rates.py` holds both to the same verdicts.

  python -m benchmarks compare_rates                  # 10,000 comparisons of each kind: some minutes
  python -m benchmarks compare_rates --document       # only the tables, from the result file
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.environment import RESULTS, environment, write_json, write_text
from octavo.inspect.compare import BEYOND_SPREAD, BLOW_UP, Rule
from octavo.inspect.paired_test import MOST_SEEDS, SEPARATED_FROM, PairedTest

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

DOCUMENT = Path(__file__).parent.parent / "docs" / "compare.md"
BEGIN, END = "<!-- compare_rates: begin -->\n", "<!-- compare_rates: end -->\n"
DRAWN = 10_000
ARMS = (1, 2, 8)
SEEDS = (2, 3, 5, 10, 40)
SPREAD = 0.007
"""Of the baseline's loss between seeds, relative: 3.00, 3.02, 2.98."""


def _skewed(sample: Callable[[np.random.Generator, tuple[int, ...]], Floats], mean: float) -> "Draw":
    return lambda rng, shape: sample(rng, shape) - mean


def _rare(rate: float, size: float) -> "Draw":
    """Normal noise, and instabilities of `size` times its deviation at a rate, about a mean of zero."""
    return lambda rng, shape: rng.normal(size=shape) + size * ((rng.random(shape) < rate) - rate)


def _mirrored(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Instabilities of both arms alike."""
    return _rare(0.1, 10)(rng, shape) - _rare(0.1, 10)(rng, shape)


def _correlated(noise: float) -> "Draw":
    """A baseline with so many times the noise of an arm: the gaps of one seed share it."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return (rng.normal(size=shape) - noise * rng.normal(size=(shape[0], 1, *shape[2:]))) / math.hypot(1, noise)

    return draw


def _unequal(noisy: range) -> "Draw":
    """Some of the arms ten times as noisy as the others."""
    return lambda rng, shape: rng.normal(size=shape) * np.where(np.isin(np.arange(shape[1]), noisy), 10, 1)[:, None]


Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]
GAPS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "normal, of arms as noisy as the baseline": _correlated(1),
    "normal, of a baseline 3 × as noisy as the arms": _correlated(3),
    "normal, of a baseline 5 × as noisy as the arms": _correlated(5),
    "normal, 1 of the arms 10 × as noisy": _unequal(range(1)),
    "normal, up to 3 of the arms 10 × as noisy": _unequal(range(3)),
    "normal, up to 5 of the arms 10 × as noisy": _unequal(range(5)),
    "Student's t, 3 degrees": lambda rng, shape: rng.standard_t(3, shape),
    "Student's t, 2 degrees": lambda rng, shape: rng.standard_t(2, shape),
    "instabilities in both arms, 10 % of seeds, 10 ×": _mirrored,
    "exponential": _skewed(lambda rng, shape: rng.exponential(size=shape), 1),
    "log-normal, σ = 1": _skewed(lambda rng, shape: rng.lognormal(size=shape), math.exp(0.5)),
    "gamma, shape 1/2": _skewed(lambda rng, shape: rng.gamma(0.5, size=shape), 0.5),
    "instabilities, 20 % of seeds, 5 ×": _rare(0.2, 5),
    "instabilities, 10 % of seeds, 10 ×": _rare(0.1, 10),
    "instabilities, 5 % of seeds, 20 ×": _rare(0.05, 20),
    "uniform": lambda rng, shape: math.sqrt(3) * rng.uniform(-1, 1, shape),
    "exponential, of the baseline alone": _skewed(lambda rng, shape: -rng.exponential(size=shape), -1),
}
"""The mean is zero in each: an arm as good as the baseline."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What each look at some arms would say, [comparisons, arms, looks]: after 2, 3, … seeds."""

    worse: Bools
    above: Bools
    """The gaps alone show it to be worse than the margin."""
    passes: Bools
    low: Floats
    high: Floats


def decide(base: Floats, losses: Floats, *, margin: float | None = None, planned: int = MOST_SEEDS) -> Decisions:
    """Judge after every seed.

    Args:
        base: Losses of the baselines [comparisons, seeds], NaN where diverged.
        losses: Of the arms [comparisons, arms, seeds].
        margin: In percent, as of `compare_losses`.
        planned: Planned maximum of seeds.
    """
    arms, seeds = losses.shape[1:]
    rule = Rule(margin=margin, confidence=0.95, arms=arms, planned=planned)
    worse, above, passes, lows, highs = ([] for _ in range(5))
    for look in range(2, seeds + 1):
        b, x = base[:, None, :look], losses[:, :, :look]
        middle = np.maximum(np.isfinite(b).sum(-1, keepdims=True) - 1, 0) // 2
        median = np.take_along_axis(np.sort(b), middle, -1)[..., 0]  # NaN are sorted last
        with np.errstate(invalid="ignore"):
            limit = BLOW_UP * np.where(np.isnan(median), np.inf, median)[..., None]
            base_failed, failed = ~(b <= limit), ~(x <= limit)
        counts = failed.sum(-1), np.broadcast_to(base_failed.sum(-1), failed.shape[:2])
        table = np.array([[rule.fails_more(i, j, look) for j in range(look + 1)] for i in range(look + 1)])
        multiples = np.nan_to_num(x / np.fmin(b, median[..., None]), nan=0.0).max(-1)
        distance = math.sqrt(2) * np.log(np.where(base_failed, 1, b)).std(-1, ddof=1)
        on_sight = (multiples > BLOW_UP) & (np.log(np.maximum(multiples, 1)) > BEYOND_SPREAD * distance)
        damaged = table[counts] | (on_sight & ~base_failed.any(-1))
        low, high = _intervals(b, x, failed, base_failed, planned)
        worse.append(damaged | (low > 0))
        above.append(damaged | (low > (margin or 0)))
        passes.append((high <= rule.limit) & (counts[0] <= counts[1]) & ~above[-1])
        lows.append(low)
        highs.append(high)
    return Decisions(
        worse=np.stack(worse, -1), above=np.stack(above, -1), passes=np.stack(passes, -1), low=np.stack(lows, -1),
        high=np.stack(highs, -1),
    )  # fmt: skip


def _intervals(b: Floats, x: Floats, failed: Bools, base_failed: Bools, planned: int) -> tuple[Floats, Floats]:
    """`low` and `high` of the pairs that ended; infinite for fewer than two."""
    arms, seeds = x.shape[1:]
    ended = ~(failed | base_failed)
    pairs = ended.sum(-1)
    b = np.broadcast_to(b, x.shape)
    widths = np.full((seeds + 1, 3), np.inf)
    for n in range(2, seeds + 1):
        unit = PairedTest(gaps=(0.0,) * n, mean=0, deviation=1, confidence=0.95, arms=arms, planned=planned)
        alone = replace(unit, arms=1, planned=MOST_SEEDS)
        widths[n] = -unit.low, unit.high, -alone.low if n >= SEPARATED_FROM else np.inf
    with np.errstate(invalid="ignore", divide="ignore"):  # of fewer than two pairs
        gaps = 100 * np.where(ended, x - b, 0) / (np.where(ended, b, 0).sum(-1) / pairs)[..., None]
        mean = gaps.sum(-1) / pairs
        deviation = np.sqrt((np.where(ended, gaps - mean[..., None], 0) ** 2).sum(-1) / (pairs - 1))
        low, high, alone = (mean + sign * widths[pairs, k] * deviation for k, sign in enumerate((-1, 1, -1)))
    alone = np.minimum(alone, _floors(gaps, ended, base_failed))
    low = np.where(alone > 0, np.maximum(low, alone), low)
    return np.where(pairs < 2, -np.inf, low), np.where(pairs < 2, np.inf, high)


def _floors(gaps: Floats, ended: Bools, base_failed: Bools) -> Floats:
    """The smallest gap in the smallest set of arms with each one that lies above all others on every seed.

    It is minus infinity for arms with a failure of their own, which do not take part. Whether another arm belongs to
    the set follows from the pairs of arms of which one does not lie below the other on every seed, by transitive
    closure.
    """
    whole = (ended | base_failed).all(-1)
    gaps = np.where(whole[..., None], gaps, -np.inf)
    reaches = ((gaps[:, None] >= gaps[:, :, None]) & ~base_failed[:, None]).any(-1)
    for _ in range(gaps.shape[1].bit_length()):
        reaches = reaches @ reaches
    lowest = np.where(base_failed, np.inf, gaps).min(-1)
    return np.where(reaches, lowest[:, None], np.inf).min(-1)


def rate(flags: Bools) -> float:
    """Share of comparisons in which some arm, at some look, is flagged."""
    return float(flags.any((1, 2)).mean())


def _losses(gaps: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Losses of baseline and arms with these gaps in percent [comparisons, arms, seeds]."""
    base = 3 * (1 + SPREAD * rng.normal(size=(len(gaps), gaps.shape[2])))
    return base, base[:, None] + 0.03 * gaps


def gap_rates(drawn: int, seeds: int = MOST_SEEDS) -> list[dict[str, Any]]:
    """False alarms with 1, 2 and 8 arms, and wrong passes and "better" of one arm, at a look after every seed."""
    rows = []
    for number, (kind, draw) in enumerate(GAPS.items()):
        rng = np.random.default_rng(number)
        noise = 0.1
        row: dict[str, Any] = {"gaps": kind, "worse": {}}
        for arms in ARMS:
            count = drawn // min(arms, 2)
            verdicts = decide(*_losses(noise * draw(rng, (count, arms, seeds)), rng))
            row["worse"][str(arms)] = rate(verdicts.worse)
            if arms == 1:
                row["better"] = rate(verdicts.passes & (verdicts.high < 0))
                row["worse_at"] = {str(n): float(verdicts.worse[:, 0, n - 2].mean()) for n in SEEDS if n <= seeds}
        # an arm worse by the margin, and by the 2 % that pass without one: the noise from small to as large as that
        wrong = []
        for margin, asked in ((1.0, 1.0), (0.2, 0.2), (2.0, None)):
            shifted = margin * (1 + 1e-9) + noise * draw(rng, (drawn, 1, seeds))
            wrong.append(rate(decide(*_losses(shifted, rng), margin=asked).passes))
        row["passes"] = max(wrong)
        rows.append(row)
    return rows


def failure_rates(drawn: int, seeds: int = MOST_SEEDS) -> list[dict[str, Any]]:
    """False alarms where baseline and arms fail alike: diverged at equal rates, or exploded on one seed."""
    rows = []
    for name, kind in (
        *((f"{share:.0%} of all runs diverge".replace("%", " %"), share) for share in (0.02, 0.1, 0.2, 0.3, 0.5)),
        ("one seed explodes, in both arms, to 3 to 10 times the loss", "same"),
        ("one seed of each arm explodes so, not the same", "own"),
    ):
        row: dict[str, Any] = {"failures": name, "worse": {}}
        for arms in ARMS:
            rng = np.random.default_rng(arms)
            count = drawn // min(arms, 2)
            base, losses = _losses(0.1 * rng.normal(size=(count, arms, seeds)), rng)
            whole = np.concatenate([base[:, None], losses], 1)
            if isinstance(kind, float):
                whole[rng.random(whole.shape) < kind] = np.nan
                looks = slice(None)
            else:
                where = rng.integers(0, seeds, (count, arms + 1, 1))
                where = where[:, :1] + 0 * where if kind == "same" else where
                exploded = np.arange(seeds) == where
                whole = np.where(exploded, whole * rng.uniform(3, 10, whole.shape), whole)
                looks = slice(seeds - 2, None) if kind == "own" else slice(None)
            row["worse"][str(arms)] = rate(decide(whole[:, 0], whole[:, 1:]).worse[:, :, looks])
        rows.append(row)
    return rows


def detection_rates(drawn: int) -> list[dict[str, Any]]:
    """What must be found, by a look at so many seeds."""
    rows = []
    draw, shared, beside = GAPS["normal"], _correlated(3), _unequal(range(1, 4))
    for name, gap, noise, exploded, damaged, kind in (
        ("one seed above twice the baseline's loss", 0.0, 0.1, True, 1, draw),
        ("the same, gaps vary by 1 %", 0.0, 1.0, True, 1, draw),
        ("all seeds 1 % worse, gaps vary by 0.1 %", 1.0, 0.1, False, 1, draw),
        ("the same, up to 3 arms damaged", 1.0, 0.1, False, 3, draw),
        ("the same, all arms damaged", 1.0, 0.1, False, 8, draw),
        ("the same, all arms damaged, a baseline 3 × as noisy", 1.0, 0.1, False, 8, shared),
        ("the same, one arm, 3 others vary by 1 %", 1.0, 0.1, False, 1, beside),
        ("all seeds 1 % worse, gaps vary by 0.5 %", 1.0, 0.5, False, 1, draw),
        ("all seeds 5 % worse, gaps vary by 0.1 %", 5.0, 0.1, False, 1, draw),
        ("all runs of the arm diverge", math.nan, 0.1, False, 1, draw),
    ):
        row: dict[str, Any] = {"damage": name, "worse": {}}
        for arms in (1, 8):
            for seeds in (2, 3, 4, 5, 10):
                rng = np.random.default_rng(seeds)
                gaps = noise * kind(rng, (drawn // 4, arms, seeds))
                gaps[:, :damaged] += gap
                base, losses = _losses(gaps, rng)
                if exploded:
                    where = rng.integers(0, seeds, len(base))
                    each = np.arange(len(base))
                    losses[each, 0, where] = base[each, where] * rng.uniform(2, 10, len(base))
                verdicts = decide(base, losses).worse[:, :damaged, -1]
                row["worse"][f"{arms},{seeds}"] = float(verdicts.mean())
        rows.append(row)
    return rows


def power_rates(drawn: int) -> list[dict[str, Any]]:
    """The true probability, on average, of finding the gap that is printed as found with about 80 or 90 %."""
    rows = []
    for kind in ("normal", "Student's t, 3 degrees", "exponential"):
        for seeds in (2, 3, 4, 5, 10, 40):
            rng = np.random.default_rng(seeds)
            first, second = (GAPS[kind](rng, (drawn, seeds)) for _ in range(2))
            unit = PairedTest(gaps=(0.0,) * seeds, mean=0, deviation=1, confidence=0.95, arms=1, planned=MOST_SEEDS)
            row: dict[str, Any] = {"gaps": kind, "seeds": seeds}
            for power in (0.8, 0.9):
                gap = unit.detectable(power) * first.std(-1, ddof=1)
                low = second.mean(-1) + unit.low * second.std(-1, ddof=1)
                row[f"{power:g}"] = float((gap + low > 0).mean())
            rows.append(row)
    return rows


def tables(content: Mapping[str, Any]) -> str:
    """The tables of docs/compare.md."""

    def share(value: float) -> str:
        return f"{100 * value:.1f} %"

    lines = [
        "| gaps of an arm that is no worse | worse, 1 arm | 2 arms | 8 arms | better | worse by the margin, passes |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in content["gaps"]:
        cells = [*row["worse"].values(), row["better"], row["passes"]]
        lines.append(f"| {' | '.join([row['gaps'], *map(share, cells)])} |")
    lines += ["", "| failures of arms alike | worse, 1 arm | 2 arms | 8 arms |", "|---|---:|---:|---:|"]
    lines += [f"| {' | '.join([row['failures'], *map(share, row['worse'].values())])} |" for row in content["failures"]]
    cases = [(arms, seeds) for arms in (1, 8) for seeds in (2, 3, 4, 5, 10)]
    heads = [f"{seeds} seeds{', 8 arms' if arms > 1 else ''}" for arms, seeds in cases]
    lines += ["", f"| called worse | {' | '.join(heads)} |"]
    lines += ["|---|" + "---:|" * len(cases)]
    for row in content["detection"]:
        cells = [share(row["worse"][f"{arms},{seeds}"]) for arms, seeds in cases]
        lines.append(f"| {' | '.join([row['damage'], *cells])} |")
    seeds = sorted({row["seeds"] for row in content["power"]})
    lines += ["", f"| printed, gaps | {' | '.join(f'{n} seeds' for n in seeds)} |", "|---|" + "---:|" * len(seeds)]
    for power in ("0.8", "0.9"):
        for kind in dict.fromkeys(row["gaps"] for row in content["power"]):
            cells = [share(row[power]) for row in content["power"] if row["gaps"] == kind]
            lines.append(f"| about {100 * float(power):.0f} %, {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def document(content: Mapping[str, Any], text: str) -> str:
    """The text of docs/compare.md with its tables anew."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + tables(content) + END + rest.split(END)[1]


def simulate(drawn: int) -> dict[str, Any]:
    """All tables."""
    return {
        "drawn": drawn,
        "gaps": gap_rates(drawn),
        "failures": failure_rates(drawn),
        "detection": detection_rates(drawn),
        "power": power_rates(drawn),
    }


def main(arguments: list[str]) -> None:
    """Simulate, and write the result file and the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare_rates", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--drawn", type=int, default=DRAWN, help=f"comparisons of each kind ({DRAWN})")
    parser.add_argument("--out", type=Path, default=RESULTS / "simulated", help="folder of the result file")
    parser.add_argument("--document", action="store_true", help="only write the tables, from the result file")
    options = parser.parse_args(arguments)
    path = options.out / "compare_rates.json"
    if not options.document:
        write_json(path, {"environment": environment(torch.device("cpu")), **simulate(options.drawn)})
    content = json.loads(path.read_text())
    print(tables(content))
    if options.out == RESULTS / "simulated":
        write_text(DOCUMENT, document(content, DOCUMENT.read_text()))
        print(f"written: {DOCUMENT}")
