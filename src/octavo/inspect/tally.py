"""Tallies: what is counted of an operand on its device, put together over calls, micro-batches and ranks.

Two vectors per operand: `SUMS`, which add up, and `MAXIMA`, of which the larger counts (a smallest value is the
largest of its negatives). Both are float64 and stay where the operand is; nothing waits for the device until the end of
a step, when all operands of all layers move at once, after one sum and one maximum over the ranks.

Counting takes one more quantization of the operand and about fifteen passes over it, made in bands: on a CPU of what
stays in a cache, on a GPU of what bounds the memory for intermediate results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.inspect.stats import OperandStats
from octavo.kernels import quantize
from octavo.numerics.formats import widen
from octavo.numerics.row_chunks import row_chunks
from octavo.numerics.spec import FULL, SMALLEST_SCALE, QuantSpec
from octavo.tensor import ScaledTensor

SUMS = ("elements", "nonfinite", "nonzero", "lost", "cut", "signal", "noise")
"""What adds up; then signal and noise of each what-if recipe."""
MAXIMA = ("amax", "smallest", "largest_scale", "smallest_scale", "order")
"""What is the largest of all; the second, fourth and last of negatives."""
GPU_BAND = 2**26
"""Elements of a band on a GPU: 256 MiB in float32 for each of a few intermediate results."""


@dataclass
class Tally:
    """What has been counted of one operand.

    Attributes:
        sums: float64 [len(SUMS) + 2 · number of what-if recipes].
        maxima: float64 [len(MAXIMA)].
    """

    sums: Tensor
    maxima: Tensor

    def add(self, other: "Tally") -> None:
        """Count what the other has counted as well."""
        self.sums += other.sums
        self.maxima = torch.maximum(self.maxima, other.maxima)

    @staticmethod
    def nothing(what_if: int, device: torch.device) -> "Tally":
        """The tally of no element."""
        return Tally(
            torch.zeros(len(SUMS) + 2 * what_if, dtype=torch.float64, device=device),
            torch.full((len(MAXIMA),), -math.inf, dtype=torch.float64, device=device),
        )


@dataclass(frozen=True)
class Form:
    """How a recipe has an operand in FP8: the spec, and the factor that is multiplied into it first.

    Attributes:
        spec: None for high precision.
        fold: float32 [R,1] or [1,C].
        scale: Scales that are used instead of those of the operand's own maxima.
        read: float32 [R,1] or [1,C], 1 for rows or columns that the product reads, and 0 for those that it multiplies
            by exact zeros: nothing of these is lost, so they count to no figure but `nonfinite`. None where all are
            read.
    """

    spec: QuantSpec | None
    fold: Tensor | None = None
    scale: Tensor | None = None
    read: Tensor | None = None

    def of(self, x: Tensor) -> ScaledTensor:
        """The FP8 form of a matrix."""
        assert self.spec is not None
        return quantize(x, self.spec, self.fold, scale=self.scale)


def tally(x: Tensor, form: Form, others: Sequence[Form], order: int) -> tuple[Tally, list[ScaledTensor | None]]:
    """Count a matrix.

    Args:
        x: [R,C] in high precision.
        form: As which it is used; not high precision.
        others: As which what-if recipes would use it.
        order: How many operands were counted before it in this step.

    Returns:
        The tally, and the FP8 forms: its own, then the others' (None for high precision).
    """
    quantized = [None if wanted.spec is None else wanted.of(x) for wanted in (form, *others)]
    own = quantized[0]
    assert own is not None
    assert own.scale is not None
    if not x.numel():
        return Tally.nothing(len(others), x.device), quantized
    elements, place = (torch.full((), value, dtype=torch.float64, device=x.device) for value in (x.numel(), -order))
    nonfinite, amax, smallest = _magnitudes(x, form)
    sums = [elements, nonfinite, *_errors(x, form, own)]
    for other, q in zip(others, quantized[1:], strict=True):
        sums += [elements, torch.zeros_like(elements)] if q is None else _errors(x, other, q)[3:]
    scale = own.scale.double()
    used = scale > SMALLEST_SCALE  # the scale of zeros says nothing
    largest, least = (torch.where(used, value, -math.inf).amax() for value in (scale, -scale))
    return Tally(torch.stack(sums), torch.stack([amax, smallest, largest, least, place])), quantized


def _magnitudes(x: Tensor, form: Form) -> list[Tensor]:
    """How many values are not finite; the largest finite magnitude, and minus the smallest above zero, of what is
    read.
    """
    sums, maxima = [], []
    for band in _bands(x, 1):
        values = _values(x, form.fold, band)
        sums.append(torch.count_nonzero(values - values))
        sizes = values.nan_to_num_(0.0, 0.0, 0.0).abs_()
        sizes = _only(sizes, form.read, band)
        maxima.append(torch.stack([sizes.amax(), -torch.where(sizes > 0, sizes, math.inf).amin()]))
    return [torch.stack(sums).sum().double(), *torch.stack(maxima).amax(0).double()]


def _errors(x: Tensor, form: Form, q: ScaledTensor) -> list[Tensor]:
    """Of what is read and finite, in x and in its FP8 form: values above zero, those of them that are zeros in FP8,
    those that were cut, and the squares of all and of what they lost.
    """
    spec, scale = q.spec, q.scale
    assert scale is not None
    extent = spec.granularity.rows
    found = []
    for band in _bands(x, extent or 1):
        rows = slice(None) if extent == FULL else slice(band.start // extent, -(-band.stop // extent))
        part = ScaledTensor(q.data[band], scale[rows], spec)
        scales = part.expanded_scale()
        there = widen(part.data).mul_(scales)
        values = torch.where(there == there, _values(x, form.fold, band).nan_to_num_(0.0, 0.0, 0.0), 0.0)
        values, there = (_only(both, form.read, band) for both in (values, there.nan_to_num_(0.0)))
        nonzero, kept = torch.count_nonzero(values), torch.count_nonzero(there)
        cut = torch.zeros_like(nonzero)
        if form.scale is not None:  # what exceeds it by rounding of the scale was not cut
            cut = torch.count_nonzero(values.abs() > (1 + 2.0**-20) * spec.format.max * scales)
        signal = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        noise = torch.linalg.vector_norm(there.sub_(values), dtype=torch.float64).square()
        found.append(torch.stack([nonzero, nonzero - kept, cut, signal, noise]))
    return [*torch.stack(found).sum(0)]


def _values(x: Tensor, fold: Tensor | None, band: slice) -> Tensor:
    """Rows of the operand in float32, a fresh tensor."""
    values = x[band].to(torch.float32, copy=True)
    return values if fold is None else values.mul_(fold if fold.shape[0] == 1 else fold[band])


def _only(values: Tensor, read: Tensor | None, band: slice) -> Tensor:
    """Finite values of a band, in place, with zeros for those that no product reads."""
    return values if read is None else values.mul_(read if read.shape[0] == 1 else read[band])


def _bands(x: Tensor, multiple: int) -> list[slice]:
    """Bands of whole block rows."""
    rows, columns = x.shape
    if x.device.type != "cpu":
        multiple *= max(GPU_BAND // max(columns * multiple, 1), 1)
    return row_chunks((rows, columns), multiple)


Key = tuple[str, str]
"""Layer and operand."""


@dataclass
class Tallies:
    """The tallies of one step, by layer and operand."""

    what_if: Sequence[str]
    found: dict[Key, Tally] = field(default_factory=dict)
    order: int = 0

    def count(self, key: Key, x: Tensor, form: Form, others: Sequence[Form]) -> list[ScaledTensor | None]:
        """Count an operand; returns its FP8 forms, its own and the others'."""
        counted, quantized = tally(x, form, others, self.order)
        self.order += 1
        if key in self.found:
            self.found[key].add(counted)
        else:
            self.found[key] = counted
        return quantized

    def reduced(self, keys: Sequence[Key], group: dist.ProcessGroup | None, device: torch.device) -> dict[Key, Tally]:
        """All tallies in host memory, put together over the ranks of a group; those of no element are left out.

        Args:
            keys: Every operand that any rank may have counted, the same on all of them.
            group: The ranks; None for this one alone.
            device: Where the ranks exchange tensors, where this one has counted nothing.
        """
        if not keys:
            return {}
        device = next((tally.sums.device for tally in self.found.values()), device)
        none = Tally.nothing(len(self.what_if), device)
        ordered = [self.found.get(key, none) for key in keys]
        sums = torch.stack([tally.sums.to(device) for tally in ordered])
        maxima = torch.stack([tally.maxima.to(device) for tally in ordered])
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        width = sums.shape[1]
        both = torch.cat([sums, maxima], dim=1).cpu()
        return {
            key: Tally(values[:width], values[width:]) for key, values in zip(keys, both, strict=True) if values[0] > 0
        }


