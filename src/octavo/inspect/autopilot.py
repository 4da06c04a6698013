"""Autopilot: linears whose numbers go bad are moved to a safer recipe, between two steps.

    pilot = octavo.inspect.Autopilot(model, every=50)
    for batch in batches:
        while True:
            with pilot.step():              # forward and backward, all micro-batches
                model(batch).loss.backward()
            for move in pilot.moved:        # as "step 50: model.layers.3.mlp.down_proj: rowwise → blockwise (x: …)"
                print(move)
            if not pilot.moved:
                break
            optimizer.zero_grad()           # the same step again, with the layers where they are now
        optimizer.step()

The ladder goes from what is fastest to what is safest:

    delayed → tensorwise → rowwise → blockwise → rowwise_hp_wgrad → bf16
                               mxfp8 ↗

An operand of a sampled step that crosses a limit (SQNR, underflow, saturation, values that are not finite: see
`octavo.inspect.findings`) moves its layer down one rung, and what comes next is sampled as well, until nothing crosses
a limit any more. A jump of an amax moves nothing: scales that are computed just in time follow it. For what is not
finite one layer is moved in a step, the one where it arose; if it is still there with that layer in high precision, it
came from elsewhere, and `undo` takes back what did not help.

The first step is sampled, and a step in which layers were moved should be taken again, its gradients dropped: where
numbers are bad from the beginning, what the first steps do to the weights is not made good by hundreds of others
(docs/adversarial.md measures both ways). The trainer does so.

Nothing moves back by itself, since what calmed down may have done so because of the move: `restore` does it on request.
Statistics are the same on all ranks, and so is every move. `state_dict` takes the moves through a checkpoint.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from octavo.inspect.findings import Finding, Thresholds, findings
from octavo.inspect.stats import OperandStats
from octavo.inspect.watch import HIGH_PRECISION, Watch
from octavo.nn.change import change_recipe
from octavo.nn.report import is_converted
from octavo.numerics.names import nearest
from octavo.numerics.recipe import Recipe

SAFER = {
    "delayed": "tensorwise",
    "tensorwise": "rowwise",
    "rowwise": "blockwise",
    "blockwise": "rowwise_hp_wgrad",
    "mxfp8": "rowwise_hp_wgrad",
    "rowwise_hp_wgrad": HIGH_PRECISION,
}
"""What comes after each recipe; after one of the user's own, high precision."""
MOVING = ("nonfinite", "saturation", "underflow", "sqnr")
"""Limits whose crossing moves a layer, the gravest first."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A layer that was moved.

    Attributes:
        step: After which step, 1, 2, …
        layer: Name of the linear.
        before: Recipe it computed in, `"bf16"` for none.
        after: Recipe it computes in now.
        why: What crossed which limit.
        back: Whether it was moved back, on request.
    """

    step: int
    layer: str
    before: str
    after: str
    why: str
    back: bool = False

    def __str__(self) -> str:
        """As "step 50: model.layers.3.mlp.down_proj: rowwise → blockwise (x: SQNR 11.2 dB (limit 18))"."""
        return f"step {self.step}: {self.layer}: {self.before} → {self.after} ({self.why})"


