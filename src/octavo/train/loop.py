"""The training loop: data, model, precision and steps (`octavo.train.trainer`).

    for each step:  batch(seed, step) → micro-batches: forward, loss / tokens of the step, backward, add up in fp32
                    → norm → finite? → clip → AdamW on the masters → metrics

A resumed run equals an uninterrupted one bit for bit. A run that stops on a non-finite value saves the state before.
"""

import json
import math
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from octavo.planner.devices import gpu_by_driver_name
from octavo.runtime.extras import INSTALL
from octavo.runtime.stopwatch import Stopwatch
from octavo.train.checkpoint.digests import DIGESTS, check_digests
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.checkpoint.store import load_checkpoint, read_trainer_state, saved_weights
from octavo.train.config.run_config import ConfigError, TrainConfig, one_line, parse_config
from octavo.train.config.sections import Data, ParallelConfig, expand, hub_folder
from octavo.train.data.epochs import difference, read_data_state
from octavo.train.diagnose import NonFiniteError, advice, changing_parameters, diverged
from octavo.train.disk import output_folder, write_file
from octavo.train.evaluation import Patience
from octavo.train.guard import SpikeError
from octavo.train.lora import frozen_note
from octavo.train.model import check_model
from octavo.train.optimizer import state_bytes_per_parameter
from octavo.train.ranks import Ranks, deterministic_algorithms, device_name, join_ranks, under_torchrun
from octavo.train.record import metrics as records
from octavo.train.record.loggers import RunFolder, ScalarLog, check_loggers, open_run_folder
from octavo.train.record.metrics import LOSS, ExpectedStep, MetricsBuffer, RunResult, RunSetup, StepMetrics
from octavo.train.record.progress import NullProgress, Progress
from octavo.train.run_plan import plan_configured
from octavo.train.sampling import Sampler
from octavo.train.signals import Between, Stop, StopRequested, stop_on
from octavo.train.tasks.registry import task_of
from octavo.train.tasks.task import Data as TaskData
from octavo.train.tasks.task import Task
from octavo.train.trainer import Trainer

# What a step says about the machine and the data: MFU, peak memory, position in the data, time; `run.profile`.
#
# The planner predicts a step in seconds on a CPU, after the first one. It cannot run in a thread beside that: while
# Transformers makes the planned model, the default dtype of the whole process is that model's.


def with_gauges(row: StepMetrics, trainer: Trainer, setup: RunSetup) -> StepMetrics:
    expected, data, device = setup.expected, setup.data, trainer.ranks.device
    batches = row.step + trainer.skipped_batches
    epoch = batches * trainer.config.optim.batch / data.rows if data is not None else None
    mfu = expected.flops / row.step_s / expected.bf16_flops if expected is not None else None
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return replace(row, time=time.time(), epoch=epoch, mfu=mfu, peak_memory=memory)


def expected_step(config: TrainConfig, device: str, gpus: int) -> ExpectedStep | None:
    """Predict a step of a run; None on a device that the planner does not know."""
    if (gpu := gpu_by_driver_name(device)) is None:
        return None
    parallel = config.parallel
    divides_layers = max(parallel.tp, parallel.cp, parallel.ep) > 1  # planned in a process group, and this is in one
    if divides_layers:
        alone = config.optim.model_copy(update={"micro_batches": config.optim.batch})
        config = config.model_copy(update={"parallel": ParallelConfig(), "optim": alone})
    planned = plan_configured(config, gpu=device, gpus=1 if divides_layers else gpus)
    return ExpectedStep(
        gpu=gpu.name, flops=planned.time.flops, bf16_flops=gpus * gpu.bf16_tflops * 1e12,
        fp8_flops=gpus * gpu.fp8_tflops * 1e12, memory=None if divides_layers else planned.memory.peak,
        tokens_per_s=None if divides_layers else planned.time.tokens_per_second,
    )  # fmt: skip


T = TypeVar("T")

