"""`octavo train` as a user runs it, a process for each precision level: start-up, speed, memory, loss (docs/gpu.md).
bf16 runs first and, at 0.4 B, last, which shows how far the GPU's clocks have drifted.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import shapes
from benchmarks.environment import read_json, write_text
from benchmarks.session import Row, Session, begin, parser

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "octavo", "train"]
WARMUP = 5  # First steps that speeds leave out, as `run.json` does
GIB = 2**30
TAIL = 15
FULL = ("precision.level=fp8+activations+optimizer", "parallel.fp8_comm=on")
LEVELS = {
    "bf16": ("precision.level=bf16",),
    "fp8": ("precision.level=fp8",),
    "fp8+activations+optimizer": FULL[:1],
    "fp8+activations": ("precision.level=fp8+activations",),
    "full": FULL,
    "bf16 again": ("precision.level=bf16",),
}
"""Settings by level, those that matter most first. On one GPU `full`, which also sends FP8, has nothing to send."""

ENDING = ("fp8+activations+optimizer", "full")


@dataclass(frozen=True)
class Size:
    """A run but for its precision; without `config` one is written. If it `ends`, levels `ENDING` save a checkpoint."""

    config: Path | None
    settings: dict[str, Any]
    steps: int
    ends: bool = False


def llama(*sizes: int, batch: int) -> dict[str, Any]:
    """Settings of a Llama with the sizes of `shapes.llama`, the last of which are the tokens of a sequence."""
    return {
        "data.source": "python-stdlib", "data.vocab_size": 8192, "data.sequence_length": sizes[-1],
        "model.type": "llama", **{f"model.config.{key}": value for key, value in shapes.llama(*sizes).items()},
        "optim.lr": 3e-4, "optim.warmup": 2, "optim.schedule": "constant", "optim.batch": batch,
    }  # fmt: skip


SIZES = {
    "0.4B": Size(None, llama(2048, 5120, 8, 16, 16, 8192, 1024, batch=32), 30, ends=True),
    "llama-3-8b-width": Size(None, llama(4096, 14336, 4, 32, 8, 32000, 2048, batch=8), 20),
    "llama-2-7b": Size(ROOT / "configs" / "llama2-7b.toml", {
        "data.source": "python-stdlib", "data.vocab_size": 8192, "optim.batch": 4, "optim.micro_batches": 2,
        "optim.warmup": 2}, 10),
}  # fmt: skip
TINY_LLAMA = llama(64, 96, 2, 4, 2, 300, 32, batch=4)
TINY = Size(None, TINY_LLAMA | {"data.vocab_size": 300, "run.device": "cpu"}, 3, ends=True)


def toml(settings: dict[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


def plan(session: Session) -> list[tuple[str, Size, str]]:
    if session.tiny:
        return [("tiny", TINY, level) for level in ("bf16", "full")]
    first, rest = list(LEVELS)[:3], list(LEVELS)[3:]
    order = [("0.4B", level, "blocks") for level in first]
    if not session.options.quick:
        order += [("llama-2-7b", "full", "blocks"), *(("llama-3-8b-width", level, "blocks") for level in first)]
        order += [(name, level, "none") for name in ("0.4B", "llama-3-8b-width") for level in first[:2]]
        order += [("0.4B", level, "blocks") for level in rest]
        order += [("llama-3-8b-width", level, "blocks") for level in rest[:2]]
    return [
        (name, replace(SIZES[name], settings=SIZES[name].settings | {"run.compile": compiles}), level)
        for name, level, compiles in order
        if name in session.options.sizes
    ]


def mode(size: Size) -> str:
    return "compiled" if size.settings.get("run.compile") == "blocks" else "eager"


def command(size: Size, level: str, folder: Path) -> list[str]:
    """The command of a run in a folder, to which the configuration is written if there is none."""
    settings = {**size.settings, "run.steps": size.steps, "run.name": "run"}
    config, overrides = size.config, [f"{name}={value}" for name, value in settings.items()]
    if config is None:
        config, overrides = folder / "config.toml", []
        write_text(config, toml(settings))
    return [*COMMAND, str(config), *overrides, *LEVELS[level], "--out", str(folder / "out")]


def measure(session: Session, name: str, size: Size, level: str) -> Row:
    limit = min(session.options.limit, max(session.left_s, 1.0))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # what is killed may leave writers
        folder = Path(scratch)
        if session.tiny:
            write_text(folder / "text.txt", "".join(f"{i} times {i} is {i * i}.\n" for i in range(2000)))
            size = replace(size, settings={**size.settings, "data.source": str(folder / "text.txt")})
        words, log, started = command(size, level, folder), folder / "log", time.time()
        ended = _train(words, log, folder / "out", None if size.ends and level in ENDING else size.steps, limit)
        figures = read(folder / "out", started, log.read_text(errors="replace"))
        if not figures.get("steps"):
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
            raise RuntimeError(f"{' '.join(words[3:])}: {ended} before its first step\n{tail}")
        if ended == "done":
            figures["command_s"] = round(time.time() - started, 1)
    if session.tiny:
        figures |= dict.fromkeys(("wall_ms", "tokens_per_s"))
    return {**figures, "ended": ended, **beside(figures, session.find(shape=name, arm="bf16", mode=mode(size)))}


def _train(words: list[str], log: Path, out: Path, steps: int | None, limit: float) -> str:
    """Run a command until it ends, has taken so many steps, or is over its limit; return which."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    environment["COLUMNS"] = "2000"  # no line of the log is broken
    environment.pop("TRITON_INTERPRET", None)  # of the rehearsal, not of the run
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=log.parent)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if steps is not None and len(_lines(out / "metrics.jsonl")) >= steps:
                    return "stopped"
                if time.monotonic() - start > limit:
                    return "over its limit"
        finally:
            process.kill()
            process.wait()
    return "done" if process.returncode == 0 else f"exit code {process.returncode}"


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")[:-1] if path.exists() else []


