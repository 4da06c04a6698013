"""Diffusion transformers of diffusers, with the interface that models of Transformers have here: config, build, load.

`model.type = "dit"` is `DiTTransformer2DModel`, initialized as its paper does (adaLN-Zero, arXiv 2212.09748). The model
itself drops no classes: the data does (`octavo.train.data.images`), so that ranks and resumed runs drop the same.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.runtime.blocks import CALLED_OUTSIDE
from octavo.serving.folder import Exported, ExportLayout
from octavo.train.checkpoint.kinds import ModelKind
from octavo.train.config.run_config import ConfigError, optional_package

TYPE, CLASS = "dit", "DiTTransformer2DModel"
INSTALL = "pip install 'octavo[diffusion]'"
INITIAL_STD = 0.02  # Standard deviation of the initial embeddings of classes and timesteps


@dataclass(frozen=True)
class DiffusersKind(ModelKind):
    @property
    def classes(self) -> dict[str, Any]:
        config_class()
        return {TYPE: CLASS}

    @property
    def auto(self) -> Any:
        return _Auto

    def make_empty(self, model: nn.Module) -> None:
        """Do nothing: classes of diffusers note nothing in `__init__`."""


IMAGE_GENERATION = DiffusersKind("diffusion transformer", "", "")


def library() -> Any:
    """The module `diffusers`. Raises ConfigError if it cannot be imported."""
    return optional_package("diffusers", "diffusion transformers are of diffusers", INSTALL)


@cache
def config_class() -> Any:
    """The config of type "dit", a class that Transformers knows from now on. Raises ConfigError without diffusers."""
    from transformers import AutoConfig, PretrainedConfig

    library()

    class DiTConfig(PretrainedConfig):
        model_type = TYPE
        attribute_map = {"image_size": "sample_size", "num_channels": "in_channels"}  # noqa: RUF012
        num_attention_heads: int = 16
        attention_head_dim: int = 72
        in_channels: int = 4
        out_channels: int | None = None
        num_layers: int = 28
        dropout: float = 0.0
        attention_bias: bool = True
        sample_size: int = 32
        patch_size: int = 2
        activation_fn: str = "gelu-approximate"
        num_embeds_ada_norm: int = 1000
        norm_eps: float = 1e-5

    AutoConfig.register(TYPE, DiTConfig)
    return DiTConfig


def is_model(model: nn.Module) -> bool:
    return any(f"{base.__module__}.".startswith("diffusers.") for base in type(model).__mro__)


def config_of(model: Any) -> Any:
    """The config of a model, of diffusers or not, as Transformers has them."""
    return _config(dict(model.config)) if is_model(model) else model.config


def save_config(model: Any, folder: Path) -> None:
    """Write config.json, also of a model under FSDP2, whose class has another name."""
    model.save_config(folder)
    text = json.dumps(_read(folder) | {"_class_name": CLASS}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def load_config(folder: Path) -> Any:
    """The config of the model in a folder; None if it is none of diffusers. Raises ConfigError for another class."""
    fields = _read(folder)
    if "_class_name" not in fields:
        return None
    if fields["_class_name"] != CLASS:
        raise ConfigError(f"config.json is of {fields['_class_name']!r}; of diffusers' models Octavo trains {CLASS}")
    return _config(fields)


def _config(fields: Mapping[str, Any]) -> Any:
    known = config_class().__annotations__
    return config_class()(**{name: value for name, value in fields.items() if name in known}, architectures=[CLASS])


def _read(folder: Path) -> dict[str, Any]:
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # whoever reads it as of Transformers says what is wrong
        return {}
    return fields if isinstance(fields, dict) else {}


def export(model: Any, folder: Path, layout: ExportLayout | None, max_shard_size: int | str) -> Exported:
    if layout is not None:
        raise ConfigError(f"--to {layout.name} is a layout of language models, and this is a {CLASS}: use --to bf16")
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Exported(path=folder, layout="bf16", fp8=(), high_precision={}, notes=())


class _Auto:
    @staticmethod
    def from_config(settings: Any, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
        names = [name for name in config_class().__annotations__ if name != "model_type"]
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # of parameters, and not of buffers, as `from_pretrained` has them
        try:
            model = getattr(library(), CLASS)(**{name: getattr(settings, name) for name in names})
        finally:
            torch.set_default_dtype(before)
        initialize(model)
        return _prepared(model)

    @staticmethod
    def from_pretrained(
        folder: str, *, dtype: torch.dtype, local_files_only: bool, trust_remote_code: bool, output_loading_info: bool
    ) -> Any:
        model, info = getattr(library(), CLASS).from_pretrained(
            folder, torch_dtype=dtype, local_files_only=local_files_only, output_loading_info=output_loading_info,
            low_cpu_mem_usage=False, use_safetensors=True,
        )  # fmt: skip
        return _prepared(model), info


def _prepared(model: Any) -> Any:
    """Leave dropping of classes to the data; mark the embeddings of the first block, which the head reads as well."""
    for module in model.modules():
        if hasattr(module, "dropout_prob") and hasattr(module, "embedding_table"):
            module.dropout_prob = 0.0
    setattr(model.transformer_blocks[0].norm1.emb, CALLED_OUTSIDE, True)
    return model


def initialize(model: nn.Module) -> None:
    """Draw the initial weights, as section 3.2 of the paper: Xavier, and zeros where modulation and head begin."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_STD)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if re.search(r"norm1\.linear$|^proj_out_[12]$", name):
                nn.init.zeros_(module.weight)
            elif ".timestep_embedder." in name:
                nn.init.normal_(module.weight, std=INITIAL_STD)
            else:  # of patches as of a linear: a kernel's outputs do not overlap
                bound = math.sqrt(6 / (module.weight.shape[0] + module.weight[0].numel()))
                nn.init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
