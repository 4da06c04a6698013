"""Each kernel by itself: quantizers in TB/s, FP8 products in TFLOP/s, fused kernels, as shares of this device's limits.
Bytes are what the op must move by definition: a kernel that reads a band again from L2 gets no credit.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import shapes
from benchmarks.session import Row, Session, begin, parser, times
from benchmarks.shapes import Shape
from benchmarks.timing import Run, sets
from octavo.kernels import fused, scaled_mm
from octavo.kernels.gemm import SCALED_MM, cases_of
from octavo.kernels.quantize import QUANTIZE, QUANTIZE_PAIR, quantize, quantize_pair
from octavo.kernels.registry import OPS, Case
from octavo.numerics.recipe import RECIPES
from octavo.numerics.spec import FULL, TENSOR, QuantSpec
from octavo.tensor import ScaledTensor

COPY_BYTES, SIDE = 2 * 2**30, 8192
MATRICES = ((16384, 4096), (16384, 14336), (8192, 8192))
TINY = ((64, 48), (33, 70))
PER_ROW_FIRST = ("e4m3/row", "e4m3/tensor", "e5m2/tensor", "e4m3/column")
ORDERS = ("rows", "both", "columns")
_PRODUCTS = ("rowwise forward", "tensorwise forward", "rowwise dgrad", "rowwise wgrad", "tensorwise dgrad",
             "blockwise forward", "mxfp8 forward")  # fmt: skip
CASES = {name: cases_of(RECIPES[name.split()[0]])[name.split()[1]] for name in _PRODUCTS}
"""Products: specs of A and B as the registry's cases name them, and the layout."""
REFERENCES = {"cuBLAS by tensor, fast": True, "cuBLAS by tensor, exact": False}


# Ceilings


def ceilings(session: Session) -> None:
    """Note copy bandwidth in TB/s (bytes read and written), TFLOP/s of 8192³ products; all None in a rehearsal."""
    if "ceilings" in session.facts:
        return
    size, side = (2**12, 32) if session.tiny else (COPY_BYTES, SIDE)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=session.device, dtype=torch.bfloat16) for _ in range(2))
    runs: dict[str, tuple[Run | None, int]] = {
        "copy_tbs": (lambda: target.copy_(source), 2 * size),
        "bf16_tflops": (lambda: a @ b.t(), 2 * side**3),
        "fp8_tflops": (fp8_product(a, b, fast_accum=True) if session.gpu else None, 2 * side**3),
        "fp8_exact_tflops": (fp8_product(a, b, fast_accum=False) if session.gpu else None, 2 * side**3),
    }
    rates: Row = {"copy_bytes": size, "side": side}
    for name, (run, amount) in runs.items():
        ms = None if run is None else session.clock.measure([run], wall=False).kernel_ms
        rates[name] = None if ms is None else round(amount / ms / 1e9, 3)
    session.facts["ceilings"] = rates
    session.save()
    print("ceilings: " + ", ".join(f"{key} {value}" for key, value in rates.items()), flush=True)


def fp8_product(a: Tensor, b: Tensor, *, fast_accum: bool) -> Run:
    """A·Bᵀ of two matrices cast to E4M3, as PyTorch's tensorwise product (cuBLASLt) runs it: the reference figure."""
    one = torch.ones((), device=a.device)
    left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": fast_accum}
    return functools.partial(torch._scaled_mm, left, right, **options)


# Quantizers


def bytes_per_element(spec: QuantSpec, order: str) -> int:
    two_passes = (FULL in spec.granularity and spec.granularity[1] != FULL) or spec.granularity == TENSOR
    return 2 * (2 if two_passes else 1) + (2 if order == "both" else 1)


def _matrix(session: Session, shape: tuple[int, int]) -> tuple[Tensor]:
    return (torch.randn(shape, device=session.device, dtype=torch.bfloat16),)


def bandwidth(
    session: Session, shape: tuple[int, int], per_element: float, run: Callable[..., Any], inputs: Any = _matrix
) -> Row:
    elements = shape[0] * shape[1]
    count = sets(per_element * elements, session.clock.l2_bytes) if session.gpu else 1
    timings = times(session.clock.measure([functools.partial(run, *inputs(session, shape)) for _ in range(count)]))
    timings["bytes_per_element"] = per_element
    if timings["kernel_ms"] is not None:
        copy_tbs = session.facts["ceilings"]["copy_tbs"]
        timings["tbs"] = round(per_element * elements / timings["kernel_ms"] / 1e9, 4)
        timings["percent"] = round(100 * timings["tbs"] / copy_tbs, 1)
    return timings


