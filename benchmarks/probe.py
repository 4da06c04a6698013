"""Does everything run here, and compute what the reference computes? The first thing to do on a new GPU.

In order of importance: this device's ceilings; which backend serves each op, and why the others do not (as `octavo
doctor` shows it); then every quantizer, memory order and pair against the reference, byte for byte, over shapes that
fill no tile; every product on every backend against the reference; a linear of every recipe against the CPU, eager,
compiled and in a CUDA graph. A row's `result` is "same bytes", the agreement in dB, or what is wrong.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks import ceilings, gemm, kernels
from benchmarks.session import Row, Session, begin, parser
from octavo.kernels import fused  # noqa: F401  (registers its ops, which `status` then shows)
from octavo.kernels.conformance import GPU, INTERPRETER, checks, compare, difference
from octavo.kernels.gemm import SCALED_MM
from octavo.kernels.gemm import reference as gemm_reference
from octavo.kernels.quantize import QUANTIZE, QUANTIZE_PAIR, quantize, quantize_pair, reference
from octavo.kernels.registry import OPS, Backend, Case, Op
from octavo.numerics import RECIPES, QuantSpec, sqnr
from octavo.numerics.spec import FULL

EXAMPLES = """probe
probe --rehearse"""
MATRICES = ((257, 771), (1, 4096), (4096, 1), (16384, 4096), (1023, 5120), (0, 64), (16, 16))
TINY = ((17, 39), (0, 64), (1, 5))
PRODUCTS = ((256, 512, 384), (17, 129, 250), (1, 4096, 16), (0, 64, 64), (1000, 2048, 1536))
SAME = "same bytes"
AGREEMENT_DB = 45.0
"""Between two float32 sums of the same products, rounded to bf16."""


def backends(session: Session) -> None:
    """One row per op, case and backend."""
    for op in OPS.values():
        for label, case in op.cases.items():
            for backend in op.backends.values():
                identity: Row = {"stage": "backend", "case": f"{op.name} {label}", "arm": backend.name}
                session.attempt(identity, functools.partial(_backend, session, op, backend, case))


def _backend(session: Session, op: Op, backend: Backend, case: Case) -> Row:
    reason = op.unavailable_reason(backend, session.device, case)
    if reason is not None:
        return {"result": f"no: {reason}"}
    return {"result": "runs" if op.choose(session.device, case).name == backend.name else "serves"}


def quantizers(session: Session) -> None:
    """Raw bytes of every spec and order and of every pair, of fresh random matrices with what is hard in them."""
    for shape in TINY if session.tiny else MATRICES:
        label = f"{shape[0]}×{shape[1]}"
        for text in QUANTIZE.cases:
            one = functools.partial(_quantizer, session, shape, text)
            session.attempt({"stage": "quantize", "shape": label, "case": text}, one)
        for case in QUANTIZE_PAIR.cases.values():
            one = functools.partial(_pair, session, shape, case)
            session.attempt({"stage": "quantize_pair", "shape": label, "case": " + ".join(case)}, one)


def samples(session: Session, shape: tuple[int, int]) -> list[Tensor]:
    """Random numbers over many magnitudes, with a row of zeros; and the same with a NaN and an infinity."""
    magnitudes = torch.logspace(-20, 3, max(shape[0], 1), device=session.device)[: shape[0], None]
    values = (torch.randn(shape, device=session.device) * magnitudes).bfloat16()
    if min(shape) < 4:
        return [values]
    values[2] = 0.0
    broken = values.clone()
    broken[1, 2], broken[3, 0] = math.nan, math.inf
    return [values, broken]


def _quantizer(session: Session, shape: tuple[int, int], text: str) -> Row:
    spec, wrong = QuantSpec.parse(text), []
    for x in samples(session, shape):
        expected, scale = reference.quantize(x, spec, None)
        for order in kernels.ORDERS:
            made = quantize(x, spec, order=order)  # type: ignore[arg-type]
            outputs = [made.data, made.scale, made.other_order if order == "both" else made.data]
            wrong += _differences(order, (expected, scale, expected), outputs)
        if FULL in spec.granularity:
            amax = torch.full(spec.granularity.scale_shape(shape), 3.0, device=session.device)
            precomputed = reference.quantize(x, spec, None, amax=amax)
            made = quantize(x, spec, order="both", amax=amax)
            wrong += _differences(
                "amax given", (*precomputed, precomputed[0]), [made.data, made.scale, made.other_order]
            )
    return {"result": "; ".join(wrong[:3]) or SAME}


def _pair(session: Session, shape: tuple[int, int], case: tuple[str, ...]) -> Row:
    spec, spec_t = (QuantSpec.parse(text) for text in case)
    fold, fold_t = torch.rand(1, shape[1], device=session.device), torch.rand(shape[0], 1, device=session.device)
    wrong = []
    for x in samples(session, shape):
        expected = [*reference.quantize(x, spec, fold), *reference.quantize(x, spec_t, fold_t)]
        first, second = quantize_pair(x, spec, fold, spec_t, fold_t)
        wrong += _differences("", expected, [first.data, first.scale, second.data, second.scale])
    return {"result": "; ".join(wrong) or SAME}


def _differences(what: str, expected: Sequence[Tensor], actual: Sequence[Tensor | None]) -> list[str]:
    if any(output is None for output in actual):
        return [f"{what}: an output is missing"]
    mismatch = difference(expected, [a for a in actual if a is not None])
    return [f"{what}: {mismatch}".lstrip(": ")] if mismatch else []


def products(session: Session) -> None:
    """Every product of a recipe on every backend beside the reference's."""
    for shape in ((17, 39, 21),) if session.tiny else PRODUCTS:
        for case in gemm.CASES:
            for name in SCALED_MM.backends:
                identity: Row = {"stage": "product", "shape": "×".join(map(str, shape)), "case": case, "arm": name}
                session.attempt(identity, functools.partial(_product, session, shape, case, name))


