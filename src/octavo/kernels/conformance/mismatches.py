"""Run kernels and their reference on the same inputs and count mismatches."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.conformance.random_inputs import GPU, Budget, RandomInputs
from octavo.numerics.error import first_mismatch, sqnr
from octavo.tensor import ScaledTensor

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
