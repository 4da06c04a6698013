"""Time the configurations of the quantize kernels, for `octavo calibrate`."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.conformance.mismatches import difference
from octavo.kernels.quantize import reference, triton
from octavo.kernels.quantize.triton import FoldedSpec, QuantizeTask
from octavo.kernels.timing import CALLS, CallTime, TimedCall, Timer, TimingResult, cache_bytes
from octavo.numerics.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """One quantization of a linear layer."""

    name: str  # Recipe and operand, such as `"rowwise G"`
    task: QuantizeTask  # Task of the kernels
    shape: tuple[int, int]  # Rows and columns

    @property
    def case(self) -> tuple[str, ...]:
        """Key in the calibration table, next to the op."""
        return self.task.case

    def rate(self, microseconds: float) -> str:
        """Format the achieved memory bandwidth."""
        elements = self.shape[0] * self.shape[1]
        moved = sum(triton.device_bytes(self.task, launch) for launch in triton.launches(self.task))
        return f"{moved * elements / microseconds / 1e6:.2f} TB/s"


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
            Quantization(name=f"{recipe.name} {n}", task=task, shape=sizes[n]) for n, task in tasks.items()
        ]
    return all_quantizations


def time_quantization(quantization: Quantization, device: torch.device, time: Timer) -> TimingResult:
    """Time every configuration of one quantization; leave out those whose bytes differ from the reference."""
    measured: dict[str, CallTime] = {}
    skipped: dict[str, str] = {}
    choices: dict[str, tuple[str, int | None]] = {}
    copies = max(1, min(CALLS, cache_bytes(device) // (quantization.shape[0] * quantization.shape[1]) + 1))
    inputs = [_operands(quantization.task, quantization.shape, device, seed) for seed in range(copies)]
    for index, (rows, columns, warps) in enumerate(triton.tiles(quantization.task)):
        label = f"{rows}x{columns} w{warps} #{index}"
        try:
            if (mismatch := _difference(quantization.task, device, index)) is not None:
                skipped[label] = mismatch
                continue
            calls: list[TimedCall] = [partial(_run, quantization.task, inputs[i % copies], index) for i in range(CALLS)]
            measured[label] = time(calls)
            choices[label] = "triton", index
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            skipped[label] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return TimingResult.of_candidates(quantization, "quantize", measured, choices, skipped)


def _operands(task: QuantizeTask, shape: tuple[int, int], device: torch.device, seed: int) -> dict[str, Tensor | None]:
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
        scale = torch.full(spec.granularity.scale_shape(shape), 2.0**-6, device=device).to(spec.scale_dtype)
    return {"x": x, "fold": factor(task.first), "fold_t": factor(task.second), "scale": scale}


def _run(task: QuantizeTask, operands: dict[str, Tensor | None], config: int) -> list[Tensor]:
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
    return difference(expected, _run(task, operands, config))
