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
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: strict, frozen, no unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Run(Section):
    """`[run]`: how long, where to, on what."""

    name: Annotated[str, Field(min_length=1)] = "run"
    """Name shown in reports."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the order of the data."""
    steps: Count
    """Optimizer steps of the whole run; may differ on resume."""
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
    deterministic: bool = False
    """Use PyTorch's deterministic algorithms, so that GPUs add in the same order in every run; slower there."""

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


class Model(Section):
    """`[model]`: a model of `transformers` for `data.task`: from a local folder, or by type and config."""

    path: PathText | None = None
    """Folder of a local checkpoint (`save_pretrained`), with its tokenizer unless `data.tokenizer` names another."""
    type: str | None = None
    """`model_type` of `transformers`, as "llama"; for images as "vit", for images and text as "llava"."""
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


OTHER_TASKS = {
    "language": ("images",),
    "image-classification": ("images", "split", "text_field", "vocab_size", "tokenizer", "packing"),
    "image-text": ("split", "text_field", "packing"),
}
"""Settings of `[data]` that a task does not read."""
Task = Literal["language", "image-classification", "image-text"]


HELD_OUT_SHARE = 0.01
"""`eval.fraction` where it is not given."""


class Data(Section):
    """`[data]`: text in, sequences of tokens out; or images, with labels or with text."""

    task: Task = "language"
    """What is learned: the next token of text, the class of an image, or the answers in conversations about images."""
    source: Annotated[PathText, Field(min_length=1)]
    """"python-stdlib"; a glob of .txt (each file a document), .jsonl or .parquet files (each row one); a folder, with
    files of one kind below it or written by `save_to_disk`; or a dataset of the Hub, as "name" or "name:subset". For
    images "digits", those that scikit-learn brings along; a folder with a folder of images for each class; or for
    "image-text" a .json file of conversations in LLaVA's form."""
    images: PathText | None = None
    """Folder of the images that a .json file names; that of the file where it is not given."""
    split: str = "train"
    """Split of a dataset, or of a folder whose file names contain one ("test.jsonl"); other sources have none."""
    text_field: str = "text"
    """Column that holds the text, in .jsonl, .parquet and datasets."""
    sequence_length: Count
    """Tokens of one sequence, for "image-text" with those of the image. Not for classes of images."""
    vocab_size: Annotated[int, Field(ge=257, le=1 << 20)] = 4096
    """Size of the byte-level BPE trained on the data (256 bytes, one end-of-text, the rest merges); 1048576 at most."""
    tokenizer: PathText | None = None
    """Folder of a `transformers` tokenizer to use, instead of the model's own or a trained one."""
    packing: Literal["stream", "documents"] = "stream"
    """"stream": sequences are cut from one stream of all documents, and attention crosses their borders. "documents":
    whole documents are packed into sequences, and attention and positions stay inside each."""
    shuffle: bool = True
    """Permute the sequences anew in each epoch; False takes them in order."""
    cache: PathText = "~/.cache/octavo"
    """Folder of tokenized data and trained tokenizers; safe to delete."""

    @model_validator(mode="before")
    @classmethod
    def _one_target_per_image(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("task") == "image-classification":
            return {"sequence_length": 1} | settings
        return settings

    @model_validator(mode="after")
    def _check_task(self) -> "Data":
        for name in OTHER_TASKS[self.task]:
            if getattr(self, name) != type(self).model_fields[name].default:
                kind = "images with text" if name == "images" else "text"
                raise ValueError(f'data.{name} is for {kind}, and data.task is "{self.task}": leave it out')
        if self.task == "image-classification" and self.sequence_length != 1:
            raise ValueError(
                f"data.sequence_length = {self.sequence_length}: an image has one target, its class: leave it out"
            )
        return self


class EvalConfig(Section):
    """`[eval]`: held-out data. Text has none without this section; of images a part is always held out."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between two measurements; 0 measures at the end only. The end is always measured."""
    source: PathText | None = None
    """Text to evaluate on, as in `data.source`. Where neither this nor `split` is given, a part of the documents of
    `data.source` is held out, and not trained on."""
    split: str | None = None
    """Split of `source` to evaluate on, or of `data.source` without one, as "validation"."""
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the documents to hold out, one at least; 0.01 where not given. Their hashes decide which."""
    batches: Count = 8
    """Largest number of batches, of `optim.batch` sequences, to measure on; always the same ones."""

    @property
    def has_own_data(self) -> bool:
        """Whether the text is not held out from that to train on."""
        return self.source is not None or self.split is not None

    @property
    def share(self) -> float:
        """`fraction` with its default."""
        return HELD_OUT_SHARE if self.fraction is None else self.fraction

    @model_validator(mode="after")
    def _check_fraction(self) -> "EvalConfig":
        if self.has_own_data and self.fraction is not None:
            name = "source" if self.source is not None else "split"
            raise ValueError(
                f"eval.fraction = {self.fraction:g} holds out a part of data.source, and eval.{name} names other text: "
                "leave one of them out"
            )
        return self


class Optim(Section):
    """`[optim]`: AdamW, its schedule and the batch."""

    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    betas: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Strict(False)] = (
        0.9,
        0.95,
    )
    """Decay of the first and the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay of weights of products and embeddings; not of norms, biases, vectors and Mamba's `A_log`."""
    states: Literal["fp32", "fp8"] | None = None
    """Moments of AdamW: 8 bytes per parameter, or about 2.1 in FP8 with dynamic range expansion (`octavo.AdamW`). Where
    not given, those of `precision.level`."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global L2 norm of the gradient; 0 does not clip."""
    batch: Count = 8
    """Sequences of one optimizer step."""
    micro_batches: Count = 1
    """Parts the batch is cut into; gradients are accumulated over them."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: cosine decay; warmup-stable-decay (linear decay at the end); or constant."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warmup."""
    decay: Share = 0.2
    """Share of all steps that the decay of "wsd" takes, at the end."""
    min_lr_ratio: Share = 0.1
    """Learning rate at the end, as a share of `lr` (cosine and wsd)."""

    @model_validator(mode="after")
    def _check_micro_batches(self) -> "Optim":
        if self.batch % self.micro_batches:
            divisors = [n for n in range(1, self.batch + 1) if self.batch % n == 0]
            raise ValueError(
                f"optim.batch = {self.batch} cannot be cut into {self.micro_batches} equal micro-batches: "
                f"set optim.micro_batches to one of {divisors}"
            )
        return self


SELECTION = ("skip", "only", "skip_first", "skip_last", "min_features")
"""The settings of `[precision]` that say which linear layers are converted."""


def decay_steps(optim: Optim, steps: int) -> int:
    """Steps that the decay of "wsd" takes of `steps`."""
    return max(1, round(optim.decay * steps)) if optim.decay else 0


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
    window: Annotated[int, Field(ge=8)] = 64
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
