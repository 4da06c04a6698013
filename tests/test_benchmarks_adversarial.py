"""The adversarial benchmark: its cases break what they say and nothing else, its document is that of its results, and
faults put into a model are named.
"""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from benchmarks import adversarial, adversarial_document, adversarial_faults
from benchmarks.adversarial_cases import CASES
from benchmarks.adversarial_document import (
    BASELINE,
    FP32,
    RECIPES,
    WITH_AUTOPILOT,
    WITHIN,
    WITHOUT_REPEATS,
    WORSE,
    gaps,
    verdict,
)
from benchmarks.adversarial_task import BYTES, Gated, batch

import octavo
from octavo.inspect import Watch
from octavo.inspect.findings import Thresholds, findings

COMMITTED = adversarial.RESULTS / "cpu" / "adversarial.json"
ARMS = (BASELINE, FP32, *RECIPES, WITH_AUTOPILOT, WITHOUT_REPEATS)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(content):
    """What is promised: the recipes break or hold as each case says, and the autopilot rescues every one."""
    rows = content["rows"]
    for name, case in CASES.items():
        for arm in ARMS:
            assert len(gaps(rows, name, arm)) == 3, (name, arm)
        assert max(map(abs, gaps(rows, name, FP32))) <= WITHIN / 2, name
        for arm in case.breaks:
            assert min(gaps(rows, name, arm)) > WORSE, (name, arm)
        for arm in (*case.holds, WITH_AUTOPILOT):
            assert max(gaps(rows, name, arm)) <= WITHIN, (name, arm)


def test_the_results_kept_hold_the_promises():
    check(json.loads(COMMITTED.read_text()))


def test_every_recipe_is_an_arm_and_some_case_breaks_plain_tensorwise():
    assert set(RECIPES) == set(octavo.RECIPES)
    assert any("tensorwise" in case.breaks for case in CASES.values())
    for case in CASES.values():
        assert not set(case.breaks) & set(case.holds)
        assert "arXiv" in case.why


def test_the_document_is_that_of_the_results():
    again = "run `python -m benchmarks adversarial --document`"
    content = json.loads(COMMITTED.read_text())
    assert adversarial.DOCUMENT.read_text() == adversarial_document.document(content), again


def test_gaps_are_taken_within_a_seed_and_what_diverged_is_infinitely_worse():
    rows = [
        {"case": "a", "arm": arm, "seed": seed, "tail_mean": loss, "diverged": loss is None}
        for (arm, seed), loss in {
            (BASELINE, 1): 2.0, (BASELINE, 2): 4.0, ("rowwise", 1): 2.1, ("rowwise", 2): 3.9,
            ("tensorwise", 1): None, ("tensorwise", 2): 5.0,
        }.items()
    ]  # fmt: skip
    assert gaps(rows, "a", "rowwise") == pytest.approx([5.0, -2.5])
    assert gaps(rows, "a", "tensorwise") == pytest.approx([math.inf, 25.0])


@pytest.mark.parametrize(
    ("loss_gaps", "word"),
    [
        ([math.inf, math.inf], "diverges"), ([math.inf, 4.0], "broken"), ([3.1, 4.0], "broken"),
        ([2.9, 40.0], "lags"), ([0.1, 1.1], "lags"), ([0.1, -1.1], "holds"), ([1.0, -0.5], "holds"),
    ],
)  # fmt: skip
def test_verdicts(loss_gaps, word):
    assert verdict(loss_gaps) == word


