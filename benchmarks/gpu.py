"""Everything that needs a GPU, from the source tree alone, in stages that cannot take each other down: docs/gpu.md.

A stage is a process of its own. The most important parts that fit into `--total` minutes are chosen, and chosen again
after each stage for the time that is really left. A price is what a part took in an earlier result file, compilation
included, or else the estimate in `PARTS`. A stage knows its deadline and begins no row that costs more than what is
left; where a row takes several times its price or takes the process down, the stage starts again behind that row.

Needs Python, torch, triton and transformers; pytest for the stage `tests`. Other packages can be brought as wheels.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import STARTED, command, targets
from benchmarks.environment import RESULTS, compile_caches, device_name, environment, read_json, unfinished, write_json
from benchmarks.session import NO_GPU, NOTHING_TIMED, part_of

ROOT = Path(__file__).parent.parent
STOP_S = 5.0  # Between the deadline of a stage and the time at which it is killed
ROW_S = 150.0  # A stage's start, or a row without a price, is cut if nothing is written or printed for so long
MINUTES = 8.0
TAIL = 40
MOST_RESTARTS = 3
PYTEST = (sys.executable, *"-m pytest tests/test_gpu.py -m gpu -v --color=no --tb=short".split(),
          *"-o addopts= -o filterwarnings= -p no:cacheprovider".split())  # fmt: skip
EXAMPLES = """gpu
gpu --list --total 4
gpu --total 4 --wheels wheels --caches caches --out results
gpu --stages smoke,linear --minutes 4
gpu --rehearse"""


ALL = "all"  # Name of a part with the rows that no other part of its stage names


@dataclass(frozen=True)
class Part:
    """A part of a stage: `seconds` is its price with empty caches, without the start of the process."""

    stage: str
    name: str
    importance: int
    seconds: float


PARTS = (
    Part("smoke", ALL, 100, 15),
    Part("tests", ALL, 95, 90),
    Part("linear", "16384×4096×14336", 90, 40),
    Part("linear", "16384×8192×28672", 60, 45),
    Part("linear", ALL, 30, 180),
    Part("layer", "llama-3-8b", 85, 110),
    Part("layer", "dim-16384", 45, 90),
    Part("layer", "llama-2-7b", 40, 140),
    Part("run", ALL, 80, 180),
    Part("step", ALL, 75, 60),
    Part("published", ALL, 70, 180),
    Part("host_gpu", ALL, 65, 45),
    Part("kernels", "quantize", 58, 45),
    Part("kernels", "product", 57, 50),
    Part("kernels", "fused", 42, 30),
    Part("ranks", ALL, 22, 45),
    Part("deep", ALL, 20, 120),
    Part("loss", ALL, 5, 180),
)
STAGES = tuple(dict.fromkeys(part.stage for part in PARTS))
"""A stage is a benchmark (`benchmarks/<stage>.py`), except `tests`, which is pytest."""
START_S = 10.0  # Estimated seconds before a stage's first row: imports, CUDA, ceilings
LEAST_S = 10.0  # A stage is started only with so much time behind its start


class Prices:
    """Seconds of parts and of starts, from the first result file of a stage in some folders, or estimated.

    Where kernels are not compiled already (`warm`), nothing costs less than the estimate.
    """

    def __init__(self, folders: Sequence[Path] = (), *, warm: bool = False, quick: bool = False) -> None:
        self.starts, self._measured = {"tests": 0.0}, dict[Part, float]()
        for stage in STAGES:
            files = (read_json(folder / f"{stage}.json") for folder in folders)
            content = next((each for each in files if each and "note" not in each), {})
            parts, seconds = {part.name: part for part in PARTS if part.stage == stage}, Counter[str]()
            for row in content.get("rows", []):
                seconds[part_of(row) if part_of(row) in parts else ALL] += row.get("took_s", 0.0)
            seconds[ALL] += content.get("seconds", 0.0)  # pytest's
            self.starts |= {stage: content["start_s"]} if "start_s" in content else {}
            # A measurement of some of its rows or with warm caches does not lower the estimate.
            sure = warm and content.get("stopped") == "done" and ("--quick" in content.get("arguments", [])) <= quick
            costs = {parts[name]: cost for name, cost in seconds.items() if cost and name in parts}
            self._measured |= {part: cost for part, cost in costs.items() if sure or cost >= part.seconds}

    def of(self, part: Part) -> float:
        return self._measured.get(part, part.seconds)

    def total(self, parts: Sequence[Part]) -> float:
        starts = (self.starts.get(stage, START_S) for stage in {part.stage for part in parts})
        return sum(map(self.of, parts)) + sum(starts)

    def choose(self, parts: Iterable[Part], left: float) -> list[Part]:
        """Parts that fit into `left` seconds, by importance; if none does, the first for which a start is worth it."""
        chosen: list[Part] = []
        ordered = sorted(parts, key=lambda part: -part.importance)
        for part in ordered:
            if self.total([*chosen, part]) <= left:
                chosen.append(part)
        return chosen or [part for part in ordered if self.starts.get(part.stage, START_S) + LEAST_S <= left][:1]

    def listing(self, parts: Iterable[Part], left: float) -> str:
        chosen = self.choose(parts, left)
        lines = [f"{'stage':<10} {'part':<18} {'importance':>10} {'start s':>8} {'s':>6}  {'price':<9} fits"]
        for part in sorted(parts, key=lambda part: -part.importance):
            source = "measured" if part in self._measured else "estimate"
            fits = ("yes" if self.total(chosen) <= left else "in part") if part in chosen else "no"
            numbers = f"{part.importance:>10} {self.starts.get(part.stage, START_S):>8.0f} {self.of(part):>6.0f}"
            lines.append(f"{part.stage:<10} {part.name:<18} {numbers}  {source:<9} {fits}")
        return "\n".join([*lines, f"{len(chosen)} parts, {self.total(chosen):.0f} s with the starts of their stages"])


@dataclass
class Outcome:
    """What became of a stage: `done`, `time`, `crashed`, `hung`, `killed` (at its limit), `no gpu` or `interrupted`.

    `failed` are rows with an error, `parts` those that ran to their end, `tail` the last output where it ended badly.
    """

    stage: str
    ended: str = "done"
    seconds: float = 0.0
    rows: int = 0
    failed: int = 0
    restarts: int = 0
    parts: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


def _content(result: Path) -> dict[str, Any]:
    """What a stage has measured, also where it has not come to its end."""
    return read_json(unfinished(result)) or read_json(result)


def _progress(result: Path) -> tuple[int, Any]:
    """What has changed if a process began an attempt, so that the next one can get further."""
    content = _content(result)
    return len(content.get("rows", [])), content.get("running") or None


@dataclass
class Runner:
    """Runs stages, whose result files and logs go to `out`."""

    out: Path
    options: argparse.Namespace
    environment: dict[str, str]
    prices: Prices = field(default_factory=Prices)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    poll_s: float = 0.5
    _said: set[str] = field(default_factory=set)

    def command(self, stage: str, seconds: float, parts: Sequence[Part] = (), *, resume: bool) -> list[str]:
        if stage == "tests":
            workers = str(max(2, min(14, (os.cpu_count() or 4) - 2)))  # they compile most of the time
            parallel = find_spec("xdist") and not self.options.rehearse
            return [*PYTEST, *(["-n", workers, "--dist", "loadgroup"] if parallel else [])]
        words = [sys.executable, "-m", "benchmarks", stage, "--out", str(self.out)]
        words += ["--deadline", f"{time.time() + seconds - STOP_S:.1f}"]
        words += ["--resume"] if resume else []
        words += ["--quick"] if self.options.quick else []
        words += ["--rehearse"] if self.options.rehearse else ["--require-gpu"]
        words += ["--peers", str(self.options.peers.resolve())] if self.options.peers else []
        names = [part.name for part in parts]
        others = [part.name for part in PARTS if part.stage == stage and part.name not in names]
        if not names or not others or self.options.rehearse:  # tiny shapes have other names
            return words
        return [*words, "--without-parts", *others] if ALL in names else [*words, "--only-parts", *names]

    def run(self, stage: str, seconds: float, parts: Sequence[Part] = (), *, resume: bool = False) -> Outcome:
        """Run parts of a stage to their end, at most `seconds`, starting it again where it crashed or hung."""
        resume |= stage in self.outcomes
        outcome, start = self.outcomes.setdefault(stage, Outcome(stage)), time.monotonic()
        outcome.ended, end, restarts = "interrupted", start + seconds, 0
        log, result = self.out / f"{stage}.log", self.out / f"{stage}.json"
        earlier = {} if resume else read_json(result)
        if not resume:
            log.unlink(missing_ok=True)
            unfinished(result).unlink(missing_ok=True)
        while True:
            before = _progress(result)
            ended = self._once(stage, end - time.monotonic(), log, parts, resume=resume or restarts > 0)
            worth_it = ended in ("crashed", "hung") and stage != "tests" and restarts < MOST_RESTARTS
            enough = end - time.monotonic() > self.prices.starts.get(stage, START_S) + LEAST_S
            if not (worth_it and enough and _progress(result) != before):
                break
            restarts += 1
            row = _content(result).get("running") or _content(result)["rows"][-1]
            self._say(f"{stage}: {ended} in {row}; going on behind it")
        if unfinished(result).exists():  # cut: what it has is the result
            unfinished(result).replace(result)
        outcome.ended, outcome.restarts = ended, outcome.restarts + restarts
        outcome.seconds = round(outcome.seconds + time.monotonic() - start, 1)
        outcome.parts += [part.name for part in parts] if outcome.ended == "done" else []
        self._conclude(outcome, log.read_text(errors="replace").splitlines(), result, earlier)
        return outcome

    def _conclude(self, outcome: Outcome, text: list[str], result: Path, earlier: dict[str, Any]) -> None:
        """Count the rows of a stage and print what became of it; what other stages printed as well is not repeated."""
        if outcome.stage == "tests":
            self._keep_tests(text, outcome)
        content = read_json(result)
        rows = content.get("rows", []) if content != earlier else []  # the earlier result stays where this run has none
        outcome.rows, outcome.failed = len(rows), sum("error" in row for row in rows)
        outcome.tail = text[-TAIL:] if outcome.ended not in ("done", "time") else []
        self._say(*(line for line in text if line.startswith("note: ")))
        print(f"{outcome.stage}: {outcome.ended}, {outcome.rows} rows", flush=True)
        if outcome.tail and outcome.tail[-1] not in self._said:
            self._said.add(outcome.tail[-1])
            print("  " + "\n  ".join(outcome.tail[-8:]), flush=True)

    def _say(self, *lines: str) -> None:
        for line in lines:
            if line not in self._said:
                self._said.add(line)
                print(line, flush=True)

    def _once(self, stage: str, seconds: float, log: Path, parts: Sequence[Part], *, resume: bool) -> str:
        result, begun, end = self.out / f"{stage}.json", time.time(), time.monotonic() + seconds
        interrupted = stage != "tests"  # others have a deadline
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # under nohup or "&", and stages would inherit it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("a") as output:
            process = subprocess.Popen(
                self.command(stage, seconds, parts, resume=resume), cwd=ROOT, env=self.environment,
                stdout=output, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
            try:
                while process.poll() is None:
                    time.sleep(self.poll_s)
                    if time.monotonic() > end:
                        return "killed"
                    if not interrupted and time.monotonic() > end - 2 * STOP_S:
                        interrupted = True
                        os.killpg(process.pid, signal.SIGINT)  # pytest then lists the failures so far, its workers end
                    if stage != "tests" and self._over_limit(unfinished(result), log, begun):
                        return "hung"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if stage == "tests" and process.returncode in (0, 1, 2, 5):
            return "time" if process.returncode == 2 else "done"
        if process.returncode != 0:
            return "no gpu" if process.returncode == NO_GPU else "crashed"
        return str(read_json(result).get("stopped", "done"))

    def _over_limit(self, result: Path, log: Path, begun: float) -> bool:
        """Whether the row in progress takes too long, or what has no price has neither written nor printed anything."""
        touched = result.stat().st_mtime if result.exists() else 0.0
        limit = self.options.row_limit or (read_json(result).get("limit_s") if touched >= begun else None)
        if limit is None:
            touched = max(touched, log.stat().st_mtime)
        return time.time() - max(touched, begun) > (limit or ROW_S)

    def _keep_tests(self, text: list[str], outcome: Outcome) -> None:
        verdicts = {}
        for line in text:
            in_order = re.sub(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (\S.*?) *$", r"\2 \1", line)  # as without workers
            if verdict := re.match(r"(tests/\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL\w*)", in_order):
                verdicts[verdict[1]] = verdict[2]
        rows: list[dict[str, Any]] = [{"stage": "test", "case": name, "result": how} for name, how in verdicts.items()]
        reasons = [line for line in text if line.startswith(("FAILED ", "ERROR "))]
        for row in rows:
            if row["result"] in ("FAILED", "ERROR"):
                row["error"] = next((reason for reason in reasons if row["case"] in reason), row["result"])
        passed = sum(row["result"] == "PASSED" for row in rows)
        tail = text[-TAIL * 3 :] if passed < len(rows) else text[-3:]
        facts = {"benchmark": "tests", "timed": False, "stopped": outcome.ended, "seconds": outcome.seconds}
        facts |= {"note": NOTHING_TIMED} if self.options.rehearse else {}
        write_json(self.out / "tests.json", {**facts, "passed": passed, "rows": rows, "tail": tail})


def spend(runner: Runner, parts: Iterable[Part], end: float, limit_s: float, after: Callable[[], None]) -> None:
    """Run the most important parts that fit until `end` (epoch), a stage at most `limit_s`; call `after` after each."""
    todo = list(parts)
    while chosen := runner.prices.choose(todo, left := end - time.time()):
        stage = chosen[0].stage
        mine = [part for part in chosen if part.stage == stage]
        others = runner.prices.total([part for part in chosen if part.stage != stage])
        outcome = runner.run(stage, min(left - others, limit_s), mine, resume=runner.options.resume)
        todo = [part for part in todo if part not in mine]
        after()
        if outcome.ended == "no gpu":
            print("the GPU is gone: what was measured is kept, no other stage can run", flush=True)
            break
    if todo:
        print("left out:", ", ".join(f"{part.stage} {part.name}" for part in todo), flush=True)


def install(wheels: Path) -> Path:
    """A folder with the packages of some wheels, for the stages' import path."""
    site = Path(tempfile.mkdtemp()) / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
    done = subprocess.run([*command, site, *sorted(wheels.glob("*.whl"))], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"note: nothing of {wheels} is installed: {(done.stderr.strip() or 'pip failed').splitlines()[-1]}")
    return site