def quantizers(session: Session) -> None:
    """Every spec in every memory order, and every pair."""
    matrices = TINY if session.tiny else MATRICES
    others = [] if session.options.quick else [text for text in QUANTIZE.cases if text not in PER_ROW_FIRST]
    specs = [*PER_ROW_FIRST, *others]
    for index, shape in enumerate(matrices[:1] if session.options.quick else matrices):
        same: Row = {"stage": "quantize", "shape": f"{shape[0]}×{shape[1]}"}
        session.attempt({**same, "case": "clone in bf16", "arm": "torch"}, bandwidth, session, shape, 4, torch.clone)
        for case in QUANTIZE_PAIR.cases.values():
            identity = {**same, "case": f"{' + '.join(case)}, folded", "arm": "pair"}
            session.attempt(identity, _pair, session, shape, case)
        for text in specs:
            for order in ORDERS if index == 0 else ORDERS[:2]:
                session.attempt({**same, "case": text, "arm": order}, _quantizer, session, shape, text, order)


def _quantizer(session: Session, shape: tuple[int, int], text: str, order: Any) -> Row:
    spec = QuantSpec.parse(text)
    return bandwidth(session, shape, bytes_per_element(spec, order), lambda x: quantize(x, spec, order=order))


def _pair(session: Session, shape: tuple[int, int], case: tuple[str, ...]) -> Row:
    spec, spec_t = (QuantSpec.parse(text) for text in case)
    fold, fold_t = None, None
    if FULL in spec.granularity:
        fold, fold_t = (torch.rand(size, device=session.device) + 0.5 for size in ((1, shape[1]), (shape[0], 1)))
    per_element = (2 if fold is None else 4) + 2
    return bandwidth(session, shape, per_element, lambda x: quantize_pair(x, spec, fold, spec_t, fold_t))


# Products


def products(session: Session) -> None:
    """bf16 and cuBLAS by tensor, then every case on every backend, at cubes and at the Llama shapes."""
    cubes, llama, names = shapes.SETS["cubes"][:3], shapes.SETS["llama"], list(CASES)
    order = [(shape, case) for shape in cubes for case in names[:4]]
    if session.tiny:
        order = [(shape, case) for shape in shapes.SETS["tiny"][session.options.quick :] for case in names]
    elif not session.options.quick:
        order += [(shape, names[0]) for shape in llama] + [(cubes[1], case) for case in names[4:]]
        order += [(shape, case) for shape in llama[:4] for case in ("rowwise dgrad", "rowwise wgrad")]
    for shape, case in order:
        same: Row = {"stage": "product", "shape": shapes.label(shape), "case": "reference"}
        for arm, fast in (("bf16", None), *REFERENCES.items()) if session.gpu else ():
            session.attempt({**same, "arm": arm}, _reference, session, shape, fast)
        _backends(session, shape, case)


def _backends(session: Session, shape: Shape, case: str) -> None:
    for name in SCALED_MM.backends:
        if not (SCALED_MM.backends[name].emulates and session.gpu):
            same: Row = {"stage": "product", "shape": shapes.label(shape), "case": case, "arm": name}
            session.attempt(same, _backend, session, shape, case, name)


def _backend(session: Session, shape: Shape, case: str, name: str) -> Row:
    fast = CASES[case][2] == "nt"
    tries = session.tiny and name == "triton" and "e8m0" not in CASES[case][0]  # in its interpreter
    reason = None if tries else SCALED_MM.unavailable_reason(SCALED_MM.backends[name], session.device, CASES[case])
    if reason is not None:
        return {"result": f"does not serve this: {reason}"}
    pairs = [operands(session, shape, CASES[case]) for _ in range(_sets(session, shape))]
    run = functools.partial(scaled_mm, layout=CASES[case][2], out_dtype=torch.bfloat16, fast_accum=fast)
    with SCALED_MM.force(name):
        timings = times(session.clock.measure([functools.partial(run, a, b) for a, b in pairs]))
    return rated(session, shape, timings, fast=fast)


def _sets(session: Session, shape: Shape) -> int:
    m, k, n = shape
    return sets(m * k + k * n + 2 * m * n, session.clock.l2_bytes) if session.gpu else 1


def operands(session: Session, shape: Shape, case: Case) -> tuple[ScaledTensor, ScaledTensor]:
    (m, k, n), (a_text, b_text, layout) = shape, case
    made = []
    for text, size, transposed, columns in (
        (a_text, (m, k), layout[0] == "t", layout[0] == "t"), (b_text, (k, n), layout[1] == "t", layout[1] == "n"),
    ):  # fmt: skip
        values = torch.randn(size[::-1] if transposed else size, device=session.device, dtype=torch.bfloat16)
        spec = QuantSpec.parse("e4m3/row" if text == "unit" else text)
        operand = quantize(values, spec, order="columns" if columns else "rows")
        made.append(operand.unscaled if text == "unit" else operand)
    return made[0], made[1]


