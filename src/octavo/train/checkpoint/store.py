"""Checkpoints: the state of a run in one folder, written atomically.

    checkpoints/step-000123/
        model.safetensors, config.json, tokenizer.json …    written by `save_pretrained` of model and tokenizer
        optimizer.pt                                        moments and masters, for torch.load(weights_only=True)
        shards/                                             instead of both, from several ranks: `shards.py`
        trainer.json                                        step, loss scale, configuration, fingerprint of the data,
                                                            recipes of the layers in FP8
        digests.json                                        of every other file: `octavo.train.checkpoint.digests`

A checkpoint is written under a temporary name, synced to disk and renamed; before removal it is renamed as well. One
process or several can read either kind; reading executes no code from it.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from octavo.nn import apply_plan, equalized, rule_plan
from octavo.nn.experts import is_converted_experts
from octavo.nn.linear_subclasses import is_converted
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.recipe import get_recipe
from octavo.numerics.suggestions import grouped
from octavo.train import lora
from octavo.train.checkpoint import diffusers_models, pretrained, shards
from octavo.train.checkpoint.digests import check_digests, find_damage, write_digests
from octavo.train.checkpoint.retention import FOLDER, REMOVING, checkpoints, obsolete_checkpoints, remove_checkpoint
from octavo.train.checkpoint.shards import SHARDS, load_whole, save_whole
from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.config.sections import Run
from octavo.train.disk import sync, sync_entry
from octavo.train.loss_scale import LossScale
from octavo.train.optimizer import TrainerOptimizer
from octavo.train.ranks import Ranks, SharedError, share_on_machine

WRITING = ".writing-"  # Prefix of a checkpoint during writing
MOST_READ = 4 << 30  # Bytes of a checkpoint's weights that are looked at after a divergence, which reaches all of them
PARTS = "parts of layers"  # Key of channel scales under tensor parallelism: a list, by part
IGNORED_CONFIG_KEYS = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Keys of a model's config that do not change what it computes; the dtype is compared as `precision.parameters`."""


class CheckpointSaver:
    def __init__(self, ranks: Ranks, *, async_save: bool = False, timeout: float = 600.0) -> None:
        self._ranks = ranks
        self._group = ranks.host_group(timedelta(seconds=timeout)) if async_save else None
        self._pending: tuple[Any, _NewCheckpoint] | None = None

    def save(
        self, out: Path, *, step: int, model: Any, save_assets: Callable[[Path], None], optimizer: TrainerOptimizer,
        loss_scale: LossScale, config: TrainConfig, data_fingerprint: str, extra: Mapping[str, Any], part: int = 0,
        prune: bool = True,
    ) -> Path:  # fmt: skip
        """Write the checkpoint of `step` under `out`; with `prune`, remove those that the run does not keep."""
        # `save_assets`: writes what belongs to the model into a folder, as the tokenizer. `extra`: more entries of
        # `trainer.json`. `part`: which part of each layer this rank has. One that is there is the same.
        self.finish()
        checkpoint = _NewCheckpoint(out, step, config.run if prune else None)
        if self._ranks.run_on_rank0(lambda: checkpoint.target in checkpoints(out)):
            self._ranks.run_on_rank0(checkpoint.prune)  # an earlier process may have been killed before
            return checkpoint.target
        metadata = {
            "step": step, "loss_scale": loss_scale.state_dict(), "data": data_fingerprint,
            "config": config.model_dump(mode="json", exclude_none=True), "ranks": self._ranks.world_size,
            **({"base": base} if (base := lora.base_digest(model, self._ranks)) else {}), **extra,
        }  # fmt: skip
        if recipes := self._merged(recipes_of(model)):
            metadata["recipes"] = recipes
        if channels := self._channels(model, part):
            metadata["equalized"] = channels
        with self._writing(checkpoint):
            self._ranks.run_on_rank0(lambda: checkpoint.begin(metadata, model, save_assets))
            digests: dict[str, str] = {}
            if self._ranks.world_size == 1 and not shards.has_shards(model):
                save_whole(checkpoint.scratch, model, optimizer)
            elif self._group is None:
                digests = shards.write(checkpoint.scratch / SHARDS, shards.state_of(model, optimizer))
            else:
                state = shards.state_of(model, optimizer)
                self._pending = shards.write_async(checkpoint.scratch / SHARDS, state, self._group), checkpoint
                return checkpoint.target
            self._publish(checkpoint, digests)
        return checkpoint.target

    def publish_finished(self) -> None:
        """Publish a pending checkpoint if all ranks have written it. Call it on all ranks after the same steps."""
        if self._pending is not None and not self._ranks.any(not self._pending[0].done()):
            self.finish()

    def finish(self) -> None:
        if self._pending is None:
            return
        (future, checkpoint), self._pending = self._pending, None
        with self._writing(checkpoint):
            self._publish(checkpoint, shards.wait_for(future, checkpoint.scratch / SHARDS))

    def _channels(self, model: nn.Module, part: int) -> dict[str, Any]:
        """The channel scales of equalized layers, by part of the layers if there are several; {} without any."""
        own = equalized.state_dict(model)
        if self._ranks.world_size == 1:
            return own
        by_part = grouped(self._ranks.all_gather((part, own)))
        states = [equalized.merge_states(by_part[index]) for index in sorted(by_part)]
        return states[0] if len(states) == 1 else {PARTS: states} if any(states) else {}

    def _merged(self, own: dict[str, str]) -> dict[str, str]:
        """The entries of all ranks, which may have different layers."""
        return {name: value for entries in self._ranks.all_gather(own) for name, value in entries.items()}

    def _publish(self, checkpoint: "_NewCheckpoint", digests: dict[str, str]) -> None:
        merged = self._merged(digests)
        self._ranks.run_on_rank0(lambda: checkpoint.publish(merged))

    @contextmanager
    def _writing(self, checkpoint: "_NewCheckpoint") -> Iterator[None]:
        try:
            yield
        except (OSError, SharedError) as error:
            if self._ranks.is_main:
                shutil.rmtree(checkpoint.scratch, ignore_errors=True)
            problem = f"the checkpoint of step {checkpoint.step} cannot be written: {error}"
            raise SharedError(f"{problem}. Those before it are as they were") from None


