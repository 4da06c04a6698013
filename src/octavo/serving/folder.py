"""Folders of exported models: FP8 layouts, model card, and that a folder appears complete or not at all.

It is written under a hidden name, and renamed at the end.
An empty folder that is there, which may be a mount point or a working directory, stays: its content is moved up.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octavo._version import __version__
from octavo.numerics.recipe import RECIPES, Recipe
from octavo.numerics.suggestions import listed, nearest


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, whose content becomes that of `out` if no error is raised."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ValueError(f"{out} is not a folder: choose another name")
    is_there = out.exists()
    if is_there and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another folder")
    target = out.absolute()
    created = [path for path in target.parents if not path.exists()]
    name = f".writing-{uuid.uuid4().hex[:8]}"
    scratch = target / name if is_there else target.with_name(f"{name}-{target.name}")
    try:
        with write_errors(out):
            scratch.mkdir(parents=True)
        yield scratch
        with write_errors(out):
            apply_umask(scratch)
            for path in scratch.iterdir() if is_there else ():
                path.rename(target / path.name)
            if not is_there:
                scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for path in created:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()


@contextmanager
def write_errors(out: Path) -> Iterator[None]:
    """Turn errors of writing files into an OSError that names the folder."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{out} cannot be written: {' '.join(str(error).split())}") from None


def apply_umask(folder: Path) -> None:
    """Give the files of `folder` the mode of the umask; some libraries write with another mode."""
    probe = folder / ".mode"
    probe.touch()
    for path in folder.iterdir():
        if path.is_file():
            shutil.copymode(probe, path)
    probe.unlink()


# The FP8 layouts of checkpoints that vLLM, SGLang and Transformers read.
#
#     W [N,K] of a linear layer, stored as `weight` (e4m3 [N,K]) and scales s with W ≈ q · s:
#
#     layout      scales              dtype, shape                        inputs at run time
#     fp8-row     weight_scale        float32 [N,1]                       one scale per token
#     fp8-block   weight_scale_inv    float32 [⌈N/128⌉,⌈K/128⌉]           one scale per token and 128 channels
#     mxfp8       weight_scale        uint8 [N,K/32], exponents e of      one scale per token and 32 channels
#                                     s = 2^(e - 127)
#
# fp8-row and mxfp8 are FP8_DYNAMIC and MXFP8 of compressed-tensors, fp8-block is DeepSeek-V3's. `weight_scale_inv` is
# the dequantization scale, as the others are. Blocks at the edges may be partial; `mxfp8` has no partial groups.


@dataclass(frozen=True, kw_only=True)
class ExportLayout:
    """How a checkpoint stores the FP8 weights of linear layers."""

    name: str  # As `octavo export --to` takes it
    recipe: Recipe  # One that quantizes weights and inputs in this way
    scale_name: str  # Name of the scales of `weight`
    multiple: int  # K must be a multiple of it
    # Returns the entry of `config.json`, given the modules in high precision.
    quantization_config: Callable[[Sequence[str]], dict[str, Any]]

    def fits(self, recipe: Recipe) -> bool:
        """Return whether this layout describes the forward of a recipe; of one that is weight only, its weights."""
        return (recipe.w, recipe.x) == (self.recipe.w, self.recipe.x) and not recipe.equalization

    @property
    def recipes(self) -> list[str]:
        """Names of the recipes that fit."""
        return [name for name, recipe in RECIPES.items() if self.fits(recipe)]


def _compressed_tensors(format: str, weights: dict[str, Any], inputs: dict[str, Any], ignore: Sequence[str]) -> Any:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": {**common, "dynamic": False, **weights},
        "input_activations": {**common, "dynamic": True, **inputs}, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(ignore), "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }  # fmt: skip


_ROWS, _TOKENS = ({"strategy": strategy, "group_size": None} for strategy in ("channel", "token"))
_GROUPS = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def _fine_grained(ignore: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": list(ignore),
    }  # fmt: skip


