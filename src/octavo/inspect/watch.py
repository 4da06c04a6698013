"""Watch: statistics of the operands of every FP8 linear, in one step of many.

    watch = octavo.inspect.Watch(model, every=50, what_if=("blockwise",))
    for batch in batches:
        with watch.step():                  # forward and backward, all micro-batches
            model(batch).loss.backward()
        for row in watch.rows:              # of the step just taken if it was sampled, else none
            print(row.layer, row.operand, f"{row.sqnr:.1f} dB")
        for finding in watch.findings():    # what crossed a limit
            print(finding)

In a step that is not sampled there is no hook on any module and nothing is done. In one that is, each linear has two:
before forward X and W are counted (`octavo.inspect.tally`), after it a hook on the output waits for G. G's FP8 forms
have scales of X and W folded in, and those row scales are all that is kept in between. Hooks look and return nothing,
outside of dispatch modes, autograd and the copies that layers share, so a sampled step computes bitwise what it
computes unsampled.

    recomputed forwards     activation checkpointing runs a forward again in backward: not counted twice
    micro-batches           all of the step are counted, W once
    torch.compile           a sampled step runs eagerly, so that hooks are called; what was compiled stays valid
    ranks                   one sum and one maximum over the group at the end of the step; rows are the same on all
    weights in FP8          FSDP gathers them so (`octavo.nn.gathered`): each rank counts its own rows

Not seen: a linear whose forward is not called (the head under the chunked loss), and that wgrad's X was made again from
FP8 where activations are stored so: its row scales, folded into G, are taken as those of forward.
"""

import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octavo.inspect.findings import Finding, History, Thresholds, findings
from octavo.inspect.sample import Layer, Sample
from octavo.inspect.stats import OPERANDS, OperandStats
from octavo.inspect.tally import as_stats
from octavo.nn.report import is_converted
from octavo.nn.select import is_linear
from octavo.numerics.display import Displayed
from octavo.numerics.names import nearest
from octavo.numerics.recipe import DEFAULT, Recipe, get_recipe

HIGH_PRECISION = "bf16"
"""Name, in place of a recipe's, of linears that are not converted."""


