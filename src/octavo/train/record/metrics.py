"""Metrics of a run: a line for each step in `metrics.jsonl`, a summary in `run.json`, its setup in `setup.json`.

What else happened is in `events.jsonl`. On resume both are cut back to the step of the checkpoint, but for a rollback
to it or to one before: that has happened, and is the state of the guard until the next checkpoint.

    {"step": 50, "event": "move", "text": "model.layers.3.mlp.down_proj: rowwise → blockwise (x: …)"}
    {"step": 23, "event": "rollback", "text": "…", "to": 20, "rollbacks": 1, "skipped_batches": 3}
"""

import dataclasses
import json
import math
import os
import re
import statistics
import tomllib
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from pathlib import Path
from typing import Annotated, Any, NotRequired, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, with_config
from typing_extensions import TypedDict

from octavo.inspect.findings import OPERANDS, Finding, History, OperandStats, Thresholds, findings
from octavo.train.checkpoint.retention import FOLDER
from octavo.train.disk import names_file, write_file
from octavo.train.record.json_lines import STRICT, NonNegative, Record, each_record, first_error, read_record

# What `[inspect]` leaves behind: one line per operand and sampled step in `statistics.jsonl`, and TensorBoard scalars.
#
# A figure that crosses a limit (`[inspect.limits]`) is reported once, and not again while it lasts; a resumed run reads
# earlier samples from the file. An SQNR that is NaN is null, one that is infinite "inf".


STATISTICS_FILE = "statistics.jsonl"
CHECKPOINT = re.compile(r"step-(\d+)")  # Folder of a checkpoint


def _level(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError('NaN is null, and infinity "inf"')
    return {None: math.nan, "inf": math.inf}.get(value, value) if isinstance(value, str | None) else value


Level = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_level)]  # dB, as JSON has them


@dataclass(frozen=True, kw_only=True)
class _Row(OperandStats, Record):
    step: NonNegative
    elements: NonNegative
    nonfinite: NonNegative
    sqnr: Level
    what_if: dict[str, Level]
    channel_scales: tuple[float, ...] = ()


Row: Any = Annotated[_Row, AfterValidator(lambda row: OperandStats(**vars(row)))]  # The same, read as `OperandStats`


def read_statistics(out: Path) -> list[OperandStats]:
    """Read the statistics in the output folder `out`, in order; [] where there are none."""
    return list(each_record(out / STATISTICS_FILE, Row, "a row of statistics", rise=0))


def statistics_of(folder: Path) -> list[OperandStats]:
    """The statistics of a run, or of a run up to one of its checkpoints."""
    at = CHECKPOINT.fullmatch(folder.resolve().name)
    run = run_of(folder)
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}: give the output folder of a run, as runs/demo")
    rows = [row for row in read_statistics(run) if at is None or row.step <= int(at[1])]
    if not rows:
        before = f" up to step {int(at[1])}" if at else ""
        raise ValueError(f"{run} has no statistics{before}: train with inspect.every=50, for every 50th step")
    return rows


def run_of(folder: Path) -> Path:
    """The output folder of a run, given that or a checkpoint of it."""
    folder = folder.resolve()
    return folder.parents[1] if CHECKPOINT.fullmatch(folder.name) else folder


def limits_of(run: Path) -> Thresholds:
    """The limits of a run, from the `config.toml` of its output folder; the defaults without one."""
    from octavo.train.config.sections import Limits

    path = run / "config.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return Thresholds(**Limits.model_validate(tables.get("inspect", {}).get("limits", {})).model_dump())
    except (ValueError, AttributeError, RecursionError) as error:
        reason = f"inspect.limits.{first_error(error)}" if isinstance(error, ValidationError) else error
        raise ValueError(f"{path} is not the configuration of a run: {reason}") from None


def all_findings(rows: Sequence[OperandStats], thresholds: Thresholds | None = None) -> list[Finding]:
    history, result = History(), []
    for now in _steps(rows):
        result += findings(now, thresholds or Thresholds(), history)
        history.add(now)
    return result


def _steps(rows: Sequence[OperandStats]) -> Iterator[list[OperandStats]]:
    return (list(of_step) for _, of_step in groupby(rows, key=lambda row: row.step))


