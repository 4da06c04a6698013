"""Plan: for every linear of a model, the recipe it gets or the reason it gets none; and what stores its activations.

A plan is the only thing that passes from deciding to doing: the deciders (default rules, filters, a user) write it,
`convert` carries it out, and `report` prints it. It is plain data, so it can be stored, compared and edited as JSON.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from octavo.numerics.display import Displayed, text_table
from octavo.numerics.names import merged, pattern
from octavo.numerics.recipe import Recipe, get_recipe


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What happens to one module.

    Attributes:
        recipe: The recipe its products run in, or None to leave them as they are.
        reason: Why, for a person to read.
        storage: How the module stores its activations in FP8 (`"norm"`, `"glu"`, `"activation"` or `"scope"`), or None
            to leave them as they are.
        gain: Predicted speed-up of the module over bf16, forward and backward, quantizing included: 1 where it is left
            in bf16; None where nothing was predicted.
    """

    recipe: Recipe | None
    reason: str
    storage: str | None = None
    gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One module of a plan, as tables and scripts read it.

    Attributes:
        name: Fully qualified name; empty for the model itself.
        converted: Whether it is to compute in FP8.
        recipe: Name of its recipe, or None.
        reason: Why, for a person to read.
        gain: Predicted speed-up over bf16, 1 where it is left in bf16; None where nothing was predicted.
    """

    name: str
    converted: bool
    recipe: str | None
    reason: str
    gain: float | None


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """Decisions by fully qualified module name, in model order (the root module's own name is the empty string).

    Printed, it is a table with like modules in one row.

    Attributes:
        decisions: What happens to each module.
        activations: How activations were asked to be stored, `"bf16"` (as given) or `"fp8"`, whatever could be.
    """

    decisions: Mapping[str, Decision]
    activations: str = "bf16"

    def __iter__(self) -> Iterator[str]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    def __getitem__(self, fqn: str) -> Decision:
        return self.decisions[fqn]

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The decisions one by one, in model order."""
        return tuple(
            PlanRow(
                name=fqn,
                converted=d.recipe is not None,
                recipe=None if d.recipe is None else d.recipe.name,
                reason=d.reason,
                gain=d.gain,
            )
            for fqn, d in self.decisions.items()
        )

    @property
    def converted(self) -> list[str]:
        """Names of the modules that get a recipe."""
        return [fqn for fqn, decision in self.decisions.items() if decision.recipe is not None]

    @property
    def storing(self) -> list[str]:
        """Names of the modules that store their activations in FP8."""
        return [fqn for fqn, decision in self.decisions.items() if decision.storage is not None]

    def __str__(self) -> str:
        rows = [(name or "(the model)", row.recipe or "–", row.reason) for name, row in merged_rows(self.rows)]
        stored = f", {len(self.storing)} store activations in FP8" if self.storing else ""
        summary = f"{len(self.converted)} of {len(self)} modules compute in FP8{stored}"
        return "\n".join([*text_table(("layer", "recipe", "reason"), rows), "", summary])

    def to_json(self) -> str:
        """JSON text that `from_json` reads back; recipes are written out in full, so it does not depend on defaults."""
        rows = [
            {"name": fqn, "recipe": d.recipe and d.recipe.to_json(), "reason": d.reason}
            | ({} if d.storage is None else {"storage": d.storage})
            | ({} if d.gain is None else {"gain": d.gain})
            for fqn, d in self.decisions.items()
        ]
        return json.dumps({"version": 1, "activations": self.activations, "modules": rows}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read a plan; a recipe may also be given by name. Raises ValueError where the text is not a plan."""
        try:
            found = json.loads(text)
            rows: list[dict[str, Any]] = found["modules"]
            return Plan({row["name"]: _decision(row) for row in rows}, found.get("activations", "bf16"))
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not a plan in JSON ({error}); write one with Plan.to_json()") from error


class RecipeRow(Protocol):
    """A row of a table about modules."""

    @property
    def name(self) -> str:
        """Fully qualified name."""

    @property
    def recipe(self) -> str | None:
        """What its column of recipes shows."""

    @property
    def reason(self) -> str:
        """Why."""


RowT = TypeVar("RowT", bound=RecipeRow)


def merged_rows(rows: Sequence[RowT]) -> list[tuple[str, RowT]]:
    """Merge rows that differ only by numbers in their names: `("layers.{0-31}.q_proj", first such row)`."""
    groups: dict[tuple[str, str | None, str], list[RowT]] = {}
    for row in rows:
        groups.setdefault((pattern(row.name), row.recipe, row.reason), []).append(row)
    return [(merged([row.name for row in group]), group[0]) for group in groups.values()]


def _decision(row: dict[str, Any]) -> Decision:
    return Decision(
        recipe=_recipe(row["recipe"]), reason=row["reason"], storage=row.get("storage"), gain=row.get("gain")
    )


def _recipe(given: dict[str, Any] | str | None) -> Recipe | None:
    return Recipe.from_json(given) if isinstance(given, dict) else get_recipe(given) if given is not None else None
