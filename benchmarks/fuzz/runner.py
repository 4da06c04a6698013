"""Run one case, with a time limit, into an `Outcome`; and the command that draws until time is over."""

import argparse
import importlib
import json
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from hypothesis.errors import Flaky

from benchmarks import command
from benchmarks.fuzz.build import Case, build
from benchmarks.fuzz.draw import KINDS, first
from benchmarks.fuzz.outcome import Outcome, outcome_of

SECONDS = 20.0  # Seconds of this process's CPU after which a case is cut; ranks have their own limit
CORPUS = Path(__file__).parent / "corpus.json"
_DRAWS, _SHOWN = 40, 3
"""Cases of one kind before the next kind; failures of one kind and label that are shrunk and shown."""
_STATUSES = ("pass", "fail", "invalid", "cut")
_ORDER = ("activations", "linear", "optimizer", "wrappers", "activations", "derivatives", "comm", "identity",
          "linear", "activations", "threads", "experts")  # fmt: skip


class _TimeLimit(BaseException):
    """A case took too long."""


def check(case: Case, seconds: float = SECONDS) -> Outcome:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of more threads have another order
    _import_all()
    try:
        with _limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return outcome_of(lambda: importlib.import_module(f"benchmarks.fuzz.{case['kind']}").check(case))
    except _TimeLimit:
        return Outcome("cut", "", f"more than {seconds:g} s")
    finally:
        torch.set_num_threads(threads)


@cache
def _import_all() -> None:
    """Import what cases import, before the time of one begins: an import that is cut short may abort the process."""
    importlib.import_module("torch._dynamo")
    if find_spec("transformers") is not None:
        for name in ("llama", "gemma", "t5", "phi3", "mixtral", "gpt_oss"):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise _TimeLimit in the main thread after a time, and each second after that in case somebody swallows it."""

    def stop(number: int, frame: Any) -> None:
        raise _TimeLimit

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def corpus(only: str | None = None) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(CORPUS.read_text())
    return [entry for entry in entries if only in (None, entry["case"]["kind"])]


def main(arguments: list[str]) -> None:
    parser = command("fuzz", __doc__, "fuzz --minutes 10 --seed 1\nfuzz --only activations\nfuzz --case '{…}'")
    parser.add_argument("--minutes", type=float, default=10.0, help="cases are drawn for so long (10)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same cases (0)")
    parser.add_argument("--only", choices=list(KINDS), help="one kind of case")
    parser.add_argument("--case", help="run one case, given as JSON, and print its outcome")
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


def _fuzz(options: argparse.Namespace) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    end = time.monotonic() + 60 * options.minutes

    def run(case: Case) -> Outcome:
        outcome = check(case)
        counts[case["kind"], outcome.status] += 1
        return outcome

    def show(name: str, case: Case, outcome: Outcome) -> None:
        found[case["kind"], outcome.label] += 1
        print(described(name, case, outcome), flush=True)

    for entry in corpus(options.only):
        if (outcome := run(entry["case"])).failed:
            show(f"corpus: {entry['note']}", entry["case"], outcome)
    for turn, kind in enumerate(cycle([options.only] if options.only else _ORDER)):
        if time.monotonic() > end:
            break
        labels: list[str] = []

        def fails(case: Case, kind: str = kind, labels: list[str] = labels) -> bool:
            """Whether a case fails in the same way as the first one of this turn."""
            if time.monotonic() > end and not labels:
                return False
            outcome = run(case)
            if outcome.failed and not labels and found[kind, outcome.label] < _SHOWN:
                labels.append(outcome.label)
            return outcome.failed and outcome.label in labels

        try:
            small = first(kind, fails, seed=f"{options.seed}/{turn}", draws=_DRAWS)
        except Flaky as error:
            found[kind, f"only sometimes: {labels[0]}"] += 1
            print(f"\n--- {kind}: {labels[0]}: fails only sometimes: {error}", flush=True)
        else:
            if small is not None:
                show(f"seed {options.seed}", small, check(small))
    print(f"{'kind':<12} " + " ".join(f"{status:>8}" for status in _STATUSES))
    for kind in dict.fromkeys(kind for kind, _ in counts):
        print(f"{kind:<12} " + " ".join(f"{counts[kind, status]:>8}" for status in _STATUSES))
    print("invalid: plain PyTorch cannot run it, or is not finite; cut: over time. Smaller cases of failures count too")
    for (kind, label), count in sorted(found.items()):
        print(f"failed: {kind}: {label}: {count} times shown")
    return int(bool(found))


def described(name: str, case: Case, outcome: Outcome) -> str:
    repeat = f"python -m benchmarks fuzz --case '{json.dumps(case)}'"
    return f"\n--- {name}: {case['kind']}: {outcome.label}: {outcome.message}\n{repeat}"
