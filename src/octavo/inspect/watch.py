"""Watch: statistics of the operands of every FP8 linear layer, in sampled steps (docs/inspect.md)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from octavo.comm.checks import gather_objects
from octavo.inspect.accumulator import as_stats
from octavo.inspect.findings import OPERANDS, QUANTILES, Finding, History, OperandStats, Thresholds, findings
from octavo.inspect.sample import Sample, WatchedLayer
from octavo.nn.linear_subclasses import is_converted
from octavo.nn.select import is_linear
from octavo.numerics.display import Displayed
from octavo.numerics.recipe import DEFAULT, Recipe, get_recipe
from octavo.numerics.suggestions import nearest
from octavo.runtime.torch_compat import run_eagerly

HIGH_PRECISION = "bf16"  # Recipe name of layers that are not converted


class Watch(Displayed):
    """Sampled statistics of a model's linear layers.

    Args:
        model: A converted model, sharded or not; each sampled step looks up its layers anew.
        every: Steps between samples: steps `every`, 2·`every`, … are sampled; 0 for forced samples only.
        what_if: Names of recipes whose SQNR on the same tensors is measured as well.
        high_precision: Also measure layers that are not converted, with the default recipe.
        group: Ranks that train the model; None for the default group, if there is one.
        stages: Ranks of all stages of a pipeline, which have layers of their own; `group` then has those of one stage,
            and `rows` and `errors` are those of all stages, on every rank.

    Attributes:
        rows: Statistics of the last step, in the order in which operands were computed; empty if it was not sampled.
        errors: Product errors (`octavo.inspect.sample`) by layer and recipe of what the last `step` measured.
        number: Number of the last step, 1, 2, …
        history: Earlier samples, to detect jumps of an amax.

    Raises:
        ValueError: For a negative `every` or an unknown recipe.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)))
        >>> watch = octavo.inspect.Watch(model, every=1)
        >>> with watch.step():
        ...     model(torch.randn(8, 64)).sum().backward()
        >>> [row.operand for row in watch.rows], watch.findings()
        (['x', 'w', 'wgrad_g'], [])
    """

    def __init__(
        self, model: nn.Module, *, every: int = 50, what_if: Sequence[str] = (), high_precision: bool = False,
        group: dist.ProcessGroup | None = None, stages: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        if every < 0:
            raise ValueError(f"Watch: every is a number of steps, or 0 for forced samples only; got {every}")
        if isinstance(what_if, str):
            raise ValueError(f"Watch: what_if is a list of recipes; write what_if=({what_if!r},)")
        self.rows: list[OperandStats] = []
        self.errors: dict[str, dict[str, float]] = {}
        self.number = 0
        self.history = History()
        self.stages = stages
        self._model = model
        self._every = every
        self._what_if = [get_recipe(name) for name in dict.fromkeys(what_if)]
        self._high_precision = high_precision
        self._group = group
        self._compared_names: list[str] | None = None

    def __str__(self) -> str:
        sampled = f"{len(self.rows)} operands sampled" if self.rows else "not sampled"
        return "\n".join([f"Watch: step {self.number}, {sampled}", *map(str, self.findings())])

    def due(self, number: int) -> bool:
        """Return whether a step is sampled without `force`."""
        return self._every > 0 and number % self._every == 0

    def findings(self, thresholds: Thresholds | None = None) -> list[Finding]:
        """Return the statistics of the last step that crossed a limit; default limits if None."""
        return findings(self.rows, thresholds or Thresholds(), self.history)

    @contextmanager
    def step(
        self, number: int | None = None, *, force: bool = False,
        measure: Mapping[str, Sequence[str | Recipe]] | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Run a step inside, with all of its forwards and backwards.

        Args:
            number: Number of the step, 1, 2, …; default: the one after the last. A resumed run sets it.
            force: Sample the step regardless of `every`; the same on all ranks.
            measure: Recipes whose products are compared with high precision on the operands of this step, by layer,
                converted or not; only if it is sampled. The same on all ranks.

        Raises:
            ValueError: For an unknown layer or recipe to measure.
            RuntimeError: If ranks watch different layers, or weights were gathered before the step began.
        """
        number = self.number + 1 if number is None else number
        if number != self.number:  # a repeated step counts once
            self.history.add(self.rows)
        self.number, self.rows, self.errors = number, [], {}
        if not (force or self.due(self.number)):
            yield
            return
        measured = {name: [get_recipe(recipe) for recipe in recipes] for name, recipes in (measure or {}).items()}
        sample = Sample(self._layers(measured), self._what_if, measured)
        with run_eagerly():
            try:
                sample.install()
                yield
            finally:
                sample.remove()
        self.rows = self._rows(sample)
        if self.stages is not None:  # joins the rows and errors of all stages, in their order
            by_rank = gather_objects((self.rows, self.errors), self.stages)
            rows = [row for rows, _ in reversed(by_rank) for row in reversed(rows)]
            self.rows = list({(row.layer, row.operand, row.recipe): row for row in rows}.values())[::-1]
            self.errors = {layer: error for _, errors in by_rank for layer, error in errors.items()}

    def _layers(self, measured: Collection[str]) -> list[WatchedLayer]:
        layers, names = [], set()
        for name, module in self._model.named_modules():
            if is_converted(module) and not module.recipe.weight_only:
                layers.append(WatchedLayer(name, module, module.recipe, module.recipe.name))
            elif is_linear(module) and (self._high_precision or name in measured):
                layers.append(WatchedLayer(name, module, DEFAULT, HIGH_PRECISION, counted=self._high_precision))
            names.add(name)
        if unknown := next((name for name in measured if name not in names), None):
            raise ValueError(f"Watch: there is no layer {unknown!r} to measure{nearest(unknown, names)}")
        return layers

    def _rows(self, sample: Sample) -> list[OperandStats]:
        layers = {layer.name: layer for layer in sample.layers if layer.counted}
        group = self._multi_rank_group(list(layers))
        keys = [(name, operand) for name in layers for operand in OPERANDS]
        accumulators = sample.accumulators.reduced(keys, group, sample.device)
        self.errors = sample.errors.reduced(group, sample.device)
        names = sample.accumulators.what_if
        rows = []
        for (name, operand), counted in sorted(accumulators.items(), key=lambda item: -item[1].maxima[-1].item()):
            layer = layers[name]
            weight: Any = layer.module.weight
            copies = counted.sums[0].item() / weight.numel() if operand == "w" else 1.0
            row = as_stats((name, operand), counted, step=self.number, recipe=layer.label, what_if=names, copies=copies)
            if operand == "x" and name in sample.channels:
                exponents = sample.channels[name].exponents().sort().values
                places = torch.linspace(0, len(exponents) - 1, QUANTILES, device=exponents.device).round().long()
                row = replace(row, channel_scales=tuple(exponents[places].tolist()))
            rows.append(row)
        return rows

    def _multi_rank_group(self, names: list[str]) -> dist.ProcessGroup | None:
        """Return the group if it has more than one rank. Compare the ranks' layers whenever they change."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self._group or dist.group.WORLD
        if dist.get_world_size(group) == 1:
            return None
        if names != self._compared_names:
            if any(other != names for other in gather_objects(names, group)):
                raise RuntimeError(
                    f"Watch: ranks watch different layers (here {len(names)}, {', '.join(names[:2])}, …): give the "
                    "group of ranks that hold the same ones, Watch(model, group=…)"
                )
            self._compared_names = names
        return group
