"""Precision: the user's precision settings for a training run, and its named levels.

    level                      matmul  activations  states  master
    bf16                       bf16    unchanged    fp32    fp32       the literature's "O2" without FP8
    fp8                        fp8     unchanged    fp32    fp32       linear layers compute in FP8, save inputs in FP8
    fp8+activations            fp8     fp8          fp32    fp32       norms, gated MLPs and activations save FP8 too
    fp8+activations+optimizer  fp8     fp8          fp8     remainder  AdamW: FP8 moments, 16 bits of each master

`O1`, `O1+act` and `O1+act+opt` are aliases of the last three (ColossalAI's and COAT's names).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from octavo.numerics.recipe import DEFAULT, get_recipe
from octavo.numerics.suggestions import check_choice, nearest

AUTO = "auto"  # Value of `recipe` that selects recipes by predicted cost


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision of a training run.

    Attributes:
        matmul: `"fp8"` or `"bf16"`: products of linear layers, and the tensors that these save for backward.
        recipe: Name of the recipe if `matmul` is `"fp8"`; or `"auto"`: on a GPU the fastest recipe of each layer by
            predicted cost (`octavo.plan`), elsewhere the default.
        skip: Name patterns (as in `fnmatch`, such as `"*.mlp.down_proj"`) of modules that stay unchanged.
        only: Name patterns of the linear layers to convert; empty for all.
        skip_first: Blocks at the beginning of the model whose linear layers are not converted; see
            `octavo.nn.filters.last` for what counts as a block.
        skip_last: The same at the end of the model.
        min_features: Smallest in_features and out_features of a linear layer that is converted.
        activations: `"fp8"`: norms, gated MLPs and activation functions save tensors for backward in FP8; `"bf16"`:
            unchanged; `"fused"`: unchanged, and norms and gated MLPs run as one kernel, which rounds once.
        states: Moments of AdamW, `"fp32"` or `"fp8"`. The trainer reads `states` and `master`; a custom loop creates
            its own optimizer, `octavo.AdamW`.
        master: fp32 masters of 16-bit parameters: `"fp32"` (a copy), `"remainder"` (bf16's missing 16 bits), `"none"`.
        keep_weights: Quantize each weight once per forward and backward, and once for all micro-batches inside
            `octavo.nn.accumulating`: for many small ones per optimizer step, at 2 bytes per parameter on a GPU.

    Raises:
        ValueError: A value is unknown (with the closest match), or a number is below 0.
        TypeError: Patterns are not a list of strings.

    Examples:
        >>> octavo.Precision.level("fp8+activations", recipe="mxfp8", skip_last=1).label
        'fp8+activations mxfp8'
    """

    matmul: Literal["bf16", "fp8"] = "fp8"
    recipe: str = DEFAULT.name
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    skip_first: int = 0
    skip_last: int = 0
    min_features: int = 0
    keep_weights: bool = False
    activations: Literal["bf16", "fused", "fp8"] = "bf16"
    states: Literal["fp32", "fp8"] = "fp32"
    master: Literal["fp32", "remainder", "none"] = "fp32"

    def __post_init__(self) -> None:
        for name in ("matmul", "activations", "states", "master"):
            check_choice(name, getattr(self, name), get_args(type(self).__annotations__[name]))
        if self.recipe != AUTO:
            get_recipe(self.recipe)
        for name in ("skip", "only"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is a list of name patterns; write {name}=({getattr(self, name)!r},)")
        for name in ("skip_first", "skip_last", "min_features"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is 0 or more; got {getattr(self, name)}")

    @staticmethod
    def level(name: str, **overrides: Any) -> "Precision":
        """Return the Precision of a level (see above; aliases count), with optional overrides."""
        name = ALIASES.get(name, name)
        if name not in LEVELS:
            raise ValueError(f"unknown precision level {name!r}{nearest(name, LEVELS)}. Known: {', '.join(LEVELS)}")
        return replace(LEVELS[name], **overrides)

    @property
    def label(self) -> str:
        """Short label: `"bf16"`, `"fp8 rowwise"`, `"bf16+fused"`, `"fp8+activations+optimizer rowwise"`."""
        label: str = self.matmul
        label += {"bf16": "", "fused": "+fused", "fp8": "+activations"}[self.activations]
        label += "+optimizer" if self.states == "fp8" else ""
        return f"{label} {self.recipe}" if self.matmul == "fp8" else label


def check_activations(value: str) -> None:
    check_choice("activations", value, ("bf16", "fused", "fp8"))


LEVELS = {
    "bf16": Precision(matmul="bf16"),
    "fp8": Precision(matmul="fp8"),
    "fp8+activations": Precision(matmul="fp8", activations="fp8"),
    "fp8+activations+optimizer": Precision(matmul="fp8", activations="fp8", states="fp8", master="remainder"),
}
ALIASES = {"O1": "fp8", "O1+act": "fp8+activations", "O1+act+opt": "fp8+activations+optimizer"}
