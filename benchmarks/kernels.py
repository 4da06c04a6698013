"""Each kernel by itself: quantizers in TB/s, FP8 products in TFLOP/s, fused kernels, as shares of this device's limits.

Bytes are what the op must move by definition (`src/octavo/kernels/quantize/__init__.py`): bf16 read once, twice where a
maximum over everything is needed first, and one byte written per element, form and memory order. A kernel that reads a
band again from L2 gets no credit for it. Products are measured on every backend beside cuBLAS by tensor, the reference
figure, in the memory orders that a linear gives them.

Part `configs` times every configuration of the quantizers, to choose defaults by.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks import ceilings, fused, gemm
from benchmarks.session import Row, Session, begin, parser, times
from benchmarks.timing import sets
from octavo.kernels.gemm import SCALED_MM
from octavo.kernels.quantize import QUANTIZE, QUANTIZE_PAIR, quantize, quantize_pair
from octavo.kernels.registry import OPS
from octavo.numerics.spec import FULL, TENSOR, QuantSpec

EXAMPLES = """kernels
kernels --quick
kernels --parts products --minutes 6
kernels --parts configs
kernels --rehearse"""
MATRICES = ((16384, 4096), (16384, 14336), (8192, 8192))
TINY = ((64, 48), (33, 70))
PARTS = ("quantizers", "products", "fused", "configs")
PER_ROW_FIRST = ("e4m3/row", "e4m3/tensor", "e5m2/tensor", "e4m3/column")
ORDERS = ("rows", "both", "columns")


def bytes_per_element(spec: QuantSpec, order: str, *, amax_is_known: bool = False) -> int:
    """Bytes that quantizing one bf16 element must move."""
    two_passes = (FULL in spec.granularity and spec.granularity[1] != FULL) or spec.granularity == TENSOR
    return 2 * (2 if two_passes and not amax_is_known else 1) + (2 if order == "both" else 1)


def bandwidth(session: Session, shape: tuple[int, int], per_element: float, run: Callable[[Tensor], Any]) -> Row:
    """A row for a kernel that moves `per_element` bytes per element of a random normal bf16 matrix."""
    elements = shape[0] * shape[1]
    count = sets(per_element * elements, session.clock.l2_bytes) if session.gpu else 1
    inputs = [torch.randn(shape, device=session.device, dtype=torch.bfloat16) for _ in range(count)]
    timings = times(session.clock.measure([functools.partial(run, x) for x in inputs]))
    timings["bytes_per_element"] = per_element
    if timings["kernel_ms"] is None:
        return timings
    timings["tbs"] = round(per_element * elements / timings["kernel_ms"] / 1e9, 4)
    timings["percent"] = round(100 * timings["tbs"] / session.facts["ceilings"]["copy_tbs"], 1)
    timings["roofline_ms"] = round(per_element * elements / session.facts["ceilings"]["copy_tbs"] / 1e9, 5)
    return timings


def quantizers(session: Session, matrices: Sequence[tuple[int, int]]) -> None:
    """Every spec in every memory order, with and without the maxima given, and every pair."""
    specs = [*PER_ROW_FIRST, *(text for text in QUANTIZE.cases if text not in PER_ROW_FIRST)]
    if session.options.quick:
        specs = list(PER_ROW_FIRST)
    for index, shape in enumerate(matrices):
        same: Row = {"stage": "quantize", "shape": f"{shape[0]}×{shape[1]}"}
        copy = functools.partial(bandwidth, session, shape, 4, torch.clone)
        session.attempt({**same, "case": "clone in bf16", "arm": "torch"}, copy)
        for case in QUANTIZE_PAIR.cases.values():
            identity = {**same, "case": f"{' + '.join(case)}, folded", "arm": "pair"}
            session.attempt(identity, functools.partial(_pair, session, shape, case))
        for text in specs:
            for order in ORDERS if index == 0 else ORDERS[:2]:
                one = functools.partial(_quantizer, session, shape, text, order)
                session.attempt({**same, "case": text, "arm": order}, one)
        for text in (text for text in specs if FULL in QuantSpec.parse(text).granularity):
            one = functools.partial(_quantizer, session, shape, text, "both", amax_is_known=True)
            session.attempt({**same, "case": f"{text}, amax given", "arm": "both"}, one)


def _quantizer(session: Session, shape: tuple[int, int], text: str, order: Any, amax_is_known: bool = False) -> Row:
    spec = QuantSpec.parse(text)
    amax = None
    if amax_is_known:
        amax = torch.full(spec.granularity.scale_shape(shape), 6.0, device=session.device)
    per_element = bytes_per_element(spec, order, amax_is_known=amax_is_known)
    return bandwidth(session, shape, per_element, lambda x: quantize(x, spec, order=order, amax=amax))


def _pair(session: Session, shape: tuple[int, int], case: tuple[str, ...]) -> Row:
    spec, spec_t = (QuantSpec.parse(text) for text in case)
    fold, fold_t = None, None
    if FULL in spec.granularity:
        fold = torch.rand(1, shape[1], device=session.device) + 0.5
        fold_t = torch.rand(shape[0], 1, device=session.device) + 0.5
    per_element = (2 if fold is None else 4) + 2
    return bandwidth(session, shape, per_element, lambda x: quantize_pair(x, spec, fold, spec_t, fold_t))


def configs(session: Session) -> None:
    """Every configuration of the quantizers at the first matrix."""
    from octavo.kernels.quantize import triton as backend

    shape = TINY[0] if session.tiny else MATRICES[0]
    texts = PER_ROW_FIRST[:1] if session.tiny else (*PER_ROW_FIRST, "e4m3/1x128", "e4m3/128x128", "e4m3/1x32/e8m0")
    for text in texts:
        spec = QuantSpec.parse(text)
        for order in ORDERS:
            task = backend.QuantizeTask(first=backend.FoldedSpec(spec=spec), order=order)  # type: ignore[arg-type]
            for config, tile in enumerate(backend.tiles(task)):
                run = functools.partial(_with_config, backend, spec, order, config)
                one = functools.partial(bandwidth, session, shape, bytes_per_element(spec, order), run)
                identity = {"stage": "config", "shape": f"{shape[0]}×{shape[1]}", "case": f"{text} {order}"}
                session.attempt({**identity, "arm": f"{config}: {tile}"}, one)
    gemm.configs(session)
    rows = torch.rand(shape[0], 1, device=session.device) + 0.5
    columns = torch.rand(1, shape[1], device=session.device) + 0.5
    row, column = QuantSpec.parse("e4m3/row"), QuantSpec.parse("e4m3/column")
    forms = backend.FoldedSpec(spec=row, fold="columns"), backend.FoldedSpec(spec=column, fold="rows")
    for config, tile in enumerate(backend.tiles(backend.QuantizeTask(first=forms[0], second=forms[1]))):
        pair = functools.partial(_pair_with_config, backend, (row, columns, column, rows), config)
        identity = {"stage": "config", "shape": f"{shape[0]}×{shape[1]}", "case": "folded pair"}
        session.attempt({**identity, "arm": f"{config}: {tile}"}, functools.partial(bandwidth, session, shape, 6, pair))


def _with_config(backend: Any, spec: QuantSpec, order: str, config: int, x: Tensor) -> Any:
    return backend.quantize(x, spec, None, None, None, order, config=config)


def _pair_with_config(backend: Any, forms: tuple[Any, ...], config: int, x: Tensor) -> Any:
    return backend.quantize_pair(x, *forms, config=config)


def main(arguments: list[str]) -> None:
    """Measure, print a row at a time, write `results/<device>/kernels.json`."""
    options = parser("kernels", __doc__, EXAMPLES)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    session = begin("kernels", options.parse_args(arguments), arguments)
    ceilings.measure(session)
    parts: dict[str, Callable[[], None]] = {
        "quantizers": lambda: quantizers(session, TINY if session.tiny else MATRICES),
        "products": lambda: gemm.products(session),
        "fused": lambda: fused.kernels(session),
        "configs": lambda: configs(session),
    }
    chosen = [name for name in PARTS if name in session.options.parts]
    if session.options.quick:
        parts["quantizers"] = lambda: quantizers(session, (TINY if session.tiny else MATRICES)[:1])
        chosen = [name for name in chosen if name != "configs"]
    with triton_only() if session.tiny else nullcontext():
        if "quantizers" in chosen and not session.tiny:  # what the targets name comes first; a row is made only once
            quantizers(session, MATRICES[:1])
        if "products" in chosen and not session.tiny:
            gemm.products(session, only_cubes=True)
        for name in chosen:
            parts[name]()
    session.finish()


@contextmanager
def triton_only() -> Iterator[None]:
    """Inside the block Triton's kernels run, products aside, whatever was chosen; without a GPU in its interpreter."""
    with ExitStack() as stack:
        for op in OPS.values():
            if "triton" in op.backends and op is not SCALED_MM:
                stack.enter_context(op.force("triton"))
        yield
