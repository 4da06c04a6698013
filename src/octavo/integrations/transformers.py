"""FP8 in Transformers' Trainer and its subclasses, such as TRL's SFTTrainer.

The model is converted when the Trainer is made, before it is wrapped or an optimizer exists. A checkpoint gets a file
`octavo.json` with the FP8 state; a saved `config.json` notes the precision, so that training without FP8 later warns.
"""

import json
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from octavo._version import __version__
from octavo.integrations import common
from octavo.nn.resident import refuses_save_pretrained
from octavo.optim import AdamW
from octavo.runtime.extras import needs_extras

with needs_extras("octavo.integrations.transformers", "pip install transformers accelerate"):
    from transformers import Trainer

T = TypeVar("T", bound=type)
if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object  # of the mixin: `with_fp8` adds a Trainer's class

STATE_FILE = "octavo.json"  # File in a checkpoint with the FP8 state of the model
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")  # Values of `TrainingArguments.optim` that Octavo replaces


class Fp8TrainerMixin(_Trainer):
    """What `with_fp8` adds to a Trainer. Use it as the first base class of a Trainer of your own.

    Args:
        args: As the Trainer's.
        precision: A level such as "fp8+activations+optimizer", an `octavo.Precision`, or a table of its fields.
        inspect_every: Optimizer steps between samples of the layers' operands; their findings are logged as
            `octavo/findings`, `octavo/lowest_sqnr_db`. 0 for none.
        autopilot: Move layers whose statistics cross a limit to a safer recipe; samples every `inspect_every` steps,
            or 50. Changes are logged as `octavo/moved_layers`.
        kwargs: As the Trainer's.

    Raises:
        ValueError: For settings that contradict each other: FP8 with `fp16=True`, with accelerate's own FP8, FSDP1 or
            DeepSpeed; in `train`, FP8 optimizer states with an optimizer that is not `octavo.AdamW`.
    """

    def __init__(
        self, *args: Any, precision: common.PrecisionLike = "fp8", inspect_every: int = 0, autopilot: bool = False,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self.precision = common.precision_of(precision)
        self._inspection = inspect_every, autopilot
        self._monitor: common.Monitor | None = None
        self._sampled_step = 0
        self._fp8_metrics: dict[str, float] = {}
        super().__init__(*args, **kwargs)
        self._check_settings()
        self._convert(self._bare_model())

    def _check_settings(self) -> None:
        label = f"precision={self.precision.label!r}"
        if self.args.fp16 and self.precision.matmul == "fp8":
            raise ValueError(f"{label} with fp16=True: FP8 training needs the range of bfloat16; set bf16=True")
        if self.accelerator.mixed_precision == "fp8":
            raise ValueError(f"{label}, and accelerate's own FP8 is on: set mixed_precision to 'bf16' in its settings")
        if self.is_deepspeed_enabled:
            raise ValueError(f"{label} under DeepSpeed is not supported: use FSDP2 or DDP")
        if self.is_fsdp_enabled and getattr(self.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
            raise ValueError(f"{label} with FSDP1 is not supported: set fsdp_version = 2 in fsdp_config")

    def _bare_model(self) -> nn.Module:
        model: nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return model

    def _convert(self, model: nn.Module) -> None:
        config = getattr(model, "config", None)
        common.warn_if_forgotten(getattr(config, "octavo", None), self.precision)
        common.prepare(model, self.precision, verbose=self.is_world_process_zero())
        if refuses_save_pretrained(model) and self.args.save_strategy != "no":
            raise ValueError(
                "the frozen weights of this model are resident in FP8, so save_pretrained raises, and with it each "
                "checkpoint: train adapters (peft.get_peft_model(model, …)), whose checkpoints hold them alone, or set "
                "save_strategy='no' and call octavo.export after training"
            )
        if config is not None:
            config.octavo = {"version": __version__, "precision": self.precision.label}
        self._monitor = common.monitor_of(model, *self._inspection, verbose=self.is_world_process_zero())

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make and convert the model: a Trainer with `model_init` calls this for each training."""
        model: nn.Module = super().call_model_init(trial)
        if hasattr(self, "accelerator"):  # else the constructor converts it
            self._convert(model)
        return model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create `octavo.AdamW` where `precision` has FP8 states, else the Trainer's own optimizer."""
        chosen, given = self.optimizer_cls_and_kwargs, self.args
        default = AdamW if getattr(given.optim, "value", given.optim) in _ADAMW else None
        cls, own = chosen or (default, {})
        if common.has_fp8_states(self.precision) and isinstance(cls, type) and issubclass(cls, AdamW):
            options = {
                "lr": given.learning_rate, "betas": (given.adam_beta1, given.adam_beta2), "eps": given.adam_epsilon,
                "states": self.precision.states,
                "master": None if self.precision.master == "none" else self.precision.master,
            }  # fmt: skip
            self.optimizer_cls_and_kwargs = cls, {**options, **own}
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        self.optimizer_cls_and_kwargs = chosen
        common.check_optimizer(self.precision, self.optimizer)
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run a micro-batch; sample the first one of each optimizer step that is due."""
        step = self.state.global_step + 1
        if self._monitor is None or step == self._sampled_step:
            return super().training_step(*args, **kwargs)
        self._sampled_step = step
        with self._monitor.step(step) as metrics:
            loss = super().training_step(*args, **kwargs)
        self._fp8_metrics |= metrics
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the Trainer's metrics, and those of the last sample, to the Trainer's own loggers."""
        if "loss" in logs:
            logs |= self._fp8_metrics
            self._fp8_metrics = {}
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the model as the Trainer does, and its FP8 state beside it."""
        super().save_model(output_dir, *args, **kwargs)
        if self.args.should_save:
            state = common.Fp8State(self._bare_model(), self.precision, self._monitor).state_dict()
            folder = Path((self.args.output_dir if output_dir is None else output_dir) or "")
            folder.mkdir(parents=True, exist_ok=True)  # FSDP writes its shards there later
            _write(folder / STATE_FILE, json.dumps(state))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        self._load_fp8_state(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        common.check_optimizer(self.precision, self.optimizer)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_fp8_state(self.state.best_model_checkpoint or "")

    def _load_fp8_state(self, checkpoint: str) -> None:
        """Load the recipes of a checkpoint and their state; warn if it has none."""
        path = Path(checkpoint) / STATE_FILE
        if not path.exists():
            warnings.warn(
                f"octavo: {checkpoint} has no {STATE_FILE}: it was trained without Octavo, and goes on "
                f"with {self.precision.label!r}",
                stacklevel=2,
            )
            return
        try:
            state = json.loads(path.read_text())
            common.Fp8State(self._bare_model(), self.precision, self._monitor).load_state_dict(state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged or of another model ({type(error).__name__}: {error}): restore it, or delete it to "
                "go on without the state of recipes"
            ) from error


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises OSError that names it, as on a full disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from None


@cache
def with_fp8(trainer: T) -> T:
    """Return a subclass of a Trainer class that trains in FP8; it takes the arguments of `Fp8TrainerMixin`, too.

    Args:
        trainer: `transformers.Trainer` or a subclass, as `trl.SFTTrainer`; returned itself if it trains in FP8.

    Examples:
        >>> from transformers import Trainer
        >>> from octavo.integrations.transformers import with_fp8
        >>> with_fp8(Trainer).__name__
        'Fp8Trainer'
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise TypeError(f"with_fp8 takes transformers.Trainer or a subclass of it; got {trainer!r}")
    if issubclass(trainer, Fp8TrainerMixin):
        return trainer
    made: Any = type(f"Fp8{trainer.__name__}", (Fp8TrainerMixin, trainer), {"__module__": trainer.__module__})
    return cast(T, made)


Fp8Trainer: Any = with_fp8(Trainer)  # `transformers.Trainer` in FP8: see `Fp8TrainerMixin`
__all__ = ["Fp8Trainer", "Fp8TrainerMixin", "with_fp8"]