def summary(out: Path, outcomes: Iterable[Outcome]) -> str:
    files = {stage: content for stage in STAGES if (content := read_json(out / f"{stage}.json"))}
    lines = ["", f"{'stage':<10} {'ended':<8} {'s':>6} {'rows':>5} {'failed':>6}"]
    lines += [f"{o.stage:<10} {o.ended:<8} {o.seconds:>6.0f} {o.rows:>5} {o.failed:>6}" for o in outcomes]
    lines += ["", f"{'target':<78} {'wanted':>9} {'reached':>9}"]
    lines += ["{:<78} {:>9} {:>9}  {}".format(*row) for row in targets.table(files)]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = command("gpu", __doc__, EXAMPLES)
    add = parser.add_argument
    add("--stages", default=",".join(STAGES), help=f"which of {','.join(STAGES)}; all if not given")
    add("--list", action="store_true", help="print all parts with their price and whether they fit; run nothing")
    add("--out", type=Path, help="folder of result files and logs; benchmarks/results/<device>/ gets the results too")
    add("--total", type=float, help="minutes for all stages together")
    add("--minutes", type=float, help=f"limit of each stage ({MINUTES:.0f} without --total)")
    add("--resume", action="store_true", help="go on behind the rows in --out, without the parts that are done")
    add("--row-limit", type=float, help="seconds of a row after which it is cut (three times its price, 30 at least)")
    add("--caches", type=Path, help="folder of compiled kernels (~/.cache/octavo/benchmarks)")
    add("--wheels", type=Path, help="folder of wheels to install for the stages, such as torchao's")
    add("--peers", type=Path, help="folder that holds torchao already (pip install --target)")
    add("--quick", action="store_true", help="only what the targets need")
    add("--rehearse", action="store_true", help="tiny shapes, nothing timed; always so without a GPU")
    options = parser.parse_args(arguments)
    asked = options.stages.split(",")
    if unknown := [name for name in asked if name not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}; there are: {', '.join(STAGES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.rehearse |= device.type == "cpu"
    kept = None if options.rehearse else RESULTS / device_name(device)
    out = (options.out or kept or Path(tempfile.mkdtemp())).resolve()
    caches, variables = compile_caches(options.caches)
    prices = Prices([out, kept or out], warm=any(caches.iterdir()), quick=options.quick)
    stages = read_json(out / "gpu.json").get("stages", []) if options.resume else []
    done = {(stage["stage"], name) for stage in stages for name in stage["parts"]}
    parts = [part for part in PARTS if part.stage in asked and (part.stage, part.name) not in done]
    total_s = float("inf") if options.total is None else 60 * options.total
    if options.list:
        print(prices.listing(parts, total_s))
        return
    end = STARTED + total_s
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), str(ROOT), *([str(install(options.wheels))] if options.wheels else [])]
    paths += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, paths))
    runner = Runner(out, options, {**os.environ, **variables, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}, prices)
    facts = {"benchmark": "gpu", "timed": not options.rehearse, "environment": environment(device)}

    def save() -> None:
        for folder in {out, kept or out}:
            if folder != out and (out / "tests.json").exists():
                shutil.copy(out / "tests.json", folder)
            write_json(folder / "gpu.json", {**facts, "stages": [asdict(each) for each in runner.outcomes.values()]})

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the stage as well
    limit_s = 60 * (options.minutes or (MINUTES if options.total is None else float("inf")))
    try:
        spend(runner, parts, end, limit_s, save)
    finally:
        save()
    print(summary(out, runner.outcomes.values()))
    if options.rehearse:
        print(NOTHING_TIMED)
    print(f"written to {out}")
