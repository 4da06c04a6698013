"""The FP8 products, on every backend: part `products` of `python -m benchmarks kernels`."""

import functools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks import ceilings, shapes
from benchmarks.session import Row, Session, times
from benchmarks.shapes import Shape
from benchmarks.timing import Run, sets
from octavo.kernels import quantize, scaled_mm
from octavo.kernels.gemm import SCALED_MM, Layout
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

CASES: dict[str, tuple[str, str, Layout]] = {
    "rowwise forward": ("e4m3/row", "e4m3/row", "nt"),
    "tensorwise forward": ("e4m3/tensor", "e4m3/tensor", "nt"),
    "rowwise dgrad": ("e4m3/row", "unit", "nn"),
    "rowwise wgrad": ("e4m3/column", "unit", "tn"),
    "tensorwise dgrad": ("e5m2/tensor", "e4m3/tensor", "nn"),
    "blockwise forward": ("e4m3/1x128", "e4m3/128x128", "nt"),
    "mxfp8 forward": ("e4m3/1x32/e8m0", "e4m3/1x32/e8m0", "nt"),
}
"""Specs of A and B as the registry's cases name them, and the layout."""
REFERENCES = {"cuBLAS by tensor, fast": True, "cuBLAS by tensor, exact": False}


def products(session: Session, *, only_cubes: bool = False) -> None:
    """bf16 and cuBLAS by tensor, then every case on every backend, at cubes and at the Llama shapes."""
    if session.tiny:
        for shape in shapes.SETS["tiny"][1 if session.options.quick else 0 :]:
            for case in CASES:
                _backends(session, shape, case)
        return
    cubes = shapes.SETS["cubes"][:3]
    order = [(shape, case) for shape in cubes for case in list(CASES)[:4]]
    order += [(shape, case) for shape in shapes.SETS["llama"] for case in list(CASES)[:1]]
    order += [(shape, case) for shape in cubes[1:2] for case in list(CASES)[4:]]
    order += [(shape, case) for shape in shapes.SETS["llama"][:4] for case in ("rowwise dgrad", "rowwise wgrad")]
    if only_cubes or session.options.quick:
        order = order[: 4 * len(cubes)]
    for shape, case in order:
        same: Row = {"stage": "product", "shape": shapes.label(shape), "case": "reference"}
        session.attempt({**same, "arm": "bf16"}, functools.partial(_bf16, session, shape))
        for name, fast in REFERENCES.items():
            one = functools.partial(_cublas, session, shape, fast)
            session.attempt({**same, "arm": name}, one)
        _backends(session, shape, case)


def _backends(session: Session, shape: Shape, case: str) -> None:
    for name in SCALED_MM.backends:
        same: Row = {"stage": "product", "shape": shapes.label(shape), "case": case, "arm": name}
        if SCALED_MM.backends[name].emulates and session.gpu:
            continue
        session.attempt(same, functools.partial(_backend, session, shape, case, name))


def _backend(session: Session, shape: Shape, case: str, name: str) -> Row:
    layout = CASES[case][2]
    backend = SCALED_MM.backends[name]
    tries = session.tiny and name == "triton" and "e8m0" not in CASES[case][0]  # in its interpreter
    reason = None if tries else SCALED_MM.unavailable_reason(backend, session.device, CASES[case])
    if reason is not None:
        return {"result": f"does not serve this: {reason}"}
    m, k, n = shape
    fast = layout == "nt"
    count = sets(m * k + k * n + 2 * m * n, session.clock.l2_bytes) if session.gpu else 1
    pairs = [operands(session, shape, CASES[case]) for _ in range(count)]
    run = functools.partial(scaled_mm, layout=layout, out_dtype=torch.bfloat16, fast_accum=fast)
    with SCALED_MM.force(name):
        timings = times(session.clock.measure([functools.partial(run, a, b) for a, b in pairs]))
    return _rated(session, shape, timings, fast=fast)


def operands(session: Session, shape: Shape, case: tuple[str, str, Layout]) -> tuple[ScaledTensor, ScaledTensor]:
    """A and B of a product, quantized random matrices, as a linear has them."""
    (m, k, n), (a_text, b_text, layout) = shape, case
    a = _operand(session, a_text, (m, k), transposed=layout[0] == "t", columns=layout[0] == "t")
    return a, _operand(session, b_text, (k, n), transposed=layout[1] == "t", columns=layout[1] == "n")