TRACE, TABLE = "profile.json", "profile.txt"
ROWS = 40  # Operations in the table, the longest first


class StepProfile:
    """Profiles the steps from the first to the last of `steps`, counted from 1, or what a run takes of them."""

    def __init__(self, steps: Sequence[int] | None, out: Path, note: Callable[[str], None]) -> None:
        self._first, self._last = steps or (0, 0)
        self._out, self._note = out, note
        self._profiler: profile | None = None
        self._taken = 0

    def run(self, step: int, take: Callable[[], T]) -> T:
        if step == self._first or (self._first < step <= self._last and not self._taken):  # or resumed in between
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profiler.start()
        result = take()
        if self._profiler is not None:
            self._taken += 1
            if step == self._last:
                self.finish()
        return result

    def finish(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self._out / TRACE))
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=80)
        (self._out / TABLE).write_text(f"{self._taken} steps\n{table}\n")
        self._note(f"profiled {self._taken} steps: {self._out / TABLE}, and {TRACE} for ui.perfetto.dev")


MAX_FINDINGS_SHOWN = 4  # Largest number of findings printed for one step
REQUIRED_PACKAGES = ("safetensors", "tokenizers", "transformers", "tensorboard", "jinja2", "plotly")  # Of every run
SLOW_STEP_SECONDS = 2.0  # Steps that take longer may end between two micro-batches
PREPARATION_TIMEOUT = timedelta(days=7)  # Wait for the rank that prepares the data; its death ends it at once


def run(
    config: TrainConfig, *, out: Path | None = None, resume: bool = False, progress: Progress | None = None,
    startup: Stopwatch | None = None, dry_run: bool = False, best_effort: bool = False,
) -> RunResult:  # fmt: skip
    """Train a model and return the summary, which is also written to `run.json`.

    Args:
        config: Configuration of the run, from `load_config`.
        out: Output folder; overrides `run.out`. Default: `runs/<name>`.
        resume: Continue from the newest checkpoint in `out`, or from the start if it holds none.
        progress: Receives stages, steps and notes; None prints nothing.
        startup: Measures the stages before the first step; None begins here.
        dry_run: Make all checks and take one step, and keep nothing of it.
        best_effort: With `resume`, from the newest checkpoint that is whole; damaged ones are renamed "damaged-…".

    In the main thread, SIGTERM (and SIGINT after training has begun) finishes the step, or where it has several slow
    micro-batches drops it, saves, and returns with `stopped = "sigterm"`. SIGTERM before the first step saves the
    initial state; if the data and the model are not ready within 8 s, it raises SystemExit.

    Raises:
        ConfigError: For a mistake in configuration, data, model or output folder; nothing is overwritten.
        NonFiniteError: For a loss or gradient that is NaN or infinite; names the layer.

    Examples:
        >>> config = octavo.train.load_config("config.toml", ["run.steps=2"])
        >>> octavo.train.run(config, out=Path("runs/two-steps")).steps
        2
    """
    out = expand(out or config.run.out or Path("runs") / config.run.name)
    startup = startup or Stopwatch()
    stop = Stop(lambda text: own_progress.note(text))
    own_progress: Progress = NullProgress()
    # A signal to torchrun and its processes reaches the processes twice; SIGKILL still ends them.
    with stop_on(stop, signal.SIGTERM, patient=under_torchrun()), join_ranks(config) as ranks, ExitStack() as stack:
        own_progress = progress if progress is not None and ranks.is_main else NullProgress()
        ranks.raise_together(lambda: _check_installed(config, ranks))
        stack.enter_context(deterministic_algorithms(config.run.deterministic))
        resume = resume or ranks.restarted
        if dry_run:  # after a look at the folder, it writes elsewhere and tells no server
            ranks.run_on_rank0(partial(open_run_folder, out, config, resume=resume))
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-dry-run-"))
            config = config.model_copy(update={"run": config.run.model_copy(update={"loggers": []})})
            out, resume = Path(scratch), False
        run_folder = ranks.run_on_rank0(lambda: _open_run_folder(stack, out, config, resume, ranks, best_effort))
        for note in run_folder.notes:
            own_progress.note(note)
        ranks.raise_together(lambda: check_model(config.model, task_of(config).kind))
        if config.model.path is not None and run_folder.checkpoint is None:
            start = hub_folder(config.model.path)
            if ranks.run_on_rank0((start / DIGESTS).exists):  # a checkpoint or an export of Octavo
                ranks.raise_together(partial(check_digests, start, part=ranks.rank, parts=ranks.world_size))
        startup.lap("configuration")
        config, data = _load_data(config, ranks, own_progress)
        startup.lap("data")
        own_progress.stage("building the model")
        trainer = Trainer(config, data, ranks.device, ranks=ranks, startup=startup)
        trainer.check_causal()
        startup.lap("causality")
        sampler = None if config.sample is None else ranks.raise_together(lambda: Sampler(trainer))
        summary = trainer.describe()
        startup.lap("trial batch")
        if resume and run_folder.checkpoint is None:
            own_progress.note(f"no checkpoint in {out}: starting from the first step")
        _prepare(trainer, out, run_folder, own_progress)
        startup.lap("resume" if run_folder.checkpoint is not None else "description")
        stop.training = True
        with stop_on(stop, signal.SIGINT, patient=under_torchrun()):
            return _train(trainer, sampler, summary, out, own_progress, stop, dry_run=dry_run)


