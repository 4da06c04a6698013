"""FP8 in loops that use Hugging Face accelerate.

Models are converted in place before accelerate wraps or shards them, so that an optimizer made before keeps its
parameters. A sampled step begins with the first forward in training mode, and ends with the optimizer's step.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from octavo.integrations import common
from octavo.runtime.extras import needs_extras

with needs_extras("octavo.integrations.accelerate", "pip install accelerate"):
    import accelerate


class Fp8Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` that converts the models it prepares.

    Args:
        args: As the Accelerator's.
        precision: A level such as "fp8+activations", an `octavo.Precision`, or a table of its fields.
        inspect_every: As of `octavo.integrations.transformers.Fp8TrainerMixin`, of the first model that is prepared.
        autopilot: As there.
        kwargs: As the Accelerator's.

    Raises:
        ValueError: With accelerate's own FP8, `mixed_precision="fp16"`, FSDP1 or DeepSpeed; in `prepare`, if
            `precision` has FP8 optimizer states and the optimizer is not `octavo.AdamW`.
    """

    def __init__(
        self, *args: object, precision: common.PrecisionLike = "fp8", inspect_every: int = 0, autopilot: bool = False,
        **kwargs: object,
    ) -> None:  # fmt: skip
        self.precision = common.precision_of(precision)
        self._inspection = inspect_every, autopilot
        self._monitor: common.Monitor | None = None
        label = f"precision={self.precision.label!r}"
        if kwargs.get("mixed_precision") == "fp8":
            raise ValueError(f"{label}, and mixed_precision='fp8' is accelerate's own FP8: set it to 'bf16'")
        super().__init__(*args, **kwargs)
        if self.mixed_precision == "fp8" or self.has_fp8_handler:
            raise ValueError(f"{label}, and accelerate's own FP8 is on: set mixed_precision='bf16', with no handler")
        if self.mixed_precision == "fp16" and self.precision.matmul == "fp8":
            raise ValueError(f"{label} with mixed_precision='fp16': set it to 'bf16'")
        if self.state.deepspeed_plugin is not None:
            raise ValueError(f"{label} under DeepSpeed is not supported: use FSDP2 or DDP")
        fsdp = getattr(self.state, "fsdp_plugin", None)
        if fsdp is not None and fsdp.fsdp_version != 2:
            raise ValueError(f"{label} with FSDP1 is not supported: FullyShardedDataParallelPlugin(fsdp_version=2)")

    def prepare(self, *args: object, **kwargs: object) -> Any:
        """Convert the models among the arguments, then prepare all as `accelerate.Accelerator.prepare` does."""
        for optimizer in args:
            if isinstance(optimizer, torch.optim.Optimizer):
                common.check_optimizer(self.precision, optimizer)
        for model in args:
            if isinstance(model, nn.Module):
                self._convert(model)
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: nn.Module, *args: object, evaluation_mode: bool = False, **kwargs: object
    ) -> nn.Module:
        """Convert a model, but not with `evaluation_mode=True`, and prepare it as `accelerate.Accelerator` does."""
        if not evaluation_mode:
            self._convert(model)
        prepared: nn.Module = super().prepare_model(model, *args, evaluation_mode=evaluation_mode, **kwargs)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> Any:
        """Prepare an optimizer as `accelerate.Accelerator.prepare_optimizer` does; its steps end those of a sample."""
        bare: Any = getattr(optimizer, "optimizer", optimizer)
        if any(self._inspection) and not hasattr(bare, "octavo_step_hook"):
            bare.octavo_step_hook = bare.register_step_post_hook(self._end_step)
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def load_state(self, *args: object, **kwargs: object) -> None:
        """Load a checkpoint as `accelerate.Accelerator.load_state` does."""
        super().load_state(*args, **kwargs)
        for optimizer in self._optimizers:
            common.check_optimizer(self.precision, optimizer)

    def _end_step(self, *_: object) -> None:
        if self._monitor is not None and (metrics := self._monitor.end()):
            self.log(metrics, step=self._monitor.number)

    def free_memory(self, *objects: object) -> Any:
        """Release all references, as `accelerate.Accelerator.free_memory` does, and those to models' FP8 state."""
        self._monitor = None
        registered: list[Any] = self._custom_objects
        registered[:] = [item for item in registered if not isinstance(item, common.Fp8State)]
        return super().free_memory(*objects)

    def _convert(self, model: nn.Module) -> None:
        bare = self.unwrap_model(model, keep_torch_compile=False)
        registered = any(isinstance(item, common.Fp8State) and item.model is bare for item in self._custom_objects)
        if registered or not any(True for _ in bare.parameters()):
            return
        common.prepare(bare, self.precision, verbose=self.is_main_process)
        first = not any(isinstance(item, common.Fp8State) for item in self._custom_objects)
        monitor = common.monitor_of(bare, *self._inspection, verbose=self.is_main_process) if first else None
        if monitor is not None:
            self._monitor = monitor
            bare.register_forward_pre_hook(partial(_begin_step, monitor))
        self.register_for_checkpointing(common.Fp8State(bare, self.precision, monitor))


def _begin_step(monitor: common.Monitor, module: nn.Module, _: object) -> None:
    if module.training and torch.is_grad_enabled():
        monitor.begin()


__all__ = ["Fp8Accelerator"]
