"""The sections of a run's configuration: frozen pydantic models with a docstring under each setting.

A section checks itself; `octavo.train.config.run_config.TrainConfig` checks combinations of sections.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from math import isqrt
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from octavo.inspect.findings import Thresholds
from octavo.numerics import Precision
from octavo.numerics.precision import ALIASES
from octavo.numerics.recipe import get_recipe
from octavo.numerics.suggestions import nearest
from octavo.optim import OPTIMIZERS
from octavo.parallel import Parallel
from octavo.parallel.combinations import EXCLUSIVE_SETTINGS

T = TypeVar("T")
IGNORED_ON_RESUME, CHANGEABLE_ON_RESUME = "free", "tunable"
Free = Annotated[T, IGNORED_ON_RESUME]
"""A setting that may differ on resume without a note: names, paths and monitoring. The data has a fingerprint."""
Tunable = Annotated[T, CHANGEABLE_ON_RESUME]
"""A setting that may differ on resume with a note: the run then differs from an uninterrupted one."""


def expand(path: str | Path) -> Path:
    """The path, with the home folder for `~`. Raises an error of pydantic, a ValueError, for no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise PydanticCustomError("path", "there is no home folder for {path}", {"path": str(path)}) from None


def _check_path(path: str) -> str:
    expand(path)
    return path


PathText = Annotated[str, AfterValidator(_check_path)]  # A path as written in the configuration; `expand` resolves `~`
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def hub_folder(path: str) -> Path:
    """The folder of a path, or of a name such as "org/model" in the Hub's cache, if there is no such path."""
    folder = expand(path)
    if HUB_NAME.fullmatch(path) and not folder.exists():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        with suppress(LocalEntryNotFoundError, ValueError, OSError):
            folder = Path(snapshot_download(path, local_files_only=True))
    return folder


LARGEST_COUNT = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Listed = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)  # A text stands for a list of it


class Section(BaseModel):
    """Base of all sections: strict, frozen, no unknown keys."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def _problems(self) -> Iterator[str]:
        """What is wrong with settings together, in sentences; the first one is raised."""
        yield from ()

    def given(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Which of some settings are not the default, and what they are."""
        values = ((name, getattr(self, name), type(self).model_fields[name].default) for name in names)
        return ((name, value) for name, value, default in values if value != default)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self


