"""The output folder of a run: whose it is, before anything is written into it.

    config.toml  layers.json  metrics.jsonl  run.json  tokenizer.json  checkpoints/  tensorboard/
    statistics.jsonl          where `[inspect]` asks for it
    events.jsonl              where something happened besides steps
    report.html  loss.png     by the command line

A folder that holds a run is only ever continued, by that run and on request. Someone else's file of one
of these names is never overwritten, and other files are left alone.
"""

import os
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from octavo.train.checkpoint import FOLDER, invalid_checkpoints, latest_checkpoint, read_trainer_state
from octavo.train.config import ConfigError, TrainConfig
from octavo.train.events import EVENTS_FILE
from octavo.train.metrics import METRICS_FILE, RESULT_FILE, TENSORBOARD_DIR
from octavo.train.same_run import check_same_run
from octavo.train.sections import expand
from octavo.train.statistics import STATISTICS_FILE

CONFIG_FILE = "config.toml"
LAYERS_FILE = "layers.json"
"""Written by an FP8 run: the rows of `octavo.report`. A BF16 run has none."""
TOKENIZER_FILE = "tokenizer.json"
RUN_MARKERS = (METRICS_FILE, RESULT_FILE, FOLDER, CONFIG_FILE)
"""A folder with one of these holds a run."""
OTHER_FILES = (TOKENIZER_FILE, LAYERS_FILE, STATISTICS_FILE, EVENTS_FILE, TENSORBOARD_DIR, "report.html", "loss.png")
"""What else a run, or its report, writes."""


class RunFolder(NamedTuple):
    """Where a run starts: the checkpoint to resume from, if any, and what to print about it."""

    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()
    """Settings changed since, and folders that are passed over."""


def open_run_folder(out: Path, config: TrainConfig, *, resume: bool) -> RunFolder:
    """Makes sure `config` may be run into the folder `out` and says where it starts.

    Raises ConfigError where `out` holds a run and `resume` is not asked for, holds files that would be overwritten,
    links that would be written through, or another run.
    """
    if config.model.path is not None and expand(config.model.path).resolve() == out.resolve():
        raise ConfigError(f"{out} is model.path, the checkpoint to start from: choose another folder (--out)")
    for name in (*RUN_MARKERS, *OTHER_FILES):
        check_kind(out / name)
    traces = [name for name in RUN_MARKERS if (out / name).exists()]
    others = [name for name in OTHER_FILES if (out / name).exists()]
    if not resume:
        if traces:
            raise ConfigError(
                f"{out} already holds a run ({traces[0]}): resume it (--resume), or choose another folder (--out)"
            )
        if others:
            raise ConfigError(f"{out} holds {others[0]}, which a run would overwrite: choose another folder (--out)")
        return RunFolder()
    checkpoint = latest_checkpoint(out)
    passed_over = tuple(
        f"{path} is no checkpoint and is passed over: it is empty, or not named as step-000100"
        for path in invalid_checkpoints(out)
    )
    if checkpoint is None:
        if (traces or others) and not (out / CONFIG_FILE).exists():
            raise ConfigError(
                f"{out} holds {(traces + others)[0]} but no checkpoint and no {CONFIG_FILE}, so whose it is "
                "cannot be told: choose another folder (--out)"
            )
        if traces:
            check_same_run(_read_config(out / CONFIG_FILE), config, out)
        return RunFolder(notes=passed_over)
    state = read_trainer_state(checkpoint)
    tuned = check_same_run(state["config"], config, out)
    if config.run.steps < state["step"]:
        raise ConfigError(f"run.steps = {config.run.steps}, but {checkpoint} is already at step {state['step']}")
    return RunFolder(checkpoint, (*passed_over, *tuned))


def check_kind(path: Path, writer: str = "a run") -> None:
    """Raise ConfigError for a folder where a run writes a file, a link there, or anything but a folder where it writes
    a folder; a link to a folder serves as one. `writer`: what is to write there.
    """
    folder = path.name in (FOLDER, TENSORBOARD_DIR)
    if os.path.lexists(path) and not (path.is_dir() if folder else path.is_file() and not path.is_symlink()):
        kind = f"a link to {os.readlink(path)}" if path.is_symlink() else "a folder" if path.is_dir() else "no folder"
        raise ConfigError(
            f"{path} is {kind}, and {writer} writes a {'folder' if folder else 'file'} there: move it away, or choose "
            "another folder (--out)"
        )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
