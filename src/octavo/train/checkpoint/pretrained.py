"""Folders of `save_pretrained`: the start of a run, and the weights and settings of a checkpoint.

Reading a folder runs no code from it: a model with its own code raises an error, and weights are read as data.
"""

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from octavo.serving.writer import no_progress_bar
from octavo.train.checkpoint import diffusers_models
from octavo.train.checkpoint.diffusers_models import IMAGE_GENERATION
from octavo.train.checkpoint.kinds import IMAGE_CLASSIFICATION, IMAGE_TEXT, LANGUAGE, ModelKind
from octavo.train.config.run_config import ConfigError, naming, one_line

KINDS = LANGUAGE, IMAGE_CLASSIFICATION, IMAGE_TEXT  # Those of Transformers
AUTO_CLASSES = "AutoConfig", "AutoModel", *(kind.auto_class for kind in KINDS)  # In `auto_map` of a config


def kind_of(settings: Any) -> ModelKind:
    """The kind of the model of a config: that of its `architectures`, else a causal language model."""
    if settings.model_type == diffusers_models.TYPE:
        return IMAGE_GENERATION
    for kind in KINDS:
        names = kind.classes.get(settings.model_type)
        names = (names,) if isinstance(names, str) else names or ()
        if set(names) & set(settings.architectures or ()):
            return kind
    return LANGUAGE


def load_model_config(folder: Path, *, adapters: bool = False) -> Any:
    """The config of the model in `folder`, of Transformers; with `adapters` also of one that has these alone."""
    # Many models name code that Transformers has by now: it is enough that their classes have the same names.
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    if (of_diffusers := diffusers_models.load_config(folder)) is not None:
        return of_diffusers
    if not adapters and (folder / "adapter_config.json").exists():
        merge = "peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(another)"
        raise ConfigError(f"it holds a PEFT adapter (adapter_config.json): give the folder of a merged model, {merge}")
    with naming("config.json cannot be read"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        auto_map, kernels, kind = config.get("auto_map"), _hub_kernels(config), config.get("model_type")
        own = CONFIG_MAPPING[kind].__name__ if kind in CONFIG_MAPPING else None
        names = {"AutoConfig": own, "AutoModel": MODEL_MAPPING_NAMES.get(kind)}
        names |= {model_kind.auto_class: model_kind.classes.get(kind) for model_kind in KINDS}
    auto_map = auto_map if isinstance(auto_map, dict) else {"AutoConfig": auto_map} if auto_map else {}
    classes = {key: str(auto_map[key]).rpartition(".")[2] for key in AUTO_CLASSES if key in auto_map}
    if custom := [name for key, name in classes.items() if name != names.get(key)]:
        problem = f"the model needs its own code ({', '.join(dict.fromkeys(custom))}), which Octavo never runs"
        raise ConfigError(f"{problem}: give a model that Transformers has, without auto_map in its config.json")
    if kernels:
        reason = f"the model needs attention from the hub ({kernels[0]!r}), code that Octavo never fetches or runs"
        raise ConfigError(f'{reason}: set attn_implementation in its config.json to "sdpa" or "eager"')
    with naming("config.json cannot be read"):
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _hub_kernels(config: object, inside: bool = False) -> list[str]:
    """What a config, or a part of it, names as attention of a repository, as "owner/kernel"."""
    if isinstance(config, dict):
        parts = [(value, inside or "attn_implementation" in key) for key, value in config.items()]
        return [kernel for part in parts for kernel in _hub_kernels(*part)]
    return [config] if inside and isinstance(config, str) and "/" in config else []


def load_pretrained(folder: Path, dtype: torch.dtype, kind: ModelKind | None = None) -> Any:
    """The model in `folder`, on the CPU, as one of `kind`; None: of its own kind."""
    settings = load_model_config(folder)
    try:
        with no_progress_bar():
            loaded: Any = (kind or kind_of(settings)).auto.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
    except UnpicklingError:
        raise ConfigError("its weights are a pickle that names more than tensors, which is not read") from None
    except Exception as error:  # of no common type
        raise ConfigError(f"the model cannot be loaded: {one_line(error)}") from None
    model, info = loaded
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random weights there
        raise ConfigError(f"the checkpoint lacks {missing[0]} ({len(missing)} weights in all)")
    load_generation_config(folder, model)  # for a damaged one transformers would take the defaults
    return model


def load_generation_config(folder: Path, model: Any) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").exists():
        with naming("generation_config.json cannot be read"):
            model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)


def save_model_configs(model: Any, folder: Path) -> None:
    """Write what `save_pretrained` writes of a model besides its weights, of which shards are written otherwise."""
    if diffusers_models.is_model(model):
        diffusers_models.save_config(model, folder)
        return
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
