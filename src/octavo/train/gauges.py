"""What a step says about the machine and the data: MFU, peak memory, position in the data, time; `run.profile`.

The planner predicts a step in seconds on a CPU, after the first one. It cannot run in a thread beside that: while
Transformers makes the planned model, the default dtype of the whole process is that model's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from octavo.planner.devices import gpu_by_driver_name
from octavo.train.config.run_config import TrainConfig
from octavo.train.config.sections import ParallelConfig
from octavo.train.record.metrics import ExpectedStep, RunResult, RunSetup, StepMetrics
from octavo.train.run_plan import plan_configured
from octavo.train.trainer import Trainer


class Gauges:
    def __init__(self, trainer: Trainer, summary: RunResult) -> None:
        self._trainer, self._data = trainer, trainer.task.data_size()
        steps = trainer.config.run.steps
        # The setup of the run; set its `expected` when there is a prediction.
        self.setup = RunSetup(started=time.time(), steps=steps, summary=summary, data=self._data, expected=None)
        self._device = trainer.ranks.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self, row: StepMetrics) -> StepMetrics:
        trainer, expected = self._trainer, self.setup.expected
        batches = row.step + trainer.skipped_batches
        epoch = batches * trainer.config.optim.batch / self._data.rows if self._data is not None else None
        mfu = expected.flops / row.step_s / expected.bf16_flops if expected is not None else None
        memory = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
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
