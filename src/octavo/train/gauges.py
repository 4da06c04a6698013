"""What a step says about the machine and the data: MFU, peak memory, position in the data, time.

The model's operations come from the planner (`octavo.train.run_plan`), which also predicts memory and speed, so that a
run shows both figures side by side. The prediction takes seconds on a CPU, so a run makes it after its first step, for
GPUs that the planner knows. It cannot run in a thread beside that step: while Transformers makes the planned model, the
default dtype of the whole process is that model's.
"""

import time
from dataclasses import replace

import torch

from octavo.planner.devices import gpu_by_driver_name
from octavo.train.config.run_config import TrainConfig
from octavo.train.config.sections import ParallelConfig
from octavo.train.record.metrics import ExpectedStep, RunResult, RunSetup, StepMetrics
from octavo.train.run_plan import plan_configured
from octavo.train.trainer import Trainer


class Gauges:
    """Completes the metrics of steps."""

    def __init__(self, trainer: Trainer, summary: RunResult) -> None:
        self._trainer, self._data = trainer, trainer.task.data_size()
        steps = trainer.config.run.steps
        # The setup of the run; set its `expected` when there is a prediction.
        self.setup = RunSetup(started=time.time(), steps=steps, summary=summary, data=self._data, expected=None)
        self._device = trainer.ranks.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self, row: StepMetrics) -> StepMetrics:
        """The metrics of a step that has ended, with the figures of this module."""
        trainer, expected = self._trainer, self.setup.expected
        batches = row.step + trainer.skipped_batches
        return replace(
            row,
            time=time.time(),
            epoch=batches * trainer.config.optim.batch / self._data.rows if self._data is not None else None,
            mfu=expected.flops / row.step_s / expected.bf16_flops if expected is not None else None,
            peak_memory=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
        )


def expected_step(config: TrainConfig, device: str, gpus: int) -> ExpectedStep | None:
    """Predict a step of a run; None on a device that the planner does not know."""
    gpu = gpu_by_driver_name(device)
    if gpu is None:
        return None
    parallel = config.parallel
    divides_layers = max(parallel.tp, parallel.cp, parallel.ep) > 1  # planned in a process group, and this is in one
    if divides_layers:
        alone = config.optim.model_copy(update={"micro_batches": config.optim.batch})
        config = config.model_copy(update={"parallel": ParallelConfig(), "optim": alone})
    planned = plan_configured(config, gpu=device, gpus=1 if divides_layers else gpus)
    return ExpectedStep(
        gpu=gpu.name,
        flops=planned.time.flops,
        bf16_flops=gpus * gpu.bf16_tflops * 1e12,
        fp8_flops=gpus * gpu.fp8_tflops * 1e12,
        memory=None if divides_layers else planned.memory.peak,
        tokens_per_s=None if divides_layers else planned.time.tokens_per_second,
    )
