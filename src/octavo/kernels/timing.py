"""Timing for `octavo calibrate`: medians of what a call takes the GPU, and the host until it returns.

A caller waits for the larger of the two (`CallTime.wait`); the candidate with the shortest wait is saved.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.calibration import Entry
from octavo.kernels.gemm import SCALED_MM, UNIT_SCALE, cases_of
from octavo.kernels.quantize import quantize
from octavo.kernels.registry import Backend, Case
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import QuantSpec
from octavo.runtime.torch_compat import cuda_sleep
from octavo.tensor import ScaledTensor

CALLS = 24  # Timed calls of each candidate


class CallTime(NamedTuple):
    """Microseconds of a call."""

    kernel: float  # On the GPU
    host: float  # On the host, until the call returns

    @property
    def wait(self) -> float:
        """What a caller waits for, call after call."""
        return max(self)


TimedCall = Callable[[], object]
Timer = Callable[[list[TimedCall]], CallTime]  # Runs calls in order and returns the medians of their times


@dataclass(frozen=True, kw_only=True)
class TimingTask(ABC):
    """A product or a quantization to time."""

    op: str  # Name in the calibration table
    name: str  # Recipe and product or operand, such as `"rowwise dgrad"`
    case: tuple[str, ...]  # Key in the calibration table, next to the op
    shape: tuple[int, ...]  # Rows and columns of a matrix, or m, n, k of a product

    @abstractmethod
    def rate(self, microseconds: float) -> str: ...

    @abstractmethod
    def candidates(self, device: torch.device) -> "Iterable[Candidate]": ...


@dataclass(frozen=True, kw_only=True)
class TimingResult:
    task: TimingTask  # The task
    times: dict[str, CallTime]  # Times by candidate, the shortest wait first
    entry: Entry | None  # The fastest candidate, for the calibration table; None if only `reference` is available
    skipped: dict[str, str] = field(default_factory=dict)  # Reasons why candidates were not timed


Candidate = tuple[str, tuple[str, int | None], Callable[[], str | list[TimedCall]]]
"""Label, backend and configuration, and what returns its calls, or the reason why it is left out."""


def time_candidates(task: TimingTask, candidates: Iterable[Candidate], time: Timer) -> TimingResult:
    """Time candidates, leave out those that raise, and choose the one with the shortest wait."""
    measured: dict[str, CallTime] = {}
    choices: dict[str, tuple[str, int | None]] = {}
    skipped: dict[str, str] = {}
    for label, choice, prepare in candidates:
        try:
            calls = prepare()
            if isinstance(calls, str):
                skipped[label] = calls
            else:
                measured[label], choices[label] = time(calls), choice
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            skipped[label] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    # Configurations of a backend take the host the same time. The shortest is the least disturbed one, and what differs
    # between them is noise, which must not choose.
    hosts: dict[str, float] = {}
    for label, (backend, _) in choices.items():
        hosts[backend] = min(hosts.get(backend, math.inf), measured[label].host)
    times = {label: CallTime(measured[label].kernel, hosts[backend]) for label, (backend, _) in choices.items()}
    times = dict(sorted(times.items(), key=lambda item: (item[1].wait, item[1].kernel)))
    entry = None
    if times:
        fastest, *rest = times
        backend, config = choices[fastest]
        entry = Entry(
            op=task.op, case=task.case, shape=task.shape, backend=backend, config=config,
            microseconds=times[fastest].kernel, host_microseconds=times[fastest].host,
            others={label: times[label].wait for label in rest},
        )  # fmt: skip
    return TimingResult(task=task, times=times, entry=entry, skipped=skipped)


def cycled(run: Callable[..., object], operands: Sequence[Sequence[Any]]) -> list[TimedCall]:
    """Return calls that take copies of operands in turn."""
    return [partial(run, *operands[i % len(operands)]) for i in range(CALLS)]


def cache_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache in bytes; 0 on other devices."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def time_on_gpu(calls: list[TimedCall]) -> CallTime:
    """Return the median times of calls on the current GPU."""
    for call in calls[:3]:  # compiles kernels and prepares their launches
        call()
    torch.cuda.synchronize()
    host = []
    for call in calls:
        begin = time.perf_counter()
        call()
        host.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
    cuda_sleep(200_000 * len(calls))  # clocks: about 0.1 ms a call
    for call, (start, end) in zip(calls, events, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return CallTime(median(start.elapsed_time(end) * 1000 for start, end in events), median(host))


# Time products of linears, for `octavo calibrate`, under the conditions of training: FP8 ones and bf16 ones.
#
# Configurations that differ from the reference are left out. The planner compares FP8 times with those of bf16.


SHAPES = (  # Default linears to measure, those of Llama models: tokens, in_features, out_features
    (2048, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 4096, 4096),
    (16384, 4096, 6144), (16384, 4096, 14336), (16384, 14336, 4096), (16384, 8192, 8192), (16384, 8192, 28672),
)  # fmt: skip
MATMUL = "matmul"  # Op name of bf16 products in the calibration table
BF16_CASES: dict[str, Case] = {  # Cases by product; layouts as in `octavo.kernels.gemm`
    "forward": ("bf16", "bf16", "nt"), "dgrad": ("bf16", "bf16", "nn"), "wgrad": ("bf16", "bf16", "tn"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gemm(TimingTask):
    """One product to measure; its case is that of the registry, or one of `BF16_CASES`."""

    def rate(self, microseconds: float) -> str:
        return f"{2 * math.prod(self.shape) / microseconds / 1e6:.0f} TFLOP/s"

    def candidates(self, device: torch.device) -> Iterator[Candidate]:
        """Return every backend and configuration; of a bf16 product, PyTorch's."""
        if self.op == MATMUL:
            yield "torch", ("torch", None), lambda: cycled(torch.mm, _bf16_operands(self, device))
            return
        operands, (*_, layout) = _operands(self, device), self.case

        def prepare(backend: Backend[Tensor], config: int | None) -> str | list[TimedCall]:
            configured = backend.configured(config)
            reason = SCALED_MM.unavailable_reason(backend, device, self.case)
            if reason is None and config is not None:
                reason = SCALED_MM.run_probe(configured, device, self.case)
            return reason or cycled(_prepared(configured, *operands[0], layout), operands)

        for label, backend, config in _candidates(device, self.case):
            yield label, (backend.name, config), partial(prepare, backend, config)