_NAMED = (
    ExportLayout(
        name="fp8-row", recipe=RECIPES["rowwise"], scale_name="weight_scale", multiple=1,
        quantization_config=partial(_compressed_tensors, "float-quantized", _ROWS, _TOKENS),
    ),
    ExportLayout(
        name="fp8-block", recipe=RECIPES["blockwise"], scale_name="weight_scale_inv", multiple=1,
        quantization_config=_fine_grained,
    ),
    ExportLayout(
        name="mxfp8", recipe=RECIPES["mxfp8"], scale_name="weight_scale", multiple=32,
        quantization_config=partial(_compressed_tensors, "mxfp8-quantized", _GROUPS, _GROUPS),
    ),
)  # fmt: skip
LAYOUTS = {layout.name: layout for layout in _NAMED}
HIGH_PRECISION = "bf16"  # What `save_pretrained` writes: every weight in its own dtype


def get_layout(name: str) -> ExportLayout | None:
    """Look up a layout; None for `HIGH_PRECISION`. Raises ValueError with the closest name."""
    names = [HIGH_PRECISION, *LAYOUTS]
    if name not in names:
        raise ValueError(f"unknown layout {name!r}{nearest(name, names)}. Known: {', '.join(names)}")
    return LAYOUTS.get(name)


# What was exported, and the model card of the folder: README.md, in the form of the Hugging Face Hub.


_READ_BY = {
    "fp8-row": "vLLM, SGLang, and Transformers with the package `compressed-tensors`",
    "fp8-block": "vLLM, SGLang and Transformers",
    "mxfp8": "vLLM on GPUs with MX formats, and Transformers with the package `compressed-tensors`",
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What `octavo.export` wrote. Prints as a few lines.

    Attributes:
        path: The folder.
        layout: `"bf16"`, `"fp8-row"`, `"fp8-block"` or `"mxfp8"`.
        fp8: Names of the modules whose weights are in FP8.
        high_precision: The other modules with matrix weights, embeddings aside, and why each is not in FP8.
        notes: What a reader of the folder must know.
    """

    path: Path
    layout: str
    fp8: tuple[str, ...]
    high_precision: Mapping[str, str]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        written = f"written: {self.path}"
        if self.layout in LAYOUTS:
            written += f" ({self.layout}: {len(self.fp8)} modules in FP8, {len(self.high_precision)} in high precision)"
        return "\n".join([written, *(f"note: {note}" for note in self.notes)])


def model_card(model: Any, exported: Exported, layout: ExportLayout, details: Mapping[str, str]) -> str:
    """Return the text: recipes, versions, what is in FP8 and what is not, and the given details."""
    recipes = sorted({model.get_submodule(fqn).recipe.name for fqn in exported.fp8})
    base = model.config._name_or_path
    rows = {
        "model": f"{type(model).__name__} ({model.config.model_type})",
        **({"base model": base} if base else {}),
        **details,
        "recipe of training": ", ".join(recipes),
        "layout": f"{layout.name}: weights {layout.recipe.w}, inputs {layout.recipe.x}, scaled at run time",
        "in FP8": f"{len(exported.fp8)} modules: {listed(exported.fp8)}",
        "versions": ", ".join(
            [f"octavo {__version__}", *(f"{name} {version(name)}" for name in ("torch", "transformers"))]
        ),
    }
    reasons: dict[str, list[str]] = {}
    for fqn, reason in exported.high_precision.items():
        reasons.setdefault(reason, []).append(fqn)
    exceptions = [f"- {listed(names)}: {reason}" for reason, names in reasons.items()]
    lines = [
        "---", "library_name: transformers", "tags: [fp8, octavo]", "---", "", "# A model trained in FP8", "",
        "Trained with Octavo. The FP8 weights are the values that training multiplied by, not a later approximation.",
        "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), "",
        f"Read by {_READ_BY[layout.name]}.", "",
        *(["In high precision, besides embeddings and norms:", "", *exceptions, ""] if exceptions else []),
        *(["Notes:", "", *(f"- {note}" for note in exported.notes), ""] if exported.notes else []),
    ]  # fmt: skip
    return "\n".join(lines)