class Run(Section):
    """`[run]`: how long, where to, on what."""

    name: Free[Annotated[str, Field(min_length=1, max_length=100)]] = "run"
    """Name shown in reports."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the order of the data."""
    steps: Tunable[Count]
    """Optimizer steps of the whole run; may differ on resume."""
    epochs: Tunable[Annotated[float, Field(gt=0)] | None] = None
    """How often the run sees its data, instead of `steps`, which follow from it once the data is read."""
    out: Free[PathText | None] = None
    """Output folder; `runs/<name>` where it is not given."""
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"
    """"auto" takes CUDA where there is a usable device."""
    log_every: Free[Count] = 1
    """Steps between two points on TensorBoard and `loggers` (`metrics.jsonl` has every step)."""
    loggers: Free[Annotated[list[Literal["wandb", "mlflow"]], Listed]] = []
    """Where metrics go besides TensorBoard. Servers, projects and keys are those of their own environment variables."""
    save_every: Free[Annotated[int, Field(ge=0)]] = 0
    """Steps between two checkpoints; 0 saves at the end only. The end of a run, and SIGTERM, always save."""
    keep: Free[Count] = 2
    """Number of newest checkpoints to keep."""
    keep_every: Free[Annotated[int, Field(ge=0)]] = 0
    """Also keep the checkpoints of all multiples of this step, a multiple of `save_every`; 0 for none."""
    keep_best: Free[Annotated[int, Field(ge=0)]] = 0
    """Also keep this number of checkpoints with the lowest held-out loss, which is then measured at every save, too."""
    restarts: Free[Annotated[int, Field(ge=0)]] = 0
    """How often `octavo train` starts the run again, from its newest checkpoint, after its process crashed or was
    killed. Not for torchrun, which has `--max-restarts`."""
    deterministic: Tunable[bool] = False
    """Use PyTorch's deterministic algorithms, so that GPUs add in the same order in every run; slower there."""
    profile: Free[Annotated[list[Count], Field(min_length=2, max_length=2)] | None] = None
    """First and last step, counted from 1, to profile: `profile.json` is a trace for ui.perfetto.dev, `profile.txt` the
    operations that took the longest. On several ranks, of the first one. Profiled steps are slower."""
    compile: Tunable[Literal["auto", "blocks", "none"]] = "auto"
    """Whether each repeated block of the model is compiled (`torch.compile`). "auto": "blocks" on a GPU, "none" on a
    CPU, and "none" for what cannot compile, with a note."""

    @model_validator(mode="before")
    @classmethod
    def _steps_of_epochs(cls, table: object) -> object:
        if isinstance(table, dict) and table.get("epochs") is not None:
            return {"steps": LARGEST_COUNT, **table}
        return table

    def _problems(self) -> Iterator[str]:
        if self.name in (".", "..") or "/" in self.name or "\\" in self.name or not self.name.isprintable():
            problem = f"run.name = {self.name!r} names the folder runs/<name>"
            yield f"{problem}: give one name, without separators or control characters; run.out is for a path"
        if self.profile is not None and not self.profile[0] <= self.profile[1] <= self.steps:
            problem = f"run.profile = {self.profile} is not the first and the last step of a part of the run"
            yield f"{problem}, which has run.steps = {self.steps}: write it as [10, 12]"
        for name, value in () if self.save_every else self.given("keep_every", "keep_best"):
            reason = "run.save_every = 0 saves none before the end"
            yield f"run.{name} = {value} keeps checkpoints, and {reason}: set run.save_every, such as 100"
        if self.keep_every and self.keep_every % self.save_every:
            problem = f"run.keep_every = {self.keep_every} is not a multiple of run.save_every = {self.save_every}"
            yield f"{problem}, so most of the checkpoints to keep are never saved: make it one"

    def saves(self, step: int) -> bool:
        """Whether the run saves after a step, besides its end."""
        return self.save_every > 0 and step % self.save_every == 0


class Model(Section):
    """`[model]`: a model of `transformers` for `data.task`: from a local folder, or by type and config."""

    path: PathText | None = None
    """Folder of a local checkpoint (`save_pretrained`), with its tokenizer unless `data.tokenizer` names another; or
    the name of one on the Hub that is in its cache here (`hf download NAME`)."""
    type: str | None = None
    """`model_type` of `transformers`, as "llama"; for images as "vit", for images and text as "llava". "dit" is
    diffusers' `DiTTransformer2DModel`."""
    config: dict[str, Any] = {}
    """Fields of that type's config, as `hidden_size = 256`. Where not given, `vocab_size` is the tokenizer's, and
    `image_size`, `num_channels` and `num_labels` are those of the images."""
    frozen: Annotated[tuple[str, ...], Strict(False)] = ()
    """Patterns of names of modules that are not trained, as "vision_tower"; they match whole names or ends of them.
    Frozen parameters have no gradients and no optimizer states."""
    attention: Tunable[
        Literal["auto", "sdpa", "eager", "varlen", "flex_attention", "flash_attention_2", "flash_attention_3"]
    ] = "auto"
    """How attention is computed: "varlen" is PyTorch's variable-length attention, for `data.packing` other than
    "stream"; the others are Transformers' names. "auto": with such packing on a GPU "varlen" if the model can, else the
    model's default, "sdpa" where it has that. With such packing "sdpa" and "eager" read a mask of all pairs of
    positions, the others none. "flash_attention_2" and "_3" need their packages, and parameters in bf16 or fp16."""

    def _problems(self) -> Iterator[str]:
        if (self.path is None) == (self.type is None):
            yield 'give either model.path (a local checkpoint) or model.type, as "llama"'
        if self.path is not None and self.config:
            yield "model.config is for model.type; the checkpoint at model.path has its own config"


