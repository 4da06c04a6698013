"""Ready configurations: what `octavo init` writes, and the files in `configs/` that are named after models.

`models.toml` beside this file has the models. `render` writes the configuration of one for a `StepLayout`: how many
GPUs, how many sequences at a time, what is recomputed. `octavo.experiments.fit_layout` chooses the layout and predicts
its step. Imports no torch, so that a list of models takes no time.
"""

import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

COMMENT_COLUMN = 28  # Column of the comments behind settings
SPARE_ROWS = 128  # Rows of the vocabulary beyond the tokenizer's, for models with images: one is their placeholder
STAGES = (
    '# In stages, each from the checkpoint of the one before (path = "runs/NAME/checkpoints/step-NNNNNN"):',
    '#   align      frozen = ["vision_tower", "language_model", "lm_head"]',
    '#   pretrain   frozen = ["vision_tower"]',
    "#   SFT        nothing frozen",
    "",
)


@dataclass(frozen=True, kw_only=True)
class ReadyModel:
    """A model of `models.toml`, whose head describes the fields."""

    name: str
    title: str
    about: str
    gpus: int
    sequence: int
    batch: int
    lr: float
    lr_from: str
    type: str
    config: Mapping[str, Any]
    task: str = "language"
    source: str = "data/images"

    @property
    def of_images(self) -> bool:
        """Whether its rows are images, without text."""
        return self.task in ("image-classification", "image-generation")

    @property
    def rows(self) -> str:
        """What a batch has."""
        return "images" if self.of_images else "sequences"

    @property
    def positions(self) -> str:
        """What a row has."""
        return "patches" if self.of_images else "tokens"


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """How a step of a configuration is divided."""

    gpus: int  # Number of GPUs
    sequences: int  # Sequences of one forward on each GPU
    micro_batches: int  # Forwards and backwards of a step
    checkpointing: str  # `precision.checkpointing`
    dp_replicate: int = 1  # Copies of the model, each shared by `gpus / dp_replicate` GPUs
    reasons: Mapping[str, str] = field(default_factory=dict)  # Why, by setting

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a configuration that differ between layouts, by their keys."""
        return {
            "optim.batch": self.gpus * self.sequences * self.micro_batches,
            "optim.micro_batches": self.micro_batches,
            "precision.checkpointing": self.checkpointing,
            "parallel.dp_replicate": self.dp_replicate,
        }

    def overrides(self, other: "StepLayout") -> list[str]:
        """What to write after a configuration of another layout to get this one."""
        theirs = other.settings
        return [f"{key}={value}" for key, value in self.settings.items() if theirs[key] != value]


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A predicted step at one level of precision, on one number of GPUs."""

    precision: str  # "FP8" or "bf16"
    gpus: int  # Number of GPUs
    layout: StepLayout | None = None  # The fastest layout that fits; None if none does
    seconds: float = 0.0  # Time of a step
    tokens_per_second: float = 0.0  # Of all GPUs
    peak: int = 0  # Bytes on each GPU at the peak
    largest: int = 0  # Most sequences of one forward on each GPU that fit


def step_table(steps: Sequence[PlannedStep], written: StepLayout) -> list[str]:
    """Return lines of a table of steps, with the settings that each adds to a configuration of layout `written`."""
    lines = ["GPUs         s a step   tokens/s    GiB  most  settings to add"]
    gpus = 0
    for step in steps:
        head = f"{step.gpus if step.gpus != gpus else '':>4}  {step.precision:<4}"
        gpus = step.gpus
        if step.layout is None:
            lines.append(f"{head}  does not fit")
            continue
        figures = f"{step.seconds:>9,.2f} {step.tokens_per_second:>10,.0f} {step.peak / 2**30:>6.1f} {step.largest:>5}"
        lines.append(f"{head} {figures}  {' '.join(step.layout.overrides(written))}".rstrip())
    return lines


@cache
def ready_models() -> dict[str, ReadyModel]:
    """All models by name."""
    text = resources.files("octavo.experiments").joinpath("models.toml").read_text(encoding="utf-8")
    return {
        name: ReadyModel(name=name, **fields.pop("run"), **{key: _joined(value) for key, value in fields.items()})
        for name, fields in tomllib.loads(text).items()
    }


def _joined(value: Any) -> Any:
    """One table of the lines of a table, which are a list in the file, as TOML's inline tables end with their line."""
    if isinstance(value, list):
        value = {key: setting for line in value for key, setting in line.items()}
    return {key: _joined(part) for key, part in value.items()} if isinstance(value, dict) else value


def ready_model(name: str) -> ReadyModel:
    """Return one model."""
    models = ready_models()
    if name not in models:
        from octavo.numerics.suggestions import nearest

        hint = nearest(name.lower(), models) or f"; there are {', '.join(models)}"
        raise ValueError(f"--model {name}: there is no ready configuration of it{hint}; octavo init --list shows all")
    return models[name]


