"""The configuration of a run: TOML in, frozen pydantic models out.

Reading is strict: nothing is coerced, and a `ConfigError` names the key as written on the command line (`optim.lr`).
"""

import datetime
import importlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from octavo.numerics import Precision
from octavo.numerics.recipe import get_recipe
from octavo.numerics.suggestions import nearest
from octavo.optim import OPTIMIZERS
from octavo.parallel.combinations import ZERO_BUBBLE
from octavo.train.config import sections
from octavo.train.config.sections import CHANGEABLE_ON_RESUME, IGNORED_ON_RESUME, Free, Optim, Run, Section, decay_steps

TEXT_ONLY_EVAL = ("source", "split", "fraction", "batches")  # Settings of `[eval]`; `batches` image generation has, too
LARGEST_STEP = 2**30  # Most tokens of a step: each process holds their ids and targets, 16 bytes a token
EXPECTED_VALUES = {  # Descriptions for settings where pydantic's message covers only a part, or one of two forms
    "optim.betas": "two numbers in [0, 1), as [0.9, 0.95]",
    "run.profile": "the first and the last step to profile, as [10, 12]",
    "precision.skip": 'a list of patterns, as ["lm_head"]',
    "precision.only": 'a list of patterns, as ["*.mlp.*"]',
    "sample.prompts": 'a list of one text or more, as ["def "]',
    "inspect.what_if": 'a list of recipes, as ["blockwise"]',
    "precision.loss_scale": '"none" | "dynamic", or a number > 0',
}


class ConfigError(ValueError):
    """A mistake in a configuration, or in the data or model it names."""


def one_line(error: Exception) -> str:
    """What an error says, without line breaks; its type as well where it says little without."""
    reason, kind = " ".join(str(error).split()), type(error).__name__
    says_enough = reason and isinstance(error, OSError | ValueError | RuntimeError)
    return reason if says_enough else f"{kind}: {reason}" if reason else kind


@contextmanager
def naming(what: str, *types: type[Exception]) -> Iterator[None]:
    """Turn errors of these types, or any but a ConfigError, into a ConfigError in one line that begins with `what`."""
    caught = types or (Exception,)  # each class of another package fails in its own way
    try:
        yield
    except caught as error:
        if not types and isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what}: {getattr(error, 'strerror', None) or one_line(error)}") from None