class StatisticsWriter:
    def __init__(self, out: Path, *, after_step: int, board: Any, limits: Thresholds | None = None) -> None:
        self._path, self._board, self._limits = out / STATISTICS_FILE, board, limits or Thresholds()
        self._history = History()
        self._crossed: set[tuple[str, str, str]] = set()
        if self._path.exists():
            earlier = [row for row in read_statistics(out) if row.step <= after_step]
            for rows in _steps(earlier):
                self._news(rows)
            write_file(self._path, "".join(map(_statistics_line, earlier)))

    def write(self, rows: Sequence[OperandStats]) -> list[Finding]:
        """Append the rows of a step. Returns what crossed a limit in it, and did not in the sample before."""
        if not rows:
            return []
        with names_file(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_statistics_line, rows)))
        for row in rows:
            for figure, value in (("sqnr", row.sqnr), ("underflow", row.underflow), ("amax", row.amax)):
                self._scalar(f"{row.operand}_{figure}/{row.layer}", value, row.step)
        for operand in OPERANDS:
            if levels := [row.sqnr for row in rows if row.operand == operand]:
                self._scalar(f"inspect/lowest_sqnr_{operand}", min(levels), rows[0].step)
        return self._news(rows)

    def _news(self, rows: Sequence[OperandStats]) -> list[Finding]:
        crossings = findings(rows, self._limits, self._history)
        self._history.add(rows)
        before = self._crossed
        self._crossed = {(finding.layer, finding.operand, finding.what) for finding in crossings}
        return [finding for finding in crossings if (finding.layer, finding.operand, finding.what) not in before]

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._board.add_scalar(name, value, step)


def _statistics_line(row: OperandStats) -> str:
    return json.dumps(row.to_json(), allow_nan=False) + "\n"


METRICS_FILE = "metrics.jsonl"
RESULT_FILE = "run.json"
SETUP_FILE = "setup.json"
TENSORBOARD_DIR = "tensorboard"
CONFIG_FILE = "config.toml"
LAYERS_FILE = "layers.json"  # The rows of `octavo.report`, from an FP8 run only
RUN_MARKERS = (METRICS_FILE, RESULT_FILE, FOLDER, CONFIG_FILE)  # Files that identify the folder of a run
LOSS, LOSS_HIGH_PRECISION, LOSS_EMA = "loss", "loss_high_precision", "loss_ema"
"""Names of the losses on held-out data: as trained, with all layers in high precision, and of the averaged weights."""
WARMUP_STEPS = 5  # First steps excluded from the median speed, because allocation, caches and clocks have not settled