def render(model: ReadyModel, layout: StepLayout, steps: Sequence[PlannedStep], path: str, gpu: tuple[str, str]) -> str:
    """Return the text of a configuration."""
    settings, why = layout.settings, defaultdict(str, layout.reasons)
    batch = settings["optim.batch"]
    launcher = f"torchrun --nproc-per-node {min(layout.gpus, 8)} -m " if layout.gpus > 1 else ""
    commands = {
        f"{launcher}octavo train {path}": f"on each of {layout.gpus // 8} machines" if layout.gpus > 8 else "",
        f"octavo plan {path} --gpu {gpu[0]} --gpus {layout.gpus}": "where the figures below are from",
        f"octavo train {path} --shrink": "the same, small: minutes on a CPU",
    }
    width = max(map(len, commands))
    head = [
        f"{model.title}: {model.about}.",
        "Trains all parameters in FP8, from random weights.",
        "",
        *(f"    {command:<{width}}{f'   # {why}' if why else ''}".rstrip() for command, why in commands.items()),
        "",
        f"Predicted by octavo plan for {gpu[1]}, never run on a GPU: for FP8 and for level bf16 the fastest step that",
        "leaves a tenth of the memory free. GiB: memory of each GPU. most: sequences at a time on each GPU that fit.",
        "Lines of bf16 are with precision.level=bf16, too.",
        *(["Tokens are patches, sequences images."] if model.of_images else []),
        *(["Experts count as bf16 in the times of FP8."] if "num_experts_per_tok" in model.config else []),
        "",
        *(f"  {line}" for line in step_table(steps, layout)),
    ]
    fields = [f"{key} = {_toml(value)}" for key, value in model.config.items() if not isinstance(value, Mapping)]
    parts = {name: part for name, part in model.config.items() if isinstance(part, Mapping)}
    tables = [
        line
        for name, part in parts.items()
        for line in ("", f"[model.config.{name}]", *(f"{key} = {_toml(value)}" for key, value in part.items()))
    ]
    is_guess = model.lr_from == "a guess"
    lr_reason = "a guess: its authors published none" if is_guess else f"{model.lr_from}, whose batches are as large"
    body = [
        "[run]", f'name = "{model.name}"', "steps = 10000", "save_every = 500", "", *_data(model), "",
        "[model]",
        _with(f'type = "{model.type}"', 'or, instead of this line and the table below, path = "a/local/checkpoint"'),
        "",
        *(STAGES if model.task == "image-text" else []),
        "[model.config]", *fields, *tables, "",
        "[optim]",
        _with(f"lr = {_toml(model.lr)}", lr_reason),
        _with(f"batch = {batch}", f"{model.rows} of a step: {batch * model.sequence:,} {model.positions}"),
        _with(f"micro_batches = {layout.micro_batches}", why["micro_batches"]),
        'schedule = "cosine"', "warmup = 500", "",
        "[precision]",
        _with('level = "fp8+activations+optimizer"', "FP8 products, stored activations and moments"),
        _with('recipe = "rowwise"', '"auto" takes the fastest for each layer on the GPU'),
        _with('parameters = "bf16"', "with an exact fp32 master in 2 more bytes"),
        _with('loss = "chunked"', "whole logits never exist"),
        _with(f'checkpointing = "{layout.checkpointing}"', why["checkpointing"]),
        "",
        "[parallel]",
        _with(f"dp_replicate = {layout.dp_replicate}", why["dp_replicate"]),
        _with("dp_shard = -1", "FSDP2: the GPUs of a copy share parameters, gradients and moments"),
    ]  # fmt: skip
    return "\n".join([*(f"# {line}".rstrip() for line in head), "", *body, ""])


def _data(model: ReadyModel) -> list[str]:
    if model.of_images:
        source = _with(f'source = "{model.source}"', "a folder with a folder for each class")
        return ["[data]", f'task = "{model.task}"', source]
    tokenizer = "of the BPE trained on {}; or tokenizer = a folder with one"
    if model.task == "image-text":
        vocabulary = model.config["text_config"]["vocab_size"] - SPARE_ROWS
        return [
            "[data]",
            'task = "image-text"',
            _with('source = "data/train.json"', "your conversations about images, in LLaVA's form"),
            _with('images = "data/images"', "the folder of the images that it names"),
            _with(f"sequence_length = {model.sequence}", "with the features of the image"),
            _with(f"vocab_size = {vocabulary}", tokenizer.format("them")),
        ]
    return [
        "[data]",
        _with('source = "data/*.txt"', "your text; docs/training.md lists the formats"),
        f"sequence_length = {model.sequence}",
        _with(f"vocab_size = {model.config.get('vocab_size')}", tokenizer.format("it")),
    ]


def _with(setting: str, comment: str) -> str:
    return f"{setting:<{COMMENT_COLUMN - 1}} # {comment}" if comment else setting


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
