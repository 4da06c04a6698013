"""report: what a model's linear layers compute in, and why: the table nobody should have to guess."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from octavo.kernels.gemm import accelerated
from octavo.nn.linear import Linear
from octavo.nn.select import is_linear
from octavo.numerics.plan import Plan
from octavo.numerics.recipe import Recipe

PLAN_ATTRIBUTE = "octavo_plan"
"""Where `convert` leaves the plan it carried out, on the module it was called with."""


def is_converted(module: nn.Module) -> bool:
    """Whether this module, itself, computes in FP8."""
    return isinstance(module, Linear) or any(c.__module__ == "octavo.nn.conv1d" for c in type(module).__mro__)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One linear layer, or another module with matrix weights of its own (experts of a mixture, a convolution).

    Attributes:
        name: Fully qualified name; empty for the model itself.
        linear: Whether it is a linear layer.
        weights: Elements of its own parameters of two and more dimensions.
        converted: Whether it computes in FP8.
        recipe: Name of its recipe, or None.
        reason: Why it was converted, or why not.
    """

    name: str
    linear: bool
    weights: int
    converted: bool
    recipe: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The rows in model order, and one line that sums them up. Printed, it is a table with like layers in one row."""

    rows: tuple[Row, ...]
    execution: str

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    @property
    def summary(self) -> str:
        """One line: how many layers, in what, what was left out and why, and how it runs here."""
        done = [row for row in self.rows if row.converted]
        recipes = ", ".join(sorted({row.recipe or "" for row in done}))
        share = sum(row.weights for row in done) / max(sum(row.weights for row in self.rows), 1)
        text = f"converted {len(done)} of {sum(row.linear for row in self.rows)} linear layers"
        text += f" to {recipes} ({share:.0%} of the matrix weights)" if done else ""
        left: dict[str, list[Row]] = {}
        for row in self.rows:
            if not row.converted:
                left.setdefault(row.reason, []).append(row)
        reasons = [f"{_named_or_counted(rows)}: {reason}" for reason, rows in left.items()]
        return "; ".join(part for part in (text, *reasons, self.execution) if part)

    def __str__(self) -> str:
        cells = [("layer", "recipe", "reason")]
        cells += [(names or "(the model)", row.recipe or "–", row.reason) for names, row in _grouped(self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
        lines = [f"{name:<{widths[0]}}  {recipe:<{widths[1]}}  {reason}" for name, recipe, reason in cells]
        lines.insert(1, "─" * max(len(line) for line in lines))
        return "\n".join([*lines, "", self.summary])


def report(model: nn.Module) -> Report:
    """List every linear layer of a model, and what else holds matrix weights, with what it computes in and why.

    Works on any model, converted or not, whole or a part of one.

    Returns:
        A `Report`: a sequence of rows with `.name`, `.converted`, `.recipe` and `.reason`; `.summary`; a table when
        printed.
    """
    plan: Plan | None = getattr(model, PLAN_ATTRIBUTE, None)
    rows = []
    for fqn, module in model.named_modules():
        weights = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2)
        converted = is_converted(module)
        linear = is_linear(module) or converted
        if linear or (weights and not isinstance(module, nn.Embedding)):
            recipe = module.recipe.name if converted and isinstance(module.recipe, Recipe) else None
            kind = type(module).__name__
            reason = _reason(plan, fqn, converted) if linear else f"{kind} is not a linear layer: high precision"
            rows.append(
                Row(name=fqn, linear=linear, weights=weights, converted=converted, recipe=recipe, reason=reason)
            )
    return Report(rows=tuple(rows), execution=_execution(model))


def _reason(plan: Plan | None, fqn: str, converted: bool) -> str:
    """The plan's reason, unless the layer was converted or reverted by itself since."""
    decision = plan.decisions.get(fqn) if plan is not None else None
    if decision is not None and (decision.recipe is not None) == converted:
        return decision.reason
    if converted:
        return "converted"
    return "octavo.convert was not called on this model" if plan is None else "not in the plan, or reverted since"


def _execution(model: nn.Module) -> str:
    """How the converted layers run on the devices they are on."""
    used: set[tuple[torch.device, Recipe]] = set()
    for module in model.modules():
        if is_converted(module) and isinstance(module.recipe, Recipe) and isinstance(module.weight, torch.Tensor):
            used.add((module.weight.device, module.recipe))
    emulated = {(device.type, recipe.name) for device, recipe in used if not accelerated(recipe, device)}
    return "; ".join(
        f"{recipe} is emulated exactly on {device}, without speed-up (see octavo doctor)"
        for device, recipe in sorted(emulated)
    )


def _named_or_counted(rows: list[Row]) -> str:
    groups = _grouped(rows)
    return groups[0][0] if len(groups) == 1 else f"{len(rows)} layers"


def _grouped(rows: Iterable[Row]) -> list[tuple[str, Row]]:
    """Rows that differ only by numbers in their names, merged: ("layers.{0-31}.q_proj", first such row)."""
    groups: dict[tuple[str, str | None, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((re.sub(r"\d+", "#", row.name), row.recipe, row.reason), []).append(row)
    return [(_merged_name([row.name for row in group]), group[0]) for group in groups.values()]


def _merged_name(names: list[str]) -> str:
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(values[0] if len(set(values)) == 1 else "{" + _ranges(values) + "}" for values in columns)


def _ranges(values: Iterable[str]) -> str:
    """0,1,2,5 → "0-2,5"."""
    spans: list[list[int]] = []
    for number in sorted({int(value) for value in values}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