def _operand(session: Session, text: str, shape: tuple[int, int], *, transposed: bool, columns: bool) -> ScaledTensor:
    """A quantized random operand in the memory order that a linear has it in: contiguous along the contraction."""
    values = torch.randn(shape[::-1] if transposed else shape, device=session.device, dtype=torch.bfloat16)
    spec = QuantSpec.parse("e4m3/row" if text == "unit" else text)
    made = quantize(values, spec, order="columns" if columns else "rows")
    return made.unscaled if text == "unit" else made


def configs(session: Session) -> None:
    """Every configuration of Triton's product, with row scales, at 8192³."""
    if find_spec("octavo.kernels.gemm.triton") is None:
        return
    from octavo.kernels.gemm import triton as backend

    shape = shapes.SETS["tiny"][1] if session.tiny else shapes.SETS["cubes"][1]
    for label in ("rowwise forward", "rowwise dgrad"):
        case = CASES[label]
        pairs = [operands(session, shape, case) for _ in range(1 if session.tiny else 2)]
        usual = backend.training_configurations(session.device, case)
        for config in usual[:1] if session.tiny else usual:
            product = functools.partial(_with_config, backend, case[2], config)
            runs: list[Run] = [functools.partial(product, a, b) for a, b in pairs]
            arm = f"{config}: {tuple(backend.CONFIGS[config])}"
            identity: Row = {"stage": "config", "shape": shapes.label(shape), "case": label, "arm": arm}
            session.attempt(identity, functools.partial(_configured, session, shape, runs, case[2] == "nt"))


def _configured(session: Session, shape: Shape, runs: list[Run], fast: bool) -> Row:
    return _rated(session, shape, times(session.clock.measure(runs, wall=False)), fast=fast)


def _with_config(backend: Any, layout: Layout, config: int, a: ScaledTensor, b: ScaledTensor) -> Tensor:
    result: Tensor = backend.scaled_mm(a, b, layout, torch.bfloat16, None, layout == "nt", config)
    return result


def _bf16(session: Session, shape: Shape) -> Row:
    pairs = _pairs(session, shape)
    return _rated(session, shape, times(session.clock.measure([functools.partial(_mm, a, b) for a, b in pairs])))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def _cublas(session: Session, shape: Shape, fast: bool) -> Row:
    runs = [ceilings.fp8_product(a, b, fast_accum=fast) for a, b in _pairs(session, shape)]
    return _rated(session, shape, times(session.clock.measure(runs)), fast=fast)


def _pairs(session: Session, shape: Shape) -> list[tuple[Tensor, Tensor]]:
    m, k, n = shape
    count = sets(m * k + k * n + 2 * m * n, session.clock.l2_bytes) if session.gpu else 1
    return [
        (
            torch.randn(m, k, device=session.device, dtype=torch.bfloat16),
            torch.randn(n, k, device=session.device, dtype=torch.bfloat16),
        )
        for _ in range(count)
    ]


def _rated(session: Session, shape: Shape, timings: Row, *, fast: bool | None = None) -> Row:
    """The row with its rate, its share of this device's rate at 8192³, and of cuBLAS by tensor at this shape."""
    if timings["kernel_ms"] is None:
        return timings
    m, k, n = shape
    timings["tflops"] = round(2 * m * k * n / timings["kernel_ms"] / 1e9, 1)
    ceiling = {None: "bf16_tflops", True: "fp8_tflops", False: "fp8_exact_tflops"}[fast]
    timings["percent"] = round(100 * timings["tflops"] / session.facts["ceilings"][ceiling], 1)
    reference = next((name for name, value in REFERENCES.items() if value == fast), None)
    same: dict[str, Any] = {"stage": "product", "shape": shapes.label(shape), "arm": reference}
    base = next((row for row in session.rows if same.items() <= row.items() and row.get("kernel_ms")), None)
    if base is not None:
        timings["of_cublas"] = round(base["kernel_ms"] / timings["kernel_ms"], 4)
    return timings
