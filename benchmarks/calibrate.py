"""`octavo calibrate`, a row at a time: every backend and configuration of each product and quantizer, and the choices.

What is run after it on the same machine (`linear`, `layer`, `published`) multiplies with what won here; their result
files say with how many choices (`calibrated`). Without it the registry's order and the kernels' own heuristics decide.
"""

from collections.abc import Callable
from typing import Any

from benchmarks import shapes
from benchmarks.kernels import ceilings
from benchmarks.session import Row, Session, begin, parser
from octavo.kernels import calibration
from octavo.kernels.gemm.product_timing import fp8_gemms
from octavo.kernels.quantize.quantize_timing import quantizations
from octavo.kernels.timing import CallTime, TimingTask, time_on_gpu
from octavo.numerics import RECIPES

PRODUCTS = ("rowwise", "tensorwise")


def run(session: Session, requested: list[shapes.Shape]) -> None:
    entries: list[calibration.Entry] = []
    for shape in requested:
        for recipe in PRODUCTS:
            tasks: list[TimingTask] = [*fp8_gemms(RECIPES[recipe], [shape]), *quantizations(RECIPES[recipe], [shape])]
            for task in tasks:
                same: Row = {"stage": "calibrate", "shape": ",".join(map(str, task.shape)), "case": task.name}
                session.attempt(same, _measure, session, task, entries)


def _measure(session: Session, task: TimingTask, entries: list[calibration.Entry]) -> Row:
    timer = time_on_gpu if session.gpu else _untimed
    result = task.timed(session.device, timer)
    if result.entry is None:
        return {"result": "reference: nothing else serves"}
    if session.tiny:
        return {"result": "measured nothing"}
    entries.append(result.entry)
    calibration.save(session.device, entries)
    best = next(iter(result.times.values()))
    return {
        "arm": f"{result.entry.backend} {'' if result.entry.config is None else result.entry.config}".strip(),
        "kernel_ms": round(1e-3 * best.kernel, 5),
        "host_ms": round(1e-3 * best.host, 5),
        "rate": task.rate(best.kernel),
        "microseconds": {label: round(value.kernel, 2) for label, value in result.times.items()},
        "host_microseconds": {label: round(value.host, 2) for label, value in result.times.items()},
    }


def _untimed(calls: list[Callable[[], Any]]) -> CallTime:
    for call in calls:
        call()
    return CallTime(1.0, 1.0)


def main(arguments: list[str]) -> None:
    options = parser("calibrate", __doc__, "--minutes 4", "--shapes targets")
    options.add_argument("--shapes", nargs="+", metavar="SET|M,K,N", help=shapes.DESCRIPTION)
    session = begin(options, arguments)
    sets = session.options.shapes or (["targets"] if session.options.quick else ["targets", "cubes", "llama"])
    try:
        requested = shapes.parse(["tiny"] if session.tiny else sets)
    except ValueError as error:
        options.error(str(error))
    ceilings(session)
    run(session, requested)
    session.finish()