def _product(session: Session, shape: tuple[int, int, int], case: str, name: str) -> Row:
    backend, texts = SCALED_MM.backends[name], gemm.CASES[case]
    reason = SCALED_MM.unavailable_reason(backend, session.device, texts)
    if reason is not None:
        return {"result": f"does not serve this: {reason}"}
    layout = texts[2]
    a, b = gemm.operands(session, shape, texts)
    expected = gemm_reference.scaled_mm(a, b, layout, torch.float32, None, False)
    got = backend.run(a, b, layout, torch.bfloat16, None, layout == "nt")
    if expected.numel() == 0 or torch.equal(expected, got.float()):
        return {"result": SAME}
    agreement = sqnr(expected, got.float())
    return {"result": f"{agreement:.1f} dB" if agreement >= AGREEMENT_DB else f"WRONG: {agreement:.1f} dB"}


def linears(session: Session) -> None:
    """A linear of every recipe: against the CPU, compiled against eager, and replayed from a CUDA graph."""
    for shape in ((33, 48, 80),) if session.tiny else ((512, 1024, 768), (37, 19, 5), (4096, 4096, 4096)):
        for name, recipe in RECIPES.items():
            for mode in ("eager",) if recipe.history else ("eager", "compiled", "graph"):  # no graph carries a history
                identity: Row = {"stage": "linear", "shape": "×".join(map(str, shape)), "arm": name, "mode": mode}
                session.attempt(identity, functools.partial(_linear, session, shape, name, mode))


def _linear(session: Session, shape: tuple[int, int, int], recipe: str, mode: str) -> Row | None:
    if mode == "graph" and not session.gpu:
        return None
    m, k, n = shape
    torch.manual_seed(0)
    layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    x, g = torch.randn(m, k).bfloat16(), torch.randn(m, n).bfloat16()
    expected = _gradients(octavo.convert(layer, recipe, verbose=False), x, g) if m * k * n < 2**32 else None
    on_device = layer.to(session.device)
    x, g = x.to(session.device), g.to(session.device)
    plain = _gradients(on_device, x, g)
    results = plain
    if mode == "compiled":
        torch._dynamo.reset()
        backend = "inductor" if session.gpu else "aot_eager"
        results = _gradients(torch.compile(on_device, fullgraph=True, dynamic=False, backend=backend), x, g)
    elif mode == "graph":
        results = _replayed(on_device, x, g)
    agreements = [
        _agreement(e, r)
        for e, r in zip(plain if expected is None or mode != "eager" else expected, results, strict=True)
    ]
    worst = min(agreements)
    return {"result": f"{worst:.1f} dB" if worst >= 40 else f"WRONG: {agreements} dB", "worst_db": min(worst, 999.0)}


def _gradients(layer: Any, x: Tensor, g: Tensor) -> list[Tensor]:
    own = x.detach().requires_grad_()
    y = layer(own)
    parameters = list(layer.parameters())
    return [y.detach(), *torch.autograd.grad(y, (own, *parameters), g)]


def _replayed(layer: Any, x: Tensor, g: Tensor) -> list[Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _gradients(layer, x, g)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _gradients(layer, x, g)
    for result in results:
        result.fill_(math.nan)  # what the replay does not write shows
    graph.replay()
    torch.cuda.synchronize()
    return results


def _agreement(expected: Tensor, actual: Tensor) -> float:
    expected, actual = expected.float().cpu(), actual.float().cpu()
    return math.inf if torch.equal(expected, actual) else sqnr(expected, actual)


def deep(session: Session) -> None:
    """Every kernel in every configuration on one random input of each case, as `octavo doctor --deep` does."""
    for index, check in enumerate(checks(session.device)):
        if session.tiny and index:
            break
        session.attempt({"stage": "deep", "case": f"{check.op} {check.case}"}, functools.partial(_deep, session, check))


def _deep(session: Session, check: Any) -> Row:
    budget = INTERPRETER if session.tiny else GPU
    outcomes = compare([check], session.device, seconds=0.0, seed=0, budget=budget)
    wrong = [f"configuration {o.config}: {o.first}" for o in outcomes if o.mismatches]
    return {"result": f"WRONG: {'; '.join(wrong[:3])}" if wrong else SAME, "configurations": len(outcomes)}


def is_wrong(row: Row) -> bool:
    """Whether a check found something that is not as it should be."""
    result = str(row.get("result", ""))
    return "error" in row or "WRONG" in result or (row["stage"].startswith("quantize") and result != SAME)


def main(arguments: list[str]) -> None:
    """Check, print a row at a time, write `results/<device>/probe.json`."""
    session = begin("probe", parser("probe", __doc__, EXAMPLES).parse_args(arguments), arguments)
    ceilings.measure(session)
    backends(session)
    with kernels.triton_only():
        quantizers(session)
    products(session)
    linears(session)
    deep(session)
    wrong = sum(is_wrong(row) for row in session.rows)
    session.facts["wrong"] = wrong
    print(f"{len(session.rows)} checks, {wrong} of them wrong")
    session.finish()
