"""A supervised run of hours beside an undisturbed one: losses and memory; docs/training.md.

Both train `configs/demo.toml` with every FP8 switch, from one seed, side by side. At random minutes SIGKILL ends the
process of the first, which `run.restarts` starts again. After `--hours` both stop (SIGTERM); the losses, learning rates
and gradient norms of the steps that both took are compared bit for bit.

  python -m benchmarks long_run                # two hours
  python -m benchmarks long_run --hours 0.1 --between 0.2 1
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
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
SETTINGS = (
    "precision.level=fp8+activations+optimizer", "optim.batch=2", "optim.lr=1e-3", "optim.schedule=constant",
    "run.steps=1000000", "run.save_every=20", "run.log_every=100", "run.keep=2", "eval.every=100",
)  # fmt: skip


class Arm:
    """A run in a process of its own, and the memory of that process over the steps."""

    def __init__(self, out: Path, *settings: str) -> None:
        command = ["train", str(ROOT / "configs" / "demo.toml"), *SETTINGS, *settings, "--out", str(out)]
        self.out, self.supervised = out, bool(settings)
        self.log = (out.parent / f"{out.name}.log").open("w")
        self.process = subprocess.Popen([sys.executable, "-m", "octavo", *command], stdout=self.log, stderr=self.log)
        self.memory: dict[int, list[tuple[int, float]]] = {}  # of each process: steps taken, MiB

    def worker(self) -> int | None:
        """PID of the process that trains; None while there is none."""
        if not self.supervised:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def sample(self) -> None:
        """Note the resident memory of the process that trains."""
        if (pid := self.worker()) is None:
            return
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except FileNotFoundError:  # it ended since
            return
        resident = next((line.split()[1] for line in lines if line.startswith("VmRSS")), None)
        if resident is not None:
            self.memory.setdefault(pid, []).append((self.steps(), int(resident) / 1024))

    def steps(self) -> int:
        """Steps taken."""
        path = self.out / "metrics.jsonl"
        return len(read_metrics(self.out)) if path.exists() and path.stat().st_size else 0

    def stop(self) -> int:
        """End the run as a user would; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=600)

    def growth(self) -> float:
        """Return the most, in MiB, that a process grew after its first `SETTLED` steps."""
        grown = [0.0]
        for samples in self.memory.values():
            settled = [size for step, size in samples if step >= samples[0][0] + SETTLED]
            grown.append(max(settled, default=0.0) - settled[0] if settled else 0.0)
        return max(grown)


def measure(folder: Path, hours: float, between: tuple[float, float], seed: int) -> dict[str, Any]:
    """Train both arms for some hours, kill one now and then, and compare them."""
    draw = random.Random(seed)
    killed, plain = Arm(folder / "killed", "run.restarts=1000"), Arm(folder / "plain")
    started, kills = time.monotonic(), list[dict[str, float]]()
    next_kill, next_sample = started + 60 * draw.uniform(*between), started
    while (now := time.monotonic()) < started + 3600 * hours:
        if now >= next_sample:
            next_sample = now + 60
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
        "growth_mib": {"killed": killed.growth(), "plain": plain.growth()},
        "memory_mib": [row for samples in plain.memory.values() for row in samples],
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Train, and keep what came of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks long_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--between", nargs=2, type=float, default=BETWEEN, metavar="MINUTES")
    parser.add_argument("--seed", type=int, default=0, help="of the minutes of the kills")
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.hours, tuple(options.between), options.seed)
    write_json(options.file, environment(torch.device("cpu")) | result)
    print(f"{len(result['kills'])} kills, {result['common_steps']} common steps, {result['differing_steps']} differ")
    if result["differing_steps"] or any(result["exit_codes"]):
        sys.exit(1)
