"""The fuzzer: finds nothing where nothing is wrong, finds injected faults, and shrinks what it finds."""

import json
from functools import partial

import pytest
from benchmarks.fuzz import check, first, ranks
from benchmarks.fuzz.draw import KINDS
from benchmarks.fuzz.runner import corpus, described, main

from injected_faults import INJECTED_FAULTS

CASES = {
    "activations": 30, "linear": 40, "optimizer": 40, "comm": 20, "wrappers": 8, "experts": 20, "derivatives": 20,
    "identity": 20, "threads": 10,
}  # fmt: skip
run = partial(check, seconds=120.0)  # other tests may run beside


@pytest.fixture(scope="module", autouse=True)
def no_processes_left():
    yield
    ranks.POOL.kill()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("experts", "wrappers"))) for kind in KINDS]
)
def test_nothing_is_found(kind):
    statuses = []

    def fails(case):
        statuses.append((outcome := run(case)).status)
        return outcome.failed

    found = first(kind, fails, seed=11, draws=CASES[kind], shrink=False)
    assert found is None, described(kind, found, run(found))
    assert statuses.count("pass") >= 0.8 * len(statuses) and len(statuses) >= CASES[kind] / 2


@pytest.mark.parametrize("entry", corpus(), ids=lambda entry: entry["note"])
def test_corpus(entry):
    """Cases once found."""
    outcome = run(entry["case"])
    assert not outcome.failed, outcome


@pytest.mark.parametrize("kind", KINDS)
def test_cases_are_plain_data_and_depend_on_the_seed_alone(kind):
    def drawn(seed):
        cases = []
        first(kind, lambda case: cases.append(case), seed=seed, draws=20)
        return cases

    cases = drawn(3)
    assert cases == drawn(3) != drawn(4)
    assert json.loads(json.dumps(cases)) == cases and {case["kind"] for case in cases} == {kind}


def find(fault, shrink=False):
    """The first case that fails with the defect and passes without it, and how it fails with the defect."""
    outcomes = []

    def fails(case):
        if not fault.concerns(json.dumps(case)):
            return False
        outcomes.append(with_fault(fault, case))
        expected = outcomes[-1].failed and fault.label in outcomes[-1].label
        own = expected and (fault.label or not outcomes[-1].label.startswith("error"))
        return bool(own) and run(case).status == "pass"

    case = first(fault.kind, fails, draws=fault.draws, shrink=shrink)
    assert case is not None, f"not found in {fault.draws} cases"
    return case, outcomes[-1]


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


@pytest.mark.slow
def test_an_injected_fault_shrinks_to_a_few_keys(capsys):
    fault = INJECTED_FAULTS["a mask forgotten"]
    case, _ = find(fault, shrink=True)
    assert len(case["parts"]) == 1 and len(json.dumps(case)) < 120, case
    with fault.defect(), pytest.raises(SystemExit, match="1"):
        main(["--case", json.dumps(case)])
    assert "fail: forward" in capsys.readouterr().out


def test_the_command_shows_what_it_finds_as_a_command(capsys):
    fault = INJECTED_FAULTS["a fold in the wrong order"]
    with fault.defect(), pytest.raises(SystemExit, match="1"):
        main(["--only", "linear", "--minutes", "0.02"])
    shown = capsys.readouterr().out
    case = json.loads(shown.split("python -m benchmarks fuzz --case '")[1].split("'\n")[0])
    assert "failed: linear: " in shown
    with fault.defect():
        assert run(case).failed
    assert not run(case).failed


def test_a_case_over_time_is_cut():
    outcome = check({"kind": "linear", "rows": 3000, "inputs": 3000, "outputs": 3000}, seconds=0.05)
    assert outcome.status == "cut" and "0.05 s" in outcome.message
