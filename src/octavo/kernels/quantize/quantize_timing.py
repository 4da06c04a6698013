"""Time the configurations of the quantize kernels, for `octavo calibrate`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import timing
from octavo.kernels.conformance.mismatches import difference
from octavo.kernels.quantize import reference, triton
from octavo.kernels.quantize.triton import FoldedSpec, Precomputed, QuantizeTask
from octavo.numerics.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Quantization(timing.TimingTask):
    task: QuantizeTask  # Task of the kernels

    def rate(self, microseconds: float) -> str:
        moved = sum(triton.device_bytes(self.task, launch) for launch in triton.launches(self.task))
        return f"{moved * prod(self.shape) / microseconds / 1e6:.2f} TB/s"

    def candidates(self, device: torch.device) -> Iterator[timing.Candidate]:
        """Return every configuration but those whose bytes differ from the reference."""
        copies = max(1, min(timing.CALLS, timing.cache_bytes(device) // prod(self.shape) + 1))
        inputs = [_inputs(self.task, self.shape, device, seed) for seed in range(copies)]

        def prepare(config: int) -> str | list[timing.TimedCall]:
            run = partial(getattr(triton, self.task.op), config=config)
            call = _inputs(self.task, (70, 530), device, 0)  # a small matrix with partial tiles
            mismatch = difference(getattr(reference, self.task.op)(*call), run(*call))
            return mismatch or timing.cycled(run, inputs)

        for index, (rows, columns, warps) in enumerate(triton.tiles(self.task)):
            yield f"{rows}x{columns} w{warps} #{index}", ("triton", index), partial(prepare, index)


def quantizations(recipe: Recipe, shapes: list[tuple[int, int, int]]) -> list[Quantization]:
    """Return the quantizations of linears of these sizes (tokens, in_features, out_features), forward and backward."""
    x, w, g = FoldedSpec(spec=recipe.x), FoldedSpec(spec=recipe.w), FoldedSpec(spec=recipe.dgrad_g)
    tasks = {"W": QuantizeTask(first=w)}
    if recipe.wgrad_x is None or recipe.wgrad_g is None:
        tasks |= {"X": QuantizeTask(first=x), "G": QuantizeTask(first=FoldedSpec(spec=recipe.dgrad_g, fold="columns"))}
    else:
        other_x = FoldedSpec(spec=recipe.wgrad_x)
        tasks["X"] = QuantizeTask(first=x, order="both") if x == other_x else QuantizeTask(first=x, second=other_x)
        if recipe.shared_grad_cast:
            tasks["G"] = QuantizeTask(first=g, order="both")
        else:
            folded = FoldedSpec(spec=recipe.dgrad_g, fold="columns" if recipe.folds_w else "none")
            other = FoldedSpec(spec=recipe.wgrad_g, fold="rows" if recipe.folds_x else "none")
            tasks["G"] = QuantizeTask(first=folded, second=other)
    given: Precomputed = "scale" if recipe.dgrad_w == recipe.w else "nothing"
    tasks["W again"] = QuantizeTask(first=FoldedSpec(spec=recipe.dgrad_w), order="columns", precomputed=given)
    all_quantizations = []
    for tokens, inner, outer in shapes:
        sizes = {"X": (tokens, inner), "G": (tokens, outer), "W": (outer, inner), "W again": (outer, inner)}
        all_quantizations += [
            Quantization(op="quantize", name=f"{recipe.name} {n}", task=task, case=task.case, shape=sizes[n])
            for n, task in tasks.items()
        ]
    return all_quantizations


def _inputs(task: QuantizeTask, shape: tuple[int, ...], device: torch.device, seed: int) -> tuple[Any, ...]:
    """Return arguments of the task's op: a random matrix, with the fold factors and scales that the task needs."""
    generator = torch.Generator(device).manual_seed(seed)
    rows, columns = shape

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def factor(folded: FoldedSpec) -> Tensor | None:
        sizes = {"rows": (rows, 1), "columns": (1, columns)}
        return None if folded.fold == "none" else random(*sizes[folded.fold]).abs()

    x, spec = random(rows, columns).bfloat16(), task.first.spec
    if task.second is not None:
        return x, spec, factor(task.first), task.second.spec, factor(task.second)
    scale = None
    if task.precomputed == "scale":
        scale = torch.full(spec.granularity.scale_shape((rows, columns)), 2.0**-6, device=device).to(spec.scale_dtype)
    return x, spec, factor(task.first), None, scale, task.order