def _check_installed(config: TrainConfig, ranks: Ranks) -> None:
    if missing := [name for name in REQUIRED_PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"{missing[0]} is not installed: {INSTALL}")
    if ranks.is_main:
        check_loggers(config.run.loggers)
    if config.parallel.async_save and ranks.world_size == 1:
        raise ConfigError("parallel.async_save is for several processes, and this is one: leave it out")


def _open_run_folder(
    stack: ExitStack, out: Path, config: TrainConfig, resume: bool, ranks: Ranks, best_effort: bool
) -> RunFolder:
    """Lock the output folder until `stack` closes. Returns where the run starts."""
    if resume and not ranks.restarted and not out.exists():
        raise ConfigError(f"there is no folder {out}, so no run to resume: check --out, or leave out --resume")
    stack.enter_context(output_folder(out))
    run_folder = open_run_folder(out, config, resume=resume, best_effort=best_effort)
    ranks.begin()
    return run_folder


def _load_data(config: TrainConfig, ranks: Ranks, progress: Progress) -> tuple[TrainConfig, TaskData]:
    """Load the data: one process of each machine prepares it, then all read it. The steps may follow from it."""
    group = ranks.host_group(PREPARATION_TIMEOUT)  # `parallel.timeout` is for steps
    load = partial(task_of(config).load, config, progress)
    built = ranks.raise_together(lambda: load() if ranks.local == 0 else None, group=group)
    data: TaskData = ranks.raise_together(lambda: built or load(), group=group)
    ranks.check_same({"the content of data.source": data.fingerprint[:12]})
    task = task_of(config)(config, data)
    if config.run.epochs is not None:
        config = ranks.raise_together(lambda: _with_steps(config, task, progress))
        task = task_of(config)(config, data)
    if summary := task.data_summary():
        progress.stage(summary)
    if warning := task.data_warning():
        progress.note(warning)
    if (held_out := task.held_out) is not None:
        ranks.check_same({"the content of the data to evaluate on": held_out.fingerprint[:12]})
    return config, data


def _with_steps(config: TrainConfig, task: Task, progress: Progress) -> TrainConfig:
    epochs, size = config.run.epochs, None if config.data.streaming else task.data_size()
    assert epochs is not None
    if size is None:
        problem = f"run.epochs = {epochs:g} needs the size of the data, which is not known before the run"
        raise ConfigError(f"{problem}: set run.steps")
    steps = max(1, math.ceil(epochs * size.rows / config.optim.batch))
    progress.stage(f"{epochs:g} epochs of {size.rows:,} rows: {steps:,} steps of {config.optim.batch}")
    tables = config.model_dump(exclude_none=True)
    return parse_config(tables | {"run": tables["run"] | {"steps": steps}})


