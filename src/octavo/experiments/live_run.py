"""A run as it is now: what `octavo watch` shows of its folder, for a run that has not begun, goes on, or has ended.

The files of the run are read while it writes them: only what is new, and never a line without its end. Nothing is
written, and the lock of the folder, which tells a run that goes on from a killed one, is held for an instant only.
"""

import json
import statistics
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.experiments.charts import Chart
from octavo.experiments.curves import Curves, smoothing_window, values_of
from octavo.experiments.heatmap import heatmaps
from octavo.experiments.logged_run import SAMPLES_SHOWN, LoggedRun, Samples, read_layers
from octavo.experiments.run_report import held_out_label, held_out_text, run_charts, summary_rows
from octavo.experiments.verdict import arm_name
from octavo.inspect.stats import OperandStats
from octavo.numerics.suggestions import nearest
from octavo.train.disk import LOCK, is_locked
from octavo.train.record.json_lines import RecordFollower
from octavo.train.record.metrics import (
    CONFIG_FILE,
    EVENT,
    EVENTS_FILE,
    METRICS_FILE,
    RESULT_FILE,
    RUN_MARKERS,
    SETUP_FILE,
    STEP,
    WARMUP_STEPS,
    Event,
    Losses,
    RunResult,
    RunSetup,
    StepMetrics,
)
from octavo.train.record.statistics import ROW, STATISTICS_FILE, Row, run_of

FOLLOWED = (METRICS_FILE, EVENTS_FILE, STATISTICS_FILE, SETUP_FILE, RESULT_FILE)
EVENTS_SHOWN = 100
ENDED = {  # State and text by `RunResult.stopped`
    "done": ("done", ""),
    "early": ("done", "The held-out loss fell no more (eval.patience): the run ended early."),
    "sigterm": ("stopped", "The run was stopped and has saved; --resume goes on."),
    "non-finite": ("failed", "The run stopped: a loss or a gradient was not finite."),
}
RECENT = 50  # Last steps that are there with all of their fields; their speed tells the time that is left
COLUMNS = {  # Type of each column; charts draw six digits
    "step": np.int64, "loss": np.float64, "held_out": np.float32, "lr": np.float32, "grad_norm": np.float32,
    "tokens_per_s": np.float32, "mfu": np.float32, "peak_memory": np.float32,
}  # fmt: skip


