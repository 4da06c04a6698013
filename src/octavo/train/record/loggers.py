"""Metrics of a run on TensorBoard, and on Weights & Biases and MLflow with `run.loggers`.

A thread of its own opens each logger and sends it the scalars, so that training never waits for a server. The first
failure, or `PENDING` scalars that wait, ends that logger. `loggers.json` names the runs for a resume.
"""

import json
import os
import queue
import re
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from octavo.train.checkpoint.retention import FOLDER, checkpoints, latest_checkpoint
from octavo.train.checkpoint.store import damaged_checkpoints, read_trainer_state, set_aside
from octavo.train.config.run_config import ConfigError, TrainConfig, check_same_run, naming
from octavo.train.config.sections import expand
from octavo.train.disk import write_file
from octavo.train.record.json_lines import read_record
from octavo.train.record.metrics import (
    CONFIG_FILE,
    EVENTS_FILE,
    LAYERS_FILE,
    RUN_MARKERS,
    SETUP_FILE,
    STATISTICS_FILE,
    TENSORBOARD_DIR,
)

LOGGERS_FILE = "loggers.json"
PROJECT = "octavo"  # The project or experiment where none is set
CLOSING_S = 30.0  # Seconds that the end of a run waits for a logger
PENDING = 1 << 20  # Most scalars that wait for a logger: 200 MB
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # Packages on PyPI; any that has the logger's module serves
Scalars = Mapping[str, float]