def _prepare(trainer: Trainer, out: Path, run_folder: RunFolder, progress: Progress) -> None:
    config, checkpoint, ranks = trainer.config, run_folder.checkpoint, trainer.ranks
    if checkpoint is not None:
        state = ranks.run_on_rank0(lambda: _read_state(trainer, checkpoint, config.data))
        _load_state(trainer, checkpoint, state)
        if note := ranks.raise_together(lambda: trainer.task.load_state(checkpoint)):
            progress.note(note)
        rollback = ranks.run_on_rank0(lambda: records.last_rollback(out, trainer.step))
        if rollback is not None and rollback.get("rollbacks", 0) > trainer.guard.rollbacks:  # rolled back after saving
            trainer.skipped_batches = rollback["skipped_batches"]
            trainer.guard.record_rollback(rollback["step"], rollback["to"], rollback["rollbacks"])
        if (previous_world := state.get("ranks", 1)) != ranks.world_size:
            progress.note(f"resumed by {ranks.world_size} processes (was {previous_world})")
    if trainer.step >= config.run.steps:
        progress.note(f"the run has taken its {trainer.step} steps: to go on, set run.steps to more")
    ranks.run_on_rank0(lambda: _write_description(trainer, out))


def _load_state(trainer: Trainer, checkpoint: Path, state: dict[str, Any]) -> None:
    if trainer.pilot is not None and "autopilot" in state:
        trainer.pilot.load_state_dict(state["autopilot"])
    trainer.guard.load_state_dict(state.get("guard", {}))
    part = trainer.layout.part
    load_checkpoint(checkpoint, trainer.model, trainer.optimizer, trainer.loss_scale, trainer.ranks, part)
    trainer.step = state["step"]
    trainer.skipped_batches = state.get("skipped_batches", 0)


def _read_state(trainer: Trainer, checkpoint: Path, data: Data) -> dict[str, Any]:
    state = read_trainer_state(checkpoint)
    if state["data"] != trainer.task.data.fingerprint:
        sources = ", ".join(part.source for part in data.parts)
        reason = difference(read_data_state(checkpoint), trainer.task.data_state(), trainer.task.file_unit)
        reason = reason or "the content has changed, or what [eval] holds out of it"
        raise ConfigError(f"{checkpoint} is of a run on other data than {sources} has now: {reason}")
    return state


def _write_description(trainer: Trainer, out: Path) -> None:
    write_file(out / records.CONFIG_FILE, trainer.config.to_toml())
    if trainer.layers is not None:
        write_file(out / records.LAYERS_FILE, json.dumps([asdict(row) for row in trainer.layers.rows], indent=1) + "\n")
    trainer.task.describe(out)


