"""Does the loss survive? Each FP8 switch alone, and all together, beside BF16, on several seeds; docs/convergence.md.

The model is the demonstration's. Arms of one seed have the same initial weights, data and order of the data, so a gap
is taken within a seed; how far seeds lie apart in BF16 stands beside it. A run that is there already is not repeated,
and one that was stopped goes on, where the same code made it: the commit and the versions stand beside its result, and
other code trains anew in a folder of its own. `--document` only writes the document anew, from the result file.

  python -m benchmarks convergence
  python -m benchmarks convergence --seeds 1 --steps 50 --out /tmp/short
  python -m benchmarks convergence --short-only      # the runs of the long part stay as they were trained
  python -m benchmarks convergence --arms "products, equalized"      # so do other arms, on the same device, and times
"""

import argparse
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from benchmarks import figures
from benchmarks.environment import RESULTS, device_name, environment, write_json, write_text
from octavo.experiments.curves import Curves, smooth
from octavo.experiments.theme import colour
from octavo.train import RunResult, TrainConfig, load_config, run
from octavo.train.data.load import load_corpus
from octavo.train.record.metrics import read_metrics
from octavo.train.record.progress import NullProgress
from octavo.train.trainer import Trainer

Row = dict[str, Any]
Code = Mapping[str, str | None]
ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "convergence.md"
IMAGE = "images/convergence.svg"
STEPS, LONG_STEPS, LONG_SEED = 200, 1000, 1
OPTIMIZER = ("optim.states=fp8", "precision.master=remainder")
ARMS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "products": ("precision.level=fp8",),
    "products, equalized": ("precision.level=fp8", "precision.recipe=rowwise_equalized"),
    "activations": ("precision.activations=fp8",),
    "optimizer": OPTIMIZER,
    "products + activations": ("precision.level=fp8+activations",),
    "everything": ("precision.level=fp8+activations+optimizer",),
}
"""What is in FP8, and the settings that ask for it. The first is the baseline of the others."""
LONG_ARMS = ("bf16", "optimizer")
CODE_FILE = "code.json"
VERSIONS = ("octavo", "torch", "transformers", "python")
FEWEST_SEEDS = 2
"""Below which the document's spread over seeds is none."""
BASELINE = "bf16"
BAND, LONG_BAND, SLOWEST = 1.5, 1.0, 3.0
"""The promises: percent of BF16's loss for everything, for the optimizer alone after 1000 steps; times its step."""
TIMED_ROUNDS, UNTIMED_ROUNDS = 15, 3
"""Steps of each arm that are timed in turn, and the first of them, which do not count."""

HEAD = """# Convergence

Written by `python -m benchmarks convergence` ({minutes:.0f} minutes of {device}, threads: {cpu_threads}); edit nothing
here. `make test-slow` runs it anew and holds it to the limits below.

The small Llama of `make demo` ({parameters:,} parameters, {tokens:,} tokens of Python source code) is trained in BF16
with fp32 masters and moments, with each FP8 switch alone, and with all of them. Arms of one seed start from the same
weights and see the same data in the same order. Loss: mean over the last 10 % of the steps, in nats per token.

![gap to BF16]({image})

"""
SPREAD = """
BF16's own loss has a standard deviation of {spread:.2f} % over {seeds} seeds. A gap well below that is smaller than the
effect of the seed. {seeds} seeds of one small model cannot detect a gap of {tenth:.2f} %, a tenth of that. Times are
of this CPU, which emulates FP8: the best of {rounds} steps taken in turn. `everything` takes {slowdown:.2f} × BF16's
(limit {slowest:g}), `products` {products:.2f} ×.

Limit: `everything` within ± {band:g} % of BF16 on each seed. Reached: at most {worst:.2f} %.

"""
LONG = """## AdamW over {steps} steps

FP8 moments and 16-bit remainders instead of fp32 moments and masters, everything else in BF16, seed {seed}; limit
± {band:g} %.

"""
EARLIER = """
These two runs are older than the others: {date}, {device}, {cpu_threads} threads, torch {torch}.
"""
Overrides = Sequence[str]


