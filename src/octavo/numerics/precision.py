"""Precision: what the user asks for, before anything is decided layer by layer.

Levels are the literature's names for useful combinations; each field is also a switch of its own.

    level       matmul  activations  states  master
    bf16        bf16    as given     fp32    fp32       the literature's "O2" without FP8
    O1          fp8     as given     fp32    fp32       linear layers compute in FP8 and keep their inputs in FP8
    O1+act      fp8     fp8          fp32    fp32       and norms, activations and attention keep theirs in FP8
    O1+act+opt  fp8     fp8          fp8     remainder  and AdamW keeps FP8 moments and 16 bits of each master
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from octavo.numerics.names import nearest
from octavo.numerics.recipe import DEFAULT, get_recipe

AUTO = "auto"
"""In the place of a recipe's name: decided by cost."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Precision of a training run.

    Attributes:
        matmul: `"fp8"` or `"bf16"`: the products of the linear layers, and with them what those keep for backward.
        recipe: Name of the recipe when `matmul` is `"fp8"`; or `"auto"`: on a GPU the fastest of each layer, where it
            pays by predicted cost (`octavo.plan`), elsewhere the default.
        skip: Name patterns (as in `fnmatch`, such as `"*.mlp.down_proj"`) of modules that stay as they are.
        only: Name patterns of the linear layers to convert; all of them where empty.
        skip_first: Blocks at the beginning of the model whose linear layers are not converted; see
            `octavo.nn.filters.last` for what counts as a block.
        skip_last: The same at its end.
        min_features: Smallest in_features and out_features of a linear layer that is converted.
        activations: `"fp8"`: norms, gated MLPs, activations and attention store what backward needs in FP8, with either
            `matmul`. `"bf16"`: in the dtype they compute in.
        states: Moments of AdamW, `"fp32"` or `"fp8"`; and
        master: its fp32 masters of 16-bit parameters, `"fp32"` (a copy), `"remainder"` (of bf16 ones: the 16 bits they
            lack) or `"none"`. Read by the trainer; your own loop makes its optimizer itself, with `octavo.AdamW`.
        keep_weights: Quantize each weight once per forward and backward, and once for all micro-batches inside
            `octavo.nn.accumulating`: for many small micro-batches per optimizer step, at 2 bytes per parameter on a
            GPU.

    Raises:
        ValueError: For an unknown value, naming the nearest known one, or a number below 0.
        TypeError: For patterns that are no list of strings.
    """

    matmul: Literal["bf16", "fp8"] = "fp8"
    recipe: str = DEFAULT.name
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    skip_first: int = 0
    skip_last: int = 0
    min_features: int = 0
    keep_weights: bool = False
    activations: Literal["bf16", "fp8"] = "bf16"
    states: Literal["fp32", "fp8"] = "fp32"
    master: Literal["fp32", "remainder", "none"] = "fp32"

    def __post_init__(self) -> None:
        for name in ("matmul", "states", "master"):
            given, known = getattr(self, name), get_args(type(self).__annotations__[name])
            if given not in known:
                choices = " or ".join(map(repr, known))
                raise ValueError(f"{name} is {choices}; got {given!r}{nearest(str(given), known)}")
        check_activations(self.activations)
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
        """The Precision of a level (`"bf16"`, `"O1"`, `"O1+act"`, `"O1+act+opt"`), with single fields overridden."""
        if name not in LEVELS:
            raise ValueError(f"unknown precision level {name!r}{nearest(name, LEVELS)}. Known: {', '.join(LEVELS)}")
        return replace(LEVELS[name], **overrides)

    @property
    def label(self) -> str:
        """What it comes to, in short: `"bf16"`, `"O1 rowwise"`, `"bf16+act"`, `"O1+act+opt rowwise"`."""
        label = "O1" if self.matmul == "fp8" else "bf16"
        label += "+act" if self.activations == "fp8" else ""
        label += "+opt" if self.states == "fp8" else ""
        return f"{label} {self.recipe}" if self.matmul == "fp8" else label


def check_activations(given: str) -> None:
    """Raise ValueError for what is no storage of activations."""
    if given not in ("bf16", "fp8"):
        hint = nearest(str(given), ("bf16", "fp8"))
        raise ValueError(f"activations are stored in 'bf16' (as given) or 'fp8'; got {given!r}{hint}")


LEVELS = {
    "bf16": Precision(matmul="bf16"),
    "O1": Precision(matmul="fp8"),
    "O1+act": Precision(matmul="fp8", activations="fp8"),
    "O1+act+opt": Precision(matmul="fp8", activations="fp8", states="fp8", master="remainder"),
}