def _train(
    trainer: Trainer, sampler: Sampler | None, summary: RunResult, out: Path, progress: Progress, stop: Stop,
    *, dry_run: bool,
) -> RunResult:  # fmt: skip
    config, ranks = trainer.config, trainer.ranks
    trainer.between, trainer.saves = Between(stop, ranks, progress), not dry_run
    frozen = frozen_note(trainer.model, config.model.frozen, adapters=config.lora is not None)
    compiled = dict.fromkeys((summary.compiled, trainer.blocks.news()))
    unscaled = config.precision.parameters == "fp16" and config.precision.loss_scale == "none"
    underflow = 'fp16 without a loss scale: small gradients underflow to zero; set precision.loss_scale = "dynamic"'
    others = [trainer.attention_note(), underflow if unscaled else "", trainer.loss_note, *trainer.groups_table]
    for note in filter(None, (summary.converted, *compiled, frozen, *others)):
        progress.note(note)
    spike, failure = None, None
    if trainer.guard.active and not ranks.run_on_rank0(lambda: checkpoints(out)):
        trainer.save(out)  # a checkpoint to roll back to
    data, steps = trainer.task.data_size(), config.run.steps
    setup = RunSetup(started=time.time(), steps=steps, summary=summary, data=data, expected=None)
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)
    ranks.run_on_rank0(lambda: setup.write(out))
    progress.start(config, trainer.step, setup)
    profiled = StepProfile(config.run.profile if ranks.is_main else None, out, progress.note)

    def step() -> StepMetrics:
        return profiled.run(trainer.step + 1, partial(_step, trainer, setup, out, progress))

    while True:
        with ranks.closing(ranks.raise_together(lambda: _metrics(trainer, out, progress))) as metrics:
            trainer.startup.lap("loggers")
            try:
                last = 1 if dry_run else config.run.steps
                stopped = _take_steps(trainer, step, sampler, out, metrics, progress, stop, last)
            except SpikeError as error:
                spike = error
            except NonFiniteError as error:
                stopped = "non-finite"
                ranks.run_on_rank0(partial(_record_statistics, trainer, error.step, metrics, progress, out))
                if ranks.first_reported(diverged(changing_parameters(trainer.model))) is None:
                    trainer.save(out, prune=False)  # this state may already be bad: keep the older ones
                    trainer.saver.finish()
                saved, bad = ranks.run_on_rank0(lambda: _usable(checkpoints(out)))
                scales = trainer.loss_scale.active
                remedy = advice(saved, bad, config.precision, converted=trainer.in_fp8, scales_loss=scales)
                failure = NonFiniteError(f"{error}. {remedy}", step=error.step, origin=error.origin)
            profiled.finish()
            if spike is None:
                states = state_bytes_per_parameter(trainer.optimizer, trainer.model) if trainer.step else None
                result = replace(
                    summary, **metrics.fields(), stopped=stopped, state_bytes_per_parameter=states,
                    startup=trainer.startup.stages,
                )  # fmt: skip
                ranks.run_on_rank0(partial(result.write, out))
                break
        _roll_back(trainer, out, spike, progress)
        spike = None
    progress.finish(result)
    if failure is not None:
        raise failure
    return result


def _usable(saved: list[Path]) -> tuple[list[Path], list[Path]]:
    """The checkpoints to go on from, and the newest ones, whose weights have diverged."""
    bad: list[Path] = []
    with suppress(Exception):  # a damaged checkpoint raises errors of many types, and a resume reports them
        while saved and diverged(saved_weights(saved[-1])) is not None:
            bad.append(saved.pop())
    return saved, bad[::-1]


def _expected(trainer: Trainer, progress: Progress) -> ExpectedStep | None:
    ranks = trainer.ranks
    if ranks.device.type != "cuda":
        return None
    progress.stage("predicting the time and memory of a step")

    def predict() -> tuple[ExpectedStep | None, str]:
        name = device_name(ranks.device)
        try:
            return expected_step(trainer.config, name, ranks.world_size), f"the planner does not know {name}"
        except Exception as error:  # of any kind: training needs no prediction
            return None, one_line(error)

    expected, reason = ranks.run_on_rank0(predict)
    if expected is None:
        progress.note(f"no prediction of time and memory, and no MFU: {reason}")
    return expected


