"""Comparison of a configuration with a saved run: which settings may differ on resume."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.numerics.precision import ALIASES
from octavo.train.config.run_config import ConfigError, TrainConfig, flat
from octavo.train.config.sample_section import SampleConfig
from octavo.train.config.sections import SELECTION, Limits

FREE = {
    *(f"run.{key}" for key in ("name", "out", "device", "log_every", "loggers", "save_every", "eval_every")),
    *(f"run.{key}" for key in ("keep", "keep_every", "keep_best", "restarts", "profile")),
    *(f"eval.{key}" for key in ("every", "ema")),
    *(f"sample.{key}" for key in SampleConfig.model_fields),
    *(f"data.{key}" for key in ("source", "sources", "cache", "cache_gib")),
    *(f"parallel.{key}" for key in ("async_save", "timeout")),
    *(f"inspect.{key}" for key in ("every", "what_if")),
}
"""Settings that may differ on resume without a note: names, paths and monitoring. The data has a fingerprint."""
NEWER: tuple[tuple[str, Any], ...] = (
    ("run.deterministic", False), ("data.task", "language"), ("model.frozen", []), ("data.packing", "stream"),
    ("data.sources", []), ("data.format", "text"), ("data.messages_field", "messages"), ("data.loss_on", "assistant"),
    ("data.streaming", False), ("data.chunk_bytes", 64 << 20), ("data.label_dropout", 0.1), ("optim.rewarm", 0),
    ("optim.groups", []), ("optim.name", "adamw"), ("optim.momentum", 0.95), ("lora.weight_only", []),
    ("run.compile", "auto"),
)  # fmt: skip
"""Defaults that the files of older runs do not have."""
TUNABLE = {
    "run.steps",
    "run.epochs",
    "run.deterministic",
    "run.compile",
    *(f"optim.{key}" for key in ("lr", "clip", "schedule", "warmup", "decay", "min_lr_ratio", "rewarm")),
    "optim.rewarm_from",
    *(f"precision.{key}" for key in (*SELECTION, "checkpointing", "autopilot")),
    *(f"guard.{key}" for key in ("spike", "window", "rollbacks")),
    *(f"inspect.limits.{key}" for key in Limits.model_fields),
    "inspect.restore_after",
    *(f"eval.{key}" for key in ("source", "split", "batches")),
    *(f"parallel.{key}" for key in ("dp_replicate", "dp_shard", "reshard_after_forward", "cpu_offload", "fp8_comm")),
    *(f"parallel.{key}" for key in ("tp", "sequence_parallel", "cp", "ep", "pp", "schedule")),
}
"""Settings that may differ on resume with a note: the run then differs from an uninterrupted one."""


def check_same_run(saved: Mapping[str, Any], config: TrainConfig, where: Path) -> list[str]:
    """Return a line for each changed setting in `TUNABLE`."""
    # Raises ConfigError for the first other setting of `config` that differs from the run saved in `where`.
    old_settings = dict(_settings(saved))
    new_settings = dict(_settings(config.model_dump(mode="json", exclude_none=True)))
    changes = []
    if config.run.epochs is not None:  # the steps follow from the data
        new_settings["run.steps"] = old_settings.get("run.steps", "unset")
    for key in [*new_settings, *(key for key in old_settings if key not in new_settings)]:
        old, new = old_settings.get(key, "unset"), new_settings.get(key, "unset")
        if old == new:
            continue
        if key in TUNABLE:
            changes.append(f"resumed with {key} = {_shown(new)} (was {_shown(old)})")
        else:
            raise ConfigError(
                f"{where} holds another run: there {key} = {_shown(old)}, here {_shown(new)}. "
                f"Set {key} back to resume it, or choose another output folder"
            )
    return changes


def _settings(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that affect a run's numbers, the model's first, as ("model.config.hidden_size", 256)."""
    # Runs from before the precision levels had their present names hold an alias.
    for section in ("model", *(name for name in tables if name != "model")):
        for key, value in flat(section, tables.get(section, {})):
            if key not in FREE and (key, value) not in NEWER:
                yield key, ALIASES.get(value, value) if key == "precision.level" else value


def _shown(value: Any) -> str:
    return value if value == "unset" else json.dumps(value)