def configuration(arm: str, seed: int, steps: int, more: Overrides = ()) -> TrainConfig:
    """The demonstration's configuration with the settings of an arm."""
    settings = [f"run.seed={seed}", f"run.steps={steps}", *ARMS[arm], *more]
    with resources.as_file(resources.files("octavo.experiments") / "demo.toml") as path:
        return load_config(path, settings)


def code() -> Code:
    """What makes the runs: the commit checked out (None outside a checkout) and versions. Local changes do not show."""
    git = shutil.which("git")
    asked = [] if git is None else [git, "-C", str(ROOT), "rev-parse", "HEAD"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout if asked else ""
    facts = environment(torch.device("cpu"))
    return {"commit": answer.strip() or None} | {name: facts[name] for name in VERSIONS}


def folder_of(out: Path, made_by: Code) -> Path:
    """The folder of a run: as wanted, or with the next number after it, the first that other code has not taken."""
    number, folder = 1, out
    while folder.exists():
        noted = folder / CODE_FILE
        if noted.exists() and json.loads(noted.read_text()) == made_by:
            return folder
        number += 1
        folder = out.with_name(f"{out.name}-{number}")
    write_json(folder / CODE_FILE, dict(made_by))
    return folder


def trained(config: TrainConfig, out: Path, made_by: Code) -> tuple[RunResult, Path]:
    """The result of a run of some code, made or found, and its folder, which is the wanted one if it can be."""
    folder = folder_of(out, made_by)
    if (folder / "run.json").exists():
        run_result = RunResult.read(folder)
        same = (folder / "config.toml").read_text() == config.to_toml()
        if same and run_result.stopped == "done" and run_result.steps == config.run.steps:
            return run_result, folder
    result = run(config, out=folder, resume=True)
    if result.stopped != "done":
        raise SystemExit(f"stopped after {result.steps} of {config.run.steps} steps; the same command goes on")
    return result, folder


def measured(arm: str, seed: int, steps: int, out: Path, more: Overrides, made_by: Code) -> Row:
    """One row of the result file."""
    result, folder = trained(configuration(arm, seed, steps, more), out, made_by)
    assert result.losses is not None
    curve = smooth(Curves.of(read_metrics(folder)).loss)
    return {
        "arm": arm, "label": result.precision, "seed": seed, "steps": steps, "tail_mean": result.losses.tail_mean,
        "tokens": result.tokens, "parameters": result.parameters,
        "saved_bytes_per_token": result.saved_bytes_per_token, "wall_s": round(result.wall_s, 1),
        "smoothed": [round(float(value), 4) for value in curve],
    }  # fmt: skip


def gaps(rows: Sequence[Row], arm: str) -> list[float]:
    """Loss of an arm above BF16's of the same seed, in percent, a seed each."""
    base = {row["seed"]: row["tail_mean"] for row in rows if row["arm"] == BASELINE}
    return [100 * (row["tail_mean"] / base[row["seed"]] - 1) for row in rows if row["arm"] == arm]


def spread(rows: Sequence[Row]) -> float:
    """Standard deviation of BF16's loss over seeds, in percent; NaN for one seed."""
    losses = [row["tail_mean"] for row in rows if row["arm"] == BASELINE]
    return 100 * statistics.stdev(losses) / statistics.mean(losses) if len(losses) > 1 else float("nan")


def slowdowns(more: Overrides, rounds: int = TIMED_ROUNDS) -> dict[str, float]:
    """Time of a step over BF16's: the best of steps taken in turn, so that other work on the machine meets all."""
    trainers, best = {}, dict.fromkeys(ARMS, float("inf"))
    for arm in ARMS:
        config = configuration(arm, 1, STEPS, more)
        trainers[arm] = Trainer(config, load_corpus(config.data, config.model, NullProgress()), torch.device("cpu"))
    for turn in range(rounds):
        for arm, trainer in trainers.items():
            start = time.perf_counter()
            trainer.train_step()
            if turn >= UNTIMED_ROUNDS:
                best[arm] = min(best[arm], time.perf_counter() - start)
    return {arm: round(seconds / best[BASELINE], 3) for arm, seconds in best.items()}


def document(content: Mapping[str, Any]) -> str:
    """docs/convergence.md of a result file."""
    short, long = (_of_length(content["rows"], steps) for steps in content["steps"])
    first, seeds = short[0], sorted({row["seed"] for row in short})
    earlier = content.get("long_environment")
    minutes = sum(row["wall_s"] for row in (content["rows"] if earlier is None else short)) / 60
    facts = content["environment"]
    head = HEAD.format(
        minutes=minutes, parameters=first["parameters"], tokens=first["tokens"], image=IMAGE,
        cpu_threads=facts["cpu_threads"], device=facts["device"],
    )  # fmt: skip
    columns = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [
        f"| in FP8 | level | {columns} | mean gap | time of a step | saved for backward, bytes per token |",
        f"|---|---|{'---:|' * (len(seeds) + 3)}",
    ]
    for arm in dict.fromkeys(row["arm"] for row in short):
        rows = [row for row in short if row["arm"] == arm]
        if arm == BASELINE:
            cells = [f"{row['tail_mean']:.4f}" for row in rows]
            gap = ""
        else:
            cells = [f"{gap:+.2f} %" for gap in gaps(short, arm)]
            gap = f"{statistics.mean(gaps(short, arm)):+.2f} %"
        name, label = ("nothing (BF16)" if arm == BASELINE else arm), rows[0]["label"]
        took, kept = f"{content['slowdowns'][arm]:.2f} ×", f"{rows[0]['saved_bytes_per_token']:,.0f}"
        lines.append(f"| {name} | `{label}` | {' | '.join(cells)} | {gap} | {took} | {kept} |")
    after = SPREAD.format(
        spread=spread(short), tenth=spread(short) / 10, seeds=len(seeds), rounds=TIMED_ROUNDS - UNTIMED_ROUNDS,
        slowdown=content["slowdowns"]["everything"], slowest=SLOWEST,
        products=content["slowdowns"]["products"], band=BAND, worst=max(map(abs, gaps(short, "everything"))),
    )  # fmt: skip
    table = ["| optimizer | loss | gap |", "|---|---:|---:|"]
    for row, name in zip(long, ("fp32 moments, fp32 masters", "FP8 moments, 16-bit remainders"), strict=True):
        gap = f"{gaps(long, row['arm'])[0]:+.2f} %" if row["arm"] != BASELINE else ""
        table.append(f"| {name} | {row['tail_mean']:.4f} | {gap} |")
    tail = LONG.format(steps=long[0]["steps"], seed=long[0]["seed"], band=LONG_BAND)
    made = "" if earlier is None else EARLIER.format(**earlier)
    return head + "\n".join(lines) + "\n" + after + tail + "\n".join(table) + "\n" + made


def picture(content: Mapping[str, Any]) -> figures.Figure:
    """Gap of the smoothed loss to BF16's of the same seed over the steps, one panel per arm, a line per seed."""
    rows = _of_length(content["rows"], content["steps"][0])
    base = {row["seed"]: row["smoothed"] for row in rows if row["arm"] == BASELINE}
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm != BASELINE]
    axes = {"x": {"title": "step", "nticks": 4, "showgrid": False}, "y": {"title": "loss above BF16 [%]"}}
    axes["y"] |= {"zeroline": True, "zerolinecolor": "var(--soft)"}
    places, settings = figures.panels(arms, 3, 170, **axes)
    data, shapes = [], []
    for slot, (place, arm) in enumerate(zip(places, arms, strict=True)):
        for row in (row for row in rows if row["arm"] == arm):
            gap = [100 * (mine / theirs - 1) for mine, theirs in zip(row["smoothed"], base[row["seed"]], strict=True)]
            line = {"type": "scatter", "mode": "lines", "line": {"color": colour(slot), "width": 1.5}, "opacity": 0.75}
            data.append({**line, **place, "x": list(range(1, len(gap) + 1)), "y": gap})
        across = {"type": "rect", "xref": f"{place['xaxis']} domain", "yref": place["yaxis"], "x0": 0, "x1": 1}
        tall = {"y0": -spread(rows), "y1": spread(rows), "fillcolor": "var(--grid)", "line": {"width": 0}}
        shapes.append({**across, **tall, "layer": "below"})
    margin = {"l": 64, "r": 14, "t": 34, "b": 54, "pad": 4}
    height = settings.pop("height") + margin["t"] + margin["b"]
    return figures.figure(data, height, **settings, shapes=shapes, showlegend=False, margin=margin)