def read(out: Path, started: float, log: str = "") -> Row:
    """Figures from a run's `metrics.jsonl`, `setup.json`, and `run.json` or, where it was killed, its output."""
    steps = [json.loads(line) for line in _lines(out / "metrics.jsonl")]
    setup, result = read_json(out / "setup.json"), read_json(out / "run.json")
    if not steps:
        return {}
    summary, expected = setup.get("summary") or {}, setup.get("expected") or {}
    timed = steps[WARMUP:] or steps[-1:]
    seconds, mfus = [step["step_s"] for step in timed], [step["mfu"] for step in timed if "mfu" in step]
    printed = re.search(r"first step after \d.*", log)
    middle, quarter = statistics.median(seconds), len(seconds) // 4
    inner = sorted(seconds)[quarter : len(seconds) - quarter]
    tokens = steps[0]["tokens"]
    figures = {
        "steps": len(steps), "tokens": tokens, "parameters": summary.get("parameters"),
        "first_step_s": round(steps[0]["time"] - started, 2),
        "startup": result.get("startup") or (printed and printed[0].strip()),
        "wall_ms": round(1e3 * middle, 3), "spread": round((inner[-1] - inner[0]) / middle, 4),
        "tokens_per_s": round(tokens / middle, 1), "predicted_tokens_per_s": expected.get("tokens_per_s"),
        "mfu": round(statistics.median(mfus), 4) if mfus else None,
        "peak_gib": _gib(max((step.get("peak_memory", 0) for step in steps), default=0)),
        "predicted_gib": _gib(expected.get("memory")),
        "saved_bytes_per_token": summary.get("saved_bytes_per_token"),
        "state_bytes_per_parameter": result.get("state_bytes_per_parameter"), "versions": summary.get("versions"),
        "losses": [step["loss"] and round(step["loss"], 4) for step in steps],
    }  # fmt: skip
    for name in ("tokens_per_s", "gib"):
        measured = figures["peak_gib" if name == "gib" else name]
        if measured and figures[f"predicted_{name}"]:
            figures[f"{name}_of_prediction"] = round(measured / figures[f"predicted_{name}"], 4)
    return figures


def _gib(amount: float | None) -> float | None:
    return round(amount / GIB, 2) if amount else None


def beside(figures: Row, bf16: Row | None) -> Row:
    if bf16 is None or "error" in bf16:
        return {}
    pairs = [(a, b) for a, b in zip(figures["losses"], bf16["losses"], strict=False) if a is not None and b is not None]
    compared: Row = {}
    if pairs:
        differences = [round(a - b, 4) for a, b in pairs]
        compared = {"loss": pairs[-1][0], "bf16_loss": pairs[-1][1], "largest_difference": max(differences, key=abs)}
    if figures["wall_ms"] and bf16["wall_ms"]:
        compared["wall_speedup"] = round(bf16["wall_ms"] / figures["wall_ms"], 4)
    return compared


def main(arguments: list[str]) -> None:
    options = parser("run", __doc__, "--sizes 0.4B llama-2-7b --minutes 4")
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="sizes to train; all")
    options.add_argument("--limit", type=float, default=240.0, help="seconds after which a run is cut (240)")
    session = begin(options, arguments)
    for name, size, level in plan(session):
        identity: Row = {"stage": "octavo train", "shape": name, "arm": level, "mode": mode(size)}
        session.attempt(identity, measure, session, name, size, level)
    session.finish()
