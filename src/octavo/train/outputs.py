"""The output folder of a run: whose it is, before anything is written into it.

    config.toml  layers.json  metrics.jsonl  run.json  tokenizer.json  checkpoints/  tensorboard/
    statistics.jsonl          where `[inspect]` asks for it
    events.jsonl              where something happened besides steps
    report.html  loss.png     by the command line

A folder that holds a run is only ever continued, by that run and on request. Someone else's file of one
of these names is never overwritten, and other files are left alone.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from octavo.train.checkpoint import FOLDER, check_same_run, latest_checkpoint, read_trainer_state
from octavo.train.config import ConfigError, TrainConfig
from octavo.train.events import EVENTS_FILE
from octavo.train.metrics import METRICS_FILE, RESULT_FILE, TENSORBOARD_DIR
from octavo.train.statistics import STATISTICS_FILE

CONFIG_FILE = "config.toml"
LAYERS_FILE = "layers.json"
"""Written by an FP8 run: the rows of `octavo.report`. A BF16 run has none."""
TOKENIZER_FILE = "tokenizer.json"
TRACES = (METRICS_FILE, RESULT_FILE, FOLDER, CONFIG_FILE)
"""A folder with one of these holds a run."""
WRITTEN = (TOKENIZER_FILE, LAYERS_FILE, STATISTICS_FILE, EVENTS_FILE, TENSORBOARD_DIR, "report.html", "loss.png")
"""What else a run, or its report, writes."""


class Claim(NamedTuple):
    """Where a run starts: the checkpoint to resume from, if any, and the settings changed since."""

    checkpoint: Path | None = None
    tuned: tuple[str, ...] = ()


def claim_folder(out: Path, config: TrainConfig, *, resume: bool) -> Claim:
    """Makes sure `config` may be run into the folder `out` and says where it starts.

    Raises ConfigError where `out` holds a run and `resume` is not asked for, holds files that would be overwritten, or
    holds another run.
    """
    if config.model.path is not None and Path(config.model.path).expanduser().resolve() == out.resolve():
        raise ConfigError(f"{out} is model.path, the checkpoint to start from: choose another folder (--out)")
    traces = [name for name in TRACES if (out / name).exists()]
    others = [name for name in WRITTEN if (out / name).exists()]
    if not resume:
        if traces:
            raise ConfigError(
                f"{out} already holds a run ({traces[0]}): resume it (--resume), or choose another folder (--out)"
            )
        if others:
            raise ConfigError(f"{out} holds {others[0]}, which a run would overwrite: choose another folder (--out)")
        return Claim()
    checkpoint = latest_checkpoint(out)
    if checkpoint is None:
        if (traces or others) and not (out / CONFIG_FILE).exists():
            raise ConfigError(
                f"{out} holds {(traces + others)[0]} but no checkpoint and no {CONFIG_FILE}, so whose it is "
                "cannot be told: choose another folder (--out)"
            )
        if traces:
            check_same_run(_read_config(out / CONFIG_FILE), config, out)
        return Claim()
    state = read_trainer_state(checkpoint)
    tuned = check_same_run(state["config"], config, out)
    if config.run.steps < state["step"]:
        raise ConfigError(f"run.steps = {config.run.steps}, but {checkpoint} is already at step {state['step']}")
    return Claim(checkpoint, tuple(tuned))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
