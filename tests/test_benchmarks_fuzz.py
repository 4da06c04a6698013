"""The fuzzer: finds nothing where nothing is wrong, finds injected faults, and shrinks what it finds."""

import json
from functools import partial

import pytest
from benchmarks.fuzz import check, draw, ranks
from benchmarks.fuzz.draw import KINDS
from benchmarks.fuzz.runner import corpus, described, main, shrink, size, smallest

from injected_faults import INJECTED_FAULTS

CASES = {"activations": 30, "linear": 40, "optimizer": 40, "comm": 20, "wrappers": 5, "experts": 20}
run = partial(check, seconds=120.0)  # other tests may run beside


@pytest.fixture(scope="module", autouse=True)
def no_processes_left():
    yield
    ranks.POOL.kill()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "experts")) for kind in KINDS])
def test_nothing_is_found(kind):
    outcomes = [(case, run(case)) for case in (draw(11, i, kind) for i in range(CASES[kind]))]
    failures = [described(kind, case, outcome) for case, outcome in outcomes if outcome.failed]
    assert not failures, "".join(failures)
    assert sum(outcome.status == "pass" for _, outcome in outcomes) >= 0.8 * len(outcomes)


@pytest.mark.parametrize("entry", corpus(), ids=lambda entry: entry["note"])
def test_corpus(entry):
    """Cases once found."""
    outcome = run(entry["case"])
    assert not outcome.failed, outcome


def test_cases_depend_on_seed_and_index_alone():
    assert [draw(3, i) for i in range(50)] == [draw(3, i) for i in range(50)]
    assert {draw(3, i)["kind"] for i in range(300)} == set(KINDS)
    case = draw(3, 7)
    assert json.loads(json.dumps(case)) == case
    assert draw(3, 7) != draw(4, 7) and draw(3, 7) != draw(3, 8)


def test_shrinking_keeps_what_the_failure_needs():
    case = {
        "kind": "activations", "seed": 5, "length": 33, "width": 64,
        "parts": [{"op": "mlp"}, {"op": "residual", "of": {"op": "gate", "form": "beta", "act": "gelu"}}],
    }  # fmt: skip

    def fails(case):
        return "beta" in json.dumps(case) and case.get("length", 4) > 16

    small = shrink(case, fails)
    assert small == {"kind": "activations", "length": 17, "parts": [{"op": "gate", "form": "beta"}]}


def find(fault):
    """The first case that fails with the defect and passes without it."""
    for index in range(fault.draws):
        case = draw(0, index, fault.kind)
        if not fault.concerns(json.dumps(case)):
            continue
        outcome = with_fault(fault, case)
        expected = outcome.failed and fault.label in outcome.label and not outcome.label.startswith("error")
        if expected and run(case).status == "pass":
            return case, outcome
    raise AssertionError(f"not found in {fault.draws} cases")


def with_fault(fault, case):
    if fault.on_ranks:
        ranks.DEFECTS.append(fault.defect)
        try:
            return run(case)
        finally:
            ranks.DEFECTS.clear()
    with fault.defect():
        return run(case)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * p.slow) for n, p in INJECTED_FAULTS.items()]
)
def test_injected_faults_are_found(name):
    case, outcome = find(INJECTED_FAULTS[name])
    assert outcome.label and outcome.message, (case, outcome)


def test_an_injected_fault_shrinks_to_a_few_keys(capsys):
    fault = INJECTED_FAULTS["a mask forgotten"]
    case, outcome = find(fault)
    with fault.defect():
        small = smallest(case, outcome.label)
        assert check(small).failed and size(small) <= min(size(case), 25)
        with pytest.raises(SystemExit, match="1"):
            main(["--case", json.dumps(small)])
    assert "fail: forward" in capsys.readouterr().out


def test_a_case_over_time_is_cut():
    outcome = check({"kind": "linear", "rows": 3000, "inputs": 3000, "outputs": 3000}, seconds=0.05)
    assert outcome.status == "cut" and "0.05 s" in outcome.message
