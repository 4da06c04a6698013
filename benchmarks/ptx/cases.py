"""Every Triton kernel but grouped products against the reference, in the interpreter of PTX.

The cases and the comparison are those of `octavo doctor --deep` (`octavo.kernels.conformance`). Each runs on finite
bf16 input and on the same with NaN and infinities, at sizes that are multiples of 16 but not of tiles; `random_inputs`
adds any size, dtype, memory layout and kind of values. AdamW is compared at 70 dB: its kernel has another order of
operations than PyTorch's `lerp_` and `addcdiv_`, and approximate logarithms. Operands of products are small integers
with scales that are powers of two, whose sums are exact in any order; their two inputs differ in the order in which
warps and transfers go on, and each program has several tiles and more than four steps of the contraction. Outputs hold
NaN before a kernel runs.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.ptx.launches import Executed, interpreted
from benchmarks.ptx.memory import Count
from octavo.kernels.conformance import GPU, Check, RandomInputs, checks, difference
from octavo.numerics.error import sqnr

SIZE = (96, 288)
"""Rows and columns: whole sectors of FP8 in both orders, and no whole tiles."""
PLANTS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "barriers": lambda text: text.replace("bar.sync", "// bar.sync"),
    "predicates": lambda text: _inverted_store(text),
    "waits": lambda text: re.sub(
        r"wgmma\.wait_group\S* (\d+)", lambda m: m[0][: -len(m[1])] + str(int(m[1]) + 1), text
    ),
}
"""Faults to plant: no barriers; one store of each kernel where it should not be; waits leave one product more."""


@dataclass(kw_only=True)
class Row:
    """One case in one configuration.

    Attributes:
        op: Name in `torch.ops.octavo`.
        case: Label within the op.
        config: Index of the configuration.
        planted: Fault that was planted, or "none".
        kernels: Kernels that ran, in order.
        instructions: Executed per CTA of the first input, by all kernels together.
        sectors: Requests, sectors and ideal sectors of device memory, by kind of access and argument, of the first
            input.
        wavefronts: Requests, wavefronts and ideal wavefronts of shared memory, likewise.
        hazards: Instructions that race in shared memory.
        mismatches: How outputs differ from the reference, by input.
    """

    op: str
    case: str
    config: int
    planted: str = "none"
    kernels: list[str] = field(default_factory=list)
    instructions: int = 0
    sectors: dict[str, list[int]] = field(default_factory=dict)
    wavefronts: dict[str, list[int]] = field(default_factory=dict)
    hazards: list[str] = field(default_factory=list)
    mismatches: dict[str, str] = field(default_factory=dict)


class _Matrices(RandomInputs):
    """Contiguous bf16 matrices of one size, with or without values that are not finite."""

    finite = True

    def size(self) -> int:
        """Return a size of vectors and of AdamW's parameters."""
        return 256

    def matrix(self, rows: int | None = None, columns: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a matrix whose rows differ in size by a factor of a million; one is zero."""
        rows, columns = rows or SIZE[0], columns or SIZE[1]
        x = self.normal(rows, columns) * torch.logspace(-3, 3, rows)[:, None]
        x[rows // 2] = 0
        if not self.finite:
            for place, special in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
                x[(5 * place + 3) % rows, (67 * place + 5) % columns] = special
        return x.to(dtype or torch.bfloat16)


class _NonFinite(_Matrices):
    finite = False


class _Products(RandomInputs):
    """Operands of products: M, N and K in turn."""

    def size(self) -> int:
        """Return the next size."""
        self._drawn = getattr(self, "_drawn", -1) + 1
        return (150, 272, 700)[self._drawn % 3]


def selected(only: list[str]) -> list[Check]:
    """Return the cases whose "op case" contains one of these texts, without grouped products, and products to bf16."""
    cases = [check for check in checks(torch.device("cpu")) if check.op != "grouped_mm"]
    cases = [check for check in cases if check.op != "scaled_mm" or check.case.endswith("bfloat16")]
    return [check for check in cases if any(text in f"{check.op} {check.case}" for text in only)]


def examine(check: Check, config: int, plant: str = "none", random_inputs: int = 0) -> Row:
    """Run a case in a configuration on all its inputs."""
    row = Row(op=check.op, case=check.case, config=config, planted=plant)
    seed = f"{check.op}/{check.case}"
    inputs: dict[str, RandomInputs] = {"finite": _Matrices(seed, GPU), "not finite": _NonFinite(seed, GPU)}
    small = GPU._replace(size=300)
    if check.op == "scaled_mm":
        inputs = {"finite": _Products(seed, GPU), "another order": _Products(seed, GPU)}
    inputs |= {f"random {n}": RandomInputs(f"{n}/{seed}", small) for n in range(random_inputs)}
    for number, (label, rng) in enumerate(inputs.items()):
        mismatch, executed = _compared(check, config, rng, PLANTS[plant], number)
        if mismatch is not None:
            row.mismatches[label] = "; ".join([*rng.notes, mismatch])
        row.hazards += [h for e in executed for h in e.counts.hazards if h not in row.hazards]
        if label == "finite":
            row.kernels = [e.kernel for e in executed]
            row.instructions = sum(e.counts.instructions for e in executed)
            row.sectors = _added([e.counts.sectors for e in executed])
            row.wavefronts = _added([e.counts.wavefronts for e in executed])
    return row


def _compared(
    check: Check, config: int, rng: RandomInputs, change: Callable[[str], str], seed: int
) -> tuple[str | None, list[Executed]]:
    arguments = check.inputs(rng)
    expected = check.expected(*arguments)
    with interpreted(change, seed) as executed, _filled_memory():
        try:
            actual = check.actual(*arguments, config)
        except (RuntimeError, ValueError) as error:  # Fault, Unknown, or of Triton's compiler
            return f"{type(error).__name__}: {error}", executed
    return (difference if check.differs is None else _low_sqnr)(expected, actual), executed


def _low_sqnr(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str | None:
    for position, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if not (ratio := sqnr(want.float(), got.float())) > 70:
            return f"output {position} of {len(expected)} has an SQNR of {ratio:.1f} dB, above 70 expected"
    return None


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Have `torch.empty` fill tensors, so that an element that no kernel writes is not what was there by chance."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _added(parts: list[dict[str, Count]]) -> dict[str, list[int]]:
    total: dict[str, Count] = {}
    for part in parts:
        for kind, count in part.items():
            total.setdefault(kind, Count()).add(count.requests, count.units, count.ideal)
    return {kind: list(asdict(count).values()) for kind, count in sorted(total.items())}


def _inverted_store(text: str) -> str:
    """Negate the predicate of the last masked store to device memory, of the widest."""
    stores = re.findall(r"@!?%\w+ (st\.global\S*) .*", text)
    if not stores:
        return text
    widest = max(stores, key=lambda name: (".v" in name, name))
    *_, last = re.finditer(rf"@(!?)(%\w+ {re.escape(widest)} )", text)
    return f"{text[: last.start()]}@{'' if last[1] else '!'}{last[2]}{text[last.end() :]}"


def as_json(row: Row) -> dict[str, Any]:
    """Return a row for a result file."""
    return asdict(row)