class LoraConfig(Section):
    """`[lora]`: train low-rank adapters of PEFT on a frozen model, and nothing else of it."""

    rank: Count = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapters' output is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Strict(False)] = ("all-linear",)
    """Names of the layers with adapters, or their ends, as "q_proj"; "all-linear": all linear layers but the head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapters' input."""
    rank_stabilized: bool = False
    """Multiply by alpha / √rank instead (rsLoRA)."""
    base: Literal["bf16", "fp8"] = "fp8"
    """"fp8": the frozen weights of layers that compute in FP8 exist in FP8 only, 1 byte per parameter; at level "bf16"
    no layer does. "bf16": all in `precision.parameters`. FSDP shards both."""
    weight_only: Literal["auto"] | Annotated[tuple[str, ...], Strict(False)] = "auto"
    """Name patterns of layers of a base in FP8 that compute in the dtype of their input: their weights are dequantized
    for each product. Gradients as of the dequantized weights, at the speed of bf16. ["*"]: all; []: none. "auto": the
    projections of attention, whose FP8 products cost the adapters' gradients most for their time."""

    def _problems(self) -> Iterator[str]:
        if not self.targets or ("all-linear" in self.targets and len(self.targets) > 1):
            yield f'lora.targets = {list(self.targets)}: give "all-linear" alone, or names of layers, as ["q_proj"]'
        if self.weight_only not in ("auto", ()) and self.base != "fp8":
            given = f"lora.weight_only = {list(self.weight_only)} is for weights in FP8"
            yield f'{given}, and lora.base = {self.base!r}: leave it out, or set lora.base = "fp8"'


TEXT_ONLY = (
    "sources", "split", "text_field", "format", "messages_field", "chat_template", "loss_on", "packing", "streaming",
    "chunk_bytes", "cache_gib",
)  # fmt: skip
OTHER_TASKS = {
    "language": ("images", "label_dropout"),
    "image-classification": ("images", "label_dropout", "vocab_size", "tokenizer", *TEXT_ONLY),
    "image-text": ("label_dropout", *TEXT_ONLY),
    "image-generation": ("images", "vocab_size", "tokenizer", *TEXT_ONLY),
}
"""Settings of `[data]` that a task does not read."""
OF_IMAGES = ("image-classification", "image-generation")  # Tasks whose rows are images, without text
Task = Literal["language", "image-classification", "image-text", "image-generation"]
SETTING_IS_FOR = {"images": "images with text", "label_dropout": "image generation"}
Format = Literal["text", "messages"]
HELD_OUT_SHARE = 0.01  # `eval.fraction` where it is not given


class DataSource(Section):
    """`[[data.sources]]`: one source of a mixture."""

    source: Annotated[PathText, Field(min_length=1)]
    """As `data.source`."""
    weight: Annotated[float, Field(gt=0)]
    """Share of the run's sequences, relative to the other weights."""
    split: str | None = None
    """As `data.split`, which it replaces for this source."""
    text_field: str | None = None
    """As `data.text_field`, which it replaces for this source."""
    format: Format | None = None
    """As `data.format`, which it replaces for this source."""
    messages_field: str | None = None
    """As `data.messages_field`, which it replaces for this source."""


