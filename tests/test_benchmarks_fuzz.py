"""The fuzzer: finds nothing where nothing is wrong, finds planted defects, and shrinks what it finds."""

import json
from functools import partial

import pytest
from benchmarks.fuzz import check, draw, ranks
from benchmarks.fuzz.console import described, main
from benchmarks.fuzz.draw import KINDS
from benchmarks.fuzz.runner import corpus, smallest
from benchmarks.fuzz.shrink import shrink, size

import planted_defects
from planted_defects import PLANTED

CASES = {"activations": 60, "linear": 60, "optimizer": 60, "comm": 40, "wrappers": 10}
run = partial(check, seconds=120.0)  # other tests may run beside


@pytest.fixture(scope="module", autouse=True)
def no_processes_left():
    yield
    ranks.POOL.kill()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["activations", "linear", "optimizer", "comm", "wrappers"])
def test_nothing_is_found(kind):
    found = [(case, run(case)) for case in (draw(11, i, kind) for i in range(CASES[kind]))]
    failures = [described(kind, case, outcome) for case, outcome in found if outcome.failed]
    assert not failures, "".join(failures)
    assert sum(outcome.status == "pass" for _, outcome in found) >= 0.8 * len(found)


@pytest.mark.parametrize("entry", corpus(), ids=lambda entry: entry["note"])
def test_corpus(entry):
    """Cases once found."""
    found = run(entry["case"])
    assert not found.failed, found


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


def find(plant):
    """The first case that fails with the defect and passes without it."""
    for index in range(plant.draws):
        case = draw(0, index, plant.kind)
        if not plant.concerns(json.dumps(case)):
            continue
        found = with_defect(plant, case)
        expected = found.failed and plant.label in found.label and not found.label.startswith("error")
        if expected and run(case).status == "pass":
            return case, found
    raise AssertionError(f"not found in {plant.draws} cases")


def with_defect(plant, case):
    if plant.on_ranks:
        ranks.DEFECTS.append(plant.defect)
        try:
            return run(case)
        finally:
            ranks.DEFECTS.clear()
    with plant.defect():
        return run(case)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * p.slow) for n, p in PLANTED.items()])
def test_planted_defects_are_found(name):
    case, found = find(PLANTED[name])
    assert found.label and found.message, (case, found)


def test_a_planted_defect_shrinks_to_a_few_keys(capsys):
    plant = PLANTED["a mask forgotten"]
    case, found = find(plant)
    with plant.defect():
        small = smallest(case, found.label)
        assert check(small).failed and size(small) <= min(size(case), 25)
        with pytest.raises(SystemExit, match="1"):
            main(["--case", json.dumps(small)])
    assert "fail: forward" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_command_counts_what_it_draws(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.fuzz.console.corpus", lambda only: [])
    with pytest.raises(SystemExit, match="0"):
        main(["--cases", "5", "--only", "linear", "--out", str(tmp_path / "out.json")])
    assert "linear            5" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["failures"] == []
    with planted_defects.finite_input(), pytest.raises(SystemExit, match="1"):
        main(["--cases", "80", "--only", "linear", "--out", str(tmp_path / "out.json")])
    assert "python -m benchmarks fuzz --case" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["failures"][0]["shrunk"]["bad"]


def test_a_case_over_time_is_cut():
    outcome = check({"kind": "linear", "rows": 3000, "inputs": 3000, "outputs": 3000}, seconds=0.05)
    assert outcome.status == "cut" and "0.05 s" in outcome.message