@dataclass(frozen=True, kw_only=True)
class StepMetrics(Record):
    """One line of `metrics.jsonl`."""

    step: NonNegative
    """Steps finished, this one included: 1, 2, …"""
    tokens: NonNegative
    """Target tokens trained on since the start of the run, this step included."""
    loss: float | None
    """Mean cross-entropy of the step's batch in nats per token; None if it was not finite (the step was skipped)."""
    lr: float
    """Learning rate the step used."""
    grad_norm: float | None
    """Global L2 norm of the gradient before clipping; None if it was not finite (the step was skipped)."""
    loss_scale: float | None
    """Factor the loss was multiplied by for backward; None without loss scaling."""
    skipped: bool
    """True if the gradient overflowed and the optimizer did not step."""
    step_s: float
    """Seconds the step took: batch, forward, backward, optimizer."""
    tokens_per_s: float
    """Target tokens per second of this step."""
    held_out: dict[str, float | None] | None = None
    """Metrics on held-out data after this step, by name; None where they were not measured, or are not finite."""
    samples: list[dict[str, str]] | None = None
    """Text that the model wrote after this step, `{"prompt": …, "text": …}`, without the prompt; None for none."""
    time: float | None = None
    """When the step ended, in seconds since 1970."""
    epoch: float | None = None
    """Position in the data: how often the run has seen all of it, skipped batches included."""
    mfu: float | None = None
    """Model FLOPs utilization: the share of the devices' bf16 peak that the model's own operations take; None where the
    peak is not known."""
    peak_memory: NonNegative | None = None
    """Largest number of bytes of tensors on the GPU of rank 0 so far; None on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Losses(Record):
    """The loss curve in three numbers (nats per token)."""

    first: float
    """Loss of the first step."""
    final: float
    """Loss of the last step."""
    tail_mean: float
    """Mean over the last 10 % of the steps (at least one)."""


@dataclass(frozen=True, kw_only=True)
class RunResult(Record):
    """The summary of a run, written to `run.json` in its output folder."""

    name: str
    precision: str
    """Precision of the run: "bf16", or the level and its recipe, as "fp8 rowwise"."""
    device: str
    """Name of the device, as "cpu" or "NVIDIA H200"."""
    steps: NonNegative
    """Steps finished."""
    tokens: NonNegative
    """Target tokens trained on."""
    parameters: NonNegative
    """Number of model parameters, tied ones counted once."""
    losses: Losses | None
    """None if no step with a finite loss finished."""
    tokens_per_s: float | None
    """Median over the steps, the first five left out where there are more; None before the first step."""
    saved_bytes_per_token: float | None
    """Bytes saved for backward per token of a micro-batch, without parameters and buffers."""
    skipped_steps: NonNegative
    """Steps skipped for an overflow under loss scaling."""
    wall_s: float
    """Seconds spent in steps, including those before a resume."""
    versions: dict[str, str]
    """Versions of octavo, torch, transformers and python."""
    converted: str
    """What `octavo.convert` reported, in one line; empty for a bf16 run."""
    stopped: str
    """"done", "early" (`eval.patience`), "sigterm" (stopped by SIGTERM or SIGINT, resumable) or "non-finite"."""
    state_bytes_per_parameter: float | None = None
    """Bytes of moments, scales, masters and remainders per trained parameter; None before the first step."""
    unit: str = "tokens"
    """What `tokens` counts: the targets, which are tokens or images."""
    held_out: dict[str, float | None] | None = None
    """The last metrics on held-out data, by name, as "accuracy"; None where none were measured."""
    mfu: float | None = None
    """Median of the steps' `mfu`, as that of `tokens_per_s`."""
    peak_memory: NonNegative | None = None
    """Largest number of bytes of tensors on the GPU of rank 0."""
    startup: dict[str, dict[str, float]] | None = None
    """Seconds of each stage up to the first step of the last process, as `{"weights": {"wall": 3.8, "cpu": 6.1}}`."""
    compiled: str = ""
    """Which blocks `run.compile` compiles, or why it does not; empty where it is off."""

    def write(self, out: Path) -> None:
        """Write `run.json` into the output folder `out`, replacing the earlier one atomically."""
        write_file(out / RESULT_FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, out: Path) -> "RunResult":
        """Read `run.json` from the output folder `out`. Raises ValueError if there is none, or it is not one."""
        if not (path := out / RESULT_FILE).exists():
            raise ValueError(f"{out} holds no {RESULT_FILE}: give the output folder of a run that finished")
        return read_record(path.read_bytes(), cls, f"{path} is not the summary of a run")


@dataclass(frozen=True, kw_only=True)
class DataSize(Record):
    rows: NonNegative  # Sequences or images of an epoch
    documents: NonNegative | None = None  # Documents; None where the data has none
    tokens: NonNegative | None = None  # Tokens of them


@dataclass(frozen=True, kw_only=True)
class ExpectedStep(Record):
    """What the planner predicts for a step of the run."""

    gpu: str  # The GPU of the prediction
    flops: float  # Operations of the model in a step, on all GPUs, without recomputation
    bf16_flops: float  # bf16 peak of all GPUs, in FLOP/s
    fp8_flops: float  # FP8 peak of all GPUs, in FLOP/s; 0 where they have none
    memory: NonNegative | None = None  # Most bytes of tensors on a GPU; None where the layout has no prediction
    tokens_per_s: float | None = None  # Tokens per second of all GPUs; None as `memory`


@dataclass(kw_only=True)
class RunSetup(Record):
    """What a run knows before its first step, and what it predicts after it."""

    started: float  # When training began or was resumed, in seconds since 1970
    steps: NonNegative  # Steps of the whole run
    summary: RunResult  # The summary before the first step
    data: DataSize | None  # Size of the data; None where the task does not count it
    expected: ExpectedStep | None  # None until the first step has ended, on a CPU, and without a prediction

    def write(self, out: Path) -> None:
        write_file(out / SETUP_FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, out: Path) -> "RunSetup | None":
        """Read `setup.json` from `out`; None if there is none. Raises ValueError for another content."""
        path = out / SETUP_FILE
        return read_record(path.read_bytes(), cls, f"{path} is not the setup of a run") if path.exists() else None


def each_step(out: Path, last: int = 0) -> Iterator[StepMetrics]:
    """The steps that `read_metrics` reads, one at a time: a run of weeks has millions."""
    path, count, step, first = out / METRICS_FILE, 0, 0, 0
    for row in each_record(path, StepMetrics, "a step of a run", rise=1):
        count, step = count + 1, row.step
        first = first or (step != count and count)
        yield row
    if count < (last := max(last, step)):
        lack = f"{path} lacks {last - count} of {last} steps, the first of them step {first or count + 1}"
        warnings.warn(f"{lack}: curves and means are of the others", RuntimeWarning, stacklevel=3)