class Data(Section):
    """`[data]`: text or conversations in, sequences of tokens out; or images, with labels or with text."""

    task: Task = "language"
    """What is learned: the next token of text, the class of an image, the answers in conversations about images, or the
    noise in an image of a class (diffusion)."""
    source: Free[PathText] = ""
    """"python-stdlib"; a glob of .txt (each file a document), .jsonl or .parquet files (each row one); a folder, with
    files of one kind below it or written by `save_to_disk`; or a dataset of the Hub, as "name" or "name:subset".
    "python-docstrings" has conversations. For images "digits", those that scikit-learn brings along; a folder with a
    folder of images for each class, for "image-generation" also of latents (.npy); or for "image-text" a .json file of
    conversations in LLaVA's form. Required, unless there are `sources`."""
    sources: Free[Annotated[tuple[DataSource, ...], Strict(False)]] = ()
    """A mixture of several sources instead of `source`: a table `[[data.sources]]` for each, with a weight."""
    images: PathText | None = None
    """Folder of the images that a .json file names; that of the file where it is not given."""
    split: str = "train"
    """Split of a dataset, or of a folder whose file names contain one ("test.jsonl"); other sources have none."""
    text_field: str = "text"
    """Column that holds the text, in .jsonl, .parquet and datasets."""
    format: Format = "text"
    """What a document is: text, or a conversation, a list of messages with `role` and `content` in `messages_field`.
    Rows of ShareGPT (`conversations` of `from` and `value`) and Alpaca (`instruction`, `input`, `output`) are such.
    Messages may have `tool_calls` and `reasoning_content`, rows `tools`, for the chat template to render."""
    messages_field: str = "messages"
    """Column that holds the conversations, with `format = "messages"`."""
    chat_template: PathText | None = None
    """Template of conversations: "plain", which is built in and fits any tokenizer, or a file with a Jinja template.
    The tokenizer's own where not given."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of conversations that are targets: those of the assistant's messages, or all."""
    sequence_length: Count
    """Tokens of one sequence, for "image-text" with those of the image. Not for images without text."""
    vocab_size: Annotated[int, Field(ge=257, le=1 << 20)] = 4096
    """Size of the byte-level BPE trained on the data (256 bytes, one end-of-text, the rest merges); 1048576 at most."""
    tokenizer: PathText | None = None
    """Folder of a `transformers` tokenizer to use, or a name as in `model.path`, instead of the model's own or a
    trained one."""
    packing: Literal["stream", "documents", "none"] = "stream"
    """"stream": sequences are cut from one stream of all documents, and attention crosses their borders. "documents":
    whole documents are packed into sequences, and attention and positions stay inside each. "none": a document for each
    sequence, padded. In the last two a longer document is cut."""
    label_dropout: Share = 0.1
    """Share of the images whose class is left out in training, for classifier-free guidance."""
    shuffle: bool = True
    """Permute the sequences anew in each epoch; False takes them in order."""
    streaming: bool = False
    """Read and tokenize files when the run needs them, instead of all before the first step; for much data."""
    chunk_bytes: Annotated[int, Field(ge=1024)] = 64 << 20
    """Text that `streaming` tokenizes, shuffles and packs at once, from several places of the files."""
    cache_gib: Free[Annotated[float, Field(gt=0, le=1e9)]] = 16.0
    """Largest size of the tokenized chunks of `streaming` in `cache`; the oldest are removed."""
    cache: Free[PathText] = "~/.cache/octavo"
    """Folder of tokenized data and trained tokenizers; safe to delete."""

    @property
    def parts(self) -> tuple["Data", ...]:
        """The settings of each source, itself if there is one."""
        if not self.sources:
            return (self,)
        replaced = (part.model_dump(exclude={"weight"}, exclude_none=True) for part in self.sources)
        return tuple(self.model_copy(update={"sources": ()} | part) for part in replaced)

    @property
    def column(self) -> str:
        """The column that holds the documents."""
        return self.messages_field if self.format == "messages" else self.text_field

    @property
    def has_messages(self) -> bool:
        return any(part.format == "messages" for part in self.parts)

    @property
    def masks_targets(self) -> bool:
        """Whether some targets of a sequence do not count."""
        return self.packing != "stream" or (self.has_messages and self.loss_on == "assistant")

    @model_validator(mode="before")
    @classmethod
    def _one_target_per_image(cls, settings: object) -> object:
        if isinstance(settings, dict) and settings.get("task") in OF_IMAGES:
            return {"sequence_length": 1} | settings
        return settings

    def _problems(self) -> Iterator[str]:
        if self.source and self.sources:
            yield "give either data.source or [[data.sources]], not both"
        if not self.source and not self.sources:
            yield "missing key data.source (or tables [[data.sources]], each with a source and a weight)"
        for name, value in () if self.has_messages else self.given("messages_field", "chat_template", "loss_on"):
            yield f'data.{name} = "{value}" is for conversations: set data.format = "messages", or leave it out'
        for name, _ in () if self.streaming else self.given("chunk_bytes", "cache_gib"):
            yield f"data.{name} is for data.streaming = true: set it, or leave data.{name} out"
        for name, _ in self.given(*OTHER_TASKS[self.task]):
            kind = SETTING_IS_FOR.get(name, "text")
            yield f'data.{name} is for {kind}, and data.task is "{self.task}": leave it out'
        if self.task in OF_IMAGES and self.sequence_length != 1:
            yield f"data.sequence_length = {self.sequence_length}: an image has one target: leave it out"


