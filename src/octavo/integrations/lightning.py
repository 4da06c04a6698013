"""FP8 in Lightning: a precision plugin for the Trainer, and one for Fabric.

The plugin converts the module in place when the Trainer sets it up, before `configure_optimizers`; Fabric's converts
what `fabric.setup` gets. Products that are not in FP8 run under bf16 autocast unless `autocast=False`.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octavo.integrations import common
from octavo.runtime.extras import needs_extras

with needs_extras("octavo.integrations.lightning", "pip install lightning"):
    from lightning.fabric.plugins.precision import Precision as FabricPrecision
    from lightning.pytorch.plugins.precision import Precision


class _Plugin:
    """What both plugins share."""

    precision: Any = "bf16-mixed"

    def __init__(
        self, precision: common.PrecisionLike = "fp8", *, autocast: bool = True, inspect_every: int = 0,
        autopilot: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.settings, self._autocast = common.precision_of(precision), autocast
        self._inspection = inspect_every, autopilot
        self._monitor: common.Monitor | None = None
        self._metrics: dict[str, float] = {}
        self.precision = "bf16-mixed" if autocast else "32-true"
        self._state: common.Fp8State | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module in place."""
        verbose = not dist.is_initialized() or dist.get_rank() == 0
        common.prepare(module, self.settings, verbose=verbose)
        self._monitor = common.monitor_of(module, *self._inspection, verbose=verbose)
        self._state = common.Fp8State(module, self.settings, self._monitor)
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return bf16 autocast, or a context without effect."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.autocast(device, dtype=torch.bfloat16, enabled=self._autocast)

    def state_dict(self) -> dict[str, Any]:
        """Return the FP8 state of the module, for a checkpoint."""
        return {} if self._state is None else self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        if self._state is not None and state_dict:
            self._state.load_state_dict(state_dict)


class Fp8Precision(_Plugin, Precision):
    """The plugin for `lightning.Trainer(plugins=[…])`.

    Args:
        precision: A level such as "fp8+activations", an `octavo.Precision`, or a table of its fields.
        autocast: Run what is not in FP8 under bf16 autocast.
        inspect_every: As of `octavo.integrations.transformers.Fp8TrainerMixin`.
        autopilot: As there.
    """

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step, and sample the micro-batch that runs with it if that is due."""
        common.check_optimizer(self.settings, optimizer)
        if self._monitor is None:
            return super().optimizer_step(optimizer, **kwargs)
        with self._monitor.step() as metrics:
            result = super().optimizer_step(optimizer, **kwargs)
        trainer = kwargs["model"].trainer
        for logger in trainer.loggers if self._monitor.watch.rows else ():
            logger.log_metrics(metrics, step=trainer.global_step)
        return result


class FabricFp8Precision(_Plugin, FabricPrecision):
    """The plugin for `lightning.Fabric(plugins=[…])`, with the arguments of `Fp8Precision`.

    Fabric saves what `fabric.save` is given: add `plugin.state_dict()` to it, and give that to `load_state_dict`. It
    logs what `fabric.log_dict` is given: `plugin.metrics()` after each step, empty if the step was not sampled.
    """

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward; with the first one of a step in training mode, the step begins."""
        trains = self._state is not None and self._state.model.training and torch.is_grad_enabled()
        if self._monitor is not None and trains:
            self._monitor.begin()
        return super().forward_context()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step. Raises ValueError if `precision` has FP8 optimizer states and the optimizer has not."""
        common.check_optimizer(self.settings, optimizer)
        result = super().optimizer_step(optimizer, **kwargs)
        self._metrics = {} if self._monitor is None else self._monitor.end()
        return result

    def metrics(self) -> dict[str, float]:
        """Return the findings of the last step, for `fabric.log_dict`; empty if it was not sampled."""
        return self._metrics


__all__ = ["FabricFp8Precision", "Fp8Precision"]