TINY = {"outlier_channels": 3, "swiglu_growth": 50, "exploding_norms": 25}
"""Steps after which a case whose activations break tensorwise shows it; rowwise is better in each."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_tensorwise_is_worse_than_rowwise_where_that_is_claimed(name, monkeypatch):
    monkeypatch.setattr("benchmarks.adversarial_cases.PRETRAINING", 60)
    case = replace(CASES[name], steps=TINY[name])
    assert "tensorwise" in case.breaks
    rows = [adversarial.measured(case, arm, 1, 128) for arm in (BASELINE, "tensorwise", "rowwise")]
    (bad,), (good,) = (gaps(rows, name, arm) for arm in ("tensorwise", "rowwise"))
    assert bad > 2.0, (bad, good)
    assert abs(good) < bad / 2, (bad, good)
    assert rows[1]["worst"]["underflow"] > 0.3 and rows[1]["worst"]["sqnr"] > 20


def test_spread_gradients_leave_columns_of_the_first_weight_without_a_gradient():
    case = CASES["spread_gradients"]
    context, target = batch(1, 1)
    present = torch.nn.functional.one_hot(context[:, :2], BYTES).sum(0).flatten() > 0
    lost = {}
    for arm in (BASELINE, "tensorwise", "rowwise", "rowwise_hp_wgrad"):
        model = case.build(1, case.strength)
        adversarial.ARMS[arm](model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(context).float(), target, reduction="none")
        (loss * case.weights(context, case.strength)).mean().backward()
        columns = model.stem.weight.grad.abs().amax(0)[present]
        lost[arm] = (columns == 0).float().mean().item()
    assert lost[BASELINE] == lost["rowwise_hp_wgrad"] == 0.0
    assert 0.1 < lost["tensorwise"] < lost["rowwise"]


@pytest.mark.slow
def test_outliers_alone_and_small_gradients_break_nothing(monkeypatch):
    monkeypatch.setattr("benchmarks.adversarial_cases.PRETRAINING", 60)
    for name in ("loud_channels", "tiny_gradients"):
        case = replace(CASES[name], steps=12)
        rows = [adversarial.measured(case, arm, 1, 128) for arm in (BASELINE, "tensorwise")]
        (gap,) = gaps(rows, name, "tensorwise")
        assert abs(gap) < 1.0, name


def test_the_autopilot_takes_a_step_again_in_which_it_moved_a_layer(monkeypatch):
    case = replace(CASES["exploding_norms"], steps=3)
    row = adversarial.measured(case, WITH_AUTOPILOT, 1, 128)
    assert row["moves"][0].startswith("step 1: ")
    taken = []
    real = adversarial.Piloted.step

    def counted(self, number, *, force):
        taken.append(number)
        return real(self, number, force=force)

    monkeypatch.setattr(adversarial.Piloted, "step", counted)
    adversarial.measured(case, WITH_AUTOPILOT, 1, 128)
    assert taken[:2] == [1, 1] and taken[-1] == 3
    taken.clear()
    adversarial.measured(case, WITHOUT_REPEATS, 1, 128)
    assert taken == [1, 2, 3]


def test_batches_are_of_seed_and_step_alone():
    first, again, other = batch(1, 5), batch(1, 5), batch(1, 6)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert first[0].shape == (256, 8) and first[0].max() < BYTES


def test_a_change_of_gains_is_the_same_function(monkeypatch):
    monkeypatch.setattr("benchmarks.adversarial_cases.PRETRAINING", 5)
    loud, quiet = (CASES[name].build(9, CASES[name].strength) for name in ("loud_channels", "outlier_channels"))
    context, _ = batch(1, 1, 64)
    torch.testing.assert_close(loud(context), quiet(context), rtol=1e-3, atol=1e-4)


# --- faults ---


def stepped(model, number, watch):
    context, target = batch(1, number, 64)
    with watch.step(number, force=True), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.nn.functional.cross_entropy(model(context).float(), target).backward()
    return watch.rows


@pytest.fixture
def model():
    torch.manual_seed(0)
    return octavo.convert(Gated(), "tensorwise", skip=["head"], verbose=False)


def of(rows, layer, operand):
    (row,) = (row for row in rows if (row.layer, row.operand) == (layer, operand))
    return row


def test_outliers_reach_the_layer_and_no_other(model):
    watch = Watch(model, every=0)
    before = stepped(model, 1, watch)
    with adversarial_faults.outliers(model, "down", channels=(3, 7)) as fault:
        during = stepped(model, 1, watch)
    after = stepped(model, 1, watch)
    assert fault.steps == 1
    assert of(during, "down", "x").amax > 100 * of(before, "down", "x").amax
    assert of(during, "gate", "x").amax == of(before, "gate", "x").amax
    assert of(after, "down", "x").amax == of(before, "down", "x").amax


def test_gradients_are_tiny_at_one_output_and_before_it(model):
    watch = Watch(model, every=0)
    before = stepped(model, 1, watch)
    with adversarial_faults.tiny_gradients(model, "gate"):
        during = stepped(model, 1, watch)
    ratio = of(during, "gate", "wgrad_g").amax / of(before, "gate", "wgrad_g").amax
    assert ratio == pytest.approx(1e-12, rel=0.01)
    assert of(during, "up", "wgrad_g").amax == of(before, "up", "wgrad_g").amax


def test_an_infinity_comes_in_its_step_and_is_named(model):
    watch = Watch(model, every=0)
    with adversarial_faults.infinity(model, "down", step=2):
        for number in (1, 2, 3):
            crossings = findings(stepped(model, number, watch), Thresholds(sqnr=-math.inf, underflow=1.0))
            named = [(finding.step, finding.layer, finding.operand, finding.what) for finding in crossings]
            assert named == ([(2, "down", "x", "nonfinite")] if number == 2 else [])


def test_a_nan_comes_on_its_rank_only(model):
    watch = Watch(model, every=0)
    for rank, count in ((0, 1), (1, 0)):
        with adversarial_faults.nan_on_rank(model, "down", rank=rank):
            assert of(stepped(model, 1, watch), "down", "x").nonfinite == count


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds is 1 or more; got 0"),
        (["--cases", "swiglu"], "invalid choice: 'swiglu'"),
        (["--arms", "fp4"], "invalid choice: 'fp4'"),
    ],
)
def test_mistakes_are_named(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        adversarial.main(words)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
def test_cases_break_and_hold_as_promised_when_made_anew(tmp_path):
    adversarial.main(["--out", str(tmp_path)])
    check(json.loads((tmp_path / "adversarial.json").read_text()))


def test_results_of_other_cases_stay_in_the_file(tmp_path, monkeypatch, capsys):
    for name in ("tiny_gradients", "swiglu_growth"):
        monkeypatch.setitem(CASES, name, replace(CASES[name], steps=2))
        adversarial.main(["--out", str(tmp_path), "--cases", name, "--seeds", "1", "--arms", "tensorwise"])
    rows = json.loads((tmp_path / "adversarial.json").read_text())["rows"]
    assert [(row["case"], row["arm"]) for row in rows] == [
        (case, arm) for case in ("swiglu_growth", "tiny_gradients") for arm in (BASELINE, "tensorwise")
    ]