class EvalConfig(Section):
    """`[eval]`: held-out data. Text has none without this section; of images a part is always held out."""

    every: Free[Annotated[int, Field(ge=0)]] = 0
    """Steps between two measurements; 0 measures at the end only. The end is always measured."""
    first: bool = False
    """Also measure before the first step."""
    source: Tunable[PathText | None] = None
    """Text to evaluate on, as in `data.source`. Where neither this nor `split` is given, a part of the documents of
    `data.source` is held out, and not trained on."""
    split: Tunable[str | None] = None
    """Split of `source` to evaluate on, or of `data.source` without one, as "validation"."""
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the documents to hold out, one at least; 0.01 where not given. Their hashes decide which."""
    batches: Tunable[Count] = 8
    """Largest number of batches, of `optim.batch` sequences, to measure on; always the same ones."""
    ema: Free[bool] = False
    """Also measure the averaged weights of `optim.ema`, as "loss_ema"."""
    patience: Tunable[Annotated[int, Field(ge=0)]] = 0
    """End the run after this many measurements in a row without a lower loss than before; 0: never. `run.keep_best`
    keeps the best weights."""

    @property
    def has_own_data(self) -> bool:
        """Whether the text is not held out from that to train on."""
        return self.source is not None or self.split is not None

    @property
    def share(self) -> float:
        return HELD_OUT_SHARE if self.fraction is None else self.fraction

    def _problems(self) -> Iterator[str]:
        if self.patience and not self.every:
            reason = "eval.every = 0 measures at the end only"
            yield f"eval.patience = {self.patience} counts measurements, and {reason}: set eval.every, such as 100"
        if self.has_own_data and self.fraction is not None:
            other = f"eval.{'source' if self.source is not None else 'split'} names other text"
            yield f"eval.fraction = {self.fraction:g} holds out a part of data.source, and {other}: leave one out"


class SampleConfig(Section):
    """`[sample]`: text that the model writes now and then while it trains, to look at."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between two samples; 0 samples at the end only. The end is always sampled."""
    prompts: Annotated[tuple[str, ...], Strict(False), Field(min_length=1), Listed]
    """Beginnings of texts to go on from, as ["def "]; "" begins a document."""
    tokens: Count = 64
    """Largest number of tokens to write for each prompt."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 takes the most likely token each time. Above 0, tokens are drawn with this temperature; the seed is a function
    of (`run.seed`, step)."""


class ParameterGroup(Section):
    """`[[optim.groups]]`: settings of the parameters that a pattern matches; the first group that matches counts."""

    match: Annotated[str, Field(min_length=1)]
    """Pattern, as in `fnmatch`, of names of parameters or of modules around them, as "*norm*" or "*embed_tokens"."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; warmup and schedule multiply it as `optim.lr`."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Decoupled weight decay, also of parameters that do not decay by rule."""
    muon: bool | None = None
    """With `optim.name = "muon"`: false leaves these parameters to AdamW."""


