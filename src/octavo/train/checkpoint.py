"""Checkpoints: everything a run is, in one folder that exists whole or not at all.

    checkpoints/step-000123/
        model.safetensors, config.json, tokenizer.json …    a `transformers` checkpoint; tied weights stored once
        optimizer.pt                                        moments and masters, for torch.load(weights_only=True)
        trainer.json                                        step, loss scale, the configuration, the data's fingerprint

Written under a temporary name, synced to disk and renamed, so a killed process leaves the previous checkpoint as
the newest. What is not here needs no saving: the learning rate, the batch and the randomness of a step are
functions of (seed, step).

A run resumes only as itself: model, data, seed, batch and precision must be as they were, and the first difference is
named. The learning rate and its schedule, clipping and a few more may change, to save a run that went wrong; each such
change is reported.
"""

import json
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from octavo.train.config import ConfigError, TrainConfig
from octavo.train.disk import sync, sync_entry
from octavo.train.loss_scale import LossScale
from octavo.train.optimizer import CompactAdamW, MasterAdamW
from octavo.train.tokenizer import TextTokenizer

FOLDER = "checkpoints"
FREE = {
    *(f"run.{key}" for key in ("name", "out", "device", "log_every", "save_every", "keep")),
    *(f"data.{key}" for key in ("source", "cache")),
}
"""What may differ on resume without a word: names and places. The data is compared by its fingerprint."""
TUNABLE = {
    "run.steps",
    *(f"optim.{key}" for key in ("lr", "clip", "schedule", "warmup", "decay", "min_lr_ratio")),
    *(f"precision.{key}" for key in ("skip", "checkpointing")),
}
"""What may differ on resume, and is reported: the run goes on, but is no longer the uninterrupted one."""
UNREADABLE = (RuntimeError, OSError, EOFError, pickle.UnpicklingError, KeyError, ValueError, TypeError, AttributeError)
"""What loading a damaged state raises, one kind or another."""


def save_checkpoint(
    out: Path,
    *,
    step: int,
    model: Any,
    tokenizer: TextTokenizer,
    optimizer: MasterAdamW | CompactAdamW,
    loss_scale: LossScale,
    config: TrainConfig,
    data_fingerprint: str,
    prune: bool = True,
) -> Path:
    """Writes the checkpoint of `step` under `out` and, with `prune`, removes all but the newest `run.keep`.

    Returns its folder. A checkpoint of that step that is there already is kept: it is the same.
    """
    root = out / FOLDER
    target = root / f"step-{step:06d}"
    if target.exists():
        return target
    scratch = root / f".writing-step-{step:06d}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    _save_model(scratch, model, tokenizer)
    torch.save(optimizer.state_dict(), scratch / "optimizer.pt")
    trainer = {
        "step": step,
        "loss_scale": loss_scale.state_dict(),
        "data": data_fingerprint,
        "config": config.model_dump(mode="json", exclude_none=True),
    }
    (scratch / "trainer.json").write_text(json.dumps(trainer, indent=2) + "\n", encoding="utf-8")
    sync(scratch)
    scratch.rename(target)
    sync_entry(root)
    if prune:
        for old in checkpoints(out)[: -config.run.keep]:
            shutil.rmtree(old)
    return target


def latest_checkpoint(out: Path) -> Path | None:
    """Folder of the newest checkpoint under `out`; None where there is none."""
    found = checkpoints(out)
    return found[-1] if found else None


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """What `trainer.json` of a checkpoint says: step, loss_scale, data, config."""
    path = folder / "trainer.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        complete = isinstance(state, dict) and state.keys() >= {"step", "loss_scale", "data", "config"}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): {_remedy(folder)}") from None
    if not complete:
        raise ConfigError(f"{path} is not the state of a trainer: {_remedy(folder)}")
    return state


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


def load_checkpoint(folder: Path, model: Any, optimizer: MasterAdamW | CompactAdamW, loss_scale: LossScale) -> None:
    """Puts weights, optimizer state and loss scale in place. Raises ConfigError where they do not fit."""
    device = next(model.parameters()).device
    try:
        safetensors.torch.load_model(model, folder / "model.safetensors", device=str(device))
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location=device, weights_only=True))
        loss_scale.load_state_dict(read_trainer_state(folder)["loss_scale"])
    except ConfigError:
        raise
    except (*UNREADABLE, SafetensorError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{folder} does not fit this model, or is damaged ({reason}): {_remedy(folder)}") from None


def _save_model(folder: Path, model: Any, tokenizer: TextTokenizer) -> None:
    safetensors.torch.save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    tokenizer.save(folder)


def checkpoints(out: Path) -> list[Path]:
    """Folders of the checkpoints under `out`, the newest last."""
    found = [path for path in (out / FOLDER).glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _settings(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that decide a run's numbers, the model's first, as ("model.config.hidden_size", 256)."""
    for section in ("model", *(name for name in tables if name != "model")):
        yield from ((key, value) for key, value in _flat(section, tables.get(section, {})) if key not in FREE)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}", item)
    else:
        yield prefix, value


def _shown(value: Any) -> str:
    return value if value == "unset" else json.dumps(value)


def _remedy(folder: Path) -> str:
    return f"remove {folder} to resume from the one before"