@dataclass(frozen=True)
class _NewCheckpoint:
    """A checkpoint during writing; `run`: which of all stay, None for all."""

    out: Path
    step: int
    run: Run | None

    @property
    def target(self) -> Path:
        return self.out / FOLDER / f"step-{self.step:06d}"

    @property
    def scratch(self) -> Path:
        return self.out / FOLDER / f"{WRITING}step-{self.step:06d}"

    def begin(self, metadata: dict[str, Any], model: Any, save_assets: Callable[[Path], None]) -> None:
        """Remove unfinished leftovers of earlier processes and write the small files."""
        for prefix in (WRITING, REMOVING):
            for leftover in (self.out / FOLDER).glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        pretrained.save_model_configs(model, self.scratch)
        if lora.has_adapters(model):
            model.peft_config[lora.ADAPTER].save_pretrained(str(self.scratch))
        save_assets(self.scratch)
        (self.scratch / "trainer.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")

    def publish(self, digests: Mapping[str, str]) -> None:
        if (folder := self.scratch / SHARDS).exists():
            files = shards.files_of_index(folder)
            if missing := sorted(name for name in files if not (folder / name).exists()):
                problem = f"{len(missing)} of {len(files)} shards are missing ({', '.join(missing[:4])})"
                raise OSError(f"{problem}, of what was just written: give --out a folder that all machines share")
        write_digests(self.scratch, digests)
        sync(self.scratch)
        self.scratch.rename(self.target)
        sync_entry(self.target.parent)
        self.prune()

    def prune(self) -> None:
        if (run := self.run) is not None:
            for old in obsolete_checkpoints(self.out, run.keep, run.keep_every, run.keep_best):
                remove_checkpoint(old)


def read_trainer_state(folder: Path) -> dict[str, Any]:
    """Read `trainer.json` of a checkpoint. Raises ConfigError if it was changed after writing."""
    path = folder / "trainer.json"
    _with_remedy(folder, lambda: check_digests(folder, [path.name]))
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))  # what was written, by its digest
    return state


def damaged_checkpoints(out: Path) -> dict[Path, str]:
    """The newest checkpoints under `out` that are damaged, up to the first whole one, with the reason of each."""
    damaged: dict[Path, str] = {}
    for folder in reversed(checkpoints(out)):
        try:
            if not (damage := find_damage(folder)):
                read_trainer_state(folder)
                return damaged
        except ConfigError as error:
            damage = str(error)
        damaged[folder] = damage
    if damaged:
        newest = next(iter(damaged))
        raise ConfigError(f"none of the {len(damaged)} checkpoints of {out} is whole: {newest}: {damaged[newest]}")
    return damaged


def set_aside(folder: Path) -> Path:
    paths = (folder.with_name(f"damaged-{folder.name}{f'-{n}' if n else ''}") for n in count())
    return folder.rename(next(path for path in paths if not path.exists()))


