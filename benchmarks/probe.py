"""Does everything run here, and compute what the reference computes? The first thing to do on a new GPU.

In order of importance: this device's ceilings; which backend serves each op, and why the others do not (as `octavo
doctor` shows it); then every kernel in every configuration against the reference, as `octavo doctor --deep` does. A
row's `result` is "as the reference" or what is wrong. The stage `tests` compares whole ops and linear layers.
"""

import functools

from benchmarks import ceilings
from benchmarks.deep import compared
from benchmarks.session import Row, Session, begin, parser
from octavo.kernels import (
    fused,  # noqa: F401  (registers its ops, which `status` then shows)
    probe_cache,
)
from octavo.kernels.conformance import checks
from octavo.kernels.registry import OPS, Backend, Case, Op

EXAMPLES = """probe
probe --rehearse"""


def backends(session: Session) -> None:
    """One row per op, case and backend."""
    probe_cache.forget(session.device)
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


def deep(session: Session) -> None:
    """Every kernel in every configuration on one random input of each case, as `octavo doctor --deep` does."""
    for index, check in enumerate(checks(session.device)):
        if session.tiny and index:
            break
        session.attempt(
            {"stage": "deep", "case": f"{check.op} {check.case}"}, functools.partial(compared, session, [check], 0)
        )


def main(arguments: list[str]) -> None:
    """Check, print a row at a time, write `results/<device>/probe.json`."""
    session = begin("probe", parser("probe", __doc__, EXAMPLES).parse_args(arguments), arguments)
    ceilings.measure(session)
    backends(session)
    deep(session)
    wrong = sum("error" in row or "WRONG" in row.get("result", "") for row in session.rows)
    session.facts["wrong"] = wrong
    print(f"{len(session.rows)} checks, {wrong} of them wrong")
    session.finish()