def _take_steps(
    trainer: Trainer, step: Callable[[], StepMetrics], sampler: Sampler | None, out: Path, metrics: MetricsBuffer,
    progress: Progress, stop: Stop, last: int,
) -> str:  # fmt: skip
    """Train and save until step `last`, a signal or `eval.patience` ends it. Returns "done", "sigterm" or "early"."""
    run_config, ranks, guard, held_out, complete = trainer.config.run, trainer.ranks, trainer.guard, None, True
    trainer.slow = True  # how long a step takes is not known yet
    if trainer.step == 0 and trainer.config.eval is not None and trainer.config.eval.first:
        _evaluate_first(trainer, out, progress)
    if trainer.patience.patience:
        held_out_rows = ranks.run_on_rank0(lambda: [row.held_out for row in records.read_metrics(out) if row.held_out])
        trainer.patience = Patience(trainer.patience.patience, (measured.get(LOSS) for measured in held_out_rows))
    row = ranks.run_on_rank0(lambda: metrics.last)
    if row is not None and row.step == trainer.step:
        row, complete = _measure(trainer, sampler, row)  # which a signal had interrupted
        ranks.raise_together(partial(metrics.amend, row))
    while trainer.step < last and (request := ranks.max(2 if stop.is_set() else int(trainer.slow))) < 2:
        if trainer.patience.over:
            progress.note(f"{trainer.patience}: the run ends early")
            break
        trainer.slow = request == 1
        try:
            row = step()
        except StopRequested:
            break
        trainer.slow = row.step_s > SLOW_STEP_SECONDS
        ranks.raise_together(partial(metrics.write, row))
        row, complete = _measure(trainer, sampler, row)
        if news := trainer.blocks.news():
            progress.note(f"step {row.step}: {news}")
        held_out = (row.held_out or {}).get(LOSS)
        ranks.raise_together(partial(_record_step, trainer, row, metrics, progress, out))
        trainer.saver.publish_finished()
        if not complete:
            break
        if run_config.saves(trainer.step) and not trainer.loss_scale.last_chance:  # not one that may stop the run
            trainer.save(out, prune=not guard.rising, held_out=held_out)  # keep the checkpoints before a rise
    trainer.save(out, prune=not guard.rising, held_out=held_out)
    trainer.saver.finish()
    if trainer.step == last and complete:
        return "done"
    return "early" if trainer.patience.over and complete else "sigterm"


def _evaluate_first(trainer: Trainer, out: Path, progress: Progress) -> None:
    with suppress(StopRequested):  # then nothing has begun
        losses = trainer.evaluate().items()
        values = (f"{name} not finite" if loss is None else f"{name} {loss:.4f}" for name, loss in losses)
        text = f"held out, before the first step: {', '.join(values)}"
        trainer.ranks.run_on_rank0(lambda: _record_event(trainer, out, progress, 0, records.EVALUATION, text))


def _step(trainer: Trainer, setup: RunSetup, out: Path, progress: Progress) -> StepMetrics:
    """Take a step. After the first one, predict what it should have taken."""
    try:
        row = with_gauges(trainer.train_step(), trainer, setup)
        if trainer.startup.running:
            trainer.ranks.raise_together(trainer.blocks.check)
            progress.note(trainer.startup.finish("first step"))
            setup.expected = _expected(trainer, progress)
            trainer.ranks.run_on_rank0(lambda: setup.write(out))
            row = replace(with_gauges(row, trainer, setup), time=row.time)
    except NonFiniteError as error:
        if trainer.guard.active:
            raise trainer.guard.spike_error(str(error), trainer.step + 1) from None
        raise
    trainer.guard.check(row)
    return row


def _measure(trainer: Trainer, sampler: Sampler | None, row: StepMetrics) -> tuple[StepMetrics, bool]:
    """Evaluate and sample after a step, where it is time. Returns its metrics, and False if a signal came meanwhile."""
    run_config = trainer.config.run
    every = 0 if trainer.config.eval is None else trainer.config.eval.every
    last = row.step == run_config.steps
    is_due = last or (every and row.step % every == 0) or (run_config.keep_best and run_config.saves(row.step))
    try:
        if is_due and row.held_out is None:
            row = replace(row, held_out=trainer.evaluate() or None)
            trainer.patience.note((row.held_out or {}).get(LOSS))
        if sampler is not None and row.samples is None and (last or sampler.is_due(row.step)):
            row = replace(row, samples=sampler.write())
    except StopRequested:
        return row, False
    return row, True


