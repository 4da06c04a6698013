"""Run kernels and their reference on the same inputs, and count where a byte differs."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.deep.draw import GPU, Budget, Draw
from octavo.numerics.error import first_mismatch
from octavo.tensor import ScaledTensor

Inputs = tuple[Any, ...]
"""Tensors on the CPU, and whatever else a kernel and its reference take."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One case of an op: how to make an input, and the two things to compare on it.

    Attributes:
        op: As in `torch.ops.octavo`.
        case: What distinguishes it within the op.
        configs: Indices of the configurations to run.
        draw: Makes an input.
        expected: The reference's outputs.
        actual: The kernel's outputs in one configuration.
        differs: What is wrong with actual outputs, given expected ones, or None: `difference`, byte for byte, but for
            kernels that use the hardware's logarithms, which say how far they may be off.
    """

    op: str
    case: str
    configs: tuple[int, ...]
    draw: Callable[[Draw], Inputs]
    expected: Callable[..., Sequence[Tensor]]
    actual: Callable[..., Sequence[Tensor]]
    differs: Callable[[Sequence[Tensor], Sequence[Tensor]], str | None] | None = None


@dataclass(kw_only=True)
class Outcome:
    """What came of one case in one configuration.

    Attributes:
        op: As in `torch.ops.octavo`.
        case: What distinguishes it within the op.
        config: Index of the configuration.
        runs: How often it ran.
        mismatches: How many of them differed from the reference, or raised.
        first: The first that did: its input and what differed; empty if none did.
    """

    op: str
    case: str
    config: int
    runs: int = 0
    mismatches: int = 0
    first: str = ""


def compare(
    wanted: Sequence[Check],
    device: torch.device,
    *,
    seconds: float,
    seed: int,
    budget: Budget = GPU,
    after: Callable[[int], None] = lambda round_: None,
) -> list[Outcome]:
    """Run every configuration once, then go on with new inputs until `seconds` have passed.

    Args:
        wanted: From `checks`.
        device: Where the kernels run.
        seconds: When to begin no new case, counted from the start, once all have run.
        seed: What inputs are drawn from.
        budget: How much is compared.
        after: Called after each case with the number of the round, from 0.

    Returns:
        One outcome per case and configuration.
    """
    outcomes = [[Outcome(op=c.op, case=c.case, config=i) for i in c.configs[: budget.configs]] for c in wanted]
    end = time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, in the interpreter, where huge values overflow
        round_ = 0
        while True:
            for check, its_outcomes in zip(wanted, outcomes, strict=True):
                if round_ and time.monotonic() >= end:
                    return [outcome for each in outcomes for outcome in each]
                draw = Draw(f"{seed}/{round_}/{check.op}/{check.case}", budget)
                _compare_once(check, its_outcomes, draw, device, round_)
                after(round_)
            round_ += 1


def _compare_once(check: Check, outcomes: list[Outcome], draw: Draw, device: torch.device, round_: int) -> None:
    inputs = check.draw(draw)
    expected = check.expected(*inputs)
    there = tuple(_on(device, value) for value in inputs)
    for outcome in outcomes:
        for _ in range(draw.budget.repeats):
            outcome.runs += 1
            try:
                actual = check.actual(*there, outcome.config)
                why = (check.differs or difference)(expected, actual)
            except Exception as error:  # whatever a compiler, driver or kernel raises is a finding
                why = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
            if why is not None:
                outcome.mismatches += 1
                outcome.first = outcome.first or f"round {round_}, {'; '.join(draw.notes)}: {why}"


def _on(device: torch.device, value: Any) -> Any:
    """A tensor on the device with the strides and the alignment it has here; anything else as it is."""
    if isinstance(value, ScaledTensor):
        return ScaledTensor(_on(device, value.data), _on(device, value.scale), value.spec)
    if not isinstance(value, Tensor):
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    return value.as_strided((elements,), (1,), 0).to(device).as_strided(
        value.shape, value.stride(), value.storage_offset()
    )  # fmt: skip


def difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str | None:
    """The first output that differs in a byte, whatever the sign of NaNs; None where all are equal."""
    for position, (want, got) in enumerate(zip(expected, actual, strict=True)):
        mismatch = first_mismatch(_one_nan(want), _one_nan(got.cpu()))
        if mismatch is not None:
            return f"output {position} of {len(expected)}: {mismatch}"
    return None


def _one_nan(values: Tensor) -> Tensor:
    """The same values with one bit pattern for NaN: all ones, NaN in every format."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    values = values.contiguous()
    return values.view(whole).masked_fill(values.float().isnan(), -1).view(values.dtype)
