"""The loss in FP8 beside bf16's on two seeds, through `octavo compare`, for as many minutes as there are.

A Llama of 175 million parameters learns .py, .md, .rst and .txt files of the machine's site-packages. When `--minutes`
are over, the run of the moment saves and stops; the same command goes on. Rows come from the folder of the runs: each
run, then each seed's gap after as many tokens and after as many seconds; at the end the verdict.
"""

import json
import os
import signal
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import write_text
from benchmarks.run import llama, toml
from benchmarks.session import Row, Session, begin, parser
from octavo.experiments.compare_report import to_json
from octavo.experiments.compare_runs import Arm, compare, make_arms
from octavo.experiments.curves import Curves, smooth
from octavo.train.record.metrics import read_metrics
from octavo.train.record.progress import NullProgress

SUFFIXES = (".py", ".md", ".rst", ".txt")
SMALLEST, LARGEST = 200, 10**6  # Bytes of a file that is read: below it is empty or a stub, above it is a table
POINTS = 20  # Of a curve, in a row
COMMON = {"run.name": "loss", "run.seed": 1, "run.save_every": 200, "run.keep": 1, "optim.lr": 6e-4,
          "optim.schedule": "cosine", "optim.min_lr_ratio": 0.1}  # fmt: skip
FULL = llama(1024, 2816, 11, 16, 16, 16384, 1024, batch=32) | {"data.vocab_size": 16384, "run.steps": 1000}
TINY = llama(32, 64, 1, 2, 2, 320, 32, batch=2) | {"data.vocab_size": 320, "run.steps": 6}


def gather(root: Path, path: Path, megabytes: float) -> int:
    """Write texts below a folder into a .jsonl file, in the order of their names. Returns their number."""
    lines, left = [], megabytes * 1e6
    for file in sorted(file for file in root.rglob("*") if file.suffix in SUFFIXES and file.is_file()):
        if not SMALLEST <= file.stat().st_size <= LARGEST:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if (left := left - len(text)) < 0:
            break
        lines.append(json.dumps({"text": text}))
    write_text(path, "\n".join(lines) + "\n")
    return len(lines)


@contextmanager
def stopping_after(seconds: float | None, again: float = 2.0) -> Iterator[None]:
    """Send this process SIGTERM after so long, again and again: the run of the moment saves, and the next one stops."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # between two runs
    signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    if seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGTERM, before)


def curve_of(folder: Path) -> dict[str, Any] | None:
    """Steps, tokens, seconds and smoothed losses of a run so far; None before the first step."""
    if not (metrics := read_metrics(folder)):
        return None
    losses = smooth(Curves.of(metrics).loss)
    return {
        "tokens": np.array([row.tokens for row in metrics]),
        "seconds": np.cumsum([row.step_s for row in metrics]),
        "loss": losses,
        "tokens_per_s": float(np.median([row.tokens_per_s for row in metrics])),
    }


def run_row(curve: dict[str, Any]) -> Row:
    """The row of a run: where it is, and its curve by tokens and by seconds."""
    at = np.unique(np.linspace(0, len(curve["loss"]) - 1, POINTS).astype(int))
    points = [[int(curve["tokens"][i]), round(float(curve["seconds"][i]), 2), _rounded(curve["loss"][i])] for i in at]
    return {
        "steps": len(curve["loss"]), "tokens": points[-1][0], "seconds": points[-1][1], "loss": points[-1][2],
        "tokens_per_s": round(curve["tokens_per_s"]), "curve": points,
    }  # fmt: skip


def gap_row(base: dict[str, Any], fp8: dict[str, Any]) -> Row:
    """FP8's loss above bf16's in percent: at as many steps, and at as many seconds."""
    steps = min(len(base["loss"]), len(fp8["loss"]))
    seconds = min(base["seconds"][-1], fp8["seconds"][-1])
    at = [int(np.searchsorted(curve["seconds"], seconds, side="right")) - 1 for curve in (base, fp8)]
    by_seconds = fp8["loss"][at[1]] / base["loss"][at[0]] - 1
    return {
        "steps": steps,
        "gap_percent": _rounded(100 * (fp8["loss"][steps - 1] / base["loss"][steps - 1] - 1)),
        "seconds": round(float(seconds), 2),
        "gap_percent_by_seconds": _rounded(100 * by_seconds),
        "tokens_ratio": round(fp8["tokens_per_s"] / base["tokens_per_s"], 4),
    }


def _rounded(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None


def rows_of(session: Session, arms: list[Arm], folder: Path) -> None:
    for seed in arms[0].configs:
        curves = {arm.name: curve_of(folder / arm.folder(seed)) for arm in arms}
        for name, curve in curves.items():
            if curve is not None:
                session.attempt({"stage": "run", "case": f"seed {seed}", "arm": name}, run_row, curve)
        base, fp8 = curves.values()
        if base is not None and fp8 is not None:
            session.attempt({"stage": "gap", "case": f"seed {seed}", "arm": "fp8"}, gap_row, base, fp8)


class Lines(NullProgress):
    """A line for each stage of a run and each fifty steps."""

    def stage(self, text: str) -> None:
        print(text, flush=True)

    def step(self, row: Any) -> None:
        if row.step % 50 == 0:
            print(f"step {row.step}  loss {row.loss or float('nan'):.4f}  {row.tokens_per_s:.0f} tokens/s", flush=True)


def main(arguments: list[str]) -> None:
    everything = "--runs runs/loss-everything --fp8 fp8+activations+optimizer"
    options = parser("loss", __doc__, "--minutes 10", "--minutes 10 optim.lr=3e-4", everything)
    add = options.add_argument
    add("--runs", type=Path, default=Path("runs/loss"), help="folder of text, runs and checkpoints (runs/loss)")
    add("--seeds", default="2", help="seeds, as for octavo compare (2)")
    add("--fp8", default="fp8", help="level of the second arm (fp8)")
    add("--megabytes", type=float, default=128, help="most text to read (128)")
    add("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="settings of all runs")
    session = begin(options, arguments)
    session.rows.clear()  # they are made from the folder, which is newer
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if session.tiny else session.options.runs.resolve()
        corpus = folder / "corpus.jsonl"
        if not corpus.exists():  # a later call reads the same text
            root = Path(__file__).parent if session.tiny else Path(sysconfig.get_paths()["purelib"])
            session.facts["files"] = gather(root, corpus, 0.05 if session.tiny else session.options.megabytes)
        sizes, where = TINY if session.tiny else FULL, {"data.source": str(corpus), "data.cache": str(folder / "cache")}
        settings = sizes | COMMON | where | {"optim.warmup": 1 if session.tiny else 100}
        del settings["model.config.vocab_size"]  # that of the tokenizer
        write_text(folder / "loss.toml", toml(settings))
        device = f"run.device={session.device.type}"
        levels = ["bf16:precision.level=bf16", f"fp8:precision.level={session.options.fp8}"]
        arms = make_arms(folder / "loss.toml", [device, *session.options.overrides], levels, session.options.seeds)
        with stopping_after(None if session.options.minutes is None else 60 * session.options.minutes):
            comparison = compare(arms, folder / "runs", progress=Lines())
        session.end = float("inf")  # what was trained is written down, however late it is
        rows_of(session, arms, folder / "runs")
        session.facts["stopped"] = "time" if comparison is None else "done"
        if comparison is not None:
            session.facts["compare"] = to_json(comparison)
            for arm in comparison.losses.arms:
                print(arm.sentence)
    session.finish()
