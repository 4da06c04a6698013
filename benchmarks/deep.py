"""Every Triton kernel in every configuration beside the reference, as `octavo doctor --deep` compares them, but
compiled by all cores first, into Triton's cache. In a rehearsal Triton's interpreter runs one case of each op.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence

import torch

from benchmarks.session import Row, Session, begin, parser
from octavo.kernels.conformance.cases import checks, unavailable_reason
from octavo.kernels.conformance.mismatches import GPU, INTERPRETER, Check, compare

SAME = "as the reference"
COMPILE_SHARE = 0.6  # Of `--minutes`, at most, for the pool; the rest is compiled where it is compared


def families(selected: Sequence[Check]) -> dict[str, list[Check]]:
    names = [f"{check.op} {check.case.partition(' ')[0]}" for check in selected]
    return {each: [c for c, name in zip(selected, names, strict=True) if name == each] for each in names}


def compile_case(index: int, only: str) -> None:
    """Run one case once in a process of the pool; what it computes is compared later."""
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device())
    compare([checks(device, only)[index]], device, seconds=0.0, seed=0, budget=GPU)


def compile_all(session: Session, count: int, seconds: float) -> Row:
    workers = min(os.cpu_count() or 1, 16, count)
    start = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:  # whose end ends its processes, also hung ones
        jobs = [pool.apply_async(compile_case, (index, session.options.only)) for index in range(count)]
        for job in jobs:
            job.wait(max(start + seconds - time.monotonic(), 0.0))
            session.save()  # the GPU runner cuts what writes nothing for long
        succeeded = [job.successful() for job in jobs if job.ready()]
    return {
        "result": f"{sum(succeeded)} of {count} cases on {workers} cores",
        "wall_ms": round(1e3 * (time.monotonic() - start)), "failed": succeeded.count(False),
    }  # fmt: skip


def compared(session: Session, selected: Sequence[Check], seed: int) -> Row:
    budget = INTERPRETER if session.tiny else GPU
    outcomes = compare(selected, session.device, seconds=0.0, seed=seed, budget=budget)
    wrong = [f"{o.op} {o.case}, configuration {o.config}: {o.first}" for o in outcomes if o.mismatches]
    return {
        "result": f"WRONG: {'; '.join(wrong[:3])}" if wrong else SAME, "cases": len(selected),
        "configurations": len(outcomes), "runs": sum(o.runs for o in outcomes),
        "mismatches": sum(o.mismatches for o in outcomes), "wrong": len(wrong),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    options = parser("deep", __doc__, "--only e4m3/row", "--rounds 10 --minutes 5")
    options.add_argument("--rounds", type=int, default=2, help="rounds of new inputs (2)")
    options.add_argument("--only", default="", help='cases whose "op case" contains this')
    session = begin(options, arguments)
    if (reason := unavailable_reason(session.device)) is not None:
        options.error(reason)
    try:
        selected = checks(session.device, session.options.only)
    except ValueError as error:
        options.error(str(error))
    if session.tiny:
        selected = list({check.op: check for check in reversed(selected)}.values())[::-1]
    else:
        seconds = 600.0 if session.options.minutes is None else 60 * COMPILE_SHARE * session.options.minutes
        session.attempt({"stage": "compile"}, compile_all, session, len(selected), seconds)
    for number in range(1 if session.tiny else session.options.rounds):
        for name, family in families(selected).items():
            session.attempt({"stage": "deep", "case": name, "round": number}, compared, session, family, number)
    session.finish(checks=True)
