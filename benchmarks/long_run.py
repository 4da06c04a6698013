"""A supervised run of hours beside an undisturbed one: losses and memory; docs/training.md.

Both train `configs/demo.toml` with every FP8 switch, from one seed, side by side. At random minutes SIGKILL ends the
process of the first, which `run.restarts` starts again. After `--hours` both stop (SIGTERM); losses, learning rates and
gradient norms of the steps that both took are compared bit for bit. The resident memory of every process is recorded
over its steps; its slope after the first 100 must stay below a bound.

  python -m benchmarks long_run                # two hours
  python -m benchmarks long_run --hours 0.1 --between 0.2 1
  python -m benchmarks long_run --alone 1200   # the undisturbed run alone, for its memory: stored beside the other
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import RESULTS, environment, write_json
from octavo.train import read_metrics

ROOT = Path(__file__).parent.parent
FILE = RESULTS / "cpu" / "long_run.json"
BETWEEN = (3.0, 12.0)
"""Least and most minutes between two kills."""
SETTLED = 100
"""Steps after which a process should not grow."""
OBSERVED = 200
"""Steps after these over which growth is judged, at least: of fewer, what still settles would be taken for a leak."""
GROWTH_KIB = 4.0
"""Most KiB per step that a settled process may grow. The smallest matrix of this run's step, the keys of one layer in
FP8 (512 tokens × 128), is 64 KiB: a step that leaves one behind is 16 times above. A row of metrics is below 1."""
EVERY_S = 30.0
"""Seconds between two samples of memory."""
SETTINGS = (
    "precision.level=fp8+activations+optimizer", "optim.batch=2", "optim.lr=1e-3", "optim.schedule=constant",
    "run.steps=1000000", "run.save_every=20", "run.log_every=100", "run.keep=2", "eval.every=100",
)  # fmt: skip

Samples = Sequence[Sequence[float]]
"""Of one process: rows of steps taken by the run, MiB resident."""


def growth(samples: Samples, settled: int = SETTLED) -> dict[str, float] | None:
    """Return how a process grew after its first `settled` steps; None if it took fewer than `OBSERVED` more.

    Returns:
        `steps` observed, `kib_per_step` (the least-squares slope) and `mib` (last minus first sample).
    """
    rows = [(step, size) for step, size in samples if step >= samples[0][0] + settled]
    if not rows or rows[-1][0] - rows[0][0] < OBSERVED:
        return None
    mean_step, mean_size = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    slope = sum((step - mean_step) * (size - mean_size) for step, size in rows)
    slope /= sum((step - mean_step) ** 2 for step, _ in rows)
    return {
        "steps": int(rows[-1][0] - rows[0][0]),
        "kib_per_step": round(1024 * slope, 3),
        "mib": round(rows[-1][1] - rows[0][1], 3),
    }


def grows(processes: Sequence[Samples]) -> list[int]:
    """Return which of the processes, by index, grew more than `GROWTH_KIB` per step."""
    slopes = [growth(samples) for samples in processes]
    return [index for index, slope in enumerate(slopes) if slope is not None and slope["kib_per_step"] > GROWTH_KIB]


class Arm:
    """A run in a process of its own, and the memory of each of its processes over the steps."""

    def __init__(self, out: Path, *settings: str) -> None:
        command = ["train", str(ROOT / "configs" / "demo.toml"), *SETTINGS, *settings, "--out", str(out)]
        self.out, self.supervised = out, bool(settings)
        self.log = (out.parent / f"{out.name}.log").open("w")
        self.process = subprocess.Popen([sys.executable, "-m", "octavo", *command], stdout=self.log, stderr=self.log)
        self.memory: dict[int, list[tuple[int, float]]] = {}
        self.next_sample = time.monotonic()

    def worker(self) -> int | None:
        """PID of the process that trains; None while there is none."""
        if not self.supervised:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def sample(self) -> None:
        """Note the resident memory of the process that trains, if `EVERY_S` have passed and it has taken a step."""
        if time.monotonic() < self.next_sample or (pid := self.worker()) is None:
            return
        self.next_sample = time.monotonic() + EVERY_S
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except FileNotFoundError:  # it ended since
            return
        resident = next((line.split()[1] for line in lines if line.startswith("VmRSS")), None)
        if resident is not None and (steps := self.steps()):
            self.memory.setdefault(pid, []).append((steps, round(int(resident) / 1024, 2)))

    def steps(self) -> int:
        """Steps taken."""
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def stop(self) -> int:
        """End the run as a user would; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=600)

    def processes(self) -> list[dict[str, Any]]:
        """Memory and growth of each process, in the order of their starts."""
        return [{"growth": growth(samples), "mib": samples} for samples in self.memory.values()]


