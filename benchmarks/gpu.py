"""Everything that needs a GPU, in stages that cannot take each other down (docs/gpu.md): a stage is a process with a
deadline, which starts again behind a row that crashes, hangs, or takes several times its price.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import benchmarks
from benchmarks import command, targets
from benchmarks.environment import RESULTS, compile_caches, device_name, environment, read_json, write_json
from benchmarks.session import NO_GPU, NOTHING_TIMED

ROOT = Path(__file__).parent.parent
STOP_S = 5.0  # Between the deadline of a stage and the time at which it is killed
ROW_S = 150.0  # A stage's start, or a row without a price, is cut if nothing is written or printed for so long
MINUTES = 8.0
TAIL = 40
MOST_RESTARTS = 3
PYTEST = (sys.executable, *"-m pytest tests/test_gpu.py -m gpu -v --color=no --tb=short".split(),
          *"-o addopts= -o filterwarnings= -p no:cacheprovider".split())  # fmt: skip
_HOW = "(PASSED|FAILED|ERROR|SKIPPED|XFAIL\\w*)"
VERDICT = re.compile(rf"\[gw\d+\] \[ *\d+%\] {_HOW} (\S.*)|(tests/\S.*?) {_HOW}")  # With xdist, or without
EXAMPLES = "gpu --list --total 4\ngpu --total 4 --wheels wheels --caches caches\ngpu --stages smoke,linear"
ALL = "all"  # Name of a part with the rows that no other part of its stage names


@dataclass(frozen=True)
class Part:
    """A part of a stage: `seconds` is its estimated price with empty caches, without the start of the process."""

    stage: str
    name: str
    importance: int
    seconds: float


PARTS = (
    Part("smoke", ALL, 100, 15),
    Part("tests", ALL, 95, 90),
    Part("linear", "16384×4096×14336", 90, 40),
    Part("linear", "16384×8192×28672", 60, 45),
    Part("linear", ALL, 30, 200),
    Part("layer", "llama-3-8b", 85, 110),
    Part("layer", "dim-16384", 45, 90),
    Part("layer", "llama-2-7b", 40, 140),
    Part("run", ALL, 80, 180),
    Part("step", ALL, 75, 60),
    Part("published", ALL, 70, 180),
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


def total(parts: Sequence[Part], start_s: float = START_S) -> float:
    return sum(part.seconds for part in parts) + start_s * len({part.stage for part in parts})


def choose(parts: Iterable[Part], left: float, start_s: float = START_S) -> list[Part]:
    """Return the parts that fit into `left` seconds, by importance, or the first one if a start is worth it."""
    chosen: list[Part] = []
    ordered = sorted(parts, key=lambda part: -part.importance)
    for part in ordered:
        if total([*chosen, part], start_s) <= left:
            chosen.append(part)
    return chosen or (ordered[:1] if start_s + LEAST_S <= left else [])


def listing(parts: Iterable[Part], left: float) -> str:
    chosen = choose(parts, left)
    lines = [f"{'stage':<10} {'part':<18} {'importance':>10} {'s':>6}  fits"]
    for part in sorted(parts, key=lambda part: -part.importance):
        fits = ("yes" if total(chosen) <= left else "in part") if part in chosen else "no"
        lines.append(f"{part.stage:<10} {part.name:<18} {part.importance:>10} {part.seconds:>6.0f}  {fits}")
    return "\n".join([*lines, f"{len(chosen)} parts, {total(chosen):.0f} s with the starts of their stages"])


@dataclass
class Outcome:
    """What became of a stage; `failed` are rows with an error, `parts` those that ran to their end."""

    stage: str
    ended: str = "done"  # Or time, crashed, hung, killed (at its limit), no gpu, interrupted
    seconds: float = 0.0
    rows: int = 0
    failed: int = 0
    restarts: int = 0
    parts: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


def _progress(result: Path) -> tuple[int, Any]:
    """What has changed if a process began an attempt, so that the next one can get further."""
    content = read_json(result)
    return len(content.get("rows", [])), content.get("running") or None


@dataclass
class Runner:
    out: Path
    options: argparse.Namespace
    environment: dict[str, str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    poll_s: float = 0.5
    start_s: float = START_S

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
        words += ["--peers", str(self.options.peers)] if self.options.peers else []
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
        for path in () if resume else (log, result):
            path.unlink(missing_ok=True)
        while True:
            before = _progress(result)
            ended = self._once(stage, end - time.monotonic(), log, parts, resume=resume or restarts > 0)
            worth_it = ended in ("crashed", "hung") and stage != "tests" and restarts < MOST_RESTARTS
            enough = end - time.monotonic() > self.start_s + LEAST_S
            if not (worth_it and enough and _progress(result) != before):
                break
            restarts += 1
            row = read_json(result).get("running") or read_json(result)["rows"][-1]
            print(f"{stage}: {ended} in {row}; going on behind it", flush=True)
        outcome.ended, outcome.restarts = ended, outcome.restarts + restarts
        outcome.seconds = round(outcome.seconds + time.monotonic() - start, 1)
        outcome.parts += [part.name for part in parts] if outcome.ended == "done" else []
        text = log.read_text(errors="replace").splitlines()
        if stage == "tests":
            self._keep_tests(text, outcome)
        rows = read_json(result).get("rows", [])
        outcome.rows, outcome.failed = len(rows), sum("error" in row for row in rows)
        outcome.tail = text[-TAIL:] if outcome.ended not in ("done", "time") else []
        for line in dict.fromkeys(line for line in text if line.startswith("note: ")):
            print(line)
        print(f"{stage}: {ended}, {outcome.rows} rows", *outcome.tail[-8:], sep="\n  ", flush=True)
        return outcome

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
                    if stage != "tests" and self._over_limit(result, log, begun):
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
        """Write what pytest printed as a result file: a killed one has written nothing else."""
        found = [match for match in map(VERDICT.match, text) if match]
        verdicts = {(match[2] or match[3]).strip(): match[1] or match[4] for match in found}
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
    while chosen := choose(todo, left := end - time.time(), runner.start_s):
        stage = chosen[0].stage
        mine = [part for part in chosen if part.stage == stage]
        others = total([part for part in chosen if part.stage != stage], runner.start_s)
        outcome = runner.run(stage, min(left - others, limit_s), mine, resume=runner.options.resume)
        todo = [part for part in todo if part not in mine]
        after()
        if outcome.ended == "no gpu":
            print("the GPU is gone: what was measured is kept, no other stage can run", flush=True)
            break
    if todo:
        print("left out:", ", ".join(f"{part.stage} {part.name}" for part in todo), flush=True)


def install(wheels: Path) -> Path:
    site = Path(tempfile.mkdtemp()) / "site"
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
    done = subprocess.run([*words, site, *sorted(wheels.glob("*.whl"))], stderr=subprocess.PIPE, text=True)
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
    add(
        "--out", type=Path, help="folder of results and logs (runs/gpu); results go to benchmarks/results/<device>/ too"
    )
    add("--total", type=float, default=float("inf"), help="minutes for all stages together")
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
    out = (options.out or Path(tempfile.mkdtemp() if options.rehearse else "runs/gpu")).resolve()
    kept = RESULTS / device_name(device)
    variables = compile_caches(options.caches)
    stages = read_json(out / "gpu.json").get("stages", []) if options.resume else []
    done = {(stage["stage"], name) for stage in stages for name in stage["parts"]}
    parts = [part for part in PARTS if part.stage in asked and (part.stage, part.name) not in done]
    if options.list:
        print(listing(parts, 60 * options.total))
        return
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), str(ROOT), *([str(install(options.wheels))] if options.wheels else [])]
    path = os.pathsep.join(filter(None, [*paths, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    runner = Runner(out, options, {**os.environ, **variables, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"})
    facts = {"benchmark": "gpu", "timed": not options.rehearse, "environment": environment(device)}

    def save() -> None:
        write_json(out / "gpu.json", {**facts, "stages": [asdict(each) for each in runner.outcomes.values()]})
        if options.rehearse or out == kept:
            return
        kept.mkdir(parents=True, exist_ok=True)
        for name in ("gpu", *(outcome.stage for outcome in runner.outcomes.values() if outcome.rows)):
            shutil.copy(out / f"{name}.json", kept)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the stage as well
    limit_s = 60 * (options.minutes or (MINUTES if options.total == float("inf") else float("inf")))
    try:
        spend(runner, parts, benchmarks.STARTED + 60 * options.total, limit_s, save)
    finally:
        save()
    print(summary(out, runner.outcomes.values()))
    if options.rehearse:
        print(NOTHING_TIMED)
    print(f"written to {out}")
