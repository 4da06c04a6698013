"""One linear layer, forward and backward, quantization included, beside bf16, torchao, and what limits it.

On a GPU: kernel time and wall time of every arm, at the shapes the project's targets name first. Beside each row stand
the roofline (`benchmarks/roofline.py` with this device's own ceilings) and the Amdahl limit: the three FP8 products
alone, measured at this very shape. `given tensorwise` is delayed scaling, whose maxima cost nothing. Times of
`rowwise_equalized` are those of passes without a measurement; what measurements add is beside them (`dense_ms`,
`amortized_ms`: see `benchmarks/equalized_phases.py`).

On a CPU: wall time of a small layer, every arm in turn, round after round, and the best round counts: arms of one run
meet the same machine. FP8 is emulated there, exactly.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import ceilings, roofline, shapes
from benchmarks.arms import BF16, MORE_ARMS, TARGET_ARMS, Arm, available, build, speedup, step
from benchmarks.equalized_phases import hold_steady, phases
from benchmarks.session import Row, Session, begin, parser, times
from benchmarks.shapes import Shape
from benchmarks.timing import CpuClock, Run, sets

EXAMPLES = """linear
linear --quick
linear --shapes llama cubes --minutes 8
linear --shapes 16384,4096,14336 --peers wheels/site
linear --rehearse"""
CPU_SHAPE = (2048, 1024, 1024)
FIRST_ARMS = 3
"""Arms of `TARGET_ARMS`, the eager ones, that every other shape gets before any is compiled, which takes seconds."""


def layer(shape: Shape, session: Session) -> nn.Linear:
    """A bf16 linear with PyTorch's own initial weights."""
    return nn.Linear(shape[1], shape[2], bias=False, device=session.device, dtype=torch.bfloat16)


@functools.lru_cache(maxsize=1)
def buffers(shape: Shape, device: torch.device, count: int) -> list[tuple[Tensor, Tensor]]:
    """Sets of X (differentiable) and G, random normal."""
    m, k, n = shape
    return [
        (
            torch.randn(m, k, device=device, dtype=torch.bfloat16).requires_grad_(),
            torch.randn(m, n, device=device, dtype=torch.bfloat16),
        )
        for _ in range(count)
    ]


def runs_of(session: Session, shape: Shape, arm: Arm) -> tuple[Any, list[Run]]:
    """The layer of one arm, and its forward and backward over each buffer set."""
    m, k, n = shape
    torch.manual_seed(0)
    model: Any = build(layer(shape, session), arm, session)
    count = sets(2 * (m * k + m * n), session.clock.l2_bytes) if session.gpu else 1
    return model, [step(model, list(model.parameters()), x, g) for x, g in buffers(shape, session.device, count)]


def measure(session: Session, shape: Shape, arm: Arm) -> Row:
    """One row: times, speed-up, rate, peak memory, and the limits."""
    model, runs = runs_of(session, shape, arm)
    figures = in_steady_state(session, model, runs, arm)
    same = {"shape": shapes.label(shape)}
    figures |= speedup(session.rows, {**figures, "mode": arm.mode}, **same)
    if figures["kernel_ms"] is None:
        return figures
    figures["tflops"] = round(6 * shape[0] * shape[1] * shape[2] / figures["kernel_ms"] / 1e9, 1)
    rates = session.facts["ceilings"]
    figures["percent"] = round(100 * figures["tflops"] / rates["bf16_tflops"], 1)
    device = roofline.named(session.facts.get("gpu", "")) or roofline.DEVICES["H200"]
    recipe = arm.recipe if arm.recipe in roofline.PASSES else "rowwise"
    if arm.name.startswith("given"):
        recipe = "amax given"
    figures["roofline_ms"] = round(1e3 * device.measured(rates).linear(shape, recipe if arm.recipe else "bf16"), 4)
    limit = next((r for r in session.rows if r.get("arm") == "products" and same.items() <= r.items()), {})
    figures["amdahl_ms"] = limit.get("kernel_ms")
    return figures


def in_steady_state(session: Session, model: Any, runs: list[Run], arm: Arm) -> Row:
    """Times and peak memory of runs of a model; of one that measures its channels in some passes, in the others."""
    steady = hold_steady(model, runs) if arm.mode == "eager" else runs
    figures = times(session.clock.measure(steady))
    figures["peak_mib"] = session.clock.peak_mib(steady[0])
    if arm.mode == "eager":
        figures |= phases(model, runs, figures["wall_ms"], lambda each: session.clock.measure(each).wall_ms)
    return figures


