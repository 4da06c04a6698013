"""Run one case, with a time limit, into an `Outcome`; shrink what fails; and the command that draws until time is over.

A case is plain data whose keys all have the simplest value as default, so smaller cases are those without a key,
without an item of a list, with a part in the place of what is around it, or with a smaller number. Whatever still fails
in the same way is taken, until nothing smaller does.
"""

import argparse
import importlib
import json
import signal
import sys
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from benchmarks.environment import write_json
from benchmarks.fuzz import ranks
from benchmarks.fuzz.build import Case, build
from benchmarks.fuzz.draw import KINDS, draw
from benchmarks.fuzz.outcome import Invalid, Outcome, of_error

SECONDS, PATIENCE = 20.0, 12.0
"""Seconds of computing after which a case is cut, and the factor for waiting: other programs may share the machine."""
CORPUS = Path(__file__).parent / "corpus.json"
_SHRUNK = 10
"""Failures of one kind and label that are shrunk; more of them are counted."""
_FIXED = ("kind", "op")


class _TimeLimit(BaseException):
    """A case took too long."""


def check(case: Case, seconds: float = SECONDS) -> Outcome:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of more threads have another order
    _import_all()
    if ranks.needed(case):
        ranks.POOL.start()
    try:
        with _limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"benchmarks.fuzz.{case['kind']}").check(case)
    except Invalid as error:
        return Outcome("invalid", "", str(error))
    except _TimeLimit:
        return Outcome("cut", "", f"more than {seconds:g} s")
    except Exception as error:
        return of_error(error)
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
    """Raise _TimeLimit in the main thread after a time, and each second after that in case somebody swallows it.

    The time is that of this process's CPU; a case that waits, for ranks or for ever, has `PATIENCE` times as long.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _TimeLimit

    timers = (
        (signal.ITIMER_PROF, signal.signal(signal.SIGPROF, stop), signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.signal(signal.SIGALRM, stop), signal.SIGALRM, seconds * PATIENCE),
    )
    for timer, _, _, limit in timers:
        signal.setitimer(timer, limit, 1.0)
    try:
        yield
    finally:
        for timer, before, number, _ in timers:
            signal.setitimer(timer, 0.0)
            signal.signal(number, before)


def corpus(only: str | None = None) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(CORPUS.read_text())
    return [entry for entry in entries if only in (None, entry["case"]["kind"])]


# Shrinking


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 30.0) -> Case:
    """Find the smallest case for which `fails` holds, or the smallest after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        for smaller in _smaller(case):
            if time.monotonic() > end:
                return case
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def smallest(case: Case, label: str) -> Case:
    return shrink(case, lambda smaller: (outcome := check(smaller)).failed and outcome.label == label)


def size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(1 + size(each) for each in value.values())
    return sum(size(each) for each in value) + 1 if isinstance(value, list) else 1


def _smaller(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if "op" in value:
            yield from (*value.get("parts", ()), *([value["of"]] if "of" in value else []))
        for key in value:
            if key not in _FIXED:
                yield {k: v for k, v in value.items() if k != key}
        for key, each in value.items():
            if key not in (*_FIXED, "seed"):
                yield from ({**value, key: smaller} for smaller in _smaller(each))
    elif isinstance(value, list):
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
        for i, item in enumerate(value):
            yield from ([*value[:i], smaller, *value[i + 1 :]] for smaller in _smaller(item))
    elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
        yield from sorted({1, value // 2, value - 1})


# The command


def main(arguments: list[str]) -> None:
    parser = command("fuzz", __doc__)
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
    for entry in corpus(options.only):
        yield f"corpus: {entry['note']}", entry["case"]
    end, index = time.monotonic() + 60 * options.minutes, 0
    while index < options.cases if options.cases is not None else time.monotonic() < end:
        yield f"seed {options.seed}, case {index}", draw(options.seed, index, options.only)
        index += 1


def _fuzz(options: argparse.Namespace) -> int:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    failures: list[dict[str, Any]] = []
    shrunk: Counter[tuple[str, str]] = Counter()
    shown: list[Case] = []
    start = last = time.monotonic()
    for name, case in _cases(options):
        outcome = check(case)
        counts[case["kind"]][outcome.status] += 1
        if (now := time.monotonic()) - last > 30:
            last, drawn = now, sum(c.total() for c in counts.values())
            print(f"{now - start:6.0f} s   {drawn} cases drawn   {len(failures)} failed", file=sys.stderr, flush=True)
        if not outcome.failed:
            continue
        key = case["kind"], outcome.label
        shrunk[key] += 1
        failure = {"name": name, "label": outcome.label, "message": outcome.message, "case": case}
        if shrunk[key] <= _SHRUNK:
            small = failure["shrunk"] = smallest(case, outcome.label)
            if small not in shown:
                shown.append(small)
                print(described(name, small, check(small)), flush=True)
        failures.append(failure)
    names = ("pass", "fail", "invalid", "cut")
    print(f"{'kind':<12} {'drawn':>6} " + " ".join(f"{name:>8}" for name in names))
    for kind in filter(counts.get, KINDS):
        print(f"{kind:<12} {counts[kind].total():>6} " + " ".join(f"{counts[kind][name]:>8}" for name in names))
    print("invalid: plain PyTorch cannot run it, or is not finite; cut: over time")
    for (kind, label), count in sorted(shrunk.items()):
        print(f"failed: {kind}: {label}: {count} cases, {min(count, _SHRUNK)} of them shrunk")
    if options.out is not None:
        write_json(options.out, {"seed": options.seed, "failures": failures})
    return int(bool(failures))


def described(name: str, case: Case, outcome: Outcome) -> str:
    """What a failure prints: what is wrong, and two ways to repeat it."""
    return f"""
--- {name}: {case["kind"]}: {outcome.label}: {outcome.message}
python -m benchmarks fuzz --case '{json.dumps(case)}'
# or, in the root of the repository:
from benchmarks.fuzz import build, check
if __name__ == "__main__":
    case = {case!r}
    print({"build(case), " if "parts" in case else ""}check(case))"""
