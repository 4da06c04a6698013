"""The sections of a run's configuration: frozen pydantic models with a docstring under each setting.

A section checks itself; `octavo.train.config.run_config.TrainConfig` checks combinations of sections.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from octavo.inspect.findings import Thresholds
from octavo.numerics import Precision
from octavo.numerics.precision import ALIASES
from octavo.numerics.recipe import get_recipe


def expand(path: str | Path) -> Path:
    """The path, with the home folder for `~`. Raises ValueError if there is no such user, or the path has a NUL."""
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"there is no home folder for {path}") from None
    if "\0" in str(path):
        raise ValueError(f"a path has no NUL: {str(path)!r}")
    return expanded


def _check_path(path: str) -> str:
    try:
        expand(path)
    except ValueError as error:
        raise PydanticCustomError("path", "{reason}", {"reason": str(error)}) from None
    return path


PathText = Annotated[str, AfterValidator(_check_path)]
"""A path as written in the configuration; `expand` resolves `~`."""
LARGEST_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: strict, frozen, no unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Run(Section):
    """`[run]`: how long, where to, on what."""

    name: Annotated[str, Field(min_length=1, max_length=100)] = "run"
    """Name shown in reports."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the order of the data."""
    steps: Count
    """Optimizer steps of the whole run; may differ on resume."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """How often the run sees its data, instead of `steps`, which follow from it once the data is read."""
    out: PathText | None = None
    """Output folder; `runs/<name>` where it is not given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes CUDA where there is a usable device."""
    log_every: Count = 1
    """Steps between two points on TensorBoard and `loggers` (`metrics.jsonl` has every step)."""
    loggers: list[Literal["wandb", "mlflow"]] = []
    """Where metrics go besides TensorBoard. Servers, projects and keys are those of their own environment variables."""
    save_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two checkpoints; 0 saves at the end only. The end of a run, and SIGTERM, always save."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Also keep the checkpoints of all multiples of this step, a multiple of `save_every`; 0 for none."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Also keep this number of checkpoints with the lowest held-out loss, which is then measured at every save, too."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often `octavo train` starts the run again, from its newest checkpoint, after its process crashed or was
    killed. Not for torchrun, which has `--max-restarts`."""
    deterministic: bool = False
    """Use PyTorch's deterministic algorithms, so that GPUs add in the same order in every run; slower there."""
    profile: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """First and last step, counted from 1, to profile: `profile.json` is a trace for ui.perfetto.dev, `profile.txt` the
    operations that took the longest. On several ranks, of the first one. Profiled steps are slower."""
    compile: Literal["auto", "blocks", "none"] = "auto"
    """Whether each repeated block of the model is compiled (`torch.compile`). "auto": "blocks" on a GPU, "none" on a
    CPU, and "none" for what cannot compile, with a note."""

    @model_validator(mode="before")
    @classmethod
    def _steps_of_epochs(cls, table: Any) -> Any:
        has_epochs = isinstance(table, dict) and table.get("epochs") is not None
        return {"steps": LARGEST_COUNT} | table if has_epochs else table

    @field_validator("loggers", mode="before")
    @classmethod
    def _list_loggers(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_name(self) -> "Run":
        if self.name in (".", "..") or "/" in self.name or "\\" in self.name or not self.name.isprintable():
            raise ValueError(
                f"run.name = {self.name!r} names the folder runs/<name>: give one name, without separators or control "
                "characters; run.out is for a path"
            )
        return self

    def saves(self, step: int) -> bool:
        """Whether the run saves after a step, besides its end."""
        return self.save_every > 0 and step % self.save_every == 0

    @model_validator(mode="after")
    def _check_profile(self) -> "Run":
        if self.profile is not None and not self.profile[0] <= self.profile[1] <= self.steps:
            raise ValueError(
                f"run.profile = {self.profile} is not the first and the last step of a part of the run, which has "
                f"run.steps = {self.steps}: write it as [10, 12]"
            )
        return self

    @model_validator(mode="after")
    def _check_keeping(self) -> "Run":
        for name in ("keep_every", "keep_best"):
            if (value := getattr(self, name)) and not self.save_every:
                raise ValueError(
                    f"run.{name} = {value} keeps checkpoints, and run.save_every = 0 saves none before the end: set "
                    "run.save_every, such as 100"
                )
        if self.keep_every and self.keep_every % self.save_every:
            raise ValueError(
                f"run.keep_every = {self.keep_every} is not a multiple of run.save_every = {self.save_every}, so most "
                "of the checkpoints to keep are never saved: make it one"
            )
        return self


class Model(Section):
    """`[model]`: a model of `transformers` for `data.task`: from a local folder, or by type and config."""

    path: PathText | None = None
    """Folder of a local checkpoint (`save_pretrained`), with its tokenizer unless `data.tokenizer` names another."""
    type: str | None = None
    """`model_type` of `transformers`, as "llama"; for images as "vit", for images and text as "llava". "dit" is
    diffusers' `DiTTransformer2DModel`."""
    config: dict[str, Any] = {}
    """Fields of that type's config, as `hidden_size = 256`. Where not given, `vocab_size` is the tokenizer's, and
    `image_size`, `num_channels` and `num_labels` are those of the images."""
    frozen: Annotated[tuple[str, ...], Strict(False)] = ()
    """Patterns of names of modules that are not trained, as "vision_tower"; they match whole names or ends of them.
    Frozen parameters have no gradients and no optimizer states."""

    @model_validator(mode="after")
    def _check_origin(self) -> "Model":
        if (self.path is None) == (self.type is None):
            raise ValueError('give either model.path (a local checkpoint) or model.type, as "llama"')
        if self.path is not None and self.config:
            raise ValueError("model.config is for model.type; the checkpoint at model.path has its own config")
        _check_config_value("model.config", self.config)
        return self


def _check_config_value(name: str, value: Any) -> None:
    """Raise ValueError for what no field of a model's config is: NaN, which equals nothing, and dates."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_config_value(f"{name}.{key}", item)
    elif isinstance(value, list):
        for item in value:
            _check_config_value(name, item)
    elif value != value or not isinstance(value, str | int | float | None):
        raise ValueError(f"{name}: expected a number, a string, true, false, a list or a table; got {value}")


SELECTION = ("skip", "only", "skip_first", "skip_last", "min_features")
"""The settings of `[precision]` that say which linear layers are converted."""


class PrecisionConfig(Section):
    """`[precision]`: number formats of computation, saved activations and optimizer."""

    level: str = "bf16"
    """Level of `octavo.Precision.level`: "bf16", "fp8" (FP8 matrix products), "fp8+activations" (and stored
    activations) or "fp8+activations+optimizer" (and optimizer states). `matmul`, `activations`, `master` and
    `optim.states` set one part of it. The aliases "O1", "O1+act" and "O1+act+opt" are replaced by these names."""
    matmul: Literal["bf16", "fp8"] | None = None
    """Products of the linear layers."""
    activations: Literal["bf16", "fp8"] | None = None
    """Format of the tensors that norms, gated MLPs and activation functions save for backward."""
    recipe: str = "rowwise"
    """Recipe of the FP8 products, a name in `octavo.RECIPES`; not used by "bf16". "auto": on a GPU the fastest for each
    layer, where it pays by predicted cost; elsewhere the default."""
    skip: Annotated[tuple[str, ...], Strict(False)] = ()
    """Patterns of module names that stay unconverted, as "*lm_head*"."""
    only: Annotated[tuple[str, ...], Strict(False)] = ()
    """Patterns of names of the linear layers to convert, as "*.mlp.*"; all of them where empty."""
    skip_first: Annotated[int, Field(ge=0)] = 0
    """Blocks at the beginning of the model whose linear layers stay unconverted."""
    skip_last: Annotated[int, Field(ge=0)] = 0
    """Blocks at the end of the model whose linear layers stay unconverted."""
    min_features: Annotated[int, Field(ge=0)] = 0
    """Smallest in_features and out_features of a linear layer to convert."""
    keep_weights: bool = False
    """Quantize weights once for all micro-batches of a step; for small micro-batches. 2 bytes per parameter on a GPU.

    No effect on weights that FSDP shards."""
    parameters: Literal["bf16", "fp32", "fp16"] = "bf16"
    """Type of the model's parameters. With fp32 the forward runs under bf16 autocast."""
    master: Literal["fp32", "remainder", "none"] | None = None
    """fp32 masters of 16-bit parameters: a full copy, or the 16 bits that bf16 lacks. fp32 parameters need none."""
    loss_scale: Literal["none", "dynamic"] | Annotated[float, Field(gt=0)] = "none"
    """"dynamic", a fixed number, or "none". fp16 gradients underflow without one."""
    autopilot: bool = False
    """Move a layer whose statistics cross a limit to a safer recipe; samples every `inspect.every` steps, or 50."""
    loss: Literal["chunked", "whole"] = "chunked"
    """"chunked" computes head and loss a chunk of tokens at a time, so that the full logits never exist."""
    checkpointing: Literal["none", "full", "selective"] = "none"
    """Activation checkpointing of each block: recompute all of it, or all but its matrix products and attention."""

    @field_validator("level")
    @classmethod
    def _without_alias(cls, level: str) -> str:
        return ALIASES.get(level, level)

    @property
    def resolved(self) -> Precision:
        """Precision of the level, with the overrides of its parts."""
        parts = {name: getattr(self, name) for name in ("matmul", "activations", "master")}
        changes = {name: value for name, value in parts.items() if value is not None}
        changes |= {name: getattr(self, name) for name in ("recipe", "keep_weights", *SELECTION)}
        return Precision.level(self.level, **changes)

    @model_validator(mode="after")
    def _check_precision(self) -> "PrecisionConfig":
        master = self.resolved.master
        if self.parameters == "fp16" and master != "fp32":
            raise ValueError(
                f'precision.master = "{master}" with fp16 parameters: AdamW\'s second moment underflows in fp16, '
                'and 16 bits more do not make fp32 of it; set precision.master = "fp32"'
            )
        return self


class GuardConfig(Section):
    """`[guard]`: rollback after a loss spike; see `octavo.train.guard`."""

    spike: Annotated[float, Field(ge=0)] = 0.0
    """Threshold of a spike in robust standard deviations above the median of the last losses, as 8. After a spike the
    run rolls back to a checkpoint and skips the batches of the spike. 0: never."""
    window: Annotated[int, Field(ge=8, le=1 << 20)] = 64
    """Number of last steps to compare with."""
    rollbacks: Count = 3
    """Largest number of rollbacks; after that the run continues without the guard."""


class Limits(Section):
    """`[inspect.limits]`: limits of statistics that are reported, and that move layers under the autopilot.

    See `octavo.inspect.Thresholds`.
    """

    sqnr: float = Thresholds.sqnr
    """Smallest SQNR in dB."""
    underflow: Share = Thresholds.underflow
    """Largest share of X and W that quantizes to zero; of G twice that."""
    saturation: Share = Thresholds.saturation
    """Largest share of saturated values."""
    amax_jump: Annotated[float, Field(gt=1)] = Thresholds.amax_jump
    """Largest factor between a maximum and the median of its earlier samples."""
    product_error: Share = Thresholds.product_error
    """Largest error of a layer's products against high precision; beyond it the autopilot moves the layer."""


class InspectConfig(Section):
    """`[inspect]`: statistics of what FP8 does to the operands of the linear layers, in some steps."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between two samples; 0 for none."""
    what_if: Annotated[tuple[str, ...], Strict(False)] = ()
    """Other recipes, to report their SQNR on the same tensors."""
    limits: Limits = Limits()
    """Limits of reported statistics."""
    restore_after: Annotated[int, Field(ge=0)] = 0
    """Samples within the limits after which the autopilot moves a layer back to its first recipe; 0 for never."""

    @property
    def thresholds(self) -> Thresholds:
        """The limits, as `octavo.inspect` takes them."""
        return Thresholds(**self.limits.model_dump())

    @model_validator(mode="after")
    def _check_recipes(self) -> "InspectConfig":
        for name in self.what_if:
            try:
                get_recipe(name)
            except ValueError as error:
                raise ValueError(f"inspect.what_if: {error}") from None
        return self
