"""Time products of linears, for `octavo calibrate`, under the conditions of training: FP8 ones and bf16 ones.

Configurations that differ from the reference are left out. The planner compares FP8 times with those of bf16.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from octavo.kernels import timing
from octavo.kernels.gemm import SCALED_MM, UNIT_SCALE, cases_of
from octavo.kernels.quantize import quantize
from octavo.kernels.registry import Backend, Case
from octavo.numerics.recipe import Recipe
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

SHAPES = (  # Default linears to measure, those of Llama models: tokens, in_features, out_features
    (2048, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (16384, 4096, 4096),
    (16384, 4096, 6144), (16384, 4096, 14336), (16384, 14336, 4096), (16384, 8192, 8192), (16384, 8192, 28672),
)  # fmt: skip
MATMUL = "matmul"  # Op name of bf16 products in the calibration table
BF16_CASES: dict[str, Case] = {  # Cases by product; layouts as in `octavo.kernels.gemm`
    "forward": ("bf16", "bf16", "nt"), "dgrad": ("bf16", "bf16", "nn"), "wgrad": ("bf16", "bf16", "tn"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gemm(timing.TimingTask):
    """One product to measure; its case is that of the registry, or one of `BF16_CASES`."""

    def rate(self, microseconds: float) -> str:
        return f"{2 * math.prod(self.shape) / microseconds / 1e6:.0f} TFLOP/s"

    def candidates(self, device: torch.device) -> Iterator[timing.Candidate]:
        """Return every backend and configuration; of a bf16 product, PyTorch's."""
        if self.op == MATMUL:
            yield "torch", ("torch", None), lambda: timing.cycled(torch.mm, _bf16_operands(self, device))
            return
        operands, (*_, layout) = _operands(self, device), self.case

        def prepare(backend: Backend, config: int | None) -> str | list[timing.TimedCall]:
            configured = backend.configured(config)
            reason = SCALED_MM.unavailable_reason(backend, device, self.case)
            if reason is None and config is not None:
                reason = SCALED_MM.run_probe(configured, device, self.case)
            return reason or timing.cycled(_prepared(configured, *operands[0], layout), operands)

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


def _bf16_operands(product: Gemm, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return copies of random operands, together larger than L2."""
    (m, n, k), (*_, layout) = product.shape, product.case
    copies = max(1, min(timing.CALLS, timing.cache_bytes(device) // (m * k + n * k) + 1))

    def operand(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        stored = torch.randn((columns, rows) if transposed else (rows, columns), device=device, dtype=torch.bfloat16)
        return stored.t() if transposed else stored

    return [(operand(m, k, layout[0] == "t"), operand(k, n, layout[1] == "t")) for _ in range(copies)]


def _prepared(
    backend: Backend, a: ScaledTensor, b: ScaledTensor, layout: str
) -> Callable[[ScaledTensor, ScaledTensor], object]:
    """Return what a linear in training calls for operands like these: the backend's plan, if it makes plans."""
    options = layout, torch.bfloat16, None, layout == "nt"
    plan = None if backend.plan is None else backend.plan(a, b, *options)
    if plan is None:
        return lambda a, b: backend.run(a, b, *options)
    return lambda a, b: plan(a.data, b.data, a.scale, b.scale, None)


def _candidates(device: torch.device, case: Case) -> Iterator[tuple[str, Backend, int | None]]:
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
    copies = max(1, min(timing.CALLS, 2 * timing.cache_bytes(device) // (a.data.numel() + b.data.numel())))
    cloned = ((replace(a, data=a.data.clone()), replace(b, data=b.data.clone())) for _ in range(copies - 1))
    return [(a, b), *cloned]
