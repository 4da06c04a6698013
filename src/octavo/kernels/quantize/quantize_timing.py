"""Time the configurations of the quantize kernels, for `octavo calibrate`."""

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from octavo.kernels import timing
from octavo.kernels.conformance.mismatches import difference
from octavo.kernels.quantize import reference, triton
from octavo.kernels.quantize.triton import FoldedSpec, QuantizeTask
from octavo.numerics.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Quantization(timing.TimingTask):
    """One quantization of a linear layer."""

    task: QuantizeTask  # Task of the kernels

    def rate(self, microseconds: float) -> str:
        """Format the achieved memory bandwidth."""
        moved = sum(triton.device_bytes(self.task, launch) for launch in triton.launches(self.task))
        return f"{moved * prod(self.shape) / microseconds / 1e6:.2f} TB/s"

    def timed(self, device: torch.device, time: timing.Timer) -> timing.TimingResult:
        """Time every candidate."""
        return time_quantization(self, device, time)


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
    tasks["W again"] = QuantizeTask(
        first=FoldedSpec(spec=recipe.dgrad_w),
        order="columns",
        precomputed="scale" if recipe.dgrad_w == recipe.w else "nothing",
    )
    all_quantizations = []
    for tokens, inner, outer in shapes:
        sizes = {"X": (tokens, inner), "G": (tokens, outer), "W": (outer, inner), "W again": (outer, inner)}
        all_quantizations += [
            Quantization(name=f"{recipe.name} {n}", task=task, case=task.case, shape=sizes[n])
            for n, task in tasks.items()
        ]
    return all_quantizations


def time_quantization(quantization: Quantization, device: torch.device, time: timing.Timer) -> timing.TimingResult:
    """Time every configuration of one quantization; leave out those whose bytes differ from the reference."""
    task = quantization.task
    copies = max(1, min(timing.CALLS, timing.cache_bytes(device) // prod(quantization.shape) + 1))
    inputs = [_operands(task, quantization.shape, device, seed) for seed in range(copies)]

    def prepare(config: int) -> str | list[timing.TimedCall]:
        mismatch = _difference(task, device, config)
        return mismatch or timing.cycled(partial(_run, task, config), [(operands,) for operands in inputs])

    candidates = (
        (f"{rows}x{columns} w{warps} #{index}", ("triton", index), partial(prepare, index))
        for index, (rows, columns, warps) in enumerate(triton.tiles(task))
    )
    return timing.time_candidates(quantization, "quantize", candidates, time)


def _operands(task: QuantizeTask, shape: tuple[int, ...], device: torch.device, seed: int) -> dict[str, Tensor | None]:
    """Return a random matrix, with the fold factors and scales that the task needs."""
    generator = torch.Generator(device).manual_seed(seed)
    rows, columns = shape

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def factor(folded: FoldedSpec | None) -> Tensor | None:
        sizes = {"rows": (rows, 1), "columns": (1, columns)}
        return None if folded is None or folded.fold == "none" else random(*sizes[folded.fold]).abs()

    x = random(rows, columns).bfloat16()
    scale = None
    if task.precomputed == "scale":
        spec = task.first.spec
        scale = torch.full(spec.granularity.scale_shape((rows, columns)), 2.0**-6, device=device).to(spec.scale_dtype)
    return {"x": x, "fold": factor(task.first), "fold_t": factor(task.second), "scale": scale}


def _run(task: QuantizeTask, config: int, operands: dict[str, Tensor | None]) -> list[Tensor]:
    x, spec = operands["x"], task.first.spec
    assert x is not None
    if task.second is not None:
        return triton.quantize_pair(x, spec, operands["fold"], task.second.spec, operands["fold_t"], config)
    return triton.quantize(x, spec, operands["fold"], None, operands["scale"], task.order, config)


def _difference(task: QuantizeTask, device: torch.device, config: int) -> str | None:
    """Describe the first mismatch with the reference on a small matrix with partial tiles, or return None."""
    operands = _operands(task, (70, 530), device, 0)
    x, spec = operands["x"], task.first.spec
    assert x is not None
    if task.second is not None:
        expected = reference.quantize_pair(x, spec, operands["fold"], task.second.spec, operands["fold_t"])
    else:
        expected = reference.quantize(x, spec, operands["fold"], None, operands["scale"], task.order)
    return difference(expected, _run(task, config, operands))
