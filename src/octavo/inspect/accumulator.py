"""Accumulators: statistics of an operand on its device, summed over calls, micro-batches and ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.inspect.findings import OperandStats
from octavo.kernels import quantize
from octavo.numerics.formats import row_chunks, widen
from octavo.numerics.spec import FULL, SMALLEST_SCALE, QuantSpec
from octavo.tensor import ScaledTensor

SUMS = ("elements", "nonfinite", "nonzero", "lost", "cut", "signal", "noise")
"""Quantities that add up, followed by signal and noise of each what-if recipe."""
MAXIMA = ("amax", "smallest", "largest_scale", "smallest_scale", "order")
"""Quantities of which the maximum counts; the second, fourth and last hold negatives."""
GPU_CHUNK = 2**26  # Elements of a row chunk on a GPU: 256 MiB in float32 for each of a few intermediate results


@dataclass
class Accumulator:
    sums: Tensor  # float64 [len(SUMS) + 2 · number of what-if recipes]
    maxima: Tensor  # float64 [len(MAXIMA)]

    def add(self, other: "Accumulator") -> None:
        self.sums += other.sums
        self.maxima = torch.maximum(self.maxima, other.maxima)

    @staticmethod
    def empty(what_if: int, device: torch.device) -> "Accumulator":
        return Accumulator(
            torch.zeros(len(SUMS) + 2 * what_if, dtype=torch.float64, device=device),
            torch.full((len(MAXIMA),), -math.inf, dtype=torch.float64, device=device),
        )


@dataclass(frozen=True)
class OperandFormat:
    """How a recipe quantizes an operand: the spec, and a factor multiplied into it first."""

    spec: QuantSpec | None  # None for high precision
    fold: Tensor | None = None  # float32 [R,1] or [1,C]
    scale: Tensor | None = None  # Scales to use instead of those from the operand's own amax
    # float32 [R,1] or [1,C]: 1 for rows or columns that the product reads, 0 for those that it multiplies by exact
    # zeros. The latter lose nothing, so they only count for `nonfinite`. None if all are read.
    read: Tensor | None = None


def accumulate(x: Tensor, forms: Sequence[OperandFormat], order: int) -> tuple[Accumulator, list[ScaledTensor | None]]:
    """Count an operand in its own format, the first, and in those of the what-if recipes."""
    quantized = [None if f.spec is None else quantize(x, f.spec, f.fold, scale=f.scale) for f in forms]
    own = quantized[0]
    assert own is not None
    assert own.scale is not None
    if not x.numel():
        return Accumulator.empty(len(forms) - 1, x.device), quantized
    elements, minus_order = (torch.full((), n, dtype=torch.float64, device=x.device) for n in (x.numel(), -order))
    nonfinite, amax, smallest = _magnitudes(x, forms[0])
    sums = [elements, nonfinite, *_errors(x, forms[0], own)]
    for other, q in zip(forms[1:], quantized[1:], strict=True):
        sums += [elements, torch.zeros_like(elements)] if q is None else _errors(x, other, q)[3:]
    scale = own.scale.double()
    used = scale > SMALLEST_SCALE  # scales of all-zero groups do not count
    largest, least = (torch.where(used, value, -math.inf).amax() for value in (scale, -scale))
    return Accumulator(torch.stack(sums), torch.stack([amax, smallest, largest, least, minus_order])), quantized


def _magnitudes(x: Tensor, form: OperandFormat) -> list[Tensor]:
    """Return the number of non-finite values, the largest finite magnitude read, and minus the smallest above zero."""
    sums, maxima = [], []
    for chunk in _row_chunks(x, 1):
        values = _values(x, form.fold, chunk)
        sums.append(torch.count_nonzero(values - values))
        sizes = _multiplied(values.nan_to_num_(0.0, 0.0, 0.0).abs_(), form.read, chunk)
        maxima.append(torch.stack([sizes.amax(), -torch.where(sizes > 0, sizes, math.inf).amin()]))
    return [torch.stack(sums).sum().double(), *torch.stack(maxima).amax(0).double()]


def _errors(x: Tensor, form: OperandFormat, q: ScaledTensor) -> list[Tensor]:
    """Return statistics of the values that are read, and finite in x and in its FP8 form."""
    # Numbers of non-zero values, of those rounded to zero and of saturated ones; sums of squares, of values and errors.
    spec, scale = q.spec, q.scale
    assert scale is not None
    extent = spec.granularity.rows
    totals = []
    for chunk in _row_chunks(x, extent or 1):
        rows = slice(None) if extent == FULL else slice(chunk.start // extent, -(-chunk.stop // extent))
        part = ScaledTensor(q.data[chunk], scale[rows], spec)
        scales = part.expanded_scale()
        dequantized = widen(part.data).mul_(scales)
        values = torch.where(dequantized == dequantized, _values(x, form.fold, chunk).nan_to_num_(0.0, 0.0, 0.0), 0.0)
        values, dequantized = (_multiplied(both, form.read, chunk) for both in (values, dequantized.nan_to_num_(0.0)))
        nonzero, nonzero_fp8 = torch.count_nonzero(values), torch.count_nonzero(dequantized)
        cut = torch.zeros_like(nonzero)
        if form.scale is not None:  # the margin allows for rounding of the scale
            cut = torch.count_nonzero(values.abs() > (1 + 2.0**-20) * spec.format.max * scales)
        signal = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        noise = torch.linalg.vector_norm(dequantized.sub_(values), dtype=torch.float64).square()
        totals.append(torch.stack([nonzero, nonzero - nonzero_fp8, cut, signal, noise]))
    return [*torch.stack(totals).sum(0)]


def _values(x: Tensor, fold: Tensor | None, chunk: slice) -> Tensor:
    return _multiplied(x[chunk].to(torch.float32, copy=True), fold, chunk)


def _multiplied(values: Tensor, factor: Tensor | None, chunk: slice) -> Tensor:
    """Multiply a chunk, in place, by its part of a factor [R,1] or [1,C]; one of 0 zeros finite values."""
    return values if factor is None else values.mul_(factor if factor.shape[0] == 1 else factor[chunk])


def _row_chunks(x: Tensor, multiple: int) -> list[slice]:
    rows, columns = x.shape
    if x.device.type != "cpu":
        multiple *= max(GPU_CHUNK // max(columns * multiple, 1), 1)
    return row_chunks((rows, columns), multiple)


OperandKey = tuple[str, str]  # Layer and operand


@dataclass
class Accumulators:
    what_if: Sequence[str]
    by_key: dict[OperandKey, Accumulator] = field(default_factory=dict)
    order: int = 0

    def count(self, key: OperandKey, x: Tensor, forms: Sequence[OperandFormat]) -> list[ScaledTensor | None]:
        """Count an operand; return it quantized in each format."""
        counted, quantized = accumulate(x, forms, self.order)
        self.order += 1
        if (earlier := self.by_key.setdefault(key, counted)) is not counted:
            earlier.add(counted)
        return quantized

    def reduced(
        self, keys: Sequence[OperandKey], group: dist.ProcessGroup | None, device: torch.device
    ) -> dict[OperandKey, Accumulator]:
        """Reduce all accumulators over the ranks of a group and move them to host memory; leave out empty ones."""
        if not keys:
            return {}
        device = next((accumulator.sums.device for accumulator in self.by_key.values()), device)
        none = Accumulator.empty(len(self.what_if), device)
        ordered = [self.by_key.get(key, none) for key in keys]
        sums = torch.stack([accumulator.sums.to(device) for accumulator in ordered])
        maxima = torch.stack([accumulator.maxima.to(device) for accumulator in ordered])
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        width = sums.shape[1]
        both = zip(keys, torch.cat([sums, maxima], dim=1).cpu(), strict=True)
        return {key: Accumulator(row[:width], row[width:]) for key, row in both if row[0] > 0}


def as_stats(
    key: OperandKey, counted: Accumulator, *, step: int, recipe: str, what_if: Sequence[str], copies: float
) -> OperandStats:
    """Convert an accumulator in host memory to statistics; each element was counted `copies` times."""
    elements, nonfinite, nonzero, lost, cut, signal, noise, *others = counted.sums.tolist()
    amax, smallest, largest_scale, smallest_scale, _ = counted.maxima.tolist()
    finite = elements - nonfinite

    def decibels(signal: float, noise: float) -> float:
        if not finite or (amax > 0 and not signal):  # nothing to compare: an infinity set its scale
            return math.nan
        return 10 * (math.log10(signal) - math.log10(noise)) if noise else math.inf

    return OperandStats(
        step=step, layer=key[0], operand=key[1], recipe=recipe, elements=round(elements / copies),
        nonfinite=math.ceil(nonfinite / copies), amax=amax, smallest=-smallest if math.isfinite(smallest) else 0.0,
        scale_spread=largest_scale / -smallest_scale if math.isfinite(largest_scale) else 1.0,
        underflow=lost / nonzero if nonzero else 0.0, saturation=cut / finite if finite else 0.0,
        sqnr=decibels(signal, noise),
        what_if={name: decibels(*others[2 * i : 2 * i + 2]) for i, name in enumerate(what_if)},
    )  # fmt: skip