def products(session: Session, shape: Shape, *, fp8: bool = True) -> Row:
    """The three products alone, in FP8 as cuBLAS runs them by tensor: no arm with these products can be faster."""
    total = 0.0
    for index, (m, k, n) in enumerate(roofline.products(shape)):
        count = sets((1 if fp8 else 2) * (m * k + k * n) + 2 * m * n, session.clock.l2_bytes) if session.gpu else 1
        runs: list[Run] = []
        for _ in range(count):
            a = torch.randn(m, k, device=session.device, dtype=torch.bfloat16)
            b = torch.randn(n, k, device=session.device, dtype=torch.bfloat16)
            cublas = fp8 and session.gpu
            runs.append(ceilings.fp8_product(a, b, fast_accum=index == 0) if cublas else functools.partial(_mm, a, b))
        total += session.clock.measure(runs, wall=False).kernel_ms or 0.0
    return {"kernel_ms": round(total, 5) or None}


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def plan(options: Any, targets: tuple[Shape, ...]) -> list[tuple[Shape, Arm]]:
    """What to measure, in order of importance."""
    sizes = shapes.parse(options.shapes) if options.shapes else []
    if options.quick:
        sizes = sizes or list(targets)
        return [(shape, arm) for shape in sizes for arm in TARGET_ARMS]
    sizes = sizes or shapes.parse(["targets", "llama", "cubes", "losing"])
    first = [shape for shape in targets if shape in sizes] or sizes[:1]
    rest = [shape for shape in sizes if shape not in first]
    return [
        *((shape, arm) for shape in first for arm in TARGET_ARMS),
        *((shape, arm) for shape in first[:1] for arm in MORE_ARMS),
        *((shape, arm) for shape in rest for arm in TARGET_ARMS[:FIRST_ARMS]),
        *((shape, arm) for shape in rest for arm in TARGET_ARMS[FIRST_ARMS:]),
    ]


def on_gpu(session: Session) -> None:
    """Every arm at every shape (tiny ones in a rehearsal)."""
    session.facts["gpu"] = torch.cuda.get_device_name(session.device) if session.gpu else ""
    ceilings.measure(session)
    todo = plan(session.options, shapes.TARGETS)
    if session.tiny:
        tiny = shapes.SETS["tiny"]
        todo = [(shape, arm) for shape in tiny[:1] for arm in (*TARGET_ARMS, *MORE_ARMS)] + [
            (shape, arm) for shape in tiny[1:] for arm in (*BF16, Arm("octavo rowwise"))
        ]
    arms = set(available(list(dict.fromkeys(arm for _, arm in todo))))
    for shape, arm in todo:
        if arm not in arms:
            continue
        m, k, n = shape
        same: Row = {"shape": shapes.label(shape), "m": m, "k": k, "n": n}
        if all(size % 16 == 0 for size in shape):
            session.attempt({**same, "arm": "products", "mode": "eager"}, functools.partial(products, session, shape))
        session.attempt({**same, "arm": arm.name, "mode": arm.mode}, functools.partial(measure, session, shape, arm))
    buffers.cache_clear()


def on_cpu(session: Session, rounds: int) -> None:
    """Best wall time of each eager arm, all in one process, in turn."""
    sizes = shapes.parse(session.options.shapes) if session.options.shapes else [CPU_SHAPE]
    for shape in sizes:
        arms = available([arm for arm in (*TARGET_ARMS, *MORE_ARMS) if arm.mode == "eager"])
        made = {arm: runs_of(session, shape, arm) for arm in arms}
        runs = {arm: hold_steady(model, each)[0] for arm, (model, each) in made.items()}
        for run in runs.values():
            run()
        best = dict.fromkeys(runs, float("inf"))
        clock = CpuClock(rounds=1)
        for _ in range(rounds):
            for arm, run in runs.items():
                best[arm] = min(best[arm], clock.measure([run]).wall_ms or 0.0)
        m, k, n = shape
        for arm, ms in best.items():
            figures = {"wall_ms": round(ms, 3), "method": "wall", "wall_speedup": round(best[arms[0]] / ms, 4)}
            identity = {"shape": shapes.label(shape), "m": m, "k": k, "n": n, "arm": arm.name, "mode": arm.mode}
            session.attempt(identity, functools.partial(dict, figures))


def main(arguments: list[str]) -> None:
    """Measure, print a row at a time, write `results/<device>/linear.json`."""
    options = parser("linear", __doc__, EXAMPLES)
    options.add_argument("--shapes", nargs="+", metavar="SET|M,K,N", help=shapes.DESCRIPTION)
    options.add_argument("--rounds", type=int, default=15, help="on a CPU: rounds of which the best counts")
    chosen = options.parse_args(arguments)
    try:
        shapes.parse(chosen.shapes or [])
    except ValueError as error:
        options.error(str(error))
    session = begin("linear", chosen, arguments, times_cpus=True)
    if session.gpu or session.tiny:
        on_gpu(session)
    else:
        on_cpu(session, chosen.rounds)
    session.finish()