def optional_package(name: str, what: str, install: str) -> Any:
    """Import a package that some settings need. Raises ConfigError, which begins with `what`, without it."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"{what}, which cannot be imported ({error}): {install}") from None


class TrainConfig(Section):
    """Configuration of a run, from `load_config` or `TrainConfig.model_validate` of a dictionary of sections."""

    run: Run
    model: sections.Model
    lora: sections.LoraConfig | None = None
    data: sections.Data
    eval: sections.EvalConfig | None = None
    sample: Free[sections.SampleConfig | None] = None
    optim: Optim
    precision: sections.PrecisionConfig = sections.PrecisionConfig()
    parallel: sections.ParallelConfig = sections.ParallelConfig()
    inspect: sections.InspectConfig = sections.InspectConfig()
    guard: sections.GuardConfig = sections.GuardConfig()

    def _problems(self) -> Iterator[str]:
        steps, warmup = self.run.steps, self.optim.warmup
        if warmup >= steps:
            yield f"optim.warmup = {warmup} is not below run.steps = {steps}: lower it, or take more steps"
        if (decay := decay_steps(self.optim, steps)) + warmup > steps:
            given = f"optim.warmup = {warmup} and a decay of {decay} steps (optim.decay = {self.optim.decay:g})"
            yield f"{given} do not fit into run.steps = {steps}: lower either, or take more steps"
        batch, length = self.optim.batch, self.data.sequence_length
        if batch * length > LARGEST_STEP:
            given = f"optim.batch = {batch} sequences of data.sequence_length = {length} are {batch * length:,} tokens"
            yield f"{given} a step, which each process holds in memory; {LARGEST_STEP:,} at most: lower either"
        yield from self._problems_of_mode()
        task = self.data.task
        if self.model.attention == "varlen" and task != "language":
            yield f'model.attention = "varlen" is for packed text, and data.task is "{task}": leave it out'
        if self.model.attention == "varlen" and self.data.packing == "stream":
            yield 'model.attention = "varlen" is for packed documents: set data.packing = "documents", or leave it out'
        if task != "language" and self.sample is not None:
            yield f'[sample] writes text, and data.task is "{task}": leave the section out'
        if task != "language" and self.eval is not None:
            names = [name for name in TEXT_ONLY_EVAL if (name, task) != ("batches", "image-generation")]
            for name, value in self.eval.given(*names):
                yield f'eval.{name} = {value} is for text, and data.task is "{task}": leave it out'
        if self.guard.spike and not self.run.save_every:
            what = f"guard.spike = {self.guard.spike:g} rolls back to checkpoints"
            yield f"{what}, and run.save_every = 0 saves none before the end: set run.save_every, such as 100"
        if self.precision.autopilot and self.resolved.matmul != "fp8":
            what = f"precision.autopilot moves FP8 layers, and precision.level = {self.precision.level!r} has none"
            yield f'{what}: set precision.level = "fp8", or leave the autopilot out'
        name = self.optim.name
        if OPTIMIZERS[name].matrices and self.parallel.tp > 1:
            what = f'optim.name = "{name}" with parallel.tp = {self.parallel.tp}: {name.title()} needs whole matrices'
            yield f'{what}, of which tp has parts; leave parallel.tp out, or set optim.name = "adamw"'
        if self.eval is not None and self.eval.ema and self.optim.ema is None:
            yield "eval.ema measures averaged weights, and there are none: set optim.ema, such as 0.999"
        best = f"run.keep_best = {self.run.keep_best} keeps the checkpoints of the lowest held-out loss"
        if self.run.keep_best and task == "language" and self.eval is None:
            yield f"{best}, and there is no section [eval]: add one, such as eval.every=100"
        if self.run.keep_best and task == "image-classification":
            yield f"{best}, and a classifier of images measures its accuracy: leave it out"
        if self.run.compile == "blocks" and (problem := self.uncompilable):
            yield f'run.compile = "blocks": {problem}: set run.compile = "none"'
        if self.lora is not None and (frozen := list(self.model.frozen)):
            yield f"model.frozen = {frozen} with [lora], which freezes all of the model: leave it out"
        if self.lora is not None and task == "image-generation":
            yield '[lora] is for models of Transformers, and data.task = "image-generation": leave it out'

    def _problems_of_mode(self) -> Iterator[str]:
        """What goes with data parallelism only."""
        (mode, size), data, text = self.parallel.mode, self.data, self.data.task == "language"
        packs = data.packing != "stream"
        problems = (
            (not text, f'data.task = "{data.task}"', "takes other models than language models"),
            (text and packs, f'data.packing = "{data.packing}"', "keeps documents apart"),
            (text and not packs and data.masks_targets, 'data.format = "messages"', "weighs targets that do not count"),
            (self.sample is not None, "[sample]", "samples"),
            (self.lora is not None, "[lora]", "trains adapters"),
        )
        for does_not_fit, what, does in problems:
            if mode and does_not_fit:
                problem = f"{what} with parallel.{mode} = {size}"
                yield f"{problem}: only data parallelism {does} (dp_replicate, dp_shard); leave one of them out"

    @property
    def uncompilable(self) -> str:
        """Why the blocks of the run cannot compile, in a sentence; empty where they can."""
        precision, parallel, (mode, size) = self.resolved, self.parallel, self.parallel.mode
        name, comm, schedule = precision.recipe, parallel.fp8_comm, parallel.schedule
        equalizes = precision.matmul == "fp8" and name != "auto" and get_recipe(name).equalization
        if equalizes and comm in ("on", "gather"):
            return f"recipe {name!r} with parallel.fp8_comm = {comm!r} measures gathered weights"
        if equalizes and parallel.pp > 1:
            return f"recipe {name!r} measures between the micro-batches of a pipeline"
        if parallel.pp > 1 and schedule in ZERO_BUBBLE:
            return f"{schedule} runs the backward of a block in two parts, and a graph has one"
        reason = f"parallel.{mode} = {size} exchanges tensors between ranks inside a block, which no graph does"
        return reason if mode in ("tp", "cp", "ep") else ""

    @property
    def frozen(self) -> Literal["bf16", "fp8"]:
        """Format of the weights of frozen layers that compute in FP8, as `octavo.convert` takes it."""
        return "bf16" if self.lora is None else self.lora.base

    @property
    def weight_only(self) -> Literal["auto"] | tuple[str, ...]:
        """Layers with products in high precision of weights in FP8, as `octavo.convert` takes them."""
        return self.lora.weight_only if self.lora is not None and self.frozen == "fp8" else ()

    @property
    def resolved(self) -> Precision:
        """Precision of the run, including the optimizer."""
        precision = self.precision.resolved
        return precision if self.optim.states is None else replace(precision, states=self.optim.states)

    @property
    def flat(self) -> dict[str, Any]:
        """All settings by dotted keys, as JSON has them; without unset ones."""
        return dict(flat("", self.model_dump(mode="json", exclude_none=True)))

    @property
    def precision_label(self) -> str:
        """Short label of the precision, as "bf16" or "fp8 rowwise"."""
        return self.resolved.label

    def to_toml(self) -> str:
        """The effective configuration as TOML that `load_config` reads back equal; unset keys are left out."""
        return "\n".join(
            f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
            for name, section in self.model_dump(exclude_none=True).items()
        )


Change = Callable[[Mapping[str, Any]], dict[str, Any]]  # Makes other sections of those of a file


def flat(prefix: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield the settings in nested tables with dotted keys: ("model.config.hidden_size", 256)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(f"{prefix}.{key}" if prefix else key, item)
    else:
        yield prefix, value


def load_config(
    path: str | Path, overrides: Sequence[str] = (), note: Callable[[str], None] = lambda text: None,
    change: Change = dict,
) -> TrainConfig:  # fmt: skip
    """Read a TOML file and apply overrides of the form `section.key=value`.

    A value is parsed as TOML (`optim.lr=3e-4`, `run.name="a b"`); other text is a string, so `precision.recipe=rowwise`
    needs no quotes. If `run.steps` is overridden and `optim.warmup` is not, a warmup that does not fit is shortened to
    at most half of the steps, and `note` receives a sentence about it. `change` replaces the sections of the file,
    before the overrides (`octavo.train.config.shrink`).

    Raises:
        ConfigError: For every mistake.

    Examples:
        >>> config = octavo.train.load_config("config.toml", ["precision.level=fp8", "run.steps=2"])
        >>> config.run.steps, config.precision_label
        (2, 'fp8 rowwise')
    """
    file = Path(path)
    with naming(f"{path} cannot be read as a TOML file", OSError, ValueError, RecursionError):
        exists = file.exists()
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig")) if exists else {}
    if not exists:
        problem = f"no such config file: {path}{nearest(str(path), map(str, file.parent.glob('*.toml')))}"
        raise ConfigError(f"{problem}; give the path of a TOML file, such as configs/demo.toml")
    tables = change(tables)
    keys = {_apply(tables, override) for override in overrides}
    if ("run", "steps") in keys and ("optim", "warmup") not in keys:
        _fit_warmup(tables, note)
    return parse_config(tables)


def _fit_warmup(tables: dict[str, Any], note: Callable[[str], None]) -> None:
    """Shorten a warmup that does not fit; other mistakes are left to `parse_config`."""
    try:
        steps, optim = Run.model_validate(tables["run"]).steps, Optim.model_validate(tables["optim"])
    except (ValidationError, KeyError):
        return
    decay = decay_steps(optim, steps)
    if optim.warmup >= steps or optim.warmup + decay > steps:
        shorter = min(steps // 2, max(0, steps - decay))
        tables["optim"]["warmup"] = shorter
        note(f"the learning rate warms up over {shorter} of the {steps} steps, as the file's {optim.warmup} do not fit")


def parse_config(tables: Mapping[str, Any]) -> TrainConfig:
    """Check a dictionary of sections. Raises ConfigError naming the first wrong key.

    Examples:
        >>> octavo.train.parse_config({"run": {"steps": "10"}})
        Traceback (most recent call last):
        octavo.train.config.run_config.ConfigError: run.steps: should be a valid integer, got '10'
    """
    try:
        return TrainConfig.model_validate(tables)
    except ValidationError as error:
        raise ConfigError(explain(error, tables, TrainConfig)) from None


def _apply(tables: dict[str, Any], override: str) -> tuple[str, ...]:
    key, text = _split_override(override)
    value = _value(override, text)
    table = tables
    for parent in key[:-1]:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {_toml(override)}: {parent} is a value, not a table")
    table[key[-1]] = value
    return key


def _split_override(override: str) -> tuple[tuple[str, ...], str]:
    name, separator, text = override.partition("=")
    table: object = _parse_toml(f"{name} = 0") if separator else None
    key = []
    while isinstance(table, dict) and table:
        ((name, table),) = table.items()
        key.append(name)
    if len(key) < 2:
        raise ConfigError(f"override {_toml(override)}: write section.key=value, as optim.lr=3e-4")
    return tuple(key), text


def _value(override: str, text: str) -> object:
    """Parse a value as TOML, else return the text. Raises ConfigError for text after the value."""
    parsed, in_list = _parse_toml(f"value = {text}"), _parse_toml(f"value = [{text}]")
    if parsed and parsed.keys() == {"value"} and in_list and len(in_list["value"]) == 1:
        value = parsed["value"]
        return text.strip() if isinstance(value, datetime.date | datetime.time) else value  # dates stay text
    if parsed is not None or len(text.splitlines()) > 1:
        problem = "expected one value, and something follows it: quote a string that holds a line break or a #"
    elif text.lstrip()[:1] in ('"', "'"):
        problem = "the string does not end where the value does: look at its quotes"
    else:
        return text
    raise ConfigError(f"override {_toml(override)}: {problem}")


def _parse_toml(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)


def explain(error: ValidationError, tables: Mapping[str, Any], config: type[Section]) -> str:
    """Return the first mistake that pydantic found in the tables of a configuration, by key, with what to write."""
    first = error.errors()[0]
    model: Any = config
    key: list[str] = []
    for part in first["loc"]:
        if not (isinstance(model, type) and issubclass(model, Section)):
            break
        if isinstance(part, int):  # a table of a list
            continue
        fields: list[str] = list(model.model_fields)
        key.append(str(part))
        if part not in fields:
            hint = nearest(str(part), fields) or f"; known here: {', '.join(fields)}"
            return f"unknown {'section' if len(key) == 1 else 'key'} {'.'.join(key)}{hint}"
        model = _section(model.model_fields[str(part)].annotation)
    name = ".".join(key)
    choices = re.findall(r"'(.*?)'", first["ctx"]["expected"]) if first["type"] == "literal_error" else []
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return f"missing {'section' if len(key) == 1 else 'key'} {name}"
    if name in EXPECTED_VALUES:
        hint = nearest(first["input"], choices) if isinstance(first["input"], str) else ""
        return f"{name}: should be {EXPECTED_VALUES[name]}, got {tables[key[0]][key[1]]!r}{hint}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    got = f", got {first['input']!r}"
    if choices and isinstance(first["input"], str):
        expected = " | ".join(f'"{choice}"' for choice in choices)
        return f"{name}: should be {expected}{got}{nearest(first['input'], choices)}"
    return f"{name}: {first['msg'].removeprefix('Input ')}{got}"


def _section(annotation: object) -> Any:
    sections = [part for part in get_args(annotation) if isinstance(part, type) and issubclass(part, Section)]
    return sections[0] if sections else annotation


def resume_of(key: str) -> str:
    """Whether a setting, as "optim.lr", may differ on resume: `IGNORED_ON_RESUME`, `CHANGEABLE_ON_RESUME` or ""."""
    section: Any = TrainConfig
    for name in key.split("."):
        if (field := getattr(section, "model_fields", {}).get(name)) is None:
            break
        if kind := next((kind for kind in (IGNORED_ON_RESUME, CHANGEABLE_ON_RESUME) if kind in field.metadata), ""):
            return kind
        section = _section(field.annotation)
    return ""


def check_same_run(saved: Mapping[str, Any], config: TrainConfig, where: Path) -> list[str]:
    """Return a line for each changed setting that is `CHANGEABLE_ON_RESUME`."""
    # Raises ConfigError for the first other setting of `config` that differs from the run saved in `where`.
    old_settings, new_settings, changes = dict(flat("", saved)), config.flat, []
    with suppress(ConfigError):  # settings that are newer than the saved run have their defaults
        old_settings = parse_config(saved).flat
    if config.run.epochs is not None:  # the steps follow from the data
        new_settings["run.steps"] = old_settings.get("run.steps", "unset")
    # The model's settings first.
    for key in sorted(new_settings | old_settings, key=lambda key: not key.startswith("model.")):
        old, new = old_settings.get(key, "unset"), new_settings.get(key, "unset")
        kind = resume_of(key)
        if old == new or kind == IGNORED_ON_RESUME:
            continue
        before, now = (value if value == "unset" else json.dumps(value) for value in (old, new))
        if kind != CHANGEABLE_ON_RESUME:
            problem = f"{where} holds another run: there {key} = {before}, here {now}"
            raise ConfigError(f"{problem}. Set {key} back to resume it, or choose another output folder")
        changes.append(f"resumed with {key} = {now} (was {before})")
    return changes
