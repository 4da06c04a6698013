"""The paired demonstration: one small model, trained in BF16 and again in FP8; only `precision.level` differs.

The configuration is `demo.toml` beside this file, in the package; `configs/demo.toml` is its copy. On a CPU the report
has the planner's prediction of the speed of a larger model on GPUs.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from octavo.experiments.compare_verdict import PairVerdict, PredictedSpeed, verdict
from octavo.experiments.ready_models import ready_model
from octavo.experiments.run_report import write_report
from octavo.numerics import Precision
from octavo.planner.model_plan import plan
from octavo.train.config.run_config import ConfigError, TrainConfig, load_config
from octavo.train.diagnose import NonFiniteError
from octavo.train.loop import run
from octavo.train.record.metrics import CONFIG_FILE, RunResult
from octavo.train.record.progress import Progress

BASELINE, CANDIDATE = "bf16", "fp8+activations+optimizer"
# Three minutes on two CPU cores with AVX-512; the learning rate of `demo.toml` is for larger batches.
SHORTENED = ("run.steps=100", "optim.batch=2", "optim.lr=1e-3")
CONFIG = Path(__file__).with_name("demo.toml")
MODEL = "Llama 3 8B"
GPUS, BATCH, SEQUENCE = 8, 1, 8192
SET_BY_DEMO = ("precision.level", "precision.matmul", "run.out", "run.restarts")


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Both arms, as far as they got; `verdict` is None if one of them was stopped, and then there is no report."""

    arms: list[RunResult]
    verdict: PairVerdict | None = None
    go_on: str = ""  # The command that finishes the arm that was stopped; empty if none was


def demo_configs(overrides: Sequence[str] = (), candidate: str = CANDIDATE) -> tuple[TrainConfig, TrainConfig]:
    """The configurations of the BF16 arm and of the arm at level `candidate`."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in SET_BY_DEMO:
            problem = f"{key} is set by the demo, which compares {BASELINE} with {candidate}"
            raise ConfigError(f"{problem}: use --level, or `octavo train`")
    if candidate == BASELINE:
        raise ConfigError(f"the demo compares {BASELINE} with another level: give one with --level, as {CANDIDATE}")
    levels = (BASELINE, candidate)
    first, second = (load_config(CONFIG, [*SHORTENED, *overrides, f'precision.level="{name}"']) for name in levels)
    return first, second


def free_folder(folder: Path) -> Path:
    """`folder` if nothing is there, else the first of `<folder>-2`, `<folder>-3`, … that is free."""
    names = chain([folder.name], (f"{folder.name}-{number}" for number in count(2)))
    return next(path for name in names if not (path := folder.with_name(name)).exists())


def run_demo(configs: Sequence[TrainConfig], out: Path, progress: Progress) -> DemoResult:
    """Train each config into `out/<level>` and write the report into `out`."""
    # An arm that stops on a loss that is not finite is a result like any other: it is in the report, without a verdict.
    if out.exists() and (not out.is_dir() or any(not path.is_dir() for path in out.rglob("*"))):
        raise ConfigError(f"{out} is not empty, and a demo overwrites nothing: give another folder with --out")
    if (warmup := configs[0].optim.warmup) != load_config(CONFIG).optim.warmup:
        progress.note(f"the learning rate warms up over {warmup} of the {configs[0].run.steps} steps")
    arms: list[RunResult] = []
    folders = [out / config.precision.level for config in configs]
    for config, folder in zip(configs, folders, strict=True):
        try:
            arms.append(run(config, out=folder, progress=progress))
        except NonFiniteError as error:
            progress.note(str(error))
            arms.append(RunResult.read(folder))
        if arms[-1].stopped == "sigterm":
            words = ["octavo", "train", str(folder / CONFIG_FILE), "--out", str(folder), "--resume"]
            return DemoResult(arms=arms, go_on=shlex.join(words))
    prediction = None
    if arms[0].device == "cpu":
        progress.stage("predicting the speed on GPUs")
        prediction = predict_speed(configs[1].resolved)
    write_report(folders, out, prediction)
    return DemoResult(arms=arms, verdict=verdict(arms[0], arms[1], prediction))


def predict_speed(precision: Precision) -> PredictedSpeed:
    """Predict the speed-up over bf16 of a training step of Llama 3 8B on 8 H100. Takes two seconds; needs no GPU."""
    # Linear layers that would lose stay in bf16, as `octavo.convert` decides on such a GPU.
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**ready_model("llama3-8b").config))
    planned = plan(model.to(torch.bfloat16), BATCH, SEQUENCE, device="h100", world_size=GPUS, precision=precision)
    where = f"{MODEL} on {GPUS} × {planned.gpu.name}, {BATCH * SEQUENCE:,} tokens each, not compiled"
    return PredictedSpeed(gain=planned.gain, where=where)
