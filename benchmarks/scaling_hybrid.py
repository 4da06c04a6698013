"""Hybrid layouts without a GPU: tensor, pipeline, expert and context parallelism up to 1024 GPUs, as `octavo plan`
predicts them; a part of docs/scaling.md.

Every row is a plan as of `octavo plan CONFIG --gpu h100 --gpus N` (`octavo.train.run_plan.plan_configured`). Plans of a
model share their traces, so another number of GPUs costs a second or two. Rows that the result file has are not planned
again: remove the file, or name models, for new ones.

  python -m benchmarks scaling_hybrid
  python -m benchmarks scaling_hybrid --models Llama-3-70B
  python -m benchmarks scaling --document                      # afterwards: docs/scaling.md
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import RESULTS, environment, write_json
from octavo.train import ConfigError, parse_config
from octavo.train.plan_parts import TraceCache
from octavo.train.run_plan import plan_configured

Row = dict[str, Any]
FILE = "scaling_hybrid.json"
GPU, GIB = "h100", 79
TOKENS = 2**23
"""Tokens of a step of all GPUs."""
SEQUENCE = {"DeepSeek-V3": 4096}
"""Tokens of a sequence, other than 8192."""
_LLAMA = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, Row] = {
    "Llama-3-70B": {"type": "llama", "config": _LLAMA},
    "Command-R 35B": {
        "type": "cohere",
        "config": {
            "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64,
            "num_key_value_heads": 64, "vocab_size": 256000, "max_position_embeddings": 8192, "logit_scale": 0.0625,
            "tie_word_embeddings": False,
        },
    },
    "Mixtral-8x7B": {
        "type": "mixtral",
        "config": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
            "max_position_embeddings": 32768, "tie_word_embeddings": False,
        },
    },
    "DeepSeek-V3": {"type": "deepseek_v3", "config": {"vocab_size": 129280, "tie_word_embeddings": False}},
}  # fmt: skip
"""Types and sizes as published, but the head of Command-R, which is its embedding: not so in a pipeline."""
DENSE: list[Row] = [{}, {"tp": 8}, {"pp": 8}, {"tp": 8, "pp": 4}, {"cp": 8}]
LAYOUTS: dict[str, list[Row]] = {
    "Llama-3-70B": DENSE,
    "Command-R 35B": DENSE,
    "Mixtral-8x7B": [{}, {"tp": 8}, {"pp": 8}, {"ep": 8}],
    "DeepSeek-V3": [{}, {"pp": 8}, {"pp": 16}, {"ep": 8}, {"ep": 64}],
}
GPUS = (8, 64, 256, 1024)
ARMS = {"bf16": "bf16", "fp8": "fp8+activations+optimizer"}
CHECKPOINTING = ("full",)


def config(model: str, parallel: Row, gpus: int, level: str, checkpointing: str) -> Any:
    """The run of a row: one sequence in a micro-batch of each group of GPUs with sequences of its own.

    Raises:
        ConfigError: If the GPUs cannot share the batch so.
    """
    length, words = SEQUENCE.get(model, 8192), MODELS[model]["config"]["vocab_size"]
    sharing = parallel.get("tp", 1) * parallel.get("cp", 1) * parallel.get("pp", 1)
    if gpus % sharing or gpus % parallel.get("ep", 1):
        raise ConfigError(f"{gpus} GPUs are no multiple of {parallel}")
    batch = TOKENS // length
    return parse_config({
        "run": {"steps": 1},
        "model": MODELS[model],
        "data": {"source": "python-stdlib", "sequence_length": length, "vocab_size": words},
        "optim": {"lr": 1e-4, "batch": batch, "micro_batches": max(1, batch * sharing // gpus)},
        "precision": {"level": level, "recipe": "rowwise", "checkpointing": checkpointing},
        "parallel": parallel,
    })  # fmt: skip


def planned(model: str, cache: TraceCache, known: list[Row]) -> Iterator[Row]:
    """The rows of a model that are not known yet, one after the other."""
    done = {key(row) for row in known}
    for checkpointing in CHECKPOINTING:
        for parallel in LAYOUTS[model]:
            for arm, level in ARMS.items():
                if level == "bf16" and parallel.get("ep", 1) > 1:
                    continue  # experts in bf16 are not distributed
                for gpus in GPUS:
                    about = {"model": model, "arm": arm, "gpus": gpus, "parallel": parallel, "recompute": checkpointing}
                    if key(about) in done:
                        continue
                    try:
                        run = config(model, parallel, gpus, level, checkpointing)
                        plan = plan_configured(run, gpu=GPU, gpus=gpus, cache=cache)
                    except ConfigError as error:
                        yield about | {"problem": str(error)}
                        continue
                    yield about | {
                        "seconds": plan.time.seconds, "bubble": plan.time.bubble,
                        "communication": plan.time.communication, "tokens_per_second": plan.time.tokens_per_second,
                        "mfu": plan.time.mfu, "peak": plan.memory.peak, "micro_batches": run.optim.micro_batches,
                        "sent": {kind: sum(s.bytes for s in plan.time.sent if s.kind == kind)
                                 for kind in dict.fromkeys(s.kind for s in plan.time.sent)},
                    }  # fmt: skip


def key(row: Row) -> str:
    """What a row is a plan of."""
    return json.dumps([row[name] for name in ("model", "arm", "gpus", "parallel", "recompute")])


def main(arguments: list[str]) -> None:
    """Plan every row that is not in `results/simulated/scaling_hybrid.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks scaling_hybrid", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="all by default")
    parser.add_argument("--out", type=Path, default=RESULTS / "simulated", help="folder of the results")
    options = parser.parse_args(arguments)
    path = options.out / FILE
    about = environment(torch.device("cpu"))
    about = {name: about[name] for name in ("octavo", "torch", "transformers", "python", "date")}
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for model in options.models:
        for row in planned(model, TraceCache(), rows):
            rows.append(row)
            text = row.get("problem") or f"{row['seconds']:8.2f} s {row['peak'] / 2**30:7.1f} GiB"
            print(
                f"{model:<14} {row['arm']:<5} {row['gpus']:>5} {row['parallel']} {row['recompute']}: {text}", flush=True
            )
            write_json(path, {"environment": about, "gpu": GPU, "gib": GIB, "tokens": TOKENS, "rows": rows})