def as_stats(
    key: Key, counted: Tally, *, step: int, recipe: str, what_if: Sequence[str], copies: float
) -> OperandStats:
    """The statistics of an operand from its tally in host memory, each of whose elements was counted `copies` times."""
    elements, nonfinite, nonzero, lost, cut, signal, noise, *others = counted.sums.tolist()
    amax, smallest, largest_scale, smallest_scale, _ = counted.maxima.tolist()
    finite = elements - nonfinite

    def decibels(signal: float, noise: float) -> float:
        if not finite or (amax > 0 and not signal):  # nothing could be compared: its scale is that of an infinity
            return math.nan
        return 10 * (math.log10(signal) - math.log10(noise)) if noise else math.inf

    return OperandStats(
        step=step,
        layer=key[0],
        operand=key[1],
        recipe=recipe,
        elements=round(elements / copies),
        nonfinite=math.ceil(nonfinite / copies),
        amax=amax,
        smallest=-smallest if math.isfinite(smallest) else 0.0,
        scale_spread=largest_scale / -smallest_scale if math.isfinite(largest_scale) else 1.0,
        underflow=lost / nonzero if nonzero else 0.0,
        saturation=cut / finite if finite else 0.0,
        sqnr=decibels(signal, noise),
        what_if={name: decibels(*others[2 * i : 2 * i + 2]) for i, name in enumerate(what_if)},
    )
