"""The FP8 layouts of checkpoints that vLLM, SGLang and Transformers read.

    W [N,K] of a linear layer, stored as `weight` (e4m3 [N,K]) and scales s with W ≈ q · s:

    layout      scales              dtype, shape                        inputs at run time
    fp8-row     weight_scale        float32 [N,1]                       one scale per token
    fp8-block   weight_scale_inv    float32 [⌈N/128⌉,⌈K/128⌉]           one scale per token and 128 channels
    mxfp8       weight_scale        uint8 [N,K/32], exponents e of      one scale per token and 32 channels
                                    s = 2^(e - 127)

fp8-row and mxfp8 are FP8_DYNAMIC and MXFP8 of compressed-tensors, fp8-block is DeepSeek-V3's. `weight_scale_inv` is the
dequantization scale, as the others are. Blocks at the edges may be partial; `mxfp8` has no partial groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.numerics.recipe import BLOCKWISE, MXFP8, RECIPES, ROWWISE, Recipe
from octavo.numerics.suggestions import nearest


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
        name="fp8-row", recipe=ROWWISE, scale_name="weight_scale", multiple=1,
        quantization_config=partial(_compressed_tensors, "float-quantized", _ROWS, _TOKENS),
    ),
    ExportLayout(
        name="fp8-block", recipe=BLOCKWISE, scale_name="weight_scale_inv", multiple=1, quantization_config=_fine_grained
    ),
    ExportLayout(
        name="mxfp8", recipe=MXFP8, scale_name="weight_scale", multiple=32,
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