class Optim(Section):
    """`[optim]`: the optimizer, its schedule and the batch."""

    name: str = "adamw"
    """"adamw"; or "muon": `octavo.optim.Muon` for the hidden matrices (and those of experts), scaled to the step of
    AdamW (`adjust_lr_fn="match_rms_adamw"`), so that `lr` and `weight_decay` are those of AdamW; AdamW for the rest."""
    momentum: Decay = 0.95
    """Decay of Muon's momentum."""
    lr: Tunable[Annotated[float, Field(gt=0)]]
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], Strict(False)] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay of weights of products and embeddings; not of norms, biases, vectors and Mamba's `A_log`."""
    groups: Annotated[tuple[ParameterGroup, ...], Strict(False)] = ()
    """Tables `[[optim.groups]]` with other settings for some parameters; the run prints what each matches."""
    states: Literal["fp32", "fp8"] | None = None
    """Moments of AdamW: 8 bytes per parameter, or about 2.1 in FP8 with dynamic range expansion (`octavo.AdamW`); half
    of it where Muon has a momentum only. Where not given, those of `precision.level`."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, as 0.999, in fp32: 4 bytes per parameter, sharded like the
    parameter. For `eval.ema` and `--ema` of `octavo export`; training does not use it."""
    clip: Tunable[Annotated[float, Field(ge=0)]] = 1.0
    """Largest global L2 norm of the gradient; 0 does not clip."""
    batch: Count = 8
    """Sequences of one optimizer step."""
    micro_batches: Count = 1
    """Parts the batch is cut into; gradients are accumulated over them."""
    schedule: Tunable[Literal["cosine", "linear", "wsd", "constant"]] = "cosine"
    """After the warmup: cosine or linear decay; warmup-stable-decay (linear decay at the end); or constant."""
    warmup: Tunable[Annotated[int, Field(ge=0)]] = 0
    """Steps of linear warmup."""
    decay: Tunable[Share] = 0.2
    """Share of all steps that the decay of "wsd" takes, at the end."""
    min_lr_ratio: Tunable[Share] = 0.1
    """Learning rate at the end, as a share of `lr` (cosine, linear and wsd)."""
    rewarm: Tunable[Annotated[int, Field(ge=0)]] = 0
    """Steps of a second linear warmup, up to the schedule, from step `rewarm_from` on; for a resumed run."""
    rewarm_from: Tunable[Annotated[int, Field(ge=0)] | None] = None
    """Finished steps at which `rewarm` begins: those of the checkpoint that the run resumes from."""

    def _problems(self) -> Iterator[str]:
        if self.name not in OPTIMIZERS:
            names = " | ".join(f'"{name}"' for name in OPTIMIZERS)
            yield f"optim.name: should be {names}, got {self.name!r}{nearest(self.name, OPTIMIZERS)}"
        if self.batch % self.micro_batches:
            lower = [n for n in range(1, isqrt(self.batch) + 1) if self.batch % n == 0]
            problem = f"optim.batch = {self.batch} cannot be cut into {self.micro_batches} equal micro-batches"
            yield f"{problem}: set optim.micro_batches to one of {sorted({*lower, *(self.batch // n for n in lower)})}"
        for other in OPTIMIZERS.values():
            if other.name != self.name and any(getattr(group, other.name, None) is not None for group in self.groups):
                yield f'optim.groups: {other.name} is for optim.name = "{other.name}": leave it out'
            for key, _ in self.given(*(key for key in other.settings if key not in OPTIMIZERS[self.name].settings)):
                yield f'optim.{key} is for optim.name = "{other.name}"; AdamW has optim.betas'
        if bool(self.rewarm) != (self.rewarm_from is not None):
            missing, given = ("rewarm_from", "rewarm") if self.rewarm else ("rewarm", "rewarm_from")
            both = "its steps (optim.rewarm) and the step where it begins (optim.rewarm_from)"
            yield f"optim.{given} = {getattr(self, given)} without optim.{missing}: a second warmup takes both, {both}"


def decay_steps(optim: Optim, steps: int) -> int:
    """Steps that the decay of "wsd" takes of `steps`; 0 for other schedules."""
    return max(1, round(optim.decay * steps)) if optim.decay and optim.schedule == "wsd" else 0


SELECTION = ("skip", "only", "skip_first", "skip_last", "min_features")  # Which linear layers are converted