def main(arguments: list[str]) -> None:
    """Train every arm on every seed, write `results/<device>/convergence.json` and the document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks convergence", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm (3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a run ({STEPS})")
    parser.add_argument("--long-steps", type=int, default=LONG_STEPS, help=f"steps of the long ones ({LONG_STEPS})")
    parser.add_argument("--short-only", action="store_true", help="leave the long runs in the result file as they are")
    parser.add_argument("--arms", nargs="+", choices=[arm for arm in ARMS if arm != BASELINE], help="some arms only")
    parser.add_argument("--runs", type=Path, default=Path("runs/convergence"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="folder of the results, other than benchmarks/results/<device>")
    parser.add_argument("--document", action="store_true", help="only write the document, from the result file")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="settings for every run")
    options = parser.parse_args(arguments)
    if options.steps == options.long_steps:
        parser.error(f"--steps and --long-steps are both {options.steps}: the long runs are told apart by their length")
    fewest = FEWEST_SEEDS if options.out is None else 1
    if options.seeds < fewest:
        why = " for the document, which compares seeds; for results alone give --out" if options.out is None else ""
        parser.error(f"--seeds is {fewest} or more{why}; got {options.seeds}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = (options.out or RESULTS / device_name(device)) / "convergence.json"
    if not options.document:
        runs = [(arm, seed, options.steps) for seed in range(1, options.seeds + 1) for arm in options.arms or ARMS]
        earlier: list[Row] = []
        rows: list[Row] = []
        long_environment = None
        before: Mapping[str, Any] = {}
        if options.arms:
            before = _comparable(path, environment(device)["device"])
            rows = [row for row in before["rows"] if (row["arm"], row["seed"], row["steps"]) not in runs]
        elif options.short_only:
            before = json.loads(path.read_text())
            earlier = _of_length(before["rows"], options.long_steps)
            long_environment = before.get("long_environment") or before["environment"]
        else:
            runs += [(arm, LONG_SEED, options.long_steps) for arm in LONG_ARMS]
        loaded = code()  # what is committed while it runs is none of it
        for number, (arm, seed, steps) in enumerate(runs, 1):
            folder = options.runs / f"{arm.replace(' ', '').replace(',', '-')}-seed{seed}-{steps}"
            rows.append(measured(arm, seed, steps, folder, options.overrides, loaded))
            row = rows[-1]
            gap = "" if arm == BASELINE else f"  {gaps(_of_length(rows, steps), arm)[-1]:+.2f} %"
            print(f"{number:2}/{len(runs)}  {arm:<24} seed {seed}  {row['tail_mean']:.4f}{gap}", flush=True)
        if options.arms:
            content = before | {"rows": sorted(rows, key=_place)}
        else:
            content = {
                "environment": environment(device), "steps": [options.steps, options.long_steps],
                "rows": rows + earlier, "long_environment": long_environment, "slowdowns": slowdowns(options.overrides),
            }  # fmt: skip
        write_json(path, content)
    if options.document or options.out is None:
        content = json.loads(path.read_text())
        seeds = {row["seed"] for row in content["rows"]}
        if len(seeds) < FEWEST_SEEDS:
            parser.error(f"{path} is of {len(seeds)} seed: the document needs {FEWEST_SEEDS} or more to compare")
        write_text(DOCUMENT, document(content))
        figures.save(picture(content), DOCUMENT.parent / IMAGE)
        print(f"written: {DOCUMENT.relative_to(ROOT)}")


def _comparable(path: Path, device: str) -> Mapping[str, Any]:
    """The results in a file, if they are of a device."""
    content: Mapping[str, Any] = json.loads(path.read_text())
    if content["environment"]["device"] != device:
        raise SystemExit(
            f"python -m benchmarks convergence: with --arms, arms are compared with those in {path}, which are of "
            f"{content['environment']['device']}; this is {device}: train all arms"
        )
    return content


def _place(row: Row) -> tuple[int, int, int]:
    """The order of rows in a result file."""
    return row["steps"], row["seed"], list(ARMS).index(row["arm"])


def _of_length(rows: Sequence[Row], steps: int) -> list[Row]:
    return [row for row in rows if row["steps"] == steps]
