"""Plan: the recipe of every linear of a model or the reason for none, and how modules store activations."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from octavo.numerics.display import Displayed, Table
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.numerics.suggestions import merged, pattern


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Decision for one module.

    Attributes:
        recipe: Recipe of its products, or None to leave them unchanged.
        reason: Reason, human-readable.
        activation_storage: How the module stores its activations in FP8 (`"norm"`, `"glu"`, `"activation"` or
            `"saved_tensors"`) or which fused kernels it runs (`"fused_norm"`, `"fused_glu"`); None: neither.
        gain: Predicted speed-up over bf16, forward and backward with quantization; 1 in bf16; None if not predicted.
        by_filter: Whether a filter of `octavo.convert` chose the recipe; not in the plan's JSON.
    """

    recipe: Recipe | None
    reason: str
    activation_storage: str | None = None
    gain: float | None = None
    by_filter: bool = field(default=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One module of a plan, for tables and scripts."""

    name: str  # Fully qualified name; empty for the model itself
    converted: bool  # Whether it computes in FP8
    recipe: str | None  # Name of its recipe, or None
    reason: str  # Reason, human-readable
    gain: float | None  # Predicted speed-up over bf16; 1 if it stays in bf16; None without a prediction


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """Decisions by fully qualified module name, in model order (the root module's name is the empty string).

    `print` shows a table that merges rows of repeated layers.

    Attributes:
        decisions: Decision for each module.
        activations: Requested handling of activations: `"bf16"` (unchanged), or where supported `"fp8"` (stored so) or
            `"fused"` (stored unchanged, computed by fused kernels).
        partial: Whether layers that the plan does not name stay in high precision. Otherwise `octavo.convert` raises an
            error about them, since the plan may be of a smaller model.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8192, 8192, device="meta", dtype=torch.bfloat16))
        >>> plan = octavo.plan(model, ((8192, 8192),), device="h100")
        >>> octavo.Plan.from_json(plan.to_json()).converted
        ['0']
    """

    decisions: Mapping[str, Decision]
    activations: str = "bf16"
    partial: bool = False

    def __iter__(self) -> Iterator[str]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    def __getitem__(self, fqn: str) -> Decision:
        return self.decisions[fqn]

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """Decisions in model order."""
        names = {fqn: None if d.recipe is None else d.recipe.name for fqn, d in self.decisions.items()}
        return tuple(
            PlanRow(name=fqn, converted=names[fqn] is not None, recipe=names[fqn], reason=d.reason, gain=d.gain)
            for fqn, d in self.decisions.items()
        )

    @property
    def converted(self) -> list[str]:
        """Names of the modules with a recipe."""
        return [fqn for fqn, decision in self.decisions.items() if decision.recipe is not None]

    @property
    def activation_modules(self) -> list[str]:
        """Names of the modules that store their activations in FP8, or run fused kernels."""
        return [fqn for fqn, decision in self.decisions.items() if decision.activation_storage is not None]

    def __str__(self) -> str:
        rows = [(name or "(the model)", row.recipe or "–", row.reason) for name, row in merged_rows(self.rows)]
        how = "run fused kernels" if self.activations == "fused" else "store activations in FP8"
        stored = f", {len(self.activation_modules)} {how}" if self.activation_modules else ""
        summary = f"{len(self.converted)} of {len(self)} modules compute in FP8{stored}"
        table = Table(headings=("layer", "recipe", "reason"), align="<<<", rows=rows)
        return "\n".join([*table.lines(), "", summary])

    def to_json(self) -> str:
        """Return JSON that `from_json` reads; recipes are written in full, so it does not depend on defaults."""
        rows = [
            {"name": fqn, "recipe": d.recipe and d.recipe.to_json(), "reason": d.reason}
            | ({} if d.activation_storage is None else {"activation_storage": d.activation_storage})
            | ({} if d.gain is None else {"gain": d.gain})
            for fqn, d in self.decisions.items()
        ]
        partial = {"partial": True} if self.partial else {}
        return json.dumps({"version": 1, "activations": self.activations, **partial, "modules": rows}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read a plan; recipes may also be names. Raises ValueError if the text is not a plan."""
        try:
            content = json.loads(text)
            rows: list[dict[str, Any]] = content["modules"]
            decisions = {row["name"]: _decision(row) for row in rows}
            return Plan(decisions, content.get("activations", "bf16"), content.get("partial", False) is True)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not a plan in JSON ({error}); write one with Plan.to_json()") from error


RowT = TypeVar("RowT")  # Has name, recipe and reason


def merged_rows(rows: Sequence[RowT]) -> list[tuple[str, RowT]]:
    """Merge rows that differ only by numbers in their names: `("layers.{0-31}.q_proj", first such row)`."""
    groups: dict[tuple[str, str | None, str], list[Any]] = {}
    for row in cast(Sequence[Any], rows):
        groups.setdefault((pattern(row.name), row.recipe, row.reason), []).append(row)
    return [(merged([row.name for row in group]), group[0]) for group in groups.values()]


def _decision(row: dict[str, Any]) -> Decision:
    recipe = row["recipe"]
    if recipe is not None:
        recipe = Recipe.from_json(recipe) if isinstance(recipe, dict) else get_recipe(recipe)
    storage, gain = row.get("activation_storage"), row.get("gain")
    return Decision(recipe=recipe, reason=row["reason"], activation_storage=storage, gain=gain)
