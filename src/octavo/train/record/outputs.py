"""The output folder of a run: check its content before a run writes into it.

Only the same run continues a folder, and only on request. Foreign files stay, also those with a name of a run's own.
"""

import os
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from octavo.train.checkpoint.retention import FOLDER, checkpoints, invalid_checkpoints, latest_checkpoint, step_of
from octavo.train.checkpoint.store import damaged_checkpoints, read_trainer_state, set_aside
from octavo.train.config.run_config import ConfigError, TrainConfig, check_same_run, naming
from octavo.train.config.sections import expand
from octavo.train.record.loggers import LOGGERS_FILE
from octavo.train.record.metrics import CONFIG_FILE, EVENTS_FILE, LAYERS_FILE, RUN_MARKERS, SETUP_FILE, TENSORBOARD_DIR
from octavo.train.record.statistics import STATISTICS_FILE

TOKENIZER_FILE = "tokenizer.json"
OTHER_FILES = (  # Other files of a run or its report
    TOKENIZER_FILE, LAYERS_FILE, SETUP_FILE, STATISTICS_FILE, EVENTS_FILE, LOGGERS_FILE, TENSORBOARD_DIR, "report.html"
)  # fmt: skip


class RunFolder(NamedTuple):
    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()  # Changed settings, damaged checkpoints and ignored folders


def open_run_folder(out: Path, config: TrainConfig, *, resume: bool, best_effort: bool = False) -> RunFolder:
    """Check that a run may write into the folder `out`, and find the checkpoint to resume from."""
    if config.model.path is not None and expand(config.model.path).resolve() == out.resolve():
        raise ConfigError(f"{out} is model.path, the checkpoint to start from: choose another folder (--out)")
    for name in (*RUN_MARKERS, *OTHER_FILES):
        check_kind(out / name)
    run_files = [name for name in RUN_MARKERS if (out / name).exists()]
    foreign_files = [name for name in OTHER_FILES if (out / name).exists()]
    if not resume:
        if run_files:
            problem = f"{out} already holds a run ({_progress(out)}"
            raise ConfigError(f"{problem}; or choose another folder for a new one (--out)")
        if foreign_files:
            problem = f"{out} holds {foreign_files[0]}, which a run would overwrite"
            raise ConfigError(f"{problem}: choose another folder (--out)")
        return RunFolder()
    damaged = damaged_checkpoints(out) if best_effort else {}
    checkpoint = next((path for path in reversed(checkpoints(out)) if path not in damaged), None)
    reason = "is no checkpoint and is ignored: it is empty, or not named as step-000100"
    ignored = tuple(f"{path} {reason}" for path in invalid_checkpoints(out))
    if checkpoint is None:
        if (files := run_files + foreign_files) and not (out / CONFIG_FILE).exists():
            problem = f"{out} holds {files[0]} but no checkpoint and no {CONFIG_FILE}"
            raise ConfigError(f"{problem}, so it is not known which run wrote it: choose another folder (--out)")
        if run_files:
            check_same_run(_read_config(out / CONFIG_FILE), config, out)
        return RunFolder(notes=ignored)
    state = read_trainer_state(checkpoint)
    changes = check_same_run(state["config"], config, out)
    if config.run.steps < state["step"]:
        raise ConfigError(f"run.steps = {config.run.steps}, but {checkpoint} is already at step {state['step']}")
    aside = (f"{path} is damaged: {reason}. It is {set_aside(path).name} now" for path, reason in damaged.items())
    return RunFolder(checkpoint, (*aside, *ignored, *changes))


def _progress(out: Path) -> str:
    """How far the run in `out` is, and what --resume does."""
    if (newest := latest_checkpoint(out)) is None:
        return "unfinished, without a checkpoint): --resume starts it again from the first step"
    try:
        steps = _read_config(out / CONFIG_FILE)["run"]["steps"]
    except (ConfigError, OSError, KeyError, TypeError):
        steps = "an unknown number of"
    if steps == (step := step_of(newest)):
        return f"finished after {step} steps): --resume with a larger run.steps continues it"
    return f"unfinished: {step} of {steps} steps): --resume continues it from {newest.name}"


def check_kind(path: Path, writer: str = "a run") -> None:
    """Raise ConfigError for a folder or link at the path of a file, or a non-folder at the path of a folder."""
    # A link to a folder counts as a folder. `writer`: who writes there.
    folder = path.name in (FOLDER, TENSORBOARD_DIR)
    if os.path.lexists(path) and not (path.is_dir() if folder else path.is_file() and not path.is_symlink()):
        kind = f"a link to {os.readlink(path)}" if path.is_symlink() else "a folder" if path.is_dir() else "no folder"
        problem = f"{path} is {kind}, and {writer} writes a {'folder' if folder else 'file'} there"
        raise ConfigError(f"{problem}: move it away, or choose another folder (--out)")


def _read_config(path: Path) -> dict[str, Any]:
    with naming(f"{path} cannot be read", ValueError, RecursionError):
        return tomllib.loads(path.read_text(encoding="utf-8"))