class Autopilot:
    """Watches a model and moves layers.

    Args:
        model: A converted model, sharded or not.
        every: Steps from one sample to the next.
        thresholds: Limits; None for the defaults.
        watch: Watches the model already, instead of `every`.

    Attributes:
        watch: What samples.
        found: What crossed a limit in the step just taken.
        moved: Moves of the step just taken.
        moves: All moves, the first one first.

    Raises:
        ValueError: For a model without converted layers, or `every` below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        thresholds: Thresholds | None = None,
        watch: Watch | None = None,
    ) -> None:
        if not any(is_converted(module) for module in model.modules()):
            raise ValueError("Autopilot: this model has no converted layer to move: call octavo.convert(model) first")
        if every < 1:
            raise ValueError(f"Autopilot: every is a number of steps, 1 or more; got {every}")
        self.watch = Watch(model, every=every) if watch is None else watch
        self.found: list[Finding] = []
        self.moved: list[Move] = []
        self.moves: list[Move] = []
        self._model = model
        self._thresholds = Thresholds() if thresholds is None else thresholds
        self._began: dict[str, Recipe] = {}
        self._again = False
        self._blamed: tuple[int, str] | None = None

    @contextmanager
    def step(self, number: int | None = None, *, force: bool = False) -> Iterator[None]:
        """Take a step inside, all of its forwards and backwards; layers are moved when it ends.

        Args:
            number: Which step it is, 1, 2, …; where not given the one after the last, or the last after a move.
            force: Sample it whatever `every` says.
        """
        number = self.watch.number + (not self._again) if number is None else number
        with self.watch.step(number, force=force or self._again or number == 1):
            yield
        self.act(self.watch.rows)

    @property
    def wants_sample(self) -> bool:
        """Whether what comes next is to be sampled whatever `every` says: after a move."""
        return self._again

    def act(self, rows: Sequence[OperandStats]) -> list[Move]:
        """Move the layers of a sampled step that crossed a limit; nothing for a step that was not sampled."""
        self.found = findings(rows, self._thresholds)
        worst: dict[str, Finding] = {}
        if not self._again:
            self._blamed = None
        for what in MOVING:
            for finding in self.found:
                if finding.what == what and not (what == "nonfinite" and self._helpless(finding)):
                    worst.setdefault(finding.layer, finding)
        recipes = {row.layer: row.recipe for row in rows}
        self.moved = []
        for layer, finding in worst.items():
            if recipes[layer] != HIGH_PRECISION:
                after = SAFER.get(recipes[layer], HIGH_PRECISION)
                why = f"{finding.operand}: {finding.measured}"
                self._move(Move(step=finding.step, layer=layer, before=recipes[layer], after=after, why=why))
        self._again = bool(self.moved)
        return self.moved

    def restore(self, layer: str | None = None, *, step: int) -> list[Move]:
        """Move a layer back to the recipe that it began with; all that were moved where None is given.

        Raises:
            ValueError: For a layer that was not moved.
        """
        if layer is not None and layer not in self._began:
            moved = ", ".join(self._began) or "none was"
            raise ValueError(
                f"Autopilot: {layer!r} was not moved{nearest(layer, self._began)}; layers that were: {moved}"
            )
        now = {move.layer: move.after for move in self.moves}
        self.moved = []
        for name in list(self._began) if layer is None else [layer]:
            after = self._began[name].name
            self._move(Move(step=step, layer=name, before=now[name], after=after, why="on request", back=True))
        return self.moved

    def undo(self, step: int) -> None:
        """Take back the moves of a step, which did not help it."""
        before: dict[str, str] = {}
        for move in self.moves:
            if move.step == step and not move.back:
                before.setdefault(move.layer, move.before)
        self.moves = [move for move in self.moves if move.step != step or move.back]
        for layer, name in before.items():
            began = self._began[layer]
            if name == began.name:
                del self._began[layer]
            reason = f"autopilot, step {step}: no other recipe helped"
            change_recipe(self._model, layer, began if name == began.name else name, reason=reason)
        self.moved, self._again = [], False

    def state_dict(self) -> dict[str, Any]:
        """The moves, as plain lists and dictionaries."""
        return {"moves": [asdict(move) for move in self.moves], "again": self._again}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move the layers of a model as it was converted to where a checkpoint's moves had taken them.

        Layers that are not converted any more stay as they are.

        Raises:
            ValueError: For moves of another model, which is left as it was.
        """
        moves = [Move(**fields) for fields in state["moves"]]
        names = dict(self._model.named_modules())
        for move in moves:
            if move.layer not in names:
                raise ValueError(f"Autopilot: the moves are of another model: this one has no {move.layer!r}")
        for move in moves:
            if move.layer in self._began or is_converted(names[move.layer]):
                self._move(move)
        self.moved, self._again = [], state["again"]

    def _helpless(self, finding: Finding) -> bool:
        """Whether another layer was moved already for what is not finite in this step: it came from elsewhere, then,
        and would go on from each layer to the next.
        """
        step, layer = self._blamed or (0, "")
        if step != finding.step:
            self._blamed = (finding.step, finding.layer)
        return step == finding.step and layer != finding.layer

    def _move(self, move: Move) -> None:
        wanted: str | Recipe | None = None if move.after == HIGH_PRECISION else move.after
        if move.back:
            wanted = self._began.pop(move.layer)  # by itself: it may be one of the user's own
        else:
            module: Any = self._model.get_submodule(move.layer)
            self._began.setdefault(move.layer, module.recipe)
        change_recipe(self._model, move.layer, wanted, reason=f"autopilot, {move}")
        self.moves.append(move)
        self.moved.append(move)
