"""Everything that needs a GPU, from the source tree alone, in stages that cannot take each other down.

Each stage is a process of its own with a hard limit. It writes its result file after every row; where a row hangs
(nothing new for `--row-limit` seconds) or takes the process down, the stage is started again behind that row. What
counts most comes first in every stage, so a limit costs the least. At the end come the project's targets, each with
what was reached, and `gpu.json` with what became of every stage and the end of its output where it failed.

Needs Python, torch, triton and transformers; pytest for the stage `tests`. Packages that are not there (torchao,
pydantic) can be brought as wheels in a folder: `--wheels`.
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
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.environment import unfinished

ROOT = Path(__file__).parent.parent
WEIGHTS = {
    "probe": 2.0, "tests": 2.0, "kernels": 3.0, "calibrate": 2.0, "linear": 3.0, "layer": 3.0, "train": 1.5,
    "compile": 2.0,
}  # fmt: skip
"""Stages in order, with their share of the time where it is scarce."""
USUAL = tuple(name for name in WEIGHTS if name != "calibrate")
"""What runs where nothing is asked for: products are chosen by heuristics then, as where nobody has calibrated."""
GRACE_S = 45.0
"""Between the time at which a stage is asked to stop and the one at which it is killed."""
TAIL = 40
EXAMPLES = """gpu
gpu --stages probe,linear --minutes 4 --out results
gpu --total 9 --wheels wheels
gpu --rehearse"""


@dataclass
class Outcome:
    """What became of a stage.

    Attributes:
        stage: Its name.
        ended: `done`, `time`, `crashed`, `hung` or `killed` (at its limit).
        seconds: Wall time.
        rows: Rows in its result file.
        failed: Rows that hold an error.
        restarts: How often it was started again.
        tail: The end of its output, where it did not end well.
    """

    stage: str
    ended: str = "done"
    seconds: float = 0.0
    rows: int = 0
    failed: int = 0
    restarts: int = 0
    tail: list[str] = field(default_factory=list)


class Runner:
    """Runs stages.

    Args:
        out: Folder of the result files.
        options: The command line.
        environment: Of the stages' processes.
    """

    def __init__(self, out: Path, options: argparse.Namespace, environment: dict[str, str]) -> None:
        self.out = out
        self.options = options
        self.environment = environment
        self.poll_s = 0.5
        self.most_restarts = 3

    def command(self, stage: str, seconds: float, *, resume: bool) -> list[str]:
        """What a stage runs."""
        if stage == "tests":
            return self._pytest()
        minutes = max((seconds - GRACE_S) / 60, 0.1)
        words = [sys.executable, "-m", "benchmarks", stage, "--out", str(self.out), "--minutes", f"{minutes:.2f}"]
        words += ["--resume"] if resume else []
        words += ["--quick"] if self.options.quick else []
        words += ["--rehearse"] if self.options.rehearse else []
        return words + (["--peers", str(self.options.peers)] if self.options.peers else [])

    def _pytest(self) -> list[str]:
        words = [sys.executable, "-m", "pytest", "tests/test_gpu.py", "-m", "gpu", "-v", "--color=no", "--tb=short"]
        words += ["-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
        return words + (["-n", "6"] if find_spec("xdist") and not self.options.rehearse else [])

    def run(self, stage: str, seconds: float) -> Outcome:
        """Run a stage to its end, at most `seconds`, starting it again where it crashed or hung."""
        outcome, start = Outcome(stage), time.monotonic()
        log = Path(tempfile.mkdtemp()) / "log"
        result, before = self.out / f"{stage}.json", log.parent / "before.json"
        if result.exists():  # of an earlier run: not this one's result, and worth keeping if this one has none
            shutil.move(result, before)
        try:
            while True:
                left = seconds - (time.monotonic() - start)
                outcome.ended = self._once(stage, left, log, resume=outcome.restarts > 0)
                worth_it = outcome.ended in ("crashed", "hung") and stage != "tests"
                still = seconds - (time.monotonic() - start)
                if (
                    not worth_it
                    or outcome.restarts == self.most_restarts
                    or still < GRACE_S
                    or not self._got_anywhere(stage)
                ):
                    break
                outcome.restarts += 1
        except BaseException:  # interrupted: what was there before comes back
            if before.exists():
                if result.exists():
                    result.replace(unfinished(result))
                shutil.move(before, result)
            raise
        outcome.seconds = round(time.monotonic() - start, 1)
        text = log.read_text(errors="replace").splitlines()
        if stage == "tests":
            self._keep_tests(text)
        rows = read(result).get("rows", [])
        outcome.rows, outcome.failed = len(rows), sum("error" in row for row in rows)
        if outcome.ended not in ("done", "time"):
            outcome.tail = text[-TAIL:]
        if before.exists() and not result.exists():
            shutil.move(before, result)
        shutil.rmtree(log.parent)
        return outcome

    def _got_anywhere(self, stage: str) -> bool:
        """Whether a second start can get further than the first: some attempt had begun."""
        content = read(self.out / f"{stage}.json")
        return bool(content.get("rows") or content.get("running"))

    def _once(self, stage: str, seconds: float, log: Path, *, resume: bool) -> str:
        result = self.out / f"{stage}.json"
        start = time.monotonic()
        started_at = time.time()
        with log.open("a") as output:
            process = subprocess.Popen(
                self.command(stage, seconds, resume=resume), cwd=ROOT, env=self.environment,
                stdout=output, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
            try:
                while process.poll() is None:
                    time.sleep(self.poll_s)
                    if time.monotonic() - start > seconds:
                        return "killed"
                    touched = max(result.stat().st_mtime if result.exists() else 0.0, started_at)
                    if stage != "tests" and time.time() - touched > self.options.row_limit:
                        return "hung"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode != 0:
            return "done" if stage == "tests" and process.returncode in (1, 5) else "crashed"
        return str(read(result).get("stopped", "done"))

    def _keep_tests(self, text: list[str]) -> None:
        """One row per test, from pytest's verbose output."""
        from benchmarks.environment import write_json

        verdicts = {}
        for line in text:
            parallel = re.match(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL\w*) (\S.*)", line)
            serial = re.match(r"(tests/\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL\w*)", line)
            if parallel:
                verdicts[parallel[2].strip()] = parallel[1]
            elif serial:
                verdicts[serial[1]] = serial[2]
        rows: list[dict[str, Any]] = [{"stage": "test", "case": name, "result": how} for name, how in verdicts.items()]
        reasons = [line for line in text if line.startswith(("FAILED ", "ERROR "))]
        for row in rows:
            if row["result"] in ("FAILED", "ERROR"):
                row["error"] = next((reason for reason in reasons if row["case"] in reason), row["result"])
        passed = sum(row["result"] == "PASSED" for row in rows)
        tail = text[-TAIL * 3 :] if passed < len(rows) else text[-3:]
        write_json(
            self.out / "tests.json",
            {"benchmark": "tests", "timed": False, "passed": passed, "rows": rows, "tail": tail},
        )


