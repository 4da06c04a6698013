"""How often does `octavo compare` see what is not there, and miss what is? Its table is in docs/compare.md.

A tiny Llama learns a page of made-up sentences by heart, to a loss so small that every error of the products shows in
it. Four arms on many seeds:

  bf16     the baseline
  again    BF16 with the batch cut into two micro-batches: the same sums in another order, so only rounding differs
  rowwise  FP8 (fp8), as it should be
  damaged  FP8 whose 3-bit mantissas are rounded to 1 bit after every quantization; a backend that only this file has

Two BF16 runs of one seed are equal to the last bit on a CPU, so `again` is what a pair without an effect looks like:
chaos from rounding, which is also what a harmless FP8 recipe does. Seeds are put into comparisons of n in order, each
seed in one comparison; and, to see more of the tails, into comparisons drawn at random from all of them.

  python -m benchmarks compare_power
  python -m benchmarks compare_power --document       # only the table, from the result file
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import RESULTS, environment, unfinished, write_json, write_text
from octavo.inspect.compare import compare_losses
from octavo.kernels.quantize import QUANTIZE, QUANTIZE_PAIR, reference
from octavo.kernels.registry import Backend
from octavo.numerics.formats import E4M3
from octavo.numerics.spec import QuantSpec
from octavo.train import TrainConfig, parse_config
from octavo.train.data.load import load_corpus
from octavo.train.record.metrics import StepTotals
from octavo.train.record.progress import NullProgress
from octavo.train.trainer import Trainer

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "compare.md"
BEGIN, END = "<!-- compare_power: begin -->\n", "<!-- compare_power: end -->\n"
BASELINE = "bf16"
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    BASELINE: {},
    "again": {"optim": {"micro_batches": 2}},
    "damaged": {"precision": {"level": "fp8"}},
    "rowwise": {"precision": {"level": "fp8"}},
}
LABELS = {"again": "BF16, other rounding", "rowwise": "FP8 rowwise", "damaged": "FP8 rowwise, 1-bit mantissas"}
COMPARISONS, SEEDS_OF_ONE = 40, 3
FP8_SEEDS = 60
STEPS, SENTENCES = 100, 40
SIZES = (2, 3, 4, 5)
DRAWN = 20_000
MOST_ALARMS, LEAST_DETECTED = 0.05, 0.9
"""The promises."""

Losses = Mapping[str, Mapping[str, float]]
"""Arm → seed → mean loss over the last 10 % of the steps."""


def page(path: Path) -> Path:
    """The sentences, as a file."""
    words = "the leaf folds eight times before a printer cuts it into pages and binds them".split()
    draw = random.Random(0)
    text = "".join(" ".join(draw.choices(words, k=8)) + ".\n" for _ in range(SENTENCES))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def configuration(arm: str, seed: int, text: Path, steps: int = STEPS) -> TrainConfig:
    """A run of the tiny model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "max_position_embeddings": 16, "initializer_range": 0.08}  # fmt: skip
    tables: dict[str, dict[str, Any]] = {
        "run": {"steps": steps, "seed": seed, "device": "cpu"},
        "model": {"type": "llama", "config": sizes},
        "data": {"source": str(text), "sequence_length": 16, "vocab_size": 300, "cache": str(text.parent / "cache")},
        "optim": {"lr": 1e-2, "batch": 8, "warmup": 10, "min_lr_ratio": 0.02},
        "precision": {},
    }
    for section, settings in ARMS[arm].items():
        tables[section] |= settings
    return parse_config(tables)


def loss_of(arm: str, seed: int, text: Path, steps: int = STEPS) -> float:
    """Train, and return the mean loss over the last 10 % of the steps."""
    config = configuration(arm, seed, text, steps)
    with damaged() if arm == "damaged" else nullcontext():
        trainer = Trainer(config, load_corpus(config.data, config.model, NullProgress()), torch.device("cpu"))
        losses = StepTotals(trainer.train_step() for _ in range(steps)).losses
    assert losses is not None
    return losses.tail_mean


def cut(data: Tensor) -> Tensor:
    """E4M3 values with their 3-bit mantissas rounded to 1 bit, to nearest even; the largest is then 384."""
    bits = data.contiguous().view(torch.uint8)
    magnitude = (bits & 0x7F).to(torch.int16)
    rest, even = magnitude & 3, (magnitude & 4) == 0
    up = (rest == 3) | ((rest == 2) & ~even)
    rounded = (magnitude - rest + 4 * up).clamp_max(0x7C)
    codes = torch.where(magnitude == 0x7F, magnitude, rounded).to(torch.uint8) | bits & 0x80
    return codes.view(data.dtype).view_as(data)


def _cut_quantize(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, amax: Tensor | None = None, scale: Tensor | None = None,
    order: str = "rows",
) -> list[Tensor]:  # fmt: skip
    """The reference's result, damaged."""
    outputs = reference.quantize(x, spec, fold, amax, scale, order)
    return [cut(output) if output.dtype == E4M3.dtype else output for output in outputs]


def _cut_quantize_pair(
    x: Tensor, spec: QuantSpec, fold: Tensor | None, spec_t: QuantSpec, fold_t: Tensor | None
) -> list[Tensor]:
    return [*_cut_quantize(x, spec, fold), *_cut_quantize(x, spec_t, fold_t, order="columns")]


@contextmanager
def damaged() -> Iterator[None]:
    """Everything that is quantized inside the block has mantissas of 1 bit."""
    backends = ((QUANTIZE, _cut_quantize), (QUANTIZE_PAIR, _cut_quantize_pair))
    for op, run in backends:
        op.add(Backend(name="damaged", run=run))
    try:
        with QUANTIZE.force("damaged"), QUANTIZE_PAIR.force("damaged"):
            yield
    finally:
        for op, _ in backends:
            del op.backends["damaged"]


