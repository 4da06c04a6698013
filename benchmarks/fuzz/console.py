"""The command: draw cases until the time is over, shrink and print what fails, count what was drawn."""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import write_json
from benchmarks.fuzz.build import Case, build
from benchmarks.fuzz.draw import KINDS, draw
from benchmarks.fuzz.outcome import Outcome
from benchmarks.fuzz.runner import check, corpus, smallest

_SHRUNK = 10
"""Failures of one kind and label that are shrunk; more of them are counted."""


def main(arguments: list[str]) -> None:
    """Run `python -m benchmarks fuzz`; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw cases (1)")
    parser.add_argument("--cases", type=int, help="or how many")
    parser.add_argument("--seed", type=int, default=0, help="case i of a seed is always the same (0)")
    parser.add_argument("--only", choices=KINDS, help="cases of one kind")
    parser.add_argument("--case", help="run this case alone, JSON as a failure prints it")
    parser.add_argument("--out", type=Path, help="write failures to this file, as under benchmarks/results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sys.exit(_repeat(json.loads(options.case)) if options.case else _fuzz(options))


def _repeat(case: Case) -> int:
    outcome = check(case)
    if "parts" in case:
        print(build(case))
    print(json.dumps(case))
    print(f"{outcome.status}: {outcome.label}: {outcome.message}" if outcome.status != "pass" else "pass")
    return int(outcome.failed)


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """The corpus, then new cases until the time is over."""
    for entry in corpus(options.only):
        yield f"corpus: {entry['note']}", entry["case"]
    end, index = time.monotonic() + 60 * options.minutes, 0
    while index < options.cases if options.cases is not None else time.monotonic() < end:
        yield f"seed {options.seed}, case {index}", draw(options.seed, index, options.only)
        index += 1


def _fuzz(options: argparse.Namespace) -> int:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failures: list[dict[str, Any]] = []
    printed: Counter[tuple[str, str]] = Counter()
    shown: list[Case] = []
    progress = _Progress()
    for name, case in _cases(options):
        outcome = check(case)
        counts[case["kind"]][outcome.status] += 1
        progress.update(sum(c.total() for c in counts.values()), len(failures) + outcome.failed)
        if not outcome.failed:
            continue
        key = case["kind"], outcome.label
        printed[key] += 1
        failure = {"name": name, "label": outcome.label, "message": outcome.message, "case": case}
        if printed[key] <= _SHRUNK:
            small = smallest(case, outcome.label)
            failure |= {"shrunk": small}
            if small not in shown:
                shown.append(small)
                progress.clear()
                print(described(name, small, check(small)), flush=True)
        failures.append(failure)
    progress.clear()
    print(_table(counts))
    for (kind, label), count in sorted(printed.items()):
        print(f"failed: {kind}: {label}: {count} cases, {min(count, _SHRUNK)} of them shrunk")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, {"seed": options.seed, "failures": failures})
    return int(bool(failures))


def described(name: str, case: Case, outcome: Outcome) -> str:
    """What a failure prints: what is wrong, and two ways to repeat it."""
    text = json.dumps(case)
    return f"""
--- {name}: {case["kind"]}: {outcome.label}: {outcome.message}
python -m benchmarks fuzz --case '{text}'
# or, in the root of the repository:
from benchmarks.fuzz import build, check
if __name__ == "__main__":
    case = {case!r}
    print({"build(case), " if "parts" in case else ""}check(case))"""


def _table(counts: dict[str, Counter[str]]) -> str:
    names = ("pass", "fail", "invalid", "cut")
    lines = [f"{'kind':<12} {'drawn':>6} " + " ".join(f"{name:>8}" for name in names)]
    for kind in KINDS:
        if counts[kind]:
            row = " ".join(f"{counts[kind][name]:>8}" for name in names)
            lines.append(f"{kind:<12} {counts[kind].total():>6} {row}")
    return "\n".join(lines) + "\ninvalid: plain PyTorch cannot run it, or is not finite; cut: over time"


class _Progress:
    """One line on a terminal; on anything else a line each half minute."""

    def __init__(self) -> None:
        self._terminal, self._start, self._last = sys.stderr.isatty(), time.monotonic(), 0.0

    def update(self, drawn: int, failed: int) -> None:
        now = time.monotonic()
        if now - self._last < (0.2 if self._terminal else 30.0):
            return
        self._last = now
        line = f"{now - self._start:6.0f} s   {drawn} cases drawn   {failed} failed"
        print(f"\r{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
