"""What was exported, and the model card of the folder: README.md, in the form of the Hugging Face Hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octavo._version import __version__
from octavo.numerics.suggestions import listed
from octavo.serving.export_layouts import LAYOUTS, ExportLayout

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
