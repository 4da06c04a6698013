"""The page of `octavo watch`: the report of a run as its folder is now, below its state, progress and last figures.

Nothing is written. The lock of the folder, which tells a run that goes on from a killed one, is held for an instant.
"""

import time
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from octavo.experiments.logged_run import LoggedRun, labels, read_run
from octavo.experiments.page import render
from octavo.experiments.run_report import page_context
from octavo.experiments.verdict import arm_name
from octavo.numerics.suggestions import nearest
from octavo.train.disk import LOCK, is_locked
from octavo.train.record import metrics as records
from octavo.train.record.metrics import CONFIG_FILE, METRICS_FILE, RESULT_FILE, SETUP_FILE, RunResult, RunSetup
from octavo.train.record.statistics import STATISTICS_FILE, run_of

FOLLOWED = (
    METRICS_FILE, records.EVENTS_FILE, STATISTICS_FILE, SETUP_FILE, RESULT_FILE, records.LAYERS_FILE, CONFIG_FILE
)  # fmt: skip
STALLED = 60  # Seconds without a step after which a run is marked, or ten steps if they take longer
ENDED = {  # State and text by `RunResult.stopped`
    "done": ("done", ""),
    "early": ("done", "The held-out loss fell no more (eval.patience): the run ended early."),
    "sigterm": ("stopped", "The run was stopped and has saved; --resume goes on."),
    "non-finite": ("failed", "The run stopped: a loss or a gradient was not finite."),
}


def run_folder(path: Path) -> Path:
    """The output folder of a run, given that or a checkpoint; a folder without files may become one."""
    # Raises ValueError for another folder, with the runs in it.
    folder = run_of(path)
    if not folder.is_dir():
        beside = [str(path.parent / other.name) for other in folder.parent.glob("*") if other.is_dir()]
        remedy = f"To watch one that has not begun, make its folder first: mkdir -p {path}"
        problem = f"there is no folder {path}{nearest(str(path), beside)}"
        raise ValueError(f"{problem}; give the output folder of a run, as runs/demo. {remedy}")
    names = {child.name for child in folder.iterdir()}
    if not names or names & {*records.RUN_MARKERS, SETUP_FILE, LOCK}:
        return folder
    runs = [child.name for child in sorted(folder.iterdir()) if (child / METRICS_FILE).exists()]
    commands = ", ".join(f"octavo watch {path / name}" for name in runs[:6])
    hint = f"; it has runs: {commands}" if runs else "; give one, as runs/demo"
    raise ValueError(f"{path} is not the output folder of a run, it has no {METRICS_FILE} and no {CONFIG_FILE}{hint}")


class LivePage:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: LoggedRun | None = None
        self._state = self._notice = self._html = ""
        self._seen: object = None
        self._silent_minutes = 0

    def html(self) -> str:
        """The page; the same text as before if nothing has changed."""
        seen: object = None
        try:
            locked = is_locked(self._folder / LOCK)
            seen = locked, [_stamp(self._folder / name) for name in FOLLOWED]
            if changed := seen != self._seen:
                with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of lines half written
                    self._run, self._state, self._notice = read_state(self._folder, locked)
        except (ValueError, OSError) as error:  # what was read before stays
            changed, self._state, self._notice = True, "damaged", str(error)
        silent_minutes = _silent_minutes(self._run) if self._run is not None and self._state == "training" else 0
        if changed or silent_minutes != self._silent_minutes:
            self._silent_minutes, self._html = silent_minutes, self._render(silent_minutes)
        self._seen = seen
        return self._html

    def _render(self, silent_minutes: int) -> str:
        state = f"no step for {silent_minutes} min" if silent_minutes else self._state
        header = {"state": state, "notice": self._notice, "folder": str(self._folder)}
        if (run := self._run) is None:
            return render("live.html.j2", title=self._folder.name, subtitle="", runs=[], steps=0, **header)
        result, steps = run.result, run.result.steps if run.setup is None else run.setup.steps
        context = page_context([run], []) | {
            "title": result.name, "steps": steps, "percent": 100 * result.steps / max(steps, 1),
            "subtitle": f"{arm_name(result.precision)} · {result.parameters:,} parameters · {result.device}",
            "times": _times(run, steps, training=self._state == "training"),
        }  # fmt: skip
        return render("live.html.j2", **context, **header)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes with the content of a file; None without it."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_state(folder: Path, locked: bool | None) -> tuple[LoggedRun | None, str, str]:
    """The run as far as it got, its state, and a sentence about that."""
    setup = RunSetup.read(folder)
    ended = RunResult.read(folder) if (folder / RESULT_FILE).exists() else None
    summary = ended if setup is None else setup.summary
    if summary is None or (locked and setup is None):
        if locked:
            return None, "preparing", "The run reads its data and builds its model."
        return None, "waiting", "The run has not begun. This page shows it once it has."
    run = read_run(folder, summary, labels([folder], [summary])[0])
    run = replace(run, events=run.events[::-1])  # the newest first
    totals = run.totals.fields()
    if ended is not None and not locked and ended.steps == totals["steps"]:
        state, notice = ENDED.get(ended.stopped, ("stopped", f"The run has stopped: {ended.stopped}."))
        return replace(run, result=ended), state, notice
    run = replace(run, result=replace(summary, **totals))
    if locked:
        return run, "training", ""
    if locked is None:
        return run, "training", "This file system has no locks: whether the run goes on is not known."
    text = f"The run was killed after step {run.result.steps:,}, before it could save; --resume goes on."
    return run, "killed", text


def _last_time(run: LoggedRun) -> float | None:
    """When the last step of this process ended, or training began; None if an earlier release wrote no times."""
    started = None if run.setup is None else run.setup.started
    last = run.recent[-1].time if run.recent else None
    return started if last is None else max(last, started or last)


def _silent_minutes(run: LoggedRun) -> int:
    """How long there was no step, if that is long; else 0."""
    seconds = time.time() - (_last_time(run) or time.time())
    return int(seconds / 60) if seconds > max(STALLED, 10 * (_seconds_per_step(run) or 0)) else 0


def _seconds_per_step(run: LoggedRun) -> float | None:
    """Mean seconds of the last steps of this process, with what lies between them."""
    recent, started = run.recent, 0.0 if run.setup is None else run.setup.started
    times = [row.time for row in recent if row.time is not None and row.time >= started]
    if len(times) > 1:
        return (times[-1] - times[0]) / (len(times) - 1)
    return recent[-1].step_s if recent else None


def _times(run: LoggedRun, steps: int, *, training: bool) -> dict[str, str]:
    times = {"step": f"{run.result.steps:,} of {steps:,}"}
    if run.setup is not None and (last := _last_time(run)) is not None:
        times["elapsed"] = str(timedelta(seconds=round(last - run.setup.started)))
    each, left = _seconds_per_step(run), steps - run.result.steps
    if training and left and each is not None:
        times["left"] = str(timedelta(seconds=round(left * each)))
    return times