class LiveSteps:
    """Columns of numbers, which grow by a step at a time; the last steps and samples as they are."""

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        """Forget all steps."""
        self._count, self._skipped, self._seconds = 0, 0, 0.0
        self._columns: dict[str, NDArray[Any]] = {name: np.empty(1024, kind) for name, kind in COLUMNS.items()}
        # One more than is shown, since the last step may be popped.
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT + 1)
        self._samples: deque[Samples] = deque(maxlen=SAMPLES_SHOWN + 1)
        self._held_out: deque[StepMetrics] = deque(maxlen=2)

    def append(self, row: StepMetrics) -> None:
        """Add a step."""
        if self._count == len(self._columns["step"]):
            for name, column in self._columns.items():
                self._columns[name] = np.empty(2 * self._count, column.dtype)  # takes memory where it is written to
                self._columns[name][: self._count] = column
        for name, value in values_of(row).items():
            self._columns[name][self._count] = value  # None becomes NaN
        self._count_step(row, 1)
        self._recent.append(row)
        if row.samples:
            self._samples.append(Samples(step=row.step, texts=row.samples))
        if row.held_out:
            self._held_out.append(row)

    def pop(self) -> None:
        """Remove the last step, but not that before it as well."""
        row = self._recent.pop()
        self._count_step(row, -1)
        if row.samples:
            self._samples.pop()
        if row.held_out:
            self._held_out.pop()

    def _count_step(self, row: StepMetrics, sign: int) -> None:
        self._count += sign
        self._skipped += sign * row.skipped
        self._seconds += sign * row.step_s

    @property
    def last_step(self) -> int:
        """Number of the last step; 0 without one."""
        return self._recent[-1].step if self._recent else 0

    @property
    def recent(self) -> list[StepMetrics]:
        """The last `RECENT` steps."""
        return list(self._recent)[-RECENT:]

    @property
    def samples(self) -> list[Samples]:
        """The last `SAMPLES_SHOWN` samples, the newest first."""
        return list(self._samples)[::-1][:SAMPLES_SHOWN]

    @property
    def held_out(self) -> StepMetrics | None:
        """The last step with an evaluation."""
        return self._held_out[-1] if self._held_out else None

    @property
    def curves(self) -> Curves:
        """The series; they share memory with the columns, until the next step."""
        return Curves(**{name: column[: self._count] for name, column in self._columns.items()})

    def totals(self) -> dict[str, Any]:
        """What `StepTotals` computes of the same steps."""
        last, curves = self._recent[-1] if self._recent else None, self.curves
        first = WARMUP_STEPS if self._count > WARMUP_STEPS else 0
        losses, memory = (values[np.isfinite(values)] for values in (curves.loss, curves.peak_memory))
        tail = losses[-max(1, len(losses) // 10) :]
        ends = None
        if len(losses):
            ends = Losses(first=float(losses[0]), final=float(losses[-1]), tail_mean=float(tail.mean()))
        return {
            "steps": self.last_step, "tokens": last.tokens if last else 0, "losses": ends,
            "tokens_per_s": _median(curves.tokens_per_s[first:]), "skipped_steps": self._skipped,
            "wall_s": self._seconds, "held_out": self.held_out.held_out if self.held_out else None,
            "mfu": None if (mfu := _median(curves.mfu[first:])) is None else mfu / 100,
            "peak_memory": round(2**30 * float(memory.max())) if len(memory) else None,
        }  # fmt: skip


def _median(values: NDArray[Any]) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def run_folder(path: Path) -> Path:
    """The output folder of a run, given that or a checkpoint; a folder without files may become one."""
    # Raises ValueError for another folder, with the runs in it.
    folder = run_of(path)
    if not folder.is_dir():
        beside = [str(path.parent / other.name) for other in folder.parent.glob("*") if other.is_dir()]
        raise ValueError(
            f"there is no folder {path}{nearest(str(path), beside)}; give the output folder of a run, as runs/demo. To "
            f"watch one that has not begun, make its folder first: mkdir -p {path}"
        )
    names = {child.name for child in folder.iterdir()}
    if not names or names & {*RUN_MARKERS, SETUP_FILE, LOCK}:
        return folder
    runs = [child.name for child in sorted(folder.iterdir()) if (child / METRICS_FILE).exists()]
    commands = ", ".join(f"octavo watch {path / name}" for name in runs[:6])
    hint = f"; it has runs: {commands}" if runs else "; give one, as runs/demo"
    raise ValueError(f"{path} is not the output folder of a run, it has no {METRICS_FILE} and no {CONFIG_FILE}{hint}")


class LiveRun:
    """Reads a run again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps = LiveSteps()
        self._metrics = RecordFollower(folder / METRICS_FILE, StepMetrics, STEP, records=self._steps)
        self._events: RecordFollower[dict[str, Any]] = RecordFollower(folder / EVENTS_FILE, Event, EVENT)
        self._statistics: RecordFollower[OperandStats] = RecordFollower(folder / STATISTICS_FILE, Row, ROW)
        self._heatmaps: list[Chart] = []
        self._seen: Any = None
        self._text = ""

    def read(self) -> str:
        """What the page shows, as JSON; the same text as before if nothing has changed."""
        # Raises ValueError for a file that is not a run's.
        locked = is_locked(self._folder / LOCK)
        seen = locked, [_stamp(self._folder / name) for name in FOLLOWED]
        if seen != self._seen:
            self._metrics.poll()
            self._events.poll()
            before = len(self._statistics.records)
            if (self._statistics.poll(), len(self._statistics.records)) != (before, before):
                self._heatmaps = heatmaps(self._statistics.records)
            self._text = json.dumps(self._content(locked), allow_nan=False)
            self._seen = seen
        return self._text

    def _content(self, locked: bool | None) -> dict[str, Any]:
        setup = RunSetup.read(self._folder)
        ended = RunResult.read(self._folder) if (self._folder / RESULT_FILE).exists() else None
        state, text = _state(locked, setup, ended, self._steps.last_step)
        content: dict[str, Any] = {"state": state, "text": text, "folder": str(self._folder), "step": 0, "steps": 0}
        summary = setup.summary if setup is not None else ended
        if summary is None:
            return content | {"title": self._folder.name, "subtitle": ""}
        run = self._logged(replace(summary, **self._steps.totals()), setup)
        result, recent = run.result, self._steps.recent
        charts = run_charts([run]) | {"maps": self._heatmaps}
        steps, started = (result.steps, None) if setup is None else (setup.steps, setup.started)
        return content | {
            "title": result.name,
            "subtitle": f"{arm_name(result.precision)} · {result.parameters:,} parameters · {result.device}",
            "step": result.steps, "steps": steps, "started": started, "last": recent[-1].time if recent else None,
            "seconds_per_step": _seconds_per_step(recent, started or 0.0), "tiles": _tiles(self._steps, run),
            "charts": {size: [chart.json for chart in group] for size, group in charts.items()},
            "samples": [asdict(samples) for samples in run.samples],
            "events": self._events.records[-EVENTS_SHOWN:][::-1],
            "events_in_all": len(self._events.records), "rows": summary_rows([result]), "layers": run.layers,
            "converted": result.converted, "config": run.config,
        }  # fmt: skip

    def _logged(self, result: RunResult, setup: RunSetup | None) -> LoggedRun:
        config = self._folder / CONFIG_FILE
        return LoggedRun(
            label=arm_name(result.precision), slot=0, result=result, curves=self._steps.curves,
            config=config.read_text(encoding="utf-8") if config.exists() else "", layers=read_layers(self._folder),
            statistics=[], findings=[], events=self._events.records, setup=setup, samples=self._steps.samples,
        )  # fmt: skip


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes with the content of a file; None without it."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _state(locked: bool | None, setup: RunSetup | None, ended: RunResult | None, step: int) -> tuple[str, str]:
    """The state of a run after its last step for the page, and a sentence about it."""
    if locked and setup is None:
        return "preparing", "The run reads its data and builds its model."
    if locked:
        return "training", ""
    if ended is not None and ended.steps == step:
        return ENDED.get(ended.stopped, ("stopped", f"The run has stopped: {ended.stopped}."))
    if locked is None and setup is not None:
        return "training", "This file system has no locks: whether the run goes on is not known."
    if setup is None:
        return "waiting", "The run has not begun. This page shows it once it has."
    return "killed", f"The run was killed after step {step:,}, before it could save; --resume goes on."


def _seconds_per_step(recent: list[StepMetrics], started: float) -> float | None:
    """Mean seconds of the last steps of this process, with what lies between them."""
    times = [row.time for row in recent if row.time is not None and row.time >= started]
    if len(times) > 1:
        return (times[-1] - times[0]) / (len(times) - 1)
    return recent[-1].step_s if recent else None


def _tiles(steps: LiveSteps, run: LoggedRun) -> list[dict[str, str]]:
    if not (recent := steps.recent):
        return []
    last, unit, setup = recent[-1], run.result.unit, run.setup
    expected, data = (setup.expected, setup.data) if setup is not None else (None, None)
    window = run.curves.loss[-smoothing_window(setup.steps if setup is not None else len(steps)) :]
    losses = window[np.isfinite(window)]
    mean = f"mean of {len(losses)} steps" if len(losses) > 1 else "last step"
    tiles = [(f"{losses.mean():.4f}" if len(losses) else "not finite", f"loss, {mean}")]
    if steps.held_out is not None:
        tiles += [
            (held_out_text(name, value), f"{held_out_label(name)}, step {steps.held_out.step:,}")
            for name, value in (steps.held_out.held_out or {}).items()
        ]
    speed = f", {expected.tokens_per_s:,.0f} predicted" if expected is not None and expected.tokens_per_s else ""
    tiles.append((f"{statistics.median(row.tokens_per_s for row in recent):,.0f}", f"{unit}/s{speed}"))
    if last.mfu is not None:
        mfu = statistics.median(row.mfu for row in recent if row.mfu is not None)
        fp8 = ""
        if expected is not None and expected.fp8_flops:
            fp8 = f"; {mfu * expected.bf16_flops / expected.fp8_flops:.1%} of the FP8 peak"
        tiles.append((f"{mfu:.1%}", f"MFU, of the bf16 peak{fp8}"))
    if last.peak_memory is not None:
        predicted = f", {expected.memory / 2**30:.1f} predicted" if expected is not None and expected.memory else ""
        tiles.append((f"{last.peak_memory / 2**30:.1f} GiB", f"peak memory{predicted}"))
    norm = "not finite" if last.grad_norm is None else f"{last.grad_norm:.3g}"
    tiles.append((norm, "gradient norm before clipping"))
    if data is not None and last.epoch is not None:
        size = f"{data.rows:,} rows"
        if data.documents is not None and data.tokens is not None:
            size = f"{data.tokens:,} in {data.documents:,} documents"
        tiles.append((f"{last.epoch:.3g}", f"epochs: {last.tokens:,} {unit} so far; the data has {size}"))
    return [{"value": value, "label": label} for value, label in tiles]
