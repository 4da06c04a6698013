"""Verdicts, exit codes and the report of comparisons of runs that never ran."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from fake_runs import result
from test_run_report import charts_of, parse, text_of

from octavo.experiments.compare_report import FILES, comparison_rows, longest, to_json, write_comparison
from octavo.experiments.compare_verdict import ArmRuns, compare_arms
from octavo.experiments.curves import Curves
from octavo.train.record.metrics import Losses

STEPS = 100


def curve(start, end, steps=STEPS):
    """A straight loss."""
    series = dict.fromkeys(("lr", "grad_norm", "tokens_per_s", "held_out", "mfu", "peak_memory"), np.ones(steps))
    return Curves(step=np.arange(1, steps + 1), loss=np.linspace(start, end, STEPS)[:steps], **series)


def runs(name, losses, *, diverged=(), ends=None, **changes):
    """An arm with these tail losses, on seeds 1, 2, …; `diverged` at half the steps on some."""
    results, curves = {}, {}
    for seed, loss in enumerate(losses, 1):
        steps = STEPS // 2 if seed in diverged else STEPS
        facts = {"steps": steps, "tokens": 256 * steps, "losses": Losses(first=8.0, final=loss, tail_mean=loss)}
        if seed in diverged:
            facts["stopped"] = "non-finite"
        results[seed] = result(**facts | changes)
        curves[seed] = curve(8.0, ends or loss, steps)
    return ArmRuns(name=name, settings=(), results=results, curves=curves)


BASE = [3.0000712, 3.2999136, 2.9000357]


def gap(*percent):
    return [base + sum(BASE) / 3 * value / 100 for base, value in zip(BASE, percent, strict=True)]


@pytest.mark.parametrize(
    ("gaps", "verdict", "outcome", "words"),
    [
        ((0.1, -0.1, 0.05), "indistinguishable", "pass", r"worse would be detected with about 90 % probability"),
        ((1.0, -1.0, 0.5), "inconclusive", "inconclusive", r"arm is at \+0.17 % of the loss .* beside base"),
        ((2.0, 2.1, 1.9), "worse", "fail", r"worse than base by 2.00 % of the loss \(\+1.5"),
        ((-2.0, -2.1, -1.9), "better", "pass", r"better than base by 2.00 %"),
        ((0.0, 0.0, 0.0), "indistinguishable", "pass", r"not a digit of the losses differs"),
        ((150.0, 0.1, 0.0), "worse", "fail", r"seed 1 ended at 7.6, 2.53 times the loss of base"),
    ],
)
def test_a_verdict_is_that_of_the_losses(gaps, verdict, outcome, words):
    comparison = compare_arms([runs("base", BASE), runs("arm", gap(*gaps))])
    (arm,) = comparison.losses.arms
    assert (arm.verdict, arm.outcome) == (verdict, outcome)
    assert comparison.exit_code == {"pass": 0, "fail": 1, "inconclusive": 3}[outcome]
    assert re.search(words, arm.sentence)
    assert any("do its settings change anything?" in note for note in arm.notes) == (not any(gaps))


@pytest.mark.parametrize(
    ("gaps", "held_out", "code"), [((2.0, 2.1, 1.9), (0.1, -0.1, 0.05), 1), ((0.1, -0.1, 0.05), (2.0, 2.1, 1.9), 1)]
)
def test_held_out_losses_have_a_verdict_of_their_own(gaps, held_out, code, tmp_path):
    arms = [runs("base", BASE), runs("arm", gap(*gaps))]
    for arm, losses in zip(arms, (BASE, gap(*held_out)), strict=True):
        for one, loss in zip(arm.results.values(), losses, strict=True):
            object.__setattr__(one, "held_out", {"loss": loss, "loss_high_precision": 1.0})
    comparison = compare_arms(arms)
    verdicts = [losses.arms[0].verdict for losses in (comparison.losses, comparison.held_out)]
    assert sorted(verdicts) == ["indistinguishable", "worse"]
    assert verdicts[0] == compare_arms([runs("base", BASE), runs("arm", gap(*gaps))]).losses.arms[0].verdict
    assert comparison.exit_code == code and to_json(comparison)["outcome"] == "fail"
    assert to_json(comparison)["held_out"]["arms"]["arm"]["verdict"] == verdicts[1]
    assert {label: values for label, *values in comparison_rows(comparison)}["held-out verdict"] == ["", verdicts[1]]
    write_comparison(comparison, ["", ""], tmp_path)
    assert f"held-out loss: {verdicts[1]}" in (tmp_path / "report.html").read_text()
    object.__setattr__(arms[0].results[1], "held_out", None)
    assert compare_arms(arms).held_out is None


def test_limits_go_through():
    arms = [runs("base", BASE), runs("arm", gap(0.1, -0.1, 0.05))]
    assert compare_arms(arms, margin=0.5).losses.arms[0].outcome == "inconclusive"
    limits = {}, {"confidence": 0.99}, {"max_seeds": 3}
    low = [compare_arms(arms, **options).losses.arms[0].test.low for options in limits]
    assert low[1] < low[0] < low[2]
    beyond = compare_arms(arms, max_seeds=2)
    assert any("planned maximum of 2 seeds" in note for note in beyond.notes) and to_json(beyond)["extended"]
    assert not to_json(compare_arms(arms))["extended"] and to_json(compare_arms(arms))["planned_seeds"] == 40


def test_divergence_is_a_result():
    """Of the arm it is no pass, of all its seeds a failure; seeds on which a run failed are not in the gaps."""
    base = runs("base", BASE)
    comparison = compare_arms([base, runs("arm", BASE, diverged=(2,))])
    (arm,) = comparison.losses.arms
    assert (arm.verdict, comparison.exit_code, arm.failed) == ("inconclusive", 3, (2,))
    assert arm.seeds == (1, 3) and comparison.times[1].steps
    comparison = compare_arms([base, runs("arm", BASE, diverged=(1, 2, 3))])
    assert comparison.exit_code == 1
    assert comparison.losses.arms[0].sentence == "arm is worse than base: it failed on 3 of 3 seeds, base on 0."
    comparison = compare_arms([runs("base", BASE, diverged=(1,)), runs("arm", BASE)])
    assert comparison.losses.arms[0].verdict == "indistinguishable" and comparison.losses.arms[0].seeds == (2, 3)
    assert any(note.startswith("base failed") and "on seed 1." in note for note in comparison.losses.arms[0].notes)
    comparison = compare_arms([runs("base", BASE, diverged=(1, 2)), runs("arm", BASE, diverged=(1,))], margin=1.0)
    losses = comparison.losses.arms[0]
    assert (losses.verdict, comparison.exit_code, losses.test) == ("inconclusive", 3, None)
    assert comparison.loss == BASE[2] and comparison.spread is None


def test_time_to_loss_is_speed_times_steps():
    """Half the baseline's time per step, but its loss falls to 4 where the baseline's falls to 3, so to 4 at 80 %."""
    base = runs("base", [3.0, 3.0], tokens_per_s=1000.0)
    arm = runs("arm", [4.0, 4.0], tokens_per_s=2000.0)
    comparison = compare_arms([base, arm])
    time, its = comparison.times
    assert time.targets == its.targets == pytest.approx((4.06, 4.06), abs=0.1)  # the smoothed end
    assert its.steps[0] in range(98, 101) and time.steps[0] in range(78, 82)
    assert time.seconds == pytest.approx(256 * time.steps[0] / 1000)
    assert its.speed == pytest.approx(2 * time.steps[0] / its.steps[0])
    assert time.speed == 1 and comparison.speeds == (1, 2)


def test_mixed_machines_and_two_seeds_are_said():
    both = compare_arms([runs("base", BASE), runs("arm", BASE, device="NVIDIA H200")]).notes
    assert any("different devices (NVIDIA H200, cpu)" in note for note in both)
    newer = compare_arms([runs("base", BASE), runs("arm", BASE, versions={"torch": "2.14.0"})]).notes
    assert any("different versions of torch: 2.13.0, 2.14.0" in note for note in newer)
    assert any("a third" in note for note in compare_arms([runs("base", BASE[:2]), runs("arm", BASE[:2])]).notes)
    assert not any("a third" in note for note in both)


def test_a_mean_is_of_runs_that_ended():
    series = [(one.step, one.loss) for one in (curve(8, 5, steps=50), curve(8, 3), curve(8, 4))]
    steps, losses = longest(series)
    assert len(steps) == STEPS and [values[-1] for values in losses] == [3, 4]
    assert len(longest(series[:1])[0]) == 50


@pytest.fixture
def settings(make_config):
    return [make_config(run={"steps": STEPS}, precision={"level": level}).to_toml() for level in ("bf16", "fp8")]


def test_the_files_say_what_was_found(settings, tmp_path):
    comparison = compare_arms([runs("base", BASE), runs("arm", gap(2.0, 2.1, 1.9), diverged=(3,))], margin=1.0)
    write_comparison(comparison, settings, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    html = (tmp_path / "report.html").read_text()
    assert parse(html).references == []
    found = comparison.losses.arms[0].sentence, f"{gap(2.0, 2.1, 1.9)[0]:.4f}", "Planned maximum: 40 seeds"
    assert all(words in text_of(html) for words in (*found, "diverged", "Loss above base", "precision.level", "95 %"))
    charts = charts_of(html)
    areas = [trace for chart in charts for trace in chart["data"] if "fill" in trace]
    assert len(areas) == 3  # two losses and a gap
    read = json.loads((tmp_path / "compare.json").read_text())
    assert read == json.loads(json.dumps(to_json(comparison)))
    assert (read["outcome"], read["exit_code"], read["arms"][1]["failed_seeds"]) == ("inconclusive", 3, [3])
    assert read["arms"][1]["losses"]["3"] is None
    assert read["arms"][1]["gaps_percent"]["1"] == pytest.approx(2 * sum(BASE) / 3 / (sum(BASE[:2]) / 2))
    assert set(read["arms"][1]["detectable_percent"]) == {"0.8", "0.9"}


def test_a_comparison_in_which_nothing_ended_has_a_page_too(settings, tmp_path):
    curves = dict.fromkeys((1, 2, 3), curve(8, 3, steps=0))
    arms = [replace(runs(name, BASE, diverged=(1, 2, 3)), curves=curves) for name in "ab"]
    comparison = compare_arms(arms)
    write_comparison(comparison, settings, tmp_path)
    assert "fewer than two pairs of runs of b and a ended" in text_of((tmp_path / "report.html").read_text())
    assert comparison.exit_code == 3
    assert to_json(comparison)["arms"][1]["time_to_loss"] is None
    assert all(len(row) == 3 for row in comparison_rows(comparison))