def read(path: Path) -> dict[str, Any]:
    """A result file; empty where there is none yet."""
    import json

    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


def shares(stages: list[str], stage: str, left: float | None, limit: float) -> float:
    """Seconds that a stage may take, of those that are left for it and the ones behind it."""
    if left is None:
        return limit
    behind = stages[stages.index(stage) :]
    return max(min(limit, left * WEIGHTS[stage] / sum(WEIGHTS[name] for name in behind)), 1.0)


def install(wheels: Path) -> Path:
    """A folder with the packages of some wheels, for the stages' import path."""
    site = Path(tempfile.mkdtemp()) / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*command, str(site), *map(str, sorted(wheels.glob("*.whl")))], check=True)
    return site


def summary(out: Path, outcomes: list[Outcome]) -> str:
    """Stages and targets, as text."""
    from benchmarks import targets

    files = {stage: content for stage in WEIGHTS if (content := read(out / f"{stage}.json"))}
    lines = ["", f"{'stage':<10} {'ended':<8} {'s':>6} {'rows':>5} {'failed':>6}"]
    lines += [f"{o.stage:<10} {o.ended:<8} {o.seconds:>6.0f} {o.rows:>5} {o.failed:>6}" for o in outcomes]
    lines += ["", f"{'target':<78} {'wanted':>9} {'reached':>9}"]
    lines += [
        f"{what:<78} {target:>9} {reached:>9}  {verdict}" for what, target, reached, verdict in targets.table(files)
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    text = argparse.ArgumentParser(
        prog="python -m benchmarks gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n" + "\n".join(f"  python -m benchmarks {line}" for line in EXAMPLES.splitlines()),
    )  # fmt: skip
    add = text.add_argument
    add("--stages", default=",".join(USUAL), help=f"which of {','.join(WEIGHTS)}; they run in this order")
    add("--out", type=Path, help="folder of the result files; benchmarks/results/<device>/ gets them too")
    add("--minutes", type=float, default=8.0, help="limit of each stage (8)")
    add("--total", type=float, help="minutes for all of them together, shared out by weight")
    add("--row-limit", type=float, default=150.0, help="seconds without a new row after which a stage counts as hung")
    add("--wheels", type=Path, help="folder of wheels to install for the stages, such as torchao's")
    add("--peers", type=Path, help="folder that holds torchao already (pip install --target)")
    add("--quick", action="store_true", help="only what the targets need")
    add("--rehearse", action="store_true", help="tiny shapes, nothing timed; always so without a GPU")
    return text


def main(arguments: list[str]) -> None:
    """Run the stages, print what became of them, write `gpu.json`."""
    import torch

    from benchmarks.environment import RESULTS, device_name, environment, write_json

    command = parser()
    options = command.parse_args(arguments)
    asked = options.stages.split(",")
    if unknown := [name for name in asked if name not in WEIGHTS]:
        command.error(f"there is no stage {unknown[0]!r}; there are: {', '.join(WEIGHTS)}")
    stages = [name for name in WEIGHTS if name in asked]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.rehearse |= device.type == "cpu"
    kept = None if options.rehearse else RESULTS / device_name(device)
    out = options.out or kept or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), str(ROOT), *([str(install(options.wheels))] if options.wheels else [])]
    paths += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    runner = Runner(
        out.resolve(),
        options,
        {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"},
    )
    start, outcomes = time.monotonic(), []
    facts = {"benchmark": "gpu", "timed": not options.rehearse, "environment": environment(device)}
    for stage in stages:
        left = None if options.total is None else 60 * options.total - (time.monotonic() - start)
        outcomes.append(runner.run(stage, shares(stages, stage, left, 60 * options.minutes)))
        print(
            f"{stage}: {outcomes[-1].ended}, {outcomes[-1].rows} rows", *outcomes[-1].tail[-8:], sep="\n  ", flush=True
        )
        for folder in {out, kept or out}:
            if stage == "tests" and folder != out:
                shutil.copy(out / "tests.json", folder)
            write_json(folder / "gpu.json", {**facts, "stages": [asdict(outcome) for outcome in outcomes]})
    print(summary(out, outcomes))
    if options.rehearse:
        print("timed nothing: no GPU")
    print(f"written to {out}")