def verdict(losses: Losses, arm: str, seeds: Sequence[str]) -> str:
    """Of one comparison, planned for so many seeds."""
    before, after = ([losses[name][seed] for seed in seeds] for name in (BASELINE, arm))
    return compare_losses(before, {arm: after}, max_seeds=len(seeds)).arms[0].verdict


def in_order(losses: Losses, arm: str, size: int) -> list[str]:
    """Verdicts of comparisons that share no seed."""
    seeds = sorted(losses[arm], key=int)
    return [verdict(losses, arm, seeds[k : k + size]) for k in range(0, len(seeds) - size + 1, size)]


def at_random(losses: Losses, arm: str, size: int, count: int) -> dict[str, float]:
    """Share of each verdict among comparisons of seeds drawn at random."""
    draw, seeds = random.Random(size), sorted(losses[arm], key=int)
    statuses = [verdict(losses, arm, draw.sample(seeds, size)) for _ in range(count)]
    return {status: statuses.count(status) / count for status in ("worse", "better")}


def summary(losses: Losses, count: int) -> list[dict[str, Any]]:
    """A row per arm and number of seeds."""
    rows = []
    for arm in (arm for arm in LABELS if len(losses.get(arm, {})) >= max(SIZES)):
        whole = statistics.fmean(losses[BASELINE][seed] for seed in losses[arm])
        gaps = [100 * (loss - losses[BASELINE][seed]) / whole for seed, loss in losses[arm].items()]
        for size in SIZES:
            statuses = in_order(losses, arm, size)
            rows.append({
                "arm": arm, "seeds": size, "comparisons": len(statuses), "worse": statuses.count("worse"),
                "better": statuses.count("better"), "drawn": at_random(losses, arm, size, count),
                "mean_gap_percent": statistics.fmean(gaps), "deviation_percent": statistics.stdev(gaps),
            })  # fmt: skip
    return rows


def table(content: Mapping[str, Any]) -> str:
    """The table of docs/compare.md."""
    lines = [
        "| arm against BF16 | gap per seed, mean ± deviation | seeds | comparisons | worse | better | worse, drawn | "
        "better, drawn |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in content["summary"]:
        gap = f"{row['mean_gap_percent']:+.2f} ± {row['deviation_percent']:.2f} %"
        drawn = (f"{100 * row['drawn'][status]:.1f} %" for status in ("worse", "better"))
        counts = (row[key] for key in ("seeds", "comparisons", "worse", "better"))
        lines.append(f"| {' | '.join([LABELS[row['arm']], gap, *map(str, counts), *drawn])} |")
    base = list(content["losses"][BASELINE].values())
    mean, spread = statistics.fmean(base), 100 * statistics.stdev(base) / statistics.fmean(base)
    lines += [
        "",
        f"BF16's own loss is {mean:.3f} nats per token, and differs by {spread:.0f} % between {len(base)} seeds "
        "(standard deviation).",
    ]
    return "\n".join(lines) + "\n"


def document(content: Mapping[str, Any], text: str) -> str:
    """The text of docs/compare.md with its table anew."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table(content) + END + rest.split(END)[1]


def main(arguments: list[str]) -> None:
    """Train what is missing in the result file, and write it and the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare_power", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=COMPARISONS * SEEDS_OF_ONE, help="seeds of BF16 and its twin (120)"
    )
    parser.add_argument("--fp8-seeds", type=int, default=FP8_SEEDS, help=f"seeds of the other arms ({FP8_SEEDS})")
    parser.add_argument("--drawn", type=int, default=DRAWN, help=f"comparisons drawn at random ({DRAWN})")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare_power"), help="folder of the sentences")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu", help="folder of the result file")
    parser.add_argument("--document", action="store_true", help="only write the table, from the result file")
    options = parser.parse_args(arguments)
    if not options.seeds >= options.fp8_seeds >= max(SIZES):
        parser.error(f"--fp8-seeds is {max(SIZES)} or more, and no more than --seeds; got {options.fp8_seeds}")
    path = options.out / "compare_power.json"
    if not options.document:
        torch.set_num_threads(1)  # a second thread would only wait
        text = page(options.runs / "page.txt")
        before = next((each for each in (unfinished(path), path) if each.exists()), None)
        losses: dict[str, dict[str, float]] = json.loads(before.read_text())["losses"] if before else {}
        pending = [
            (arm, seed)
            for arm in ARMS
            for seed in range(1, 1 + (options.seeds if arm in (BASELINE, "again") else options.fp8_seeds))
        ]
        facts = environment(torch.device("cpu"))
        for number, (arm, seed) in enumerate(pending, 1):
            if str(seed) not in losses.setdefault(arm, {}):
                losses[arm][str(seed)] = loss_of(arm, seed, text)
                print(f"{number:3}/{len(pending)}  {arm:<8} seed {seed:3}  {losses[arm][str(seed)]:.4f}", flush=True)
                write_json(unfinished(path), {"losses": losses})
        write_json(
            path, {"environment": facts, "steps": STEPS, "losses": losses, "summary": summary(losses, options.drawn)}
        )
        unfinished(path).unlink(missing_ok=True)
    content = json.loads(path.read_text())
    print(table(content))
    if options.out == RESULTS / "cpu":
        write_text(DOCUMENT, document(content, DOCUMENT.read_text()))
        print(f"written: {DOCUMENT.relative_to(ROOT)}")
