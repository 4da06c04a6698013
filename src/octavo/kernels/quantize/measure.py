"""Which configuration of a quantizer is fastest on this GPU: what `octavo calibrate` runs, beside the products."""

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from octavo.kernels.calibration import Entry
from octavo.kernels.quantize import reference, triton
from octavo.kernels.quantize.triton import Form, Task
from octavo.kernels.timing import CALLS, Call, Result, Timer, cache_bytes
from octavo.numerics.error import first_mismatch
from octavo.numerics.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """One quantization of a linear.

    Attributes:
        name: Recipe and operand, such as `"rowwise G"`.
        task: What the kernels are asked for.
        shape: Rows and columns.
    """

    name: str
    task: Task
    shape: tuple[int, int]

    @property
    def case(self) -> tuple[str, ...]:
        """Key of the calibration table, beside the op."""
        return self.task.case

    def rate(self, microseconds: float) -> str:
        """Bytes that the launches move over the time, for tables."""
        elements = self.shape[0] * self.shape[1]
        moved = sum(triton.device_bytes(self.task, launch) for launch in triton.launches(self.task))
        return f"{moved * elements / microseconds / 1e6:.2f} TB/s"


def quantizations(recipe: Recipe, shapes: list[tuple[int, int, int]]) -> list[Quantization]:
    """What linears of these sizes (tokens, in_features, out_features) quantize on a GPU, forward and backward."""
    x, w, g = Form(spec=recipe.x), Form(spec=recipe.w), Form(spec=recipe.dgrad_g)
    tasks = {"W": Task(form=w)}
    if recipe.wgrad_x is None or recipe.wgrad_g is None:
        tasks |= {"X": Task(form=x), "G": Task(form=Form(spec=recipe.dgrad_g, fold="columns"))}
    else:
        other_x = Form(spec=recipe.wgrad_x)
        tasks["X"] = Task(form=x, order="both") if x == other_x else Task(form=x, second=other_x)
        if recipe.shares_g:
            tasks["G"] = Task(form=g, order="both")
        else:
            folded = Form(spec=recipe.dgrad_g, fold="columns" if recipe.folds_w else "none")
            other = Form(spec=recipe.wgrad_g, fold="rows" if recipe.folds_x else "none")
            tasks["G"] = Task(form=folded, second=other)
    again = recipe.dgrad_w == recipe.w
    tasks["W again"] = Task(form=Form(spec=recipe.dgrad_w), order="columns", given="scale" if again else "nothing")
    found = []
    for tokens, inner, outer in shapes:
        sizes = {"X": (tokens, inner), "G": (tokens, outer), "W": (outer, inner), "W again": (outer, inner)}
        found += [Quantization(name=f"{recipe.name} {n}", task=task, shape=sizes[n]) for n, task in tasks.items()]
    return found


def measure(what: Quantization, device: torch.device, time: Timer) -> Result:
    """Time every configuration of one quantization; one whose bytes differ from the reference's is left out."""
    times: dict[str, float] = {}
    left_out: dict[str, str] = {}
    labels: dict[str, int] = {}
    copies = max(1, min(CALLS, cache_bytes(device) // (what.shape[0] * what.shape[1]) + 1))
    inputs = [_operands(what.task, what.shape, device, seed) for seed in range(copies)]
    for index, (rows, columns, warps) in enumerate(triton.tiles(what.task)):
        label = f"{rows}x{columns} w{warps} #{index}"
        try:
            if (difference := _difference(what.task, device, index)) is not None:
                left_out[label] = f"differs from reference: {difference}"
                continue
            calls: list[Call] = [partial(_run, what.task, inputs[i % copies], index) for i in range(CALLS)]
            times[label] = median(time(calls))
            labels[label] = index
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            left_out[label] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    times = dict(sorted(times.items(), key=lambda item: item[1]))
    entry = None
    if times:
        fastest, *rest = times
        entry = Entry(
            op="quantize",
            case=what.case,
            shape=what.shape,
            backend="triton",
            config=labels[fastest],
            microseconds=times[fastest],
            others={label: times[label] for label in rest},
        )
    return Result(task=what, times=times, entry=entry, left_out=left_out)


def _operands(task: Task, shape: tuple[int, int], device: torch.device, seed: int) -> dict[str, Tensor | None]:
    """A random matrix, with factors and scales where the task asks for them."""
    generator = torch.Generator(device).manual_seed(seed)
    rows, columns = shape

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def factor(form: Form | None) -> Tensor | None:
        sizes = {"rows": (rows, 1), "columns": (1, columns)}
        return None if form is None or form.fold == "none" else random(*sizes[form.fold]).abs()

    x = random(rows, columns).bfloat16()
    scale = None
    if task.given == "scale":
        spec = task.form.spec
        scale = torch.full(spec.granularity.scale_shape(shape), 2.0**-6, device=device).to(spec.scale_dtype)
    return {"x": x, "fold": factor(task.form), "fold_t": factor(task.second), "scale": scale}


def _run(task: Task, operands: dict[str, Tensor | None], config: int) -> list[Tensor]:
    x, spec = operands["x"], task.form.spec
    assert x is not None
    if task.second is not None:
        return triton.quantize_pair(x, spec, operands["fold"], task.second.spec, operands["fold_t"], config)
    return triton.quantize(x, spec, operands["fold"], None, operands["scale"], task.order, config)


def _difference(task: Task, device: torch.device, config: int) -> str | None:
    """First byte in which a configuration differs from the reference, on a small matrix that fills no tile."""
    operands = _operands(task, (70, 530), device, 0)
    x, spec = operands["x"], task.form.spec
    assert x is not None
    if task.second is not None:
        expected = reference.quantize_pair(x, spec, operands["fold"], task.second.spec, operands["fold_t"])
    else:
        expected = reference.quantize(x, spec, operands["fold"], None, operands["scale"], task.order)
    actual = _run(task, operands, config)
    return next((d for e, a in zip(expected, actual, strict=True) if (d := first_mismatch(e, a)) is not None), None)