def read_metrics(out: Path, last: int = 0) -> list[StepMetrics]:
    """Read the steps in the output folder `out`, in order; [] where there are none yet.

    An incomplete last line of a killed process is skipped with a warning. Any other line that is not a step, or out of
    order, raises ValueError with its number and the field. Missing steps, of at least `last`, give a warning: a power
    cut loses lines that were not on disk yet.

    Examples:
        >>> config, out = octavo.train.load_config("config.toml", ["run.steps=2"]), Path("runs/metrics")
        >>> result = octavo.train.run(config, out=out)
        >>> [step.step for step in octavo.train.read_metrics(out)]
        [1, 2]
    """
    return list(each_step(out, last))


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class StepTotals:
    """What the summary of a run takes from its steps: 24 bytes of each, of which a run of weeks has millions."""

    def __init__(self, rows: Iterable[StepMetrics] = ()) -> None:
        self._step = self._tokens = self._skipped = 0
        self._seconds = 0.0
        self._losses, self._speeds, self._mfus = array("d"), array("d"), array("d")  # NaN for an unknown MFU
        self.held_out: dict[str, float | None] | None = None
        self._peak_memory: int | None = None
        for row in rows:
            self.add(row)

    def add(self, row: StepMetrics) -> None:
        self._step, self._tokens = row.step, row.tokens
        self._skipped += row.skipped
        self._seconds += row.step_s
        self._speeds.append(row.tokens_per_s)
        if row.loss is not None:
            self._losses.append(row.loss)
        self._mfus.append(math.nan if row.mfu is None else row.mfu)
        self.held_out = row.held_out or self.held_out
        if row.peak_memory is not None:
            self._peak_memory = max(row.peak_memory, self._peak_memory or 0)

    @property
    def losses(self) -> Losses | None:
        losses = self._losses
        if not losses:
            return None
        tail = losses[-max(1, len(losses) // 10) :]
        return Losses(first=losses[0], final=losses[-1], tail_mean=statistics.fmean(tail))

    def fields(self) -> dict[str, Any]:
        """The fields of a `RunResult` from its steps; speed and MFU without the first five where there are more."""
        first = WARMUP_STEPS if len(self._speeds) > WARMUP_STEPS else 0
        speeds, mfus = self._speeds[first:], [mfu for mfu in self._mfus[first:] if not math.isnan(mfu)]
        return {
            "steps": self._step, "tokens": self._tokens, "losses": self.losses, "skipped_steps": self._skipped,
            "tokens_per_s": statistics.median(speeds) if speeds else None, "wall_s": self._seconds,
            "held_out": self.held_out, "mfu": statistics.median(mfus) if mfus else None,
            "peak_memory": self._peak_memory,
        }  # fmt: skip


class MetricsBuffer(StepTotals):
    """Counts steps, on ranks that write no files. A context manager."""

    last: StepMetrics | None = None  # The last step, where files are written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, row: StepMetrics) -> None:
        self.add(row)

    def amend(self, row: StepMetrics) -> None:
        """Add to the last step what was measured after it: `held_out` and `samples`."""
        self.held_out = row.held_out or self.held_out

    def write_statistics(self, rows: Sequence[OperandStats]) -> list[Finding]:
        return []


class MetricsWriter(MetricsBuffer):
    """Append steps to `metrics.jsonl`, statistics to `statistics.jsonl`, both to TensorBoard; a context manager."""

    # `after_step`: number of finished steps at the start of this process. Later lines of an earlier process are
    # dropped, in TensorBoard too. `log_every`: steps between two TensorBoard points. `limits`: thresholds of reported
    # statistics; None for the defaults. `loggers`: makes of TensorBoard's writer one that writes to others too.

    def __init__(
        self, out: Path, *, after_step: int, log_every: int, limits: Thresholds | None = None,
        loggers: Callable[[Any], Any] = lambda board: board,
    ) -> None:  # fmt: skip
        rows = [row for row in read_metrics(out, after_step) if row.step <= after_step]
        super().__init__(rows)
        self._log_every = log_every
        self._path = out / METRICS_FILE
        write_file(self._path, "".join(map(_line, rows)))
        self.last = rows[-1] if rows else None
        self._file = self._path.open("r+", encoding="utf-8")
        self._start = self._file.seek(0, os.SEEK_END) - (len(_line(rows[-1])) if rows else 0)
        from torch.utils.tensorboard import SummaryWriter  # half a second, and only a run that trains needs it

        self._board = loggers(SummaryWriter(str(out / TENSORBOARD_DIR), purge_step=after_step + 1))
        self._statistics = StatisticsWriter(out, after_step=after_step, board=self._board, limits=limits)

    def __exit__(self, *_: object) -> None:
        try:
            with names_file(self._path):
                self._file.close()
        finally:
            self._board.close()

    def write(self, row: StepMetrics) -> None:
        self.add(row)
        self._start = self._file.seek(0, os.SEEK_END)
        self._write(row)
        if row.step % self._log_every == 0:
            for name in ("loss", "lr", "grad_norm", "loss_scale", "tokens_per_s", "epoch", "mfu", "peak_memory"):
                if (value := getattr(row, name)) is not None:
                    self._board.add_scalar(f"train/{name}", value, row.step)

    def amend(self, row: StepMetrics) -> None:
        super().amend(row)
        if row != self.last:
            self._write(row)
        for name, value in (row.held_out or {}).items():
            if value is not None:
                self._board.add_scalar(f"held_out/{name}", value, row.step)

    def _write(self, row: StepMetrics) -> None:
        """Write the last line, over what is there of it, which is shorter: a kill leaves the one or the other."""
        self.last = row
        with names_file(self._path):
            self._file.seek(self._start)
            self._file.write(_line(row))
            self._file.flush()

    def write_statistics(self, rows: Sequence[OperandStats]) -> list[Finding]:
        return self._statistics.write(rows)


def _line(row: StepMetrics) -> str:
    fields = dataclasses.asdict(row)
    for field in dataclasses.fields(row):
        if field.default is None and fields[field.name] is None:
            del fields[field.name]
    return json.dumps(fields, allow_nan=False) + "\n"


EVENTS_FILE = "events.jsonl"
FINDING, MOVE, ROLLBACK, LOSS_SCALE, RESTART = "finding", "move", "rollback", "loss_scale", "restart"
EVALUATION = "evaluation"  # Of the model before its first step


def _check_rollback(event: dict[str, Any]) -> dict[str, Any]:
    if "rollbacks" in event and not {"to", "skipped_batches"} <= event.keys():
        raise ValueError("rollbacks: come with to and skipped_batches")
    return event


@with_config(STRICT)
class _Event(TypedDict):
    step: NonNegative
    event: str
    text: str
    to: NotRequired[NonNegative]  # and the following, of a rollback
    rollbacks: NotRequired[NonNegative]
    skipped_batches: NotRequired[NonNegative]


Event: Any = Annotated[_Event, AfterValidator(_check_rollback)]  # A line of `events.jsonl`; readers take it as a dict


def add_event(out: Path, step: int, event: str, text: str, **details: int) -> None:
    """Append an event to the record of the run in `out`, after its last whole line."""
    path = out / EVENTS_FILE
    with names_file(path), path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read() not in (b"", b"\n"):  # a process was killed while it wrote
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(_event_line({"step": step, "event": event, "text": text} | details).encode())


def read_events(out: Path) -> list[dict[str, Any]]:
    """The events of a run, in order; [] where there were none."""
    return list(each_record(out / EVENTS_FILE, Event, "an event of a run"))


def last_rollback(out: Path, step: int) -> dict[str, Any] | None:
    """The last rollback of a run that resumes from a checkpoint of `step`; None if there was none."""
    return next((event for event in reversed(read_events(out)) if _happened_before(event, step)), None)


def drop_later_events(out: Path, after_step: int) -> None:
    """Drop the events of steps after `after_step`, and rollbacks to such steps."""
    if not (out / EVENTS_FILE).exists():
        return
    events = read_events(out)
    last = max((number for number, event in enumerate(events) if _happened_before(event, after_step)), default=-1)
    stays = (number <= last if e["event"] == ROLLBACK else e["step"] <= after_step for number, e in enumerate(events))
    write_file(out / EVENTS_FILE, "".join(map(_event_line, compress(events, stays))))


def _happened_before(event: dict[str, Any], step: int) -> bool:
    return bool(event["event"] == ROLLBACK and event.get("to", event["step"]) <= step)


def _event_line(event: Mapping[str, object]) -> str:
    return json.dumps(event, ensure_ascii=False) + "\n"
