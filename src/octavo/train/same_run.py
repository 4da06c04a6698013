"""Whether a run is the one in a folder: which settings may differ on resume, and which make it another run."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.train.config import ConfigError, TrainConfig, flat
from octavo.train.sections import SELECTION, Limits

FREE = {
    *(f"run.{key}" for key in ("name", "out", "device", "log_every", "save_every", "keep")),
    *(f"data.{key}" for key in ("source", "cache")),
    *(f"parallel.{key}" for key in ("async_save", "timeout")),
    *(f"inspect.{key}" for key in ("every", "what_if")),
}
"""What may differ on resume without a word: names, places and what is only looked at. The data is compared by its
fingerprint.
"""
TUNABLE = {
    "run.steps",
    *(f"optim.{key}" for key in ("lr", "clip", "schedule", "warmup", "decay", "min_lr_ratio")),
    *(f"precision.{key}" for key in (*SELECTION, "checkpointing", "autopilot")),
    *(f"guard.{key}" for key in ("spike", "window", "rollbacks")),
    *(f"inspect.limits.{key}" for key in Limits.model_fields),
    "inspect.restore_after",
    *(f"parallel.{key}" for key in ("dp_replicate", "dp_shard", "reshard_after_forward", "cpu_offload", "fp8_comm")),
}
"""What may differ on resume, and is reported: the run goes on, but is no longer the uninterrupted one."""


def check_same_run(saved: Mapping[str, Any], config: TrainConfig, where: Path) -> list[str]:
    """Returns what was tuned since, one line each.

    Raises ConfigError naming the first setting that makes `config` another run than the one saved in `where`.
    """
    before = dict(_settings(saved))
    now = dict(_settings(config.model_dump(mode="json", exclude_none=True)))
    tuned = []
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = before.get(key, "unset"), now.get(key, "unset")
        if old == new:
            continue
        if key in TUNABLE:
            tuned.append(f"resumed with {key} = {_shown(new)} (was {_shown(old)})")
        else:
            raise ConfigError(
                f"{where} holds another run: there {key} = {_shown(old)}, here {_shown(new)}. "
                f"Set {key} back to resume it, or choose another output folder"
            )
    return tuned


def _settings(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that decide a run's numbers, the model's first, as ("model.config.hidden_size", 256)."""
    for section in ("model", *(name for name in tables if name != "model")):
        yield from ((key, value) for key, value in flat(section, tables.get(section, {})) if key not in FREE)


def _shown(value: Any) -> str:
    return value if value == "unset" else json.dumps(value)
