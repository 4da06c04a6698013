"""Output folders of runs that never ran: what the report reads, with curves made by formula."""

import dataclasses
import json
import math
import random
import sys
from unittest.mock import Mock

from octavo.inspect.findings import OperandStats
from octavo.train.record.metrics import Losses, RunResult, StatisticsWriter, StepMetrics, StepTotals

CONFIG = """
run = {{name = "{name}", seed = 0, steps = {steps}, out = "{out}"}}
model = {{type = "llama", config = {{"hidden_size" = 256}}}}
optim = {{lr = {lr}}}
precision = {{level = "{level}", recipe = "rowwise"}}
"""


def result(arm="bf16", tail=3.0, **changes):
    fields = {
        "name": "demo", "precision": arm, "device": "cpu", "steps": 100, "tokens": 25600, "parameters": 1_000_000,
        "losses": Losses(first=8.3, final=tail + 0.1, tail_mean=tail),
        "tokens_per_s": 1000.0 if arm == "bf16" else 400.0,
        "saved_bytes_per_token": 10_000.0 if arm == "bf16" else 7_000.0,
        "state_bytes_per_parameter": 12.0 if arm == "bf16" else 4.1, "skipped_steps": 0, "wall_s": 25.6,
        "versions": {"octavo": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.7"},
        "converted": "" if arm == "bf16" else "converted 28 of 29 linears; lm_head: vocabulary head kept in bf16",
        "stopped": "done",
    }  # fmt: skip
    return RunResult(**{**fields, **changes})


def step(number=1, loss=3.0, **changes):
    fields = {"lr": 1e-3, "grad_norm": 1.0, "loss_scale": None, "step_s": 1.0, "tokens_per_s": 1.0}
    return StepMetrics(**{"step": number, "tokens": number, "loss": loss, "skipped": loss is None} | fields | changes)


def operand(step=1, layer="layers.0", operand="x", **changes):
    """The statistics of an operand in one step."""
    fields = {
        "recipe": "rowwise", "elements": 64, "nonfinite": 0, "amax": 4.0, "smallest": 0.5, "scale_spread": 2.0,
        "underflow": 0.0, "saturation": 0.0, "sqnr": 31.0, "what_if": {"mxfp8": 30.5},
    }  # fmt: skip
    return OperandStats(step=step, layer=layer, operand=operand, **fields | changes)


def sample(folder, *rows):
    """Write statistics behind those that a run has."""
    StatisticsWriter(folder, after_step=sys.maxsize, board=Mock()).write(list(rows))


def folder(path, arm="bf16", *, steps=100, shift=0.0, lr=3e-3, **changes):
    """Write a run's folder: losses fall from 8.3, `shift` (relative) higher at the end; batches as in every arm."""
    batches, own = random.Random(0), random.Random(arm)
    rows = []
    for number in range(1, steps + 1):
        progress = number / steps
        loss = 3.0 + 5.3 * math.exp(-7 * progress) + batches.gauss(0, 0.09)
        loss *= 1 + shift * progress + own.gauss(0, 0.002)
        seconds = 0.25 * (1 if arm == "bf16" else 2.5) * (1 + abs(own.gauss(0, 0.05)))
        rate = lr * min(1, number / (0.1 * steps)) * (0.55 + 0.45 * math.cos(math.pi * progress))
        norm = 0.4 + 2 * math.exp(-9 * progress) + abs(own.gauss(0, 0.05))
        times = {"step_s": seconds, "tokens_per_s": 256 / seconds}
        rows.append(step(number, loss, tokens=256 * number, lr=rate, grad_norm=norm, **times))
    path.mkdir(parents=True)
    lines = [json.dumps(dataclasses.asdict(row)) + "\n" for row in rows]
    (path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    level = arm.split()[0]
    config = CONFIG.format(name=arm, steps=steps, out=path.as_posix(), lr=lr, level=level)
    (path / "config.toml").write_text(config, encoding="utf-8")
    fields = StepTotals(rows).fields()
    summary = {name: fields[name] for name in ("steps", "tokens", "losses", "tokens_per_s")} | changes
    result(arm, **summary).write(path)
    return path
