"""Export a checkpoint of one process or several to a folder that `transformers`, vLLM and SGLang load."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from octavo.serving.folder import Exported, ExportLayout, get_layout, model_card, new_folder, write_errors
from octavo.serving.writer import check_shard_size, write
from octavo.train import lora
from octavo.train.checkpoint import diffusers_models, shards
from octavo.train.checkpoint.digests import DIGESTS, files_of, write_digests
from octavo.train.checkpoint.pretrained import kind_of, load_generation_config, load_model_config, load_pretrained
from octavo.train.checkpoint.shards import SHARDS
from octavo.train.checkpoint.store import check_files, convert_as, read_trainer_state
from octavo.train.config.run_config import ConfigError, naming, parse_config
from octavo.train.config.sections import hub_folder
from octavo.train.data.epochs import DATA_FILE
from octavo.train.model import PARAMETER_DTYPES
from octavo.train.ranks import Ranks

DAMAGE = OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError  # What reading it may raise
OWN = {"trainer.json", "optimizer.pt", DATA_FILE, DIGESTS}  # Files in a checkpoint that `save_pretrained` never writes


def export(
    checkpoint: Path, out: Path, to: str = "bf16", max_shard_size: int | str = "50GB", *, ema: bool = False,
    merge: bool = False,
) -> Exported:  # fmt: skip
    """Write the weights of a checkpoint, with the tokenizer and digests, for a run from there."""
    layout = get_layout(to)
    check_shard_size(max_shard_size)
    if not (checkpoint / "trainer.json").exists():
        raise ConfigError(f"{checkpoint} is no checkpoint of a run: give a folder as runs/NAME/checkpoints/step-000100")
    if checkpoint.resolve() in out.resolve().parents:
        raise ConfigError(f"{out} is inside the checkpoint, which it would damage: choose another folder")
    with new_folder(out) as folder:
        state = read_trainer_state(checkpoint)
        if merge and (layout is not None or not state["config"].get("lora")):
            raise ConfigError("--merge adds the adapters of a run with [lora] to its base, with --to bf16")
        if layout is not None and not state.get("recipes"):
            problem = f"has no layer that computed in FP8, to write as {layout.name}: export it with --to bf16"
            hint = f"train with precision.level=fp8 precision.recipe={layout.recipe.name}"
            raise ConfigError(f"{checkpoint} {problem}, or {hint}")
        if ema and state["config"]["optim"].get("ema") is None:
            raise ConfigError(f"{checkpoint} has no averaged weights: train with optim.ema, or export without --ema")
        check_files(checkpoint, Ranks(torch.device("cpu")))
        if state["config"].get("lora"):
            if ema:
                raise ConfigError(f"{checkpoint} holds adapters: their average is not exported; leave --ema out")
            if not merge:
                return _export_adapters(checkpoint, folder, out, layout)
        with naming(f"{checkpoint} is damaged", *DAMAGE):
            dtype = PARAMETER_DTYPES[state["config"]["precision"]["parameters"]]
            model = _merged(checkpoint, state, dtype) if merge else _read(checkpoint, dtype)
            average: dict[str, torch.Tensor] = {}  # by name of the trained parameters
            if ema and (checkpoint / SHARDS).exists():
                average = shards.read_tensors(checkpoint / SHARDS, "optimizer.", ".ema")
            elif ema:
                average = torch.load(checkpoint / "optimizer.pt", weights_only=True, mmap=True)["ema"]
            model.load_state_dict(average, strict=False)
            if layout is not None:
                convert_as(model, state["recipes"])
        with write_errors(out):
            write_model = diffusers_models.export if diffusers_models.is_model(model) else write
            exported = replace(write_model(model, folder, layout, max_shard_size), path=out)
            _copy_assets(checkpoint, folder)
            if merge:
                (folder / "adapter_config.json").unlink()
            if layout is not None:
                config = state["config"]
                base = config["model"].get("path") or f"none: a new {config['model'].get('type')}"
                rows = {"base model": base, "run": f"{config['run'].get('name')}, step {state['step']}"}
                (folder / "README.md").write_text(model_card(model, exported, layout, rows), encoding="utf-8")
            write_digests(folder, {})
    return exported


def _copy_assets(checkpoint: Path, folder: Path) -> None:
    """Copy what neither the trainer nor the model wrote: the tokenizer's files, whatever they are."""
    for name in files_of(checkpoint):
        path, target = checkpoint / name, folder / name
        weights = re.fullmatch(r"(model|diffusion_pytorch_model).*(\.safetensors|\.index\.json)", name)
        own = weights or name in OWN or name.startswith(f"{SHARDS}/")
        if path.is_file() and not own and not target.exists():  # also a link: its content has the digest
            target.parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(path, target)


def _export_adapters(checkpoint: Path, folder: Path, out: Path, layout: ExportLayout | None) -> Exported:
    """Write the adapters of a run with `[lora]` as PEFT does; the base is not in the checkpoint."""
    if layout is not None:
        merge = "merge them with peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()"
        raise ConfigError(f"{checkpoint} holds adapters, which {layout.name} does not have: --to bf16, or {merge}")
    with write_errors(out):
        if (checkpoint / SHARDS).exists():
            lora.save(shards.read_tensors(checkpoint / SHARDS, "model."), folder)
        _copy_assets(checkpoint, folder)
        (folder / "config.json").unlink()  # of the base, which PEFT reads from its own folder
        write_digests(folder, {})
    return Exported(path=out, layout="bf16", fp8=(), high_precision={}, notes=("these are adapters of PEFT alone",))


def _merged(checkpoint: Path, state: dict[str, Any], dtype: torch.dtype) -> Any:
    config = parse_config(state["config"])
    if config.model.path is None or config.lora is None:
        raise ConfigError(f"{checkpoint} has no base to add its adapters to: its run had no model.path")
    base = hub_folder(config.model.path)
    with naming(f"{base}, the base of {checkpoint} (model.path), cannot be read", ConfigError):
        model = load_pretrained(base, dtype, kind_of(load_model_config(base)))
    lora.add_adapters(model, config.lora, 0, None)
    sharded = (checkpoint / SHARDS).exists()
    comparable = config.lora.base == "bf16" and not sharded  # the digest is that of the weights in the run
    if comparable and state["base"] != lora.base_digest(model, Ranks(torch.device("cpu"))):
        raise ConfigError(f"{base} is not the base that the adapters of {checkpoint} were trained on: it has changed")
    weights = shards.read_tensors(checkpoint / SHARDS, "model.") if sharded else lora.load(checkpoint, model)
    model.load_state_dict(weights, strict=False)
    lora.merge(model)
    return model


def _read(checkpoint: Path, dtype: torch.dtype) -> Any:
    if not (checkpoint / SHARDS).exists():
        return load_pretrained(checkpoint, dtype)
    settings = load_model_config(checkpoint)
    with torch.random.fork_rng(devices=[]):
        model = kind_of(settings).auto.from_config(settings, dtype=dtype, trust_remote_code=False)
    load_generation_config(checkpoint, model)
    shards.fill(checkpoint / SHARDS, {f"model.{name}": value for name, value in model.state_dict().items()})
    return model
