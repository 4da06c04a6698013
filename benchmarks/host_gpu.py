"""Host time of eager linears and layers on a GPU: wall time beside kernel time, where tokens or widths are small.

    kernel_ms    what the GPU needs, from a CUDA graph
    wall_ms      calls back to back: the larger of host and GPU time
    host_ms      what the calls take the host while the GPU's queue takes everything: the host time itself

`waiting` is the share of the wall time in which the GPU has nothing to do. Small operands stay in L2. bf16 is timed in
turns with each arm. Beside FP8's host time stands the ratio to bf16's that the planner uses
(`octavo.planner.roofline.RATIOS`), which comes from `python -m benchmarks host`, without a GPU.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import layer, linear, shapes
from benchmarks.arms import Arm, available, build, in_turns, named, step
from benchmarks.layer import Size
from benchmarks.session import Row, Session, begin, parser
from benchmarks.timing import Run
from octavo.planner.roofline import RATIOS

ARMS = named("octavo rowwise", "octavo tensorwise", "torchao rowwise", "torchao tensorwise", "bf16")
TOKENS = (1024, 4096, 256, 2048, 512)
DIMS = (2048, 4096, 1024)
QUICK = ((1024, 2048), (4096, 4096))
CALLS, ROUNDS = 5, 9  # Calls between two synchronizations, few enough for a GPU's queue of about a thousand launches


def made(session: Session, kind: str, tokens: int, dim: int, arm: Arm) -> list[Run]:
    """Forward and backward of a linear [dim, dim], or of a decoder layer of this width, its MLP 3.5 times as wide."""
    torch.manual_seed(0)
    if kind == "linear":
        model: Any = build(linear.layer((tokens, dim, dim), session), arm, session)
        shape: tuple[int, ...] = (tokens, dim)
    else:
        heads = dim // (128 if dim >= 1024 else 16)
        size = Size(dim, 7 * dim // 2, heads, max(heads // 4, 1), 1, tokens)
        model, shape = build(layer.block(size, session.device), arm, session), (1, tokens, dim)
    x, g = (torch.randn(shape, device=session.device, dtype=torch.bfloat16) for _ in range(2))
    return [step(model, list(model.parameters()), x.requires_grad_(), g)]


def host_ms(session: Session, runs: Sequence[Run]) -> float | None:
    """Milliseconds that one call takes the host; the median of some rounds that each begin with an empty queue."""
    if session.tiny:
        return None
    times = []
    for _ in range(ROUNDS):
        if session.gpu:
            torch.cuda.synchronize(session.device)
        start = time.perf_counter()
        for _ in range(CALLS):
            runs[0]()
        times.append(1e3 * (time.perf_counter() - start) / CALLS)
    return round(statistics.median(times), 5)


def measure(session: Session, kind: str, tokens: int, dim: int, arm: Arm) -> Row:
    base, runs = (made(session, kind, tokens, dim, each) for each in (Arm("bf16"), arm))
    figures: Row = in_turns(session, base, runs)
    figures |= {"bf16_host_ms": host_ms(session, base), "host_ms": host_ms(session, runs)}
    if figures["host_ms"]:
        figures["host_ratio"] = round(figures["host_ms"] / figures["bf16_host_ms"], 3)
    if arm.name.startswith("octavo"):
        figures["predicted_host_ratio"] = RATIOS[arm.recipe]
    if figures["kernel_ms"]:
        figures["waiting"] = round(max(1 - figures["kernel_ms"] / figures["wall_ms"], 0.0), 4)
    return figures


def plan(session: Session) -> list[tuple[str, int, int, Arm]]:
    """What to measure, in order of importance: every arm at a few sizes, then the other sizes."""
    sizes = [(32, 64)] if session.tiny else list(QUICK)
    if not (session.tiny or session.options.quick):
        sizes += [(tokens, dim) for dim in DIMS for tokens in TOKENS if (tokens, dim) not in QUICK]
    kinds = ("linear", "layer")
    return available([(kind, tokens, dim, arm) for tokens, dim in sizes for kind in kinds for arm in ARMS])


def main(arguments: list[str]) -> None:
    session = begin(parser("host_gpu", __doc__), arguments)
    for kind, tokens, dim, arm in plan(session):
        shape = shapes.label((tokens, dim, dim)) if kind == "linear" else f"{tokens}×{dim}"
        identity: Row = {"stage": kind, "shape": shape, "tokens": tokens, "dim": dim, "arm": arm.name, "mode": "eager"}
        session.attempt(identity, measure, session, kind, tokens, dim, arm)
    session.finish()
