"""Report the recipe of each linear layer, the modules that store activations in FP8, and the reasons."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import nn

from octavo.activations.detect import original_class
from octavo.activations.modules import STORAGE_ATTRIBUTE, handles_activations
from octavo.kernels.gemm import accelerated
from octavo.nn.experts import looks_like_experts
from octavo.nn.linear_subclasses import computes_fp8
from octavo.nn.memory_audit import audit
from octavo.nn.operands import multiplies_itself
from octavo.nn.resident import resident_weights
from octavo.nn.select import STORED_HOW, is_adapter, is_linear, own_weight
from octavo.numerics.display import Displayed, Table
from octavo.numerics.plan import Decision, Plan, merged_rows
from octavo.numerics.recipe import Recipe
from octavo.numerics.suggestions import grouped, merged, pattern

PLAN_ATTRIBUTE = "octavo_plan"  # Attribute of the converted model that holds the plan of `convert`
NOTE_ATTRIBUTE = "octavo_note"  # Attribute of a layer: a function of it that returns a text to append to its reason


@dataclass(frozen=True, kw_only=True)
class Row:
    """One linear layer, the experts of a mixture, or another module with its own matrix weights (a convolution)."""

    name: str  # Fully qualified name; empty for the model itself
    linear: bool  # Whether it is a linear layer
    weights: int  # Number of elements of its own parameters with at least two dimensions
    converted: bool  # Whether it computes in FP8
    recipe: str | None  # Name of its recipe, or None
    reason: str  # Why it was converted, or why not
    experts: bool = False  # Whether it holds the experts of a mixture
    resident_bytes: int = 0  # Bytes of its weight if that is frozen and resident in FP8, with scales; else 0


@dataclass(frozen=True, kw_only=True)
class ActivationRow:
    """A module that stores its activations in FP8 or runs fused kernels, or was considered for it."""

    name: str  # Fully qualified name; empty for the model itself
    activation_storage: str | None  # As of `Decision`; None if it is unchanged
    reason: str  # What it stores or runs, or why it is unchanged

    @property
    def fused(self) -> bool:
        """Whether it runs fused kernels, and stores nothing in FP8."""
        return self.activation_storage is not None and self.activation_storage.startswith("fused")

    @property
    def recipe(self) -> str | None:
        """Text for the recipe column of tables."""
        return "fused" if self.fused else None if self.activation_storage is None else "stores fp8"


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Displayed):
    """The rows in model order, and a one-line summary. Prints as a table with similar layers in one row.

    Attributes:
        rows: Linear layers, and other modules with matrix weights.
        execution: How FP8 products run on this machine, if they are emulated.
        activations: Modules that store activations in FP8 or run fused kernels, and those that could not.
        saved_bytes: Bytes that a forward saves for backward, by module; empty without a batch.
        activations_requested: Whether `activations` was set, to `"fp8"` or `"fused"`.
    """

    rows: tuple[Row, ...]
    execution: str
    activations: tuple[ActivationRow, ...] = ()
    saved_bytes: Mapping[str, int] = field(default_factory=dict)
    activations_requested: bool = False

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    @property
    def in_fp8(self) -> bool:
        """Whether any layer computes in FP8, or any module stores its activations in FP8."""
        stores = any(row.activation_storage is not None and not row.fused for row in self.activations)
        return stores or any(row.converted for row in self.rows)

    @property
    def summary(self) -> str:
        """One line: converted layers and recipes, skipped layers with reasons, and emulation."""
        converted = [row for row in self.rows if row.converted]
        recipes = ", ".join(sorted({row.recipe or "" for row in converted}))
        fraction = sum(row.weights for row in converted) / max(sum(row.weights for row in self.rows), 1)
        text = f"converted {sum(row.linear for row in converted)} of {sum(r.linear for r in self.rows)} linear layers"
        if experts := [row for row in self.rows if row.experts]:
            text += f" and {sum(row.converted for row in experts)} of {len(experts)} modules of experts"
        text += f" to {recipes} ({fraction:.0%} of the matrix weights)" if converted else ""
        if resident := [row for row in converted if row.resident_bytes]:
            size = sum(row.resident_bytes for row in resident) / sum(row.weights for row in resident)
            text += f", {len(resident)} of them frozen and resident in FP8 ({size:.3f} bytes per parameter)"
        reasons = []
        for reason, rows in grouped((row.reason, row) for row in self.rows if not row.converted).items():
            alike = merged_rows(rows)
            named = alike[0][0] or "the model itself" if len(alike) == 1 else f"{len(rows)} layers"
            reasons.append(f"{named}: {reason}")
        parts = (text, *reasons, self._storage_summary(), self.execution)
        return "; ".join(part for part in parts if part)

    def _storage_summary(self) -> str:
        counts = Counter(row.activation_storage for row in self.activations if row.activation_storage is not None)
        unchanged = [row for row in self.activations if row.activation_storage is None]
        if not counts:
            none = "no module stores activations in FP8 or runs fused kernels" if self.activations_requested else ""
            return none + (f" ({len(unchanged)} were looked at)" if none and unchanged else "")
        kinds = ", ".join(f"{kind.removeprefix('fused_')} {count}" for kind, count in counts.items())
        how = "fused kernels" if all(kind.startswith("fused") for kind in counts) else "activations in FP8"
        text = f"{how} in {counts.total()} modules ({kinds})"
        return text + (f", not in {len(unchanged)} others" if unchanged else "")

    def __str__(self) -> str:
        rows: list[tuple[str, Row | ActivationRow]] = [*merged_rows(self.rows), *merged_rows(self.activations)]
        cells = [(names or "(the model)", row.recipe or "–", row.reason) for names, row in rows]
        table = Table(headings=("layer", "recipe", "reason"), align="<<<", rows=cells)
        return "\n".join([*table.lines(), "", *self._saved_bytes_lines(), self.summary])

    def _saved_bytes_lines(self) -> list[str]:
        if not self.saved_bytes:
            return []
        groups = grouped((pattern(name), name) for name in self.saved_bytes)
        rows = [(sum(self.saved_bytes[n] for n in names), merged(names) or "(the model)") for names in groups.values()]
        cells = [*sorted(rows, reverse=True), (sum(self.saved_bytes.values()), "in all")]
        table = Table(headings=("bytes saved", "by"), align="><", rows=[(f"{size:,}", name) for size, name in cells])
        return [*table.lines(), ""]


def check_module(function: str, model: object, hint: str = "") -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"{function} takes a torch.nn.Module, the model itself; got {kind}{hint}")


def report(model: nn.Module, batch: object = None) -> Report:
    """List every linear layer of a model, and other modules with matrix weights, with recipe and reason; and, with
    activations in FP8 or fused kernels, every module considered for that.

    Works on any model, converted or not, and on a part of one.

    Args:
        model: The model.
        batch: Runs one forward on it and lists the bytes that each module saves for backward. Keyword arguments as a
            mapping, positional ones as a tuple, or the one argument. `octavo.nn.memory_audit.audit` lists each tensor.
            Converted layers that this forward does not call, as where other code reads their weights, are named.

    Returns:
        A `Report`: rows with `.name`, `.converted`, `.recipe` and `.reason`; `.summary`; prints as a table.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
        >>> octavo.report(octavo.convert(model))[0].recipe
        'rowwise'
    """
    check_module("report", model)
    # Bypasses `__getattr__`, which in a wrapper (PEFT's, torch.compile's) returns the wrapped model's plan.
    own_plans = ((fqn, vars(module).get(PLAN_ATTRIBUTE)) for fqn, module in model.named_modules())
    plans: dict[str, Plan] = {fqn: plan for fqn, plan in own_plans if plan is not None}  # outer ones first
    saved_bytes, called = ({}, None) if batch is None else _run(model, batch)
    rows = []
    for fqn, module in model.named_modules():
        weights = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2)
        converted = computes_fp8(module)
        linear, experts = is_linear(module), looks_like_experts(module)
        if linear or (weights and not isinstance(module, nn.Embedding)):
            recipe = module.recipe.name if converted else None
            reason = f"{original_class(module).__name__} is not a linear layer: high precision"
            if linear or experts:
                reason = _reason(plans, fqn, converted)
                if (note := vars(module).get(NOTE_ATTRIBUTE)) is not None:
                    reason = f"{reason}; {note(module)}"
            if converted and isinstance(model.get_submodule(fqn.rpartition(".")[0]), nn.TransformerEncoderLayer):
                reason += "; in eval without gradients PyTorch's fast path multiplies its weight in high precision"
            weight = own_weight(module)
            if converted and weight is not None and multiplies_itself(weight):
                recipe, converted = None, False
                reason = f"its weight was replaced by a {type(weight).__name__}, which multiplies itself"
            if converted and called is not None and module not in called:
                reason += "; not called in this forward, so not in FP8: other code may read its weight"
            resident = [weight for _, weight in resident_weights(module)]
            resident_bytes = sum(weight.data_.nbytes + weight.scale.nbytes for weight in resident)
            if resident:
                reason += f"; resident in FP8: {resident_bytes / max(weights, 1):.3f} bytes per parameter"
            rows.append(Row(
                name=fqn, linear=linear, weights=weights, converted=converted, recipe=recipe, reason=reason,
                experts=experts, resident_bytes=resident_bytes,
            ))  # fmt: skip
    return Report(
        rows=tuple(rows), execution=_execution(model), activations=tuple(_activation_rows(model, plans)),
        saved_bytes=saved_bytes, activations_requested=any(plan.activations != "bf16" for plan in plans.values()),
    )  # fmt: skip


def _run(model: nn.Module, batch: object) -> tuple[dict[str, int], set[nn.Module]]:
    """Run a batch; return the bytes saved for backward by module, and the modules that were called."""
    called: set[nn.Module] = set()
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda module, _: called.add(module)))
        return audit(model, batch).by_owner, called


def _decision(plans: Mapping[str, Plan], fqn: str) -> Decision | None:
    """Return the decision of the outermost plan that covers a module."""
    owners = (owner for owner in plans if owner in ("", fqn) or fqn.startswith(f"{owner}."))
    owner = next(owners, None)
    return None if owner is None else plans[owner].decisions.get(fqn[len(owner) :].lstrip("."))


def _activation_rows(model: nn.Module, plans: Mapping[str, Plan]) -> Iterator[ActivationRow]:
    for fqn, module in model.named_modules():
        decision = _decision(plans, fqn)
        if handles_activations(module) or (computes_fp8(module) and STORAGE_ATTRIBUTE in vars(module)):
            storage = getattr(module, STORAGE_ATTRIBUTE).kind
            yield ActivationRow(name=fqn, activation_storage=storage, reason=STORED_HOW[storage])
        elif decision is not None and not is_linear(module) and not computes_fp8(module):
            layer = looks_like_experts(module) or decision.recipe is not None  # PEFT wraps layers under their names
            if layer and decision.activation_storage is None:
                continue  # nothing was said about what they store
            reason = decision.reason if decision.activation_storage is None else "reverted since"
            yield ActivationRow(name=fqn, activation_storage=None, reason=reason)


def _reason(plans: Mapping[str, Plan], fqn: str, converted: bool) -> str:
    """Return the plan's reason, unless the layer was converted or reverted on its own since."""
    decision = _decision(plans, fqn)
    if decision is not None and (decision.recipe is not None) == converted:
        return decision.reason
    if converted:
        return "converted"
    if plans and is_adapter(fqn):
        return "adapter added after octavo.convert: high precision"
    return "not in the plan, or reverted since" if plans else "octavo.convert was not called on this model"


def _execution(model: nn.Module) -> str:
    """Return how converted layers run on their devices, if emulated."""
    used: set[tuple[torch.device, Recipe]] = set()
    for module in model.modules():
        if computes_fp8(module):  # FSDP1 holds the parameters of its modules elsewhere
            used |= {(parameter.device, module.recipe) for parameter in islice(module.parameters(), 1)}
    emulated = {(device.type, recipe.name) for device, recipe in used if not accelerated(recipe, device)}
    return "; ".join(
        f"{recipe} is emulated on {device}, without speed-up (see octavo doctor)" for device, recipe in sorted(emulated)
    )
