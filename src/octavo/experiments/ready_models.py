"""Ready configurations of the models in `models.toml`: what `octavo init` writes, and files in `configs/`.

Imports no torch, so that a list of models takes no time.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from octavo.runtime.extras import needs_extras

COMMENT_COLUMN = 28  # Column of the comments behind settings
SPARE_ROWS = 128  # Rows of the vocabulary beyond the tokenizer's, for models with images: one is their placeholder


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
        return "images" if self.of_images else "sequences"

    @property
    def positions(self) -> str:
        return "patches" if self.of_images else "tokens"

    @property
    def vocabulary(self) -> int:
        """Tokens of the tokenizer of a model of text."""
        if self.task == "image-text":
            return int(self.config["text_config"]["vocab_size"]) - SPARE_ROWS
        return int(self.config["vocab_size"])


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    gpus: int  # Number of GPUs
    sequences: int  # Sequences of one forward on each GPU
    micro_batches: int  # Forwards and backwards of a step
    checkpointing: str  # `precision.checkpointing`
    dp_replicate: int = 1  # Copies of the model, each shared by `gpus / dp_replicate` GPUs
    reasons: Mapping[str, str] = field(default_factory=dict)  # Why, by setting

    @property
    def settings(self) -> dict[str, int | str]:
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
    """A table of steps, with the settings that each adds to a configuration of layout `written`."""
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
    text = resources.files("octavo.experiments").joinpath("models.toml").read_text(encoding="utf-8")
    return {
        name: ReadyModel(name=name, config=json.loads(fields.pop("config")), **fields.pop("run"), **fields)
        for name, fields in tomllib.loads(text).items()
    }


def ready_model(name: str) -> ReadyModel:
    models = ready_models()
    if name not in models:
        from octavo.numerics.suggestions import nearest

        hint = nearest(name.lower(), models) or f"; there are {', '.join(models)}"
        raise ValueError(f"--model {name}: there is no ready configuration of it{hint}; octavo init --list shows all")
    return models[name]


def render(model: ReadyModel, layout: StepLayout, steps: Sequence[PlannedStep], path: str, gpu: tuple[str, str]) -> str:
    """The text of a configuration; `gpu`: its name on the command line, and for people."""
    with needs_extras("octavo init"):
        from jinja2 import Environment, PackageLoader
    launcher = f"torchrun --nproc-per-node {min(layout.gpus, 8)} -m " if layout.gpus > 1 else ""
    commands = {
        f"{launcher}octavo train {path}": f"on each of {layout.gpus // 8} machines" if layout.gpus > 8 else "",
        f"octavo plan {path} --gpu {gpu[0]} --gpus {layout.gpus}": "where the figures below are from",
        f"octavo train {path} --shrink": "the same, small: minutes on a CPU",
    }
    width = max(map(len, commands))
    is_guess = model.lr_from == "a guess"
    parts = {f"model.config.{name}": part for name, part in model.config.items() if isinstance(part, Mapping)}
    fields = {key: value for key, value in model.config.items() if not isinstance(value, Mapping)}
    loader = PackageLoader("octavo.experiments")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"with": _with, "toml": _toml}
    return environment.get_template("model.toml.j2").render(
        model=model, layout=layout, batch=layout.settings["optim.batch"], table=step_table(steps, layout), gpu=gpu[1],
        commands=[f"{command:<{width}}   # {why}" if why else command for command, why in commands.items()],
        tables={"model.config": fields, **parts},
        lr_reason="a guess: its authors published none" if is_guess else f"{model.lr_from}, whose batches are as large",
    )  # fmt: skip


def _with(setting: str, comment: str, value: object) -> str:
    """A setting with a comment behind it, if there is one."""
    setting %= value
    return f"{setting:<{COMMENT_COLUMN - 1}} # {comment}" if comment else setting


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
