"""One linear layer, forward and backward with quantization, beside bf16, torchao, and the three FP8 products alone
(`amdahl_ms`). `given tensorwise` has maxima that cost nothing. On a CPU: wall time, in turns with bf16.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import shapes
from benchmarks.arms import MORE_ARMS, TARGET_ARMS, Arm, available, build, in_turns, speedup, step
from benchmarks.kernels import ceilings, reference_runs
from benchmarks.session import Row, Session, begin, parser, times
from benchmarks.shapes import Shape
from benchmarks.timing import Run, sets
from octavo.nn.equalized import equalized_layers, equalizer_of

CPU_SHAPE = (2048, 1024, 1024)
FIRST_ARMS = 3
"""Arms of `TARGET_ARMS`, the eager ones, that every other shape gets before any is compiled, which takes seconds."""


def layer(shape: Shape, session: Session) -> nn.Linear:
    return nn.Linear(shape[1], shape[2], bias=False, device=session.device, dtype=torch.bfloat16)


def identity(shape: Shape, arm: Arm) -> Row:
    return {"shape": shapes.label(shape), **dict(zip("mkn", shape, strict=True)), "arm": arm.name, "mode": arm.mode}


@functools.lru_cache(maxsize=1)
def buffers(shape: Shape, session: Session) -> list[tuple[Tensor, Tensor]]:
    """Sets of X (differentiable) and G, random normal, that leave the cache behind."""
    m, k, n = shape
    count = sets(2 * (m * k + m * n), session.clock.l2_bytes) if session.gpu else 1
    new = functools.partial(torch.randn, device=session.device, dtype=torch.bfloat16)
    return [(new(m, k).requires_grad_(), new(m, n)) for _ in range(count)]


def runs_of(session: Session, shape: Shape, arm: Arm) -> tuple[Any, list[Run]]:
    torch.manual_seed(0)
    model: Any = build(layer(shape, session), arm, session)
    return model, [step(model, list(model.parameters()), x, g) for x, g in buffers(shape, session)]


def measure(session: Session, shape: Shape, arm: Arm) -> Row:
    model, runs = runs_of(session, shape, arm)
    figures = in_steady_state(session, model, runs)
    label = shapes.label(shape)
    figures |= speedup(session.rows, {**figures, "mode": arm.mode}, shape=label)
    if figures["kernel_ms"] is None:
        return figures
    figures["tflops"] = round(6 * shape[0] * shape[1] * shape[2] / figures["kernel_ms"] / 1e9, 1)
    figures["percent"] = round(100 * figures["tflops"] / session.facts["ceilings"]["bf16_tflops"], 1)
    limit = session.find(shape=label, arm="products") or {}
    return figures | {"amdahl_ms": limit.get("kernel_ms")}


def in_steady_state(session: Session, model: nn.Module, runs: list[Run]) -> Row:
    """Times and peak memory of runs of a model. One that measures its channels begins behind such a pass."""
    eager = not hasattr(model, "_orig_mod")  # compiled ones measure in every pass
    for _, equalized in equalized_layers(model) if eager else ():
        equalizer_of(equalized).advance(equalizer_of(equalized).every + 1)
    figures = times(session.clock.measure(runs))
    return figures | {"peak_mib": session.clock.peak_mib(runs[0])}


def products(session: Session, shape: Shape, *, fp8: bool = True) -> Row:
    """The three products alone, in FP8 as cuBLAS runs them by tensor: no arm with these products can be faster."""
    total = 0.0
    tokens, inputs, outputs = shape
    for index, sizes in enumerate((shape, (tokens, outputs, inputs), (outputs, tokens, inputs))):
        runs = reference_runs(session, sizes, index == 0 if fp8 and session.gpu else None)
        total += session.clock.measure(runs, wall=False).kernel_ms or 0.0
    return {"kernel_ms": round(total, 5) or None}


def plan(options: Any, targets: tuple[Shape, ...]) -> list[tuple[Shape, Arm]]:
    sizes = shapes.each_once(options.shapes)
    if options.quick:
        return [(shape, arm) for shape in sizes or targets for arm in TARGET_ARMS]
    sizes = sizes or shapes.each_once(shapes.SETS[name] for name in ("targets", "llama", "cubes", "losing"))
    first = [shape for shape in targets if shape in sizes] or sizes[:1]
    rest = [shape for shape in sizes if shape not in first]
    return [
        *((shape, arm) for shape in first for arm in TARGET_ARMS),
        *((shape, arm) for shape in first[:1] for arm in MORE_ARMS),
        *((shape, arm) for shape in rest for arm in TARGET_ARMS[:FIRST_ARMS]),
        *((shape, arm) for shape in rest for arm in TARGET_ARMS[FIRST_ARMS:]),
    ]


def on_gpu(session: Session) -> None:
    ceilings(session)
    todo = plan(session.options, shapes.TARGETS)
    if session.tiny:
        one, two = shapes.SETS["tiny"]
        todo = [(one, arm) for arm in (*TARGET_ARMS, *MORE_ARMS)]
        todo += [(two, arm) for arm in (Arm("bf16"), Arm("bf16", "compiled"), Arm("octavo rowwise"))]
    for shape, arm in available(todo):
        if all(size % 16 == 0 for size in shape):
            session.attempt(identity(shape, Arm("products")), products, session, shape)
        session.attempt(identity(shape, arm), measure, session, shape, arm)
    buffers.cache_clear()


def on_cpu(session: Session) -> None:
    for shape in shapes.each_once(session.options.shapes) or [CPU_SHAPE]:
        base = runs_of(session, shape, Arm("bf16"))[1]
        for (arm,) in available([(arm,) for arm in (*TARGET_ARMS, *MORE_ARMS) if arm.mode == "eager"]):
            session.attempt(identity(shape, arm), in_turns, session, base, runs_of(session, shape, arm)[1])


def main(arguments: list[str]) -> None:
    options = parser(
        "linear", __doc__, "--shapes llama cubes --minutes 8", "--shapes 16384,4096,14336 --peers wheels/site"
    )
    options.add_argument(
        "--shapes", nargs="+", type=shapes.of, default=[], metavar="SET|M,K,N", help=shapes.DESCRIPTION
    )
    session = begin(options, arguments, times_cpus=True)
    if session.gpu or session.tiny:
        on_gpu(session)
    else:
        on_cpu(session)
    session.finish()