def _roll_back(trainer: Trainer, out: Path, spike: SpikeError, progress: Progress) -> None:
    """Load the checkpoint before a spike, and continue with the batches after the spike."""
    ranks, guard = trainer.ranks, trainer.guard
    trainer.saver.finish()
    checkpoint = ranks.run_on_rank0(lambda: guard.checkpoint_before(out, spike))
    state = ranks.run_on_rank0(lambda: read_trainer_state(checkpoint))
    trainer.optimizer.zero_grad()
    skipped, rollbacks = trainer.skipped_batches, guard.rollbacks + 1
    moves = len(trainer.pilot.changes) if trainer.pilot is not None else 0
    _load_state(trainer, checkpoint, state)
    batches_to_skip = spike.step - trainer.step
    trainer.skipped_batches = skipped + batches_to_skip
    guard.record_rollback(spike.step, trainer.step, rollbacks)
    text = f"{spike}. Back to step {trainer.step}, and on without the {batches_to_skip} batches since"
    if trainer.pilot is not None and moves > len(trainer.pilot.changes):
        text += f"; {moves - len(trainer.pilot.changes)} moves of the autopilot are taken back"
    text += "" if guard.active else "; the guard goes off after this one (guard.rollbacks)"
    details = {"to": trainer.step, "rollbacks": rollbacks, "skipped_batches": trainer.skipped_batches}
    ranks.run_on_rank0(lambda: _record_event(trainer, out, progress, spike.step, records.ROLLBACK, text, **details))


def _record_event(
    trainer: Trainer, out: Path, progress: Progress, step: int, event: str, text: str, **details: int
) -> None:
    if trainer.ranks.is_main:
        records.add_event(out, step, event, text, **details)
        progress.note(text)


def _metrics(trainer: Trainer, out: Path, progress: Progress) -> MetricsBuffer:
    if not trainer.ranks.is_main:
        return MetricsBuffer()
    config = trainer.config
    records.drop_later_events(out, trainer.step)
    return records.MetricsWriter(
        out, after_step=trainer.step, log_every=config.run.log_every, limits=config.inspect.thresholds,
        loggers=lambda board: ScalarLog(board, config.run.loggers, out, config.run.name, config.flat, progress.note),
    )  # fmt: skip


def _record_step(trainer: Trainer, row: StepMetrics, metrics: MetricsBuffer, progress: Progress, out: Path) -> None:
    metrics.amend(row)
    progress.step(row)
    _record_statistics(trainer, row.step, metrics, progress, out)
    for move in trainer.recipe_changes:
        _record_event(trainer, out, progress, row.step, records.MOVE, f"autopilot, {move}")
    scale = trainer.loss_scale
    if row.skipped and row.loss is None:
        reason = f"the loss is not finite, which no loss scale changes (loss scale {row.loss_scale:g} stays)"
        progress.note(f"step {row.step} skipped: {reason}")
    elif row.skipped:
        what = "overflowed" if row.grad_norm is None else "is exactly zero in every parameter"
        scales = f"at loss scale {row.loss_scale:g} (next {scale.value:g})"
        progress.note(f"step {row.step} skipped: the gradient {what} {scales}")
    if scale.restored_from is not None:
        text = f"the loss scale fell to {scale.restored_from:g}, at which most gradients underflow: restored to "
        text += f"{scale.value:g}, from before the steps that were skipped"
        _record_event(trainer, out, progress, row.step, records.LOSS_SCALE, f"step {row.step}: {text}")


def _record_statistics(trainer: Trainer, step: int, metrics: MetricsBuffer, progress: Progress, out: Path) -> None:
    """Write the statistics of a step and print those that began to cross a limit."""
    findings = metrics.write_statistics(trainer.watch.rows)
    texts = list(map(str, findings[:MAX_FINDINGS_SHOWN]))
    if (more := len(findings) - MAX_FINDINGS_SHOWN) > 0:
        texts.append(f"step {step}: {more} more figures crossed a limit: octavo inspect shows them")
    for text in texts:
        _record_event(trainer, out, progress, step, records.FINDING, text)