class PrecisionConfig(Section):
    """`[precision]`: number formats of computation, saved activations and optimizer."""

    level: Annotated[str, AfterValidator(lambda level: ALIASES.get(level, level))] = "bf16"
    """Level of `octavo.Precision.level`: "bf16", "fp8" (FP8 matrix products), "fp8+activations" (and stored
    activations) or "fp8+activations+optimizer" (and optimizer states). `matmul`, `activations`, `master` and
    `optim.states` set one part of it. The aliases "O1", "O1+act" and "O1+act+opt" are replaced by these names."""
    matmul: Literal["bf16", "fp8"] | None = None
    """Products of the linear layers."""
    activations: Literal["auto", "bf16", "fused", "fp8"] | None = None
    """What norms, gated MLPs and activation functions save for backward: "fp8" copies, or what they save without Octavo
    ("bf16"). "fused" saves no copies either; norms and gates of several eager kernels run as one, in blocks that do not
    compile. "auto": the level's; if that is "bf16", "fused" on a GPU whose blocks run eagerly."""
    recipe: str = "rowwise"
    """Recipe of the FP8 products, a name in `octavo.RECIPES`; not used by "bf16". "auto": on a GPU the fastest for each
    layer, where it pays by predicted cost; elsewhere the default."""
    skip: Tunable[Annotated[tuple[str, ...], Strict(False)]] = ()
    """Patterns of module names that stay unconverted, as "*lm_head*"."""
    only: Tunable[Annotated[tuple[str, ...], Strict(False)]] = ()
    """Patterns of names of the linear layers to convert, as "*.mlp.*"; all of them where empty."""
    skip_first: Tunable[Annotated[int, Field(ge=0)]] = 0
    """Blocks at the beginning of the model whose linear layers stay unconverted."""
    skip_last: Tunable[Annotated[int, Field(ge=0)]] = 0
    """Blocks at the end of the model whose linear layers stay unconverted."""
    min_features: Tunable[Annotated[int, Field(ge=0)]] = 0
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
    autopilot: Tunable[bool] = False
    """Move a layer whose statistics cross a limit to a safer recipe; samples every `inspect.every` steps, or 50."""
    loss: Literal["chunked", "whole"] = "chunked"
    """"chunked" computes head and loss a chunk of tokens at a time, so that the full logits never exist."""
    checkpointing: Tunable[Literal["none", "full", "selective"]] = "none"
    """Activation checkpointing of each block: recompute all of it, or all but its matrix products and attention."""

    @property
    def resolved(self) -> Precision:
        """Precision of the level, with the overrides of its parts."""
        parts = {name: getattr(self, name) for name in ("matmul", "activations", "master")}
        changes = {name: value for name, value in parts.items() if value not in (None, "auto")}
        changes |= {name: getattr(self, name) for name in ("recipe", "keep_weights", *SELECTION)}
        return Precision.level(self.level, **changes)

    def _problems(self) -> Iterator[str]:
        master = self.resolved.master
        if self.parameters == "fp16" and master != "fp32":
            problem = "AdamW's second moment underflows in fp16, also with 16 bits more"
            yield f'precision.master = "{master}" with fp16 parameters: {problem}; set precision.master = "fp32"'


MODES = ("tp", "cp", "ep", "pp")  # The kinds of parallelism that divide a model or a sequence


