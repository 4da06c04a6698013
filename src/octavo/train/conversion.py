"""The conversion of a run's model to FP8."""

import torch
from torch import nn

from octavo.nn import Report, apply_plan, report
from octavo.numerics.plan import Plan
from octavo.planner.auto_convert import convert
from octavo.train.tasks.task import Task


def convert_run(model: nn.Module, task: Task, device: torch.device, world: int, plan: Plan | None) -> Report | None:
    """Convert a model by a plan or by its configuration; the recipe "auto" uses measured costs on a GPU."""
    config, precision = task.config, task.config.resolved
    if plan is not None:
        if plan.converted or plan.fp8_activations:
            frozen = config.frozen if plan.converted else "bf16"
            apply_plan(
                model, plan, keep_weights=precision.keep_weights, frozen=frozen
            )  # fmt: skip
    elif "fp8" not in (precision.matmul, precision.activations):
        return None
    else:
        sharing = config.parallel.tp * config.parallel.pp
        tokens = round(config.optim.batch * sharing / (config.optim.micro_batches * world) * task.positions(model))
        convert(
            model, precision=precision, device=None if device.type == "cuda" else "cpu", tokens=tokens, verbose=False,
            frozen=config.frozen if precision.matmul == "fp8" else "bf16",
            weight_only=config.weight_only if precision.matmul == "fp8" else (),
        )  # fmt: skip
    return report(model)