def fp8_gemms(recipe: Recipe, shapes: list[tuple[int, int, int]]) -> list[Gemm]:
    """Return the products of linears of these sizes (tokens, in_features, out_features)."""
    return _gemms(SCALED_MM.name, recipe.name, cases_of(recipe), shapes)


def bf16_gemms(shapes: list[tuple[int, int, int]]) -> list[Gemm]:
    return _gemms(MATMUL, "bf16", BF16_CASES, shapes)


def _gemms(op: str, name: str, cases: Mapping[str, Case], shapes: list[tuple[int, int, int]]) -> list[Gemm]:
    products = []
    for tokens, inner, outer in shapes:
        sizes = {"forward": (tokens, outer, inner), "dgrad": (tokens, inner, outer), "wgrad": (outer, inner, tokens)}
        products += [Gemm(op=op, name=f"{name} {of}", case=case, shape=sizes[of]) for of, case in cases.items()]
    return products


def _bf16_operands(product: Gemm, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return copies of random operands, together larger than L2."""
    (m, n, k), (*_, layout) = product.shape, product.case
    copies = max(1, min(CALLS, cache_bytes(device) // (m * k + n * k) + 1))

    def operand(rows: int, columns: int, transposed: bool) -> Tensor:
        stored = torch.randn((columns, rows) if transposed else (rows, columns), device=device, dtype=torch.bfloat16)
        return stored.t() if transposed else stored

    return [(operand(m, k, layout[0] == "t"), operand(k, n, layout[1] == "t")) for _ in range(copies)]


def _prepared(
    backend: Backend[Tensor], a: ScaledTensor, b: ScaledTensor, layout: str
) -> Callable[[ScaledTensor, ScaledTensor], object]:
    """Return what a linear in training calls for operands like these: the backend's plan, if it makes plans."""
    options = layout, torch.bfloat16, None, layout == "nt"
    plan = backend.plan(a, b, *options)
    if plan is None:
        return lambda a, b: backend.run(a, b, *options)
    return lambda a, b: plan(a.data, b.data, a.scale, b.scale, None)


def _candidates(device: torch.device, case: Case) -> Iterator[tuple[str, Backend[Tensor], int | None]]:
    """Every backend that does not emulate FP8, in every configuration that supports the case."""
    for name, backend in SCALED_MM.backends.items():
        if name in ("triton", "triton_plain") and find_spec("triton"):
            from octavo.kernels.gemm.triton import CONFIGS, training_configurations

            for index in training_configurations(device, case):
                yield f"{name} {CONFIGS[index].tile_m}x{CONFIGS[index].tile_n} #{index}", backend, index
        elif not backend.emulates:
            yield name, backend, None


def _operands(product: Gemm, device: torch.device) -> list[tuple[ScaledTensor, ScaledTensor]]:
    """Return copies of random operands in the memory order that quantizers write, together larger than L2."""
    m, n, k = product.shape
    a_text, b_text, layout = product.case
    shapes = ((k, m) if layout[0] == "t" else (m, k), (n, k) if layout[1] == "t" else (k, n))
    operands = []
    for text, shape, row_major in zip((a_text, b_text), shapes, (layout[0] == "n", layout[1] == "t"), strict=True):
        values = torch.randn(shape, device=device, dtype=torch.bfloat16)
        quantized = quantize(values, QuantSpec.parse("e4m3/tensor" if text == UNIT_SCALE else text))
        data = quantized.data if row_major else quantized.data.t().contiguous().t()
        operands.append(ScaledTensor(data, None if text == UNIT_SCALE else quantized.scale, quantized.spec))
    a, b = operands
    copies = max(1, min(CALLS, 2 * cache_bytes(device) // (a.data.numel() + b.data.numel())))
    cloned = ((replace(a, data=a.data.clone()), replace(b, data=b.data.clone())) for _ in range(copies - 1))
    return [(a, b), *cloned]
