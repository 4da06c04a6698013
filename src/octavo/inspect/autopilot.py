"""Autopilot: between two steps, switch linear layers that FP8 harms to a recipe that does not (docs/autopilot.md)."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from octavo.comm.checks import gather_objects
from octavo.inspect.findings import Finding, OperandStats, Thresholds, findings
from octavo.inspect.watch import HIGH_PRECISION, Watch
from octavo.nn.convert import change_recipe
from octavo.nn.linear_subclasses import change_since, is_converted
from octavo.nn.select import is_linear
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.numerics.suggestions import nearest

FALLBACK_RECIPES = ("tensorwise", "rowwise_equalized", "rowwise", "blockwise", "mxfp8", "rowwise_hp_wgrad")
"""Recipes that a layer may switch to, cheapest first; high precision comes last."""


@dataclass(frozen=True, kw_only=True)
class RecipeChange:
    """A change of a layer's recipe.

    Attributes:
        step: The step after which it happened, 1, 2, …
        layer: Name of the linear layer.
        before: Previous recipe; `"bf16"` for none.
        after: New recipe.
        why: The statistic that crossed a limit, and the product error.
        back: Whether the layer switched back.
    """

    step: int
    layer: str
    before: str
    after: str
    why: str
    back: bool = False

    def __str__(self) -> str:
        """As "step 50: model.layers.3.mlp.down_proj: rowwise → blockwise (x: underflow 83.4 % (limit 20), …)"."""
        return f"step {self.step}: {self.layer}: {self.before} → {self.after} ({self.why})"


class Autopilot:
    """Watches a model and moves layers to other recipes.

    Args:
        model: A converted model, sharded or not.
        every: Steps between samples.
        thresholds: Limits; None for the defaults.
        watch: An existing `Watch` of the model, instead of `every`.
        restore_after: Samples in a row without harm by a layer's first recipe after which it returns to that; 0: never.
        fallback_recipes: Names of recipes that a layer may switch to, most preferred first; then comes high precision.

    Attributes:
        watch: The sampler.
        findings: Findings of the last step.
        last_changes: Changes of recipes in the last step.
        changes: All of them, in order.
        should_repeat: Whether to repeat the last step, with its gradients dropped.

    Raises:
        ValueError: For a model without converted layers, `every` below 1, or `restore_after` below 0.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        >>> pilot = octavo.inspect.Autopilot(model, every=50)
        >>> with pilot.step():
        ...     model(torch.randn(8, 64)).sum().backward()
        >>> pilot.last_changes, pilot.should_repeat
        ([], False)
    """

    def __init__(
        self, model: nn.Module, *, every: int = 50, thresholds: Thresholds | None = None, watch: Watch | None = None,
        restore_after: int = 0, fallback_recipes: Sequence[str] = FALLBACK_RECIPES,
    ) -> None:  # fmt: skip
        self.watch = Watch(model, every=max(every, 1)) if watch is None else watch
        self._elsewhere = _layers_of_other_stages(model, self.watch.stages)  # and their recipes now
        if not any(is_converted(module) for module in model.modules()) and not any(self._elsewhere.values()):
            raise ValueError("Autopilot: this model has no converted layer to move: call octavo.convert(model) first")
        if every < 1:
            raise ValueError(f"Autopilot: every is a number of steps, 1 or more; got {every}")
        if restore_after < 0:
            raise ValueError(f"Autopilot: restore_after is a number of samples, 0 or more; got {restore_after}")
        self.findings: list[Finding] = []
        self.last_changes: list[RecipeChange] = []
        self.changes: list[RecipeChange] = []
        self.should_repeat = False
        self._model = model
        self._thresholds = Thresholds() if thresholds is None else thresholds
        self._restore_after = restore_after
        self._fallbacks = tuple(fallback_recipes)
        self._first_recipes: dict[str, Recipe] = {}
        self._acted = 0  # the step of the last `act`
        self._due = True  # whether the first sample is still to come
        self._trials: dict[str, str] = {}  # layers moved in the last step, and their recipe before
        self._healthy: dict[str, int] = {}  # consecutive samples without harm by a layer's first recipe
        self._stuck: set[str] = set()  # layers that could not be moved
        self._suspects: dict[str, set[str]] = {}  # of the current step, with the recipes that were rejected in it

    @contextmanager
    def step(self, number: int | None = None, *, force: bool = False) -> Iterator[None]:
        """Run a step inside, with all of its forwards and backwards; layers move when it ends.

        Args:
            number: Number of the step, 1, 2, …; default: the one after the last, or the last if `should_repeat`.
            force: Sample the step regardless of `every`.
        """
        number = self.watch.number + (not self.should_repeat) if number is None else number
        with self.watch.step(number, force=force or self.needs_sample, measure=self.measures):
            yield
        self.act()

    @property
    def needs_sample(self) -> bool:
        """Whether to sample the next step regardless of `every`."""
        return self._due or self.should_repeat or bool(self._trials)

    @property
    def measures(self) -> dict[str, list[str | Recipe]]:
        """Recipes by layer that `Watch.step` should measure in the next step if it is sampled."""
        requests: list[tuple[str, str | Recipe]] = []
        if self.should_repeat:
            modules = dict(self._model.named_modules())
            for layer in self._suspects:
                own = getattr(modules.get(layer), "recipe", None)
                requests += [(layer, recipe) for recipe in (own, *self._fallbacks) if recipe is not None]
        requests += [(layer, self._recipe(layer, before) or before) for layer, before in self._trials.items()]
        requests += self._first_recipes.items() if self._restore_after else ()
        by_layer: dict[str, dict[str, str | Recipe]] = {}
        for layer, recipe in requests:
            name = recipe if isinstance(recipe, str) else recipe.name
            by_layer.setdefault(layer, {}).setdefault(name, recipe)
        return {layer: [*recipes.values()] for layer, recipes in by_layer.items() if layer not in self._elsewhere}

    def act(
        self, rows: Sequence[OperandStats] | None = None, errors: Mapping[str, Mapping[str, float]] | None = None, *,
        finite: bool = True,
    ) -> list[RecipeChange]:  # fmt: skip
        """Move layers according to the last step; do nothing if it was not sampled or not finite.

        Args:
            rows: Its statistics; None for those of `watch`.
            errors: Its product errors by layer and recipe; None for those of `watch`.
            finite: Whether its loss and gradient are finite.
        """
        rows = self.watch.rows if rows is None else rows
        errors = self.watch.errors if errors is None else errors
        self.findings = findings(rows, self._thresholds)
        self.last_changes = []
        step = rows[0].step if rows else self.watch.number
        repeated = self.should_repeat and step == self._acted
        self.should_repeat, self._acted = False, step
        if (not rows and not errors) or not finite or any(row.nonfinite for row in rows):
            return []
        if not repeated:
            self._suspects = {}
            self._move_back(step, errors)
        recipes = {row.layer: row.recipe for row in rows}
        for layer, finding in self._suspicions():
            if recipes[layer] in errors.get(layer, ()):
                self._switch_if_harmed(finding, recipes[layer], errors[layer])
            elif layer not in self._suspects:
                self._suspects[layer], self.should_repeat = set(), True
        self.should_repeat = self.should_repeat or any(not move.back for move in self.last_changes)
        self._due = self._due and self.should_repeat
        return self.last_changes

    def restore(self, layer: str | None = None, *, step: int) -> list[RecipeChange]:
        """Return a layer to its first recipe; None for all moved layers.

        Raises:
            ValueError: For a layer that was not moved.
        """
        if layer is not None and layer not in self._first_recipes:
            moved = ", ".join(self._first_recipes) or "none was"
            raise ValueError(
                f"Autopilot: {layer!r} was not moved{nearest(layer, self._first_recipes)}; layers that were: {moved}"
            )
        self.last_changes = []
        for name in list(self._first_recipes) if layer is None else [layer]:
            self._switch_back(name, self._first_recipes[name].name, step, "on request")
        return self.last_changes

    def state_dict(self) -> dict[str, Any]:
        """Return the moves, the step number and what the next step is to measure, as plain lists and dictionaries."""
        return {
            "moves": [asdict(move) for move in self.changes], "step": self.watch.number, "due": self._due,
            "trials": dict(self._trials), "calm": dict(self._healthy), "repeat": self.should_repeat,
            "suspects": {layer: sorted(rejected) for layer, rejected in self._suspects.items()},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move layers as in a checkpoint, and return all others to their first recipe.

        Layers that are no longer converted stay as they are.

        Raises:
            ValueError: For moves of another model; this one is unchanged.
        """
        moves = [RecipeChange(**fields) for fields in state["moves"]]
        names = dict(self._model.named_modules())
        for move in moves:
            if move.layer not in names and move.layer not in self._elsewhere:
                raise ValueError(f"Autopilot: the moves are of another model: this one has no {move.layer!r}")
        for layer, recipe in self._first_recipes.items():
            if layer in self._elsewhere:
                self._elsewhere[layer] = recipe
            else:
                change_recipe(self._model, layer, recipe, reason="as converted")
        self._first_recipes, self.changes = {}, []
        for move in moves:
            if move.layer in self._first_recipes or self._is_converted(move.layer):
                self._move(move)
        self.last_changes, self.should_repeat = [], state.get("repeat", False)
        self._suspects = {layer: set(rejected) for layer, rejected in state.get("suspects", {}).items()}
        self.watch.number = state.get("step", self.watch.number)
        self._due = state.get("due", False)
        self._trials = {layer: name for layer, name in state.get("trials", {}).items() if layer in self._first_recipes}
        self._healthy = dict(state.get("calm", {}))

    def _suspicions(self) -> list[tuple[str, Finding]]:
        """Return the FP8 layers with an operand that crossed a limit, with their most severe finding."""
        worst: dict[str, Finding] = {}
        for what in ("saturation", "underflow", "sqnr"):  # most severe first
            for finding in self.findings:
                if finding.what != what or not self._is_converted(finding.layer):
                    continue
                if finding.layer in self._stuck:  # stages, which do not see others' layers, assume it still is
                    stages = self.watch.stages
                    if stages is not None or change_since(self._model.get_submodule(finding.layer)) is not None:
                        continue
                worst.setdefault(finding.layer, finding)
        return list(worst.items())

    def _is_converted(self, layer: str) -> bool:
        if layer in self._elsewhere:
            return self._elsewhere[layer] is not None
        return is_converted(self._model.get_submodule(layer))

    def _switch_if_harmed(self, finding: Finding, recipe: str, errors: Mapping[str, float]) -> None:
        """Switch a harmed layer to a recipe that does not harm it, by the measured product errors."""
        layer, limit = finding.layer, self._thresholds.product_error
        if errors[recipe] <= limit:
            return
        rejected = self._suspects.setdefault(layer, set())
        rejected.add(recipe)
        harmless = (name for name in self._fallbacks if name not in rejected and errors.get(name, 1.0) <= limit / 2)
        after = next(harmless, HIGH_PRECISION)
        why = f"{finding.operand}: {finding.measured}, product error {errors[recipe]:.2g} (limit {limit:g})"
        if self._move(RecipeChange(step=finding.step, layer=layer, before=recipe, after=after, why=why)):
            self._trials.setdefault(layer, recipe)
            self._healthy.pop(layer, None)

    def _move_back(self, step: int, errors: Mapping[str, Mapping[str, float]]) -> None:
        """Undo moves that one batch caused, and those that have not been needed for `restore_after` samples."""
        limit = self._thresholds.product_error
        for layer, before in list(self._trials.items()):
            if before in errors.get(layer, ()):
                del self._trials[layer]
                if (error := errors[layer][before]) <= limit / 2:
                    self._switch_back(layer, before, step, f"the next batch is not harmed, product error {error:.2g}")
        for layer, recipe in list(self._first_recipes.items()) if self._restore_after else ():
            if recipe.name in errors.get(layer, ()) and layer not in self._trials:
                healthy = errors[layer][recipe.name] <= limit / 2
                self._healthy[layer] = self._healthy.get(layer, 0) + 1 if healthy else 0
                if self._healthy[layer] >= self._restore_after:
                    self._switch_back(layer, recipe.name, step, f"no harm in {self._restore_after} samples")

    def _switch_back(self, layer: str, recipe: str, step: int, why: str) -> None:
        current = next(move.after for move in reversed(self.changes) if move.layer == layer)
        self._trials.pop(layer, None)
        self._healthy.pop(layer, None)
        self._move(RecipeChange(step=step, layer=layer, before=current, after=recipe, why=why, back=True))

    def _recipe(self, layer: str, name: str) -> Recipe | str | None:
        """Return a layer's recipe by name; its first recipe may be the user's own."""
        if layer in self._first_recipes and self._first_recipes[layer].name == name:
            return self._first_recipes[layer]
        return None if name == HIGH_PRECISION else name

    def _move(self, move: RecipeChange) -> bool:
        """Carry out a move. A layer that cannot be moved stays as it is, with a warning; returns whether it was."""
        layer = None if move.layer in self._elsewhere else self._model.get_submodule(move.layer)
        first = self._first_recipes.get(move.layer) or (self._elsewhere[move.layer] if layer is None else layer.recipe)
        assert isinstance(first, Recipe)
        if (error := self._change(move)) is not None:
            self._stuck.add(move.layer)
            warnings.warn(f"autopilot cannot do this and leaves the layer as it is: {move}: {error}", stacklevel=2)
            return False
        self._first_recipes[move.layer] = first
        if move.after == first.name:
            del self._first_recipes[move.layer]
        self.changes.append(move)
        self.last_changes.append(move)
        return True

    def _change(self, move: RecipeChange) -> str | None:
        """Change the recipe of a layer where it is. Returns why it cannot be, on all ranks."""
        recipe, error = self._recipe(move.layer, move.after), None
        if move.layer not in self._elsewhere:
            try:
                change_recipe(self._model, move.layer, recipe, reason=f"autopilot, {move}")
            except ValueError as problem:
                error = str(problem)
        if self.watch.stages is not None:
            error = next((text for text in gather_objects(error, self.watch.stages) if text is not None), None)
        if error is None and move.layer in self._elsewhere:
            self._elsewhere[move.layer] = None if recipe is None else get_recipe(recipe)
        return error


def _layers_of_other_stages(model: nn.Module, stages: dist.ProcessGroup | None) -> dict[str, Recipe | None]:
    """Return the linear layers that only other ranks have, with their recipes."""
    if stages is None:
        return {}
    linears = [(name, m) for name, m in model.named_modules() if is_converted(m) or is_linear(m)]
    own = {name: module.recipe if is_converted(module) else None for name, module in linears}
    by_rank = gather_objects(own, stages)
    return {name: recipe for layers in by_rank for name, recipe in layers.items() if name not in own}
