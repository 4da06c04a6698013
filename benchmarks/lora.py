"""Does LoRA learn as well on a base that is resident in FP8? Beside bf16 adapters on a bf16 base; docs/training.md.

For each seed a small Llama is trained in bf16 on source code of this package, then adapters on its documentation, in
two arms: at level "bf16", and at level "fp8" with `lora.base = "fp8"` and the default `lora.weight_only`, "auto". Both
have the same base, data and initial adapters.

  python -m benchmarks lora
  python -m benchmarks lora --seeds 1 --steps 20
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import RESULTS, environment, write_json
from octavo.train import parse_config, run

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
FILE = RESULTS / "cpu" / "lora.json"
SEEDS, BASE_STEPS, STEPS, BAND = (1, 2, 3), 150, 200, 1.0
MODEL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
TEXTS = {"code": "src/octavo/nn/*.py", "documentation": "docs/*.md"}
ARMS = {"bf16": {"level": "bf16"}, "resident FP8": {"level": "fp8"}}


def settings(seed: int, steps: int, source: Path, lr: float, model: Row, precision: Row) -> Row:
    """Sections of a run."""
    return {
        "run": {"seed": seed, "steps": steps, "device": "cpu"},
        "model": model,
        "data": {"source": str(source), "sequence_length": 32, "vocab_size": 512, "cache": str(source.parent)},
        "eval": {"fraction": 0.1},
        "optim": {"lr": lr, "batch": 8, "warmup": steps // 10},
        "precision": precision,
    }


def measure(seed: int, steps: int, folder: Path) -> Row:
    """Train the base of a seed, then adapters in both arms; losses in nats per token."""
    for name, pattern in TEXTS.items():
        parts = folder / name
        parts.mkdir()
        for file in sorted(ROOT.glob(pattern)):
            (parts / f"{file.stem}.txt").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    base = settings(seed, BASE_STEPS, folder / "code" / "*.txt", 3e-3, {"type": "llama", "config": MODEL}, {})
    started = run(parse_config(base), out=folder / "base")
    model = {"path": str(folder / "base" / "checkpoints" / f"step-{BASE_STEPS:06d}")}
    assert started.losses is not None
    row: Row = {"seed": seed, "steps": steps, "base": started.losses.tail_mean}
    for name, precision in ARMS.items():
        tables = settings(seed, steps, folder / "documentation" / "*.txt", 2e-3, model, precision)
        result = run(parse_config(tables | {"lora": {"rank": 8, "base": "fp8"}}), out=folder / name)
        assert result.losses is not None and result.held_out is not None
        row[name] = {"first": result.losses.first, "tail": result.losses.tail_mean, "held_out": result.held_out["loss"]}
    row["gap"] = 100 * (row["resident FP8"]["tail"] / row["bf16"]["tail"] - 1)
    row["held_out_gap"] = 100 * (row["resident FP8"]["held_out"] / row["bf16"]["held_out"] - 1)
    return row


def main(arguments: list[str]) -> None:
    """Train, and keep the rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(seed, options.steps, Path(folder))
        print(json.dumps(row), flush=True)
        rows = json.loads(options.file.read_text(encoding="utf-8"))["rows"] if options.file.exists() else []
        rows = sorted([*(old for old in rows if old["seed"] != seed), row], key=lambda row: row["seed"])
        write_json(options.file, environment(torch.device("cpu")) | {"band": BAND, "rows": rows})
