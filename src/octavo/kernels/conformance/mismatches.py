"""Run kernels and their reference on the same inputs and count mismatches."""

import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.numerics.error import first_mismatch, sqnr
from octavo.tensor import ScaledTensor

# Random inputs as a function of a seed: sizes, strides, alignment and values, with notes.


class Budget(NamedTuple):
    size: int  # Largest size of an input
    repeats: int  # Runs of a configuration on one input
    configs: int | None = None  # Configurations per case; None for all
    bf16_subnormals: bool = True  # Whether bf16 inputs may be subnormal; Triton's interpreter converts those wrongly


GPU = Budget(size=1500, repeats=2)
INTERPRETER = Budget(size=40, repeats=1, configs=1, bf16_subnormals=False)
"""Triton's interpreter takes a second where a GPU takes microseconds, and configurations differ only in their tile."""

KINDS = ("normal", "log-normal", "outlier rows and columns", "zeros", "subnormal", "huge", "not finite")  # Of values


@dataclass
class RandomInputs:
    """Generator of random sizes, values and strides; `notes` describes the results."""

    seed: str
    budget: Budget
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(63))

    def size(self) -> int:
        """Return a size of 1 or more, log-uniform; every other one is a multiple of 16."""
        size = int(self.budget.size ** self.random.random())
        return -(-size // 16) * 16 if self.random.random() < 0.5 else size

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu")

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator, device="cpu")

    def positive(self, *shape: int) -> Tensor:
        return torch.exp(2 * self.normal(*shape))

    def matrix(self, rows: int | None = None, columns: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a matrix of random size, dtype, memory layout and kind of values."""
        rows, columns = rows or self.size(), columns or self.size()
        dtype = dtype or self.random.choice((torch.bfloat16, torch.bfloat16, torch.float32, torch.float16))
        layout = self.random.choice(("contiguous", "contiguous", "transposed", "every other column", "not aligned"))
        kind = self.random.choice(KINDS)
        if kind == "subnormal" and dtype == torch.bfloat16 and not self.budget.bf16_subnormals:
            kind = "normal"
        self.notes.append(f"{str(dtype).removeprefix('torch.')} [{rows},{columns}] {layout} {kind}")
        if layout == "transposed":
            return self._values(kind, columns, rows, dtype).t()
        if layout == "every other column":
            return self._values(kind, rows, 2 * columns, dtype)[:, ::2]
        if layout == "not aligned":
            return self._values(kind, rows + 1, columns + 3, dtype)[1:, 3:]
        return self._values(kind, rows, columns, dtype)

    def _values(self, kind: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        values = self.normal(rows, columns)
        if kind == "log-normal":
            values *= self.positive(rows, columns)
        if kind == "outlier rows and columns":
            values.mul_(self.positive(rows, 1)).mul_(self.positive(1, columns))
        if kind == "zeros":
            values.mul_(self.normal(rows, 1) > 0).mul_(self.normal(1, columns) > 0)
        if kind == "subnormal":
            values *= torch.finfo(dtype).smallest_normal / 10
        if kind == "huge":
            values = (values * (torch.finfo(dtype).max / 4)).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        if kind == "not finite":
            for special in (torch.nan, -torch.nan, torch.inf, -torch.inf):
                values[self.random.randrange(rows), self.random.randrange(columns)] = special
        return values.to(dtype)


Inputs = tuple[Any, ...]  # Arguments of a kernel and its reference; tensors are on the CPU


@dataclass(frozen=True, kw_only=True)
class Check:
    """One case of an op: its inputs, and the two functions to compare."""

    op: str  # Name in `torch.ops.octavo`
    case: str  # Label within the op
    configs: tuple[int, ...]  # Indices of the configurations to run
    inputs: Callable[[RandomInputs], Inputs]  # Makes the inputs
    expected: Callable[..., Sequence[Tensor] | Tensor]  # Computes the reference's outputs
    actual: Callable[..., Sequence[Tensor] | Tensor]  # Computes the kernel's outputs in one configuration
    # Describes how actual outputs differ from expected ones, or returns None. None: `difference`, byte for byte.
    # Kernels that use the hardware's logarithms have a tolerance instead.
    differs: Callable[[Sequence[Tensor], Sequence[Tensor]], str | None] | None = None


@dataclass(kw_only=True)
class CaseResult:
    op: str  # Name in `torch.ops.octavo`
    case: str  # Label within the op
    config: int  # Index of the configuration
    runs: int = 0  # Number of runs
    mismatches: int = 0  # Runs that differed from the reference, or raised
    first: str = ""  # Input and difference of the first mismatch; empty without one


def compare(
    checks: Sequence[Check], device: torch.device, *, seconds: float, seed: int, budget: Budget = GPU,
    after: Callable[[int], None] = lambda round_: None,
) -> list[CaseResult]:  # fmt: skip
    """Run every configuration once, then continue with new inputs until `seconds` have passed."""
    outcomes = [[CaseResult(op=c.op, case=c.case, config=i) for i in c.configs[: budget.configs]] for c in checks]
    end = time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, in the interpreter, where huge values overflow
        round_ = 0
        while True:
            for check, check_outcomes in zip(checks, outcomes, strict=True):
                if round_ and time.monotonic() >= end:
                    return [outcome for of_check in outcomes for outcome in of_check]
                rng = RandomInputs(f"{seed}/{round_}/{check.op}/{check.case}", budget)
                _compare_once(check, check_outcomes, rng, device, round_)
                after(round_)
            round_ += 1


def _compare_once(
    check: Check, outcomes: list[CaseResult], rng: RandomInputs, device: torch.device, round_: int
) -> None:
    inputs = check.inputs(rng)
    expected = listed(check.expected(*inputs))
    device_inputs = tuple(_on(device, value) for value in inputs)
    for outcome in outcomes:
        for _ in range(rng.budget.repeats):
            outcome.runs += 1
            try:
                actual = listed(check.actual(*device_inputs, outcome.config))
                mismatch = (check.differs or difference)(expected, actual)
            except Exception as error:  # anything that a compiler, driver or kernel raises counts
                mismatch = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            if mismatch is not None:
                outcome.mismatches += 1
                outcome.first = outcome.first or f"round {round_}, {'; '.join(rng.notes)}: {mismatch}"


def listed(outputs: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    """Return the outputs of an op that may return one tensor alone."""
    return [outputs] if isinstance(outputs, Tensor) else outputs


def _on(device: torch.device, value: Any) -> Any:
    """Move a tensor to a device, with the same strides and alignment; return anything else unchanged."""
    if isinstance(value, ScaledTensor):
        return ScaledTensor(_on(device, value.data), _on(device, value.scale), value.spec)
    if not isinstance(value, Tensor):
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    return value.as_strided((elements,), (1,), 0).to(device).as_strided(
        value.shape, value.stride(), value.storage_offset()
    )  # fmt: skip


def difference(expected: Sequence[Tensor], actual: Sequence[Tensor], names: Sequence[str] = ()) -> str | None:
    """Describe the first output that differs in a byte, ignoring the sign and payload of NaNs, or return None."""
    for position, (reference, output) in enumerate(zip(expected, actual, strict=True)):
        same_device = output.to(reference.device)
        if (mismatch := first_mismatch(_canonical_nan(reference), _canonical_nan(same_device))) is not None:
            return f"{_name(position, expected, names)} differs from reference: {mismatch}"
    return None


def low_sqnr(
    expected: Sequence[Tensor], actual: Sequence[Tensor], decibels: float, names: Sequence[str] = ()
) -> str | None:
    """Describe the first output whose SQNR is not above so many dB, or return None. Equal outputs always are."""
    for position, (reference, output) in enumerate(zip(expected, actual, strict=True)):
        output = output.to(reference.device).float()
        if not torch.equal(reference.float(), output) and not (ratio := sqnr(reference.float(), output)) > decibels:
            name = _name(position, expected, names)
            return f"{name} has an SQNR of {ratio:.1f} dB against reference; above {decibels:g} dB expected"
    return None


def _name(position: int, outputs: Sequence[Tensor], names: Sequence[str]) -> str:
    return names[position] if names else f"output {position} of {len(outputs)}"


def _canonical_nan(values: Tensor) -> Tensor:
    """Replace NaNs by one bit pattern, all ones, which is NaN in every format."""
    if not values.is_floating_point():
        return values
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    values = values.detach().contiguous()
    return values.view(integer).masked_fill(values.float().isnan(), -1).view(values.dtype)