class _WandB:
    # id: Names the run on the server, to continue it; known before `open`, which may take longer than the run.
    def __init__(self, out: Path, name: str, config: Mapping[str, Any], id: str | None) -> None:
        self.id = id or uuid4().hex[:8]
        self._settings = {"name": name, "id": self.id, "dir": str(out), "config": dict(config)}

    def open(self) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(project=project, resume="allow", reinit="create_new", **self._settings)
        # A step of their own: W&B's counter drops the steps that a rollback repeats.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Scalars) -> None:
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, out: Path, name: str, config: Mapping[str, Any], id: str | None) -> None:
        from mlflow import MlflowClient

        self._client, self._config = MlflowClient(), {} if id else dict(config)
        if id is None:
            wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(wanted)
            home = self._client.create_experiment(wanted) if experiment is None else experiment.experiment_id
            id = self._client.create_run(home, run_name=name).info.run_id
        self.id: str = id

    def open(self) -> None:
        self._client.update_run(self.id, status="RUNNING")
        for key, value in {_mlflow_name(key): str(value)[:500] for key, value in self._config.items()}.items():
            self._client.log_param(self.id, key, value)

    def log(self, step: int, scalars: Scalars) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(key), value, now, step) for key, value in scalars.items()]
        for start in range(0, len(metrics), 1000):  # the most that a request may have
            self._client.log_batch(self.id, metrics=metrics[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self.id)


def _mlflow_name(name: str) -> str:
    """The name with the characters that MLflow takes; it refuses all metrics of a step for one other."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)


Remote = _WandB | _MLflow
REMOTES: dict[str, type[Remote]] = {"wandb": _WandB, "mlflow": _MLflow}


def check_loggers(names: Sequence[str]) -> None:
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f'run.loggers has "{name}", which is not installed: pip install {PACKAGES[name]}')


class ScalarLog:
    """Send scalars to TensorBoard and to the loggers of a run; the interface of TensorBoard's `SummaryWriter`."""

    def __init__(
        self, board: Any, names: Sequence[str], out: Path, name: str, config: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._board = board
        path, lock = out / LOGGERS_FILE, threading.Lock()

        def opened(logger: str) -> Remote:
            remote = REMOTES[logger](out, name, config, _ids(path).get(logger))
            with lock:
                write_file(path, json.dumps(_ids(path) | {logger: remote.id}, indent=1) + "\n")
            remote.open()
            return remote

        self._senders = [_Sender(logger, partial(opened, logger), note) for logger in dict.fromkeys(names)]

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._board.add_scalar(name, value, step)
        for sender in self._senders:
            sender.put(step, name, value)

    def close(self) -> None:
        self._board.close()
        end = time.monotonic() + CLOSING_S
        for sender in self._senders:
            sender.close(end)


def _ids(path: Path) -> dict[str, str]:
    return read_record(path.read_bytes(), dict[str, str], f"{path} does not name runs") if path.exists() else {}


class _Sender:
    def __init__(self, name: str, open: Callable[[], Remote], note: Callable[[str], None]) -> None:
        self._name, self._open, self._note = name, open, note
        self._queue: queue.SimpleQueue[tuple[int, str, float] | None] = queue.SimpleQueue()
        self._ended, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"octavo-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, name: str, value: float) -> None:
        if self._ended:
            return
        if self._queue.qsize() >= PENDING:
            self._fail(f"{PENDING:,} values wait for it")
        else:
            self._queue.put((step, name, value))

    def close(self, end: float) -> None:
        self._queue.put(None)
        self._thread.join(max(end - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._end(f"{self._name} has not received the last metrics after {CLOSING_S:.0f} s; metrics.jsonl has all")

    def _work(self) -> None:
        try:
            remote = self._open()
            scalars: dict[str, float] = {}  # of `step`
            step = 0
            for number, name, value in iter(self._queue.get, None):
                if scalars and (number != step or name in scalars):
                    remote.log(step, scalars)
                    scalars = {}
                step, scalars[name] = number, value
            if scalars:
                remote.log(step, scalars)
            remote.close()
        except BaseException as error:  # of no common type, SystemExit among them: a thread ends with it in silence
            self._fail((str(error).strip().splitlines() or [type(error).__name__])[0][:200])

    def _fail(self, reason: str) -> None:
        self._end(f"{self._name} gets no more metrics ({reason}); training goes on, metrics.jsonl has all")

    def _end(self, message: str) -> None:
        with self._lock:
            before, self._ended = self._ended, True
        if not before:
            self._note(message)


# The output folder of a run: check its content before a run writes into it.
#
# Only the same run continues a folder, and only on request. Foreign files stay, also those with a name of a run's own.

TOKENIZER_FILE = "tokenizer.json"
OTHER_FILES = (  # Other files of a run or its report
    TOKENIZER_FILE, LAYERS_FILE, SETUP_FILE, STATISTICS_FILE, EVENTS_FILE, LOGGERS_FILE, TENSORBOARD_DIR, "report.html"
)  # fmt: skip


class RunFolder(NamedTuple):
    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()  # Changed settings and damaged checkpoints


def open_run_folder(out: Path, config: TrainConfig, *, resume: bool, best_effort: bool = False) -> RunFolder:
    """Check that a run may write into the folder `out`, and find the checkpoint to resume from."""
    if config.model.path is not None and expand(config.model.path).resolve() == out.resolve():
        raise ConfigError(f"{out} is model.path, the checkpoint to start from: choose another folder (--out)")
    for folder in (out / FOLDER, out / TENSORBOARD_DIR):
        if os.path.lexists(folder) and not folder.is_dir():  # or a run would begin anew, and fail when it saves
            problem = f"{folder} is no folder, or a link to one that is not there"
            raise ConfigError(f"{problem}: mount its disk, move it away, or choose another folder (--out)")
    run_files = [name for name in RUN_MARKERS if os.path.lexists(out / name)]
    foreign_files = [name for name in OTHER_FILES if os.path.lexists(out / name)]
    if not resume:
        if run_files:
            newest = latest_checkpoint(out)
            what = "without a checkpoint" if newest is None else f"with {newest.name}"
            problem = f"{out} already holds a run ({what}): --resume continues it"
            raise ConfigError(f"{problem}; or choose another folder for a new one (--out)")
        if foreign_files:
            problem = f"{out} holds {foreign_files[0]}, which a run would overwrite"
            raise ConfigError(f"{problem}: choose another folder (--out)")
        return RunFolder()
    damaged = damaged_checkpoints(out) if best_effort else {}
    checkpoint = next((path for path in reversed(checkpoints(out)) if path not in damaged), None)
    if checkpoint is None:
        if (files := run_files + foreign_files) and not (out / CONFIG_FILE).exists():
            problem = f"{out} holds {files[0]} but no checkpoint and no {CONFIG_FILE}"
            raise ConfigError(f"{problem}, so it is not known which run wrote it: choose another folder (--out)")
        if run_files:
            with naming(f"{out / CONFIG_FILE} cannot be read", ValueError, RecursionError):
                saved = tomllib.loads((out / CONFIG_FILE).read_text(encoding="utf-8"))
            check_same_run(saved, config, out)
        return RunFolder()
    state = read_trainer_state(checkpoint)
    changes = check_same_run(state["config"], config, out)
    if config.run.steps < state["step"]:
        raise ConfigError(f"run.steps = {config.run.steps}, but {checkpoint} is already at step {state['step']}")
    aside = (f"{path} is damaged: {reason}. It is {set_aside(path).name} now" for path, reason in damaged.items())
    return RunFolder(checkpoint, (*aside, *changes))