def reference_runs(session: Session, shape: Shape, fast: bool | None) -> list[Run]:
    """Calls of cuBLAS over buffers of their own: in FP8 by tensor, accumulating fast or not; None: in bf16."""
    (m, k, n), runs = shape, []
    for _ in range(_sets(session, shape)):
        a, b = (torch.randn(size, k, device=session.device, dtype=torch.bfloat16) for size in (m, n))
        runs.append(functools.partial(torch.mm, a, b.t()) if fast is None else fp8_product(a, b, fast_accum=fast))
    return runs


def _reference(session: Session, shape: Shape, fast: bool | None) -> Row:
    runs = reference_runs(session, shape, fast)
    return rated(session, shape, times(session.clock.measure(runs)), fast=fast)


def rated(session: Session, shape: Shape, timings: Row, *, fast: bool | None = None) -> Row:
    """The row with its rate, its share of this device's rate at 8192³, and of cuBLAS by tensor at this shape."""
    if timings["kernel_ms"] is None:
        return timings
    m, k, n = shape
    timings["tflops"] = round(2 * m * k * n / timings["kernel_ms"] / 1e9, 1)
    ceiling = {None: "bf16_tflops", True: "fp8_tflops", False: "fp8_exact_tflops"}[fast]
    timings["percent"] = round(100 * timings["tflops"] / session.facts["ceilings"][ceiling], 1)
    reference = next((name for name, value in REFERENCES.items() if value == fast), None)
    base = session.find(stage="product", shape=shapes.label(shape), arm=reference)
    if base is not None and base.get("kernel_ms"):
        timings["of_cublas"] = round(base["kernel_ms"] / timings["kernel_ms"], 4)
    return timings


# Fused kernels

ROW, EPS = QuantSpec.parse("e4m3/row"), 1e-5


Fused = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]
FUSED: dict[str, tuple[int, Fused, Fused | None]] = {
    "rms_norm → FP8 by row, both orders": (
        4, lambda x, up, g, w, rstd: fused.rms_norm(x, w, EPS, ROW, "both"),
        lambda x, up, g, w, rstd: quantize(F.rms_norm(x, w.shape, w, EPS), ROW, order="both")),
    "rms_norm → y": (
        4, lambda x, up, g, w, rstd: fused.rms_norm(x, w, EPS),
        lambda x, up, g, w, rstd: F.rms_norm(x, w.shape, w, EPS)),
    "layer_norm → FP8 by row, both orders": (
        4, lambda x, up, g, w, rstd: fused.layer_norm(x, w, None, EPS, ROW, "both"), None),
    "silu(gate) · up → FP8 by row, both orders": (
        6, lambda x, up, g, w, rstd: fused.glu(x, up, "silu", ROW, "both"),
        lambda x, up, g, w, rstd: quantize(F.silu(x) * up, ROW, order="both")),
    "silu(gate) · up → h": (
        6, lambda x, up, g, w, rstd: fused.glu(x, up, "silu"), lambda x, up, g, w, rstd: F.silu(x) * up),
    "rms_norm backward": (6, lambda x, up, g, w, rstd: fused.rms_norm_backward(g, x, w, rstd), None),
    "silu(gate) · up backward": (10, lambda x, up, g, w, rstd: fused.glu_backward(g, x, up, "silu"), None),
}  # fmt: skip
"""Bytes per element of x that a kernel must move, the kernel, and what it replaces, which is given the same bytes."""


def fused_kernels(session: Session) -> None:
    """Each fused kernel and what it replaces, at the widths of a Llama 3 8B layer."""
    for shape in TINY[1:] if session.tiny else MATRICES[:1] if session.options.quick else MATRICES[:2]:
        for name, (per_element, run, separate) in FUSED.items():
            same: Row = {"stage": "fused", "shape": f"{shape[0]}×{shape[1]}", "case": name}
            for arm, each in (("fused", run), ("separate", separate)):
                if each is not None:
                    session.attempt({**same, "arm": arm}, bandwidth, session, shape, per_element, each, _operands)


def _operands(session: Session, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    """Gate (or the input of a norm), up, and gradient [R,C] in bf16, a weight [C], and the norm's rstd [R,1]."""
    x, up, g, w = (torch.randn(size, device=session.device).bfloat16() for size in (shape, shape, shape, shape[1]))
    return x, up, g, w, (x.float().square().mean(1, keepdim=True) + EPS).rsqrt()


PARTS = {"quantizers": quantizers, "products": products, "fused": fused_kernels}


def main(arguments: list[str]) -> None:
    options = parser("kernels", __doc__, "--parts products --minutes 6")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    session = begin(options, arguments)
    ceilings(session)
    with ExitStack() as stack:
        for op in OPS.values() if session.tiny else ():  # Triton's interpreter runs its kernels, but for products
            if "triton" in op.backends and op is not SCALED_MM:
                stack.enter_context(op.force("triton"))
        for name, measure in PARTS.items():
            if name in session.options.parts:
                measure(session)
    session.finish()