def saved_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Weights of a checkpoint of one process or several, by name, up to `MOST_READ` bytes of them."""
    left = MOST_READ
    for name, weight in _each_weight(folder):
        yield name, weight
        left -= weight.nbytes
        if left <= 0:
            return


def _each_weight(folder: Path) -> Iterator[tuple[str, Tensor]]:
    if (folder / SHARDS).exists():
        for name in shards.read_index(folder / SHARDS).state_dict_metadata:
            if name.startswith("model."):
                yield name.removeprefix("model."), shards.read_tensors(folder / SHARDS, name)[""]
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def check_files(folder: Path, ranks: Ranks) -> None:
    """Raise ConfigError on all ranks if a file of a checkpoint does not match its digest; each rank reads its share."""
    check = partial(check_digests, folder, part=ranks.rank, parts=ranks.world_size)
    ranks.raise_together(lambda: _with_remedy(folder, check))


def check_same_model(folder: Path, config: Any) -> None:
    try:
        saved = pretrained.load_model_config(folder, adapters=True).to_dict()
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}: {_remedy(folder)}") from None
    current = config.to_dict()
    for key in [*current, *(key for key in saved if key not in current)]:
        # As JSON with sorted keys, which become strings first.
        values = (json.loads(json.dumps(settings.get(key), default=str)) for settings in (saved, current))
        before, now = (json.dumps(value, sort_keys=True) for value in values)
        if before != now and key not in IGNORED_CONFIG_KEYS:
            problem = f"{folder} holds another model: there {key} = {before}, here {now}"
            raise ConfigError(f"{problem}. Set it back in model.path or [model.config], or choose another --out")


def load_checkpoint(
    folder: Path, model: Any, optimizer: TrainerOptimizer, loss_scale: LossScale, ranks: Ranks,
    part: tuple[int, int] = (0, 1),
) -> None:  # fmt: skip
    """Load weights, optimizer state and loss scale. Raises ConfigError if they do not fit."""
    # `part`: which part of each layer this rank has, and of how many; channel scales of another number are not loaded.
    state = ranks.run_on_rank0(lambda: read_trainer_state(folder))
    check_files(folder, ranks)
    ranks.run_on_rank0(lambda: check_same_model(folder, diffusers_models.config_of(model)))
    base = lora.base_digest(model, ranks)
    if ranks.world_size == state.get("ranks", 1) and base != state.get("base", base):
        problem = f"{folder} holds adapters of other base weights: what is at model.path has changed since"
        raise SharedError(f"{problem}. Set it back to resume the run, or choose another output folder")
    try:
        if ranks.run_on_rank0((folder / SHARDS).exists):
            shards.read(folder / SHARDS, model, optimizer)
        else:
            if lora.has_adapters(model):
                weights = ranks.raise_together(lambda: lora.load(folder, model))
            else:
                dtype = next(model.parameters()).dtype
                weights = share_on_machine(lambda: pretrained.load_pretrained(folder, dtype).state_dict(), ranks)
            ranks.raise_together(lambda: load_whole(folder, weights, model, optimizer))
        ranks.raise_together(lambda: pretrained.load_generation_config(folder, model))
        loss_scale.load_state_dict(state["loss_scale"])
        channels = state.get("equalized", {})
        states = channels.get(PARTS, [channels])
        equalized.load_state_dict(model, states[part[0]] if len(states) == part[1] else {})
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise SharedError(f"{folder} does not fit this model, or is damaged ({error}): {_remedy(folder)}") from None


def _with_remedy(folder: Path, check: Callable[[], None]) -> None:
    try:
        check()
    except ConfigError as error:
        raise ConfigError(f"{error}: {_remedy(folder)}") from None


def _remedy(folder: Path) -> str:
    return f"remove {folder} to resume from the one before, or add --best-effort"


def recipes_of(model: nn.Module) -> dict[str, str]:
    """The name of the recipe of each converted layer, by the layer's name, which `octavo export` needs."""
    modules = model.named_modules()
    return {fqn: m.recipe.name for fqn, m in modules if is_converted(m) or is_converted_experts(m)}


def convert_as(model: nn.Module, recipes: Mapping[str, str]) -> None:
    """Convert a model to what `recipes_of` returned, in place. Raises ValueError for recipes of another model."""
    if recipes:
        decisions = dict(rule_plan(model).decisions)
        for fqn, decision in decisions.items():
            if decision.recipe is not None:
                decisions[fqn] = replace(decision, recipe=None, reason="in high precision in training")
        in_fp8 = {fqn: Decision(recipe=get_recipe(name), reason="as in training") for fqn, name in recipes.items()}
        apply_plan(model, Plan(decisions | in_fp8, partial=True))