def measure(folder: Path, hours: float, between: tuple[float, float], seed: int) -> dict[str, Any]:
    """Train both arms for some hours, kill one now and then, and compare them."""
    draw = random.Random(seed)
    killed, plain = Arm(folder / "killed", "run.restarts=1000"), Arm(folder / "plain")
    started, kills = time.monotonic(), list[dict[str, float]]()
    next_kill = started + 60 * draw.uniform(*between)
    while (now := time.monotonic()) < started + 3600 * hours:
        for arm in (killed, plain):
            arm.sample()
        if now >= next_kill and (pid := killed.worker()) is not None:
            os.kill(pid, signal.SIGKILL)
            kills.append({"minute": round((now - started) / 60, 2), "step": killed.steps()})
            print(f"minute {kills[-1]['minute']}: SIGKILL at step {kills[-1]['step']}", flush=True)
            next_kill = now + 60 * draw.uniform(*between)
        time.sleep(1)
    codes = [arm.stop() for arm in (killed, plain)]
    first, second = read_metrics(killed.out), read_metrics(plain.out)
    common = min(len(first), len(second))
    differing = [
        a.step
        for a, b in zip(first, second, strict=False)
        if (a.step, a.loss, a.lr, a.grad_norm) != (b.step, b.loss, b.lr, b.grad_norm)
    ]
    return {
        "hours": hours, "seed": seed, "kills": kills, "exit_codes": codes, "steps": [len(first), len(second)],
        "common_steps": common, "differing_steps": differing[:10],
        "last_loss": first[common - 1].loss if common else None,
        "memory": {"killed": killed.processes(), "plain": plain.processes()},
        "grew": {"killed": grows([*killed.memory.values()]), "plain": grows([*plain.memory.values()])},
    }  # fmt: skip


def measure_alone(folder: Path, steps: int) -> dict[str, Any]:
    """Train the undisturbed arm alone for some steps; return its memory."""
    arm, started = Arm(folder / "plain"), time.monotonic()
    while arm.steps() < steps and arm.process.poll() is None:
        arm.sample()
        time.sleep(1)
    minutes = round((time.monotonic() - started) / 60, 1)
    return {
        "minutes": minutes, "exit_code": arm.stop(), "steps": arm.steps(), "last_loss": read_metrics(arm.out)[-1].loss,
        "memory": arm.processes(), "grew": grows([*arm.memory.values()]),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Train, and keep what came of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks long_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--between", nargs=2, type=float, default=BETWEEN, metavar="MINUTES")
    parser.add_argument("--seed", type=int, default=0, help="of the minutes of the kills")
    parser.add_argument("--alone", type=int, metavar="STEPS", help="the undisturbed run alone, for so many steps")
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    before = json.loads(options.file.read_text()) if options.file.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.alone is not None:
            result = environment(torch.device("cpu")) | measure_alone(folder, options.alone)
            write_json(options.file, before | {"alone": result})
            print(f"{result['steps']} steps, {[process['growth'] for process in result['memory']]}")
            sys.exit(1 if result["exit_code"] or result["grew"] else 0)
        result = measure(folder, options.hours, tuple(options.between), options.seed)
    alone = {"alone": before["alone"]} if "alone" in before else {}
    write_json(options.file, environment(torch.device("cpu")) | result | alone)
    print(f"{len(result['kills'])} kills, {result['common_steps']} common steps, {result['differing_steps']} differ")
    print(f"processes that grew more than {GROWTH_KIB} KiB per step: {result['grew']}")
    if (
        not result["common_steps"]
        or result["differing_steps"]
        or any(result["exit_codes"])
        or any(result["grew"].values())
    ):
        sys.exit(1)