class Watch(Displayed):
    """Statistics of a model's linears, sampled.

    Args:
        model: A converted model, sharded or not; its linears are looked up anew in each sampled step.
        every: Steps from one sample to the next: steps `every`, 2·`every`, …; 0 for only those that are forced.
        what_if: Names of recipes whose SQNR on the same tensors is wanted as well.
        high_precision: Also linears that were not converted, measured as the default recipe would have them.
        group: The ranks that train the model; None for the default group, where there is one.

    Attributes:
        rows: Statistics of the step just taken, in the order in which operands were computed; empty where it was not
            sampled.
        errors: Of the layers that `step` was to measure in the step just taken, the errors of their products by layer
            and recipe: see `octavo.inspect.product_error`.
        number: Number of the step just taken, 1, 2, …
        history: Earlier samples, for jumps of an amax.

    Raises:
        ValueError: For a negative `every` or an unknown recipe.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        what_if: Sequence[str] = (),
        high_precision: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if every < 0:
            raise ValueError(f"Watch: every is a number of steps, or 0 for forced samples only; got {every}")
        if isinstance(what_if, str):
            raise ValueError(f"Watch: what_if is a list of recipes; write what_if=({what_if!r},)")
        self.rows: list[OperandStats] = []
        self.errors: dict[str, dict[str, float]] = {}
        self.number = 0
        self.history = History()
        self._model = model
        self._every = every
        self._what_if = [get_recipe(name) for name in dict.fromkeys(what_if)]
        self._high_precision = high_precision
        self._group = group
        self._agreed: list[str] | None = None

    def __str__(self) -> str:
        sampled = f"{len(self.rows)} operands sampled" if self.rows else "not sampled"
        return "\n".join([f"Watch: step {self.number}, {sampled}", *map(str, self.findings())])

    def due(self, number: int) -> bool:
        """Whether a step is sampled without being forced."""
        return self._every > 0 and number % self._every == 0

    def findings(self, thresholds: Thresholds | None = None) -> list[Finding]:
        """What crossed a limit in the step just taken; the default limits where none are given."""
        return findings(self.rows, thresholds or Thresholds(), self.history)

    @contextmanager
    def step(
        self,
        number: int | None = None,
        *,
        force: bool = False,
        measure: Mapping[str, Sequence[str | Recipe]] | None = None,
    ) -> Iterator[None]:
        """Take a step inside: all of its forwards and backwards.

        Args:
            number: Which step it is, 1, 2, …; the one after the last where not given. A resumed run says so here.
            force: Sample it whatever `every` says; on all ranks alike.
            measure: Recipes whose products are compared with high precision on the operands of this step, by layer,
                converted or not; where it is sampled. The same on all ranks.

        Raises:
            ValueError: For an unknown layer or recipe to measure.
            RuntimeError: Where ranks watch different layers, or weights were gathered before the step began.
        """
        number = self.number + 1 if number is None else number
        if number != self.number:  # a step that is taken again counts once
            self.history.add(self.rows)
        self.number, self.rows, self.errors = number, [], {}
        if not (force or self.due(self.number)):
            yield
            return
        measured = {name: [get_recipe(recipe) for recipe in recipes] for name, recipes in (measure or {}).items()}
        sample = Sample(self._layers(measured), self._what_if, measured)
        with _eager():
            try:
                sample.install()
                yield
            finally:
                sample.remove()
        self.rows = self._rows(sample)

    def _layers(self, measured: Collection[str]) -> list[Layer]:
        """What is watched now."""
        found, names = [], set()
        for name, module in self._model.named_modules():
            if is_converted(module):
                recipe = module.recipe
                assert isinstance(recipe, Recipe)
                found.append(Layer(name, module, recipe, recipe.name))
            elif is_linear(module) and (self._high_precision or name in measured):
                found.append(Layer(name, module, DEFAULT, HIGH_PRECISION, counted=self._high_precision))
            names.add(name)
        if unknown := next((name for name in measured if name not in names), None):
            raise ValueError(f"Watch: there is no layer {unknown!r} to measure{nearest(unknown, names)}")
        return found

    def _rows(self, sample: Sample) -> list[OperandStats]:
        layers = {layer.name: layer for layer in sample.layers if layer.counted}
        group = self._several(list(layers), sample.device)
        keys = [(name, operand) for name in layers for operand in OPERANDS]
        found = sample.tallies.reduced(keys, group, sample.device)
        self.errors = sample.errors.reduced(group, sample.device)
        names = sample.tallies.what_if
        rows = []
        for (name, operand), counted in sorted(found.items(), key=lambda item: -item[1].maxima[-1].item()):
            layer = layers[name]
            whole = layer.module.weight.numel()  # type: ignore[operator]
            copies = counted.sums[0].item() / whole if operand == "w" else 1.0
            row = as_stats((name, operand), counted, step=self.number, recipe=layer.label, what_if=names, copies=copies)
            rows.append(row)
        return rows

    def _several(self, names: list[str], device: torch.device) -> dist.ProcessGroup | None:
        """The group, if it has more ranks than this one. Their layers are compared when they differ from the last."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self._group or dist.group.WORLD
        if dist.get_world_size(group) == 1:
            return None
        if names != self._agreed:
            own = zlib.crc32("\n".join(names).encode())
            extremes = torch.tensor([own, -own], dtype=torch.int64, device=device)
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
            if (extremes.sum() != 0).item():
                raise RuntimeError(
                    f"Watch: ranks watch different layers (here {len(names)}, {', '.join(names[:2])}, …): give the "
                    "group of ranks that hold the same ones, Watch(model, group=…)"
                )
            self._agreed = names
        return group


def _eager() -> AbstractContextManager[Any]:
    """Inside, compiled modules run as they were written, where anything may be compiled at all."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