class ParallelConfig(Section):
    """`[parallel]`: how the processes of torchrun share the work; not for a single process."""

    dp_replicate: Tunable[Count] = 1
    """Copies of the model, each sharded or not (with dp_shard = 1: DDP)."""
    dp_shard: Tunable[Annotated[int, Field(ge=-1)]] = -1
    """Processes that share one copy (FSDP2); -1 for all that are left."""
    reshard_after_forward: Tunable[bool] = True
    """Free gathered weights between forward and backward (ZeRO-3), or keep them (ZeRO-2)."""
    cpu_offload: Tunable[bool] = False
    """Shards, gradients and optimizer states in host memory: models larger than the device."""
    fp8_comm: Tunable[Literal["auto", "on", "gather", "off"]] = "auto"
    """FP8 communication: weights and gradients ("on"), weights ("gather"), none ("off"), or by cost ("auto")."""
    tp: Tunable[Count] = 1
    """Processes that share each linear layer (tensor parallelism), by the plan of the model's config. Neighbours in
    rank, so that they are on one machine. `fp8_comm` "off" sends tokens in bf16, "on" also sums in FP8."""
    sequence_parallel: Tunable[bool] = True
    """With `tp`: each process has S/tp tokens outside of attention and MLP, and computes the loss of these."""
    cp: Tunable[Count] = 1
    """Processes that share each sequence (Ulysses context parallelism): S/cp tokens each, and some heads inside
    attention. Weights are sharded over them as over `dp_shard`."""
    ep: Tunable[Count] = 1
    """Processes that share the experts of each layer, each with rows of its own (expert parallelism). Experts are
    sharded over the others."""
    pp: Tunable[Count] = 1
    """Stages' ranks of a pipeline: each has some blocks of the model. `optim.micro_batches` go through it."""
    schedule: Tunable[
        Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
    ] = "1F1B"
    """Schedule of the pipeline, torch's; from "Interleaved1F1B" on each rank has two stages."""
    async_save: Free[bool] = False
    """Write checkpoints in the background, from a copy in host memory."""
    timeout: Free[Annotated[float, Field(gt=0, le=1e9)]] = 600.0
    """Seconds that a process waits for the others before it raises an error."""

    def _problems(self) -> Iterator[str]:
        _ = self.resolved
        yield from (message.format(self) for apart, message in EXCLUSIVE_SETTINGS if apart(self))

    @property
    def mode(self) -> tuple[str, int]:
        """The first of `MODES` that is used, and its size; ("", 1) for data parallelism alone."""
        return next(((name, size) for name in MODES if (size := getattr(self, name)) > 1), ("", 1))

    @property
    def resolved(self) -> Parallel:
        """The data-parallel part, for `octavo.parallelize`."""
        fields = {"dp_replicate", "dp_shard", "reshard_after_forward", "cpu_offload", "fp8_comm"}
        return Parallel(**self.model_dump(include=fields))

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Return (dp_replicate, dp_shard) for a world size; the ranks of `ep` count as shards."""
        shared = self.tp * self.cp * self.pp
        for name, size in [*((name, getattr(self, name)) for name in MODES), ("tp × cp × pp", shared)]:
            if world_size % size:
                fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
                raise ValueError(f"parallel.{name} = {size} does not divide the {world_size} processes: take {fitting}")
        try:
            return self.resolved.sizes(world_size // shared)
        except ValueError as error:
            note = f" (the {world_size} processes divided by tp × cp × pp = {shared})" if shared > 1 else ""
            raise ValueError(f"{error}{note}") from None

    def alone(self) -> str:
        """Why the layout needs several processes; empty if one is enough."""
        ranks = max(self.dp_replicate * max(self.dp_shard, 1) * self.tp * self.cp * self.pp, self.ep)
        problem = f"{ranks} processes" if ranks > 1 else "cpu_offload, which shards do" if self.cpu_offload else ""
        start = f"start it with torchrun --nproc-per-node {ranks} -m octavo train CONFIG"
        return f"[parallel] asks for {problem}, and this is one by itself: {start}" if problem else ""


class GuardConfig(Section):
    """`[guard]`: rollback after a loss spike; see `octavo.train.guard`."""

    spike: Tunable[Annotated[float, Field(ge=0)]] = 0.0
    """Threshold of a spike in robust standard deviations above the median of the last losses, as 8. After a spike the
    run rolls back to a checkpoint and skips the batches of the spike. 0: never."""
    window: Tunable[Annotated[int, Field(ge=8, le=1 << 20)]] = 64
    """Number of last steps to compare with."""
    rollbacks: Tunable[Count] = 3
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

    every: Free[Annotated[int, Field(ge=0)]] = 0
    """Steps between two samples; 0 for none."""
    what_if: Free[Annotated[tuple[str, ...], Strict(False)]] = ()
    """Other recipes, to report their SQNR on the same tensors."""
    limits: Tunable[Limits] = Limits()
    """Limits of reported statistics."""
    restore_after: Tunable[Annotated[int, Field(ge=0)]] = 0
    """Samples within the limits after which the autopilot moves a layer back to its first recipe; 0 for never."""

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(**self.limits.model_dump())

    def _problems(self) -> Iterator[str]:
        for name in self.what_if:
            try:
                get_recipe(name)
            except ValueError as error:
                yield f"inspect.what_if: {error}"
