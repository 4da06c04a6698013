import pytest
from fake_runs import result
from hypothesis import given
from hypothesis import strategies as st

from octavo.experiments.verdict import ONE_SEED, PredictedSpeed, verdict
from octavo.train.record.metrics import Losses

FP8 = "fp8 rowwise"
losses = st.floats(0.05, 20, allow_nan=False)


@given(a=losses, b=losses)
def test_swapping_the_arms_flips_the_gap_and_inverts_the_ratios(a, b):
    bf16, fp8 = result(tail=a), result(FP8, tail=b)
    there, back = verdict(bf16, fp8), verdict(fp8, bf16)
    assert there.tail_gap == -back.tail_gap == b - a
    assert there.final_gap == -back.final_gap
    assert there.tail_gap_percent * back.tail_gap_percent <= 0
    assert there.speed_ratio * back.speed_ratio == pytest.approx(1)
    assert there.memory_ratio * back.memory_ratio == pytest.approx(1)
    assert (there.baseline, there.candidate) == (back.candidate, back.baseline) == ("BF16", "FP8 rowwise")


@given(a=losses, b=losses)
def test_the_status_is_decided_by_the_gap_alone(a, b):
    pair_verdict = verdict(result(tail=a), result(FP8, tail=b))
    percent = 100 * (b - a) / a
    assert pair_verdict.tail_gap_percent == pytest.approx(percent)
    assert pair_verdict.status == ("within" if abs(percent) <= 1 else "above" if b > a else "below")
    assert f"{b:.4f} against {a:.4f}" in pair_verdict.sentence
    assert f"{percent:+.2f} %" in pair_verdict.sentence


@pytest.mark.parametrize(
    ("bf16", "fp8", "names", "status"),
    [(3.2, None, "FP8 rowwise", "above"), (None, 3.2, "BF16", "none"), (None, None, "BF16 and FP8 rowwise", "none")],
)
def test_a_held_out_loss_that_is_not_finite_is_named(bf16, fp8, names, status):
    """Whatever the loss in training; without a sentence it would read as if none had been measured."""
    pair_verdict = verdict(result(held_out={"loss": bf16}), result(FP8, held_out={"loss": fp8}))
    assert pair_verdict.held_out_sentence == f"The held-out loss of {names} is not finite at the end."
    assert (pair_verdict.held_out_status, pair_verdict.held_out_gap) == (status, None)


def test_the_held_out_loss_has_a_sentence_of_its_own():
    pair_verdict = verdict(result(tail=3.0, held_out={"loss": 3.2}), result(FP8, tail=3.0, held_out={"loss": 3.3}))
    assert (pair_verdict.status, pair_verdict.held_out_status) == ("within", "above")
    assert (
        "held-out loss is not within 1 % of BF16's at the end: it is higher, 3.3000" in pair_verdict.held_out_sentence
    )
    assert "3.0000 against 3.0000" in pair_verdict.sentence
    without = verdict(result(held_out={"loss": 3.2}), result(FP8, held_out={"accuracy": 0.5}))
    assert without.held_out_sentence == "" and without.held_out_gap is None


def test_few_steps_are_no_claim():
    pair_verdict = verdict(result(tail=3.0, steps=12), result(FP8, tail=3.001, steps=12))
    assert pair_verdict.status == "none" and pair_verdict.tail_gap == pytest.approx(0.001)
    assert pair_verdict.sentence.startswith("No verdict: 12 steps are too few, 100 are needed.")
    assert "+0.03 %" in pair_verdict.sentence
    assert "within" not in pair_verdict.sentence


def test_a_cpu_is_no_speed_claim_and_a_gpu_is_named():
    (on_cpu,) = [note for note in verdict(result(), result(FP8)).notes if "tokens/s" in note]
    assert "0.40 ×" in on_cpu and "emulates" in on_cpu and "nothing about the speed on a GPU" in on_cpu
    of_gpu = verdict(result(device="NVIDIA H200"), result(FP8, device="NVIDIA H200", tokens_per_s=1300.0)).notes
    (on_gpu,) = [note for note in of_gpu if "tokens/s" in note]
    assert "1.30 ×" in on_gpu and "NVIDIA H200" in on_gpu and "emulated" not in on_gpu


def test_memory_skipped_steps_and_the_single_seed_are_always_said():
    notes = verdict(result(), result(FP8, skipped_steps=3, saved_bytes_per_token=12_000.0)).notes
    assert any("1.20 × BF16's bytes" in note for note in notes)
    assert any("0.34 × BF16's memory: 4.1 against 12.0 bytes per parameter" in note for note in notes)
    assert any("skipped 3 of 100 steps" in note for note in notes)
    assert notes[-1] == ONE_SEED


def test_a_prediction_is_marked_as_one():
    prediction = PredictedSpeed(gain=1.234, where="a model on 8 GPUs")
    pair_verdict = verdict(result(), result(FP8), prediction)
    assert "Predicted, not measured: 1.23 × BF16's speed for a model on 8 GPUs." in pair_verdict.notes
    assert pair_verdict.to_json()["prediction"] == {"gain": 1.234, "where": "a model on 8 GPUs"}
    assert not any("Predicted" in note for note in verdict(result(), result(FP8)).notes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stopped": "non-finite", "steps": 17}, "FP8 rowwise stopped after 17 steps"),
        ({"losses": None}, "FP8 rowwise has no step with a finite loss"),
        ({"steps": 90}, "BF16 trained for 100 steps and FP8 rowwise for 90"),
        ({"tokens": 1}, "BF16 trained for 25,600 tokens and FP8 rowwise for 1"),
        ({"losses": Losses(first=1.0, final=0.0, tail_mean=0.0)}, "FP8 rowwise's loss is 0"),
    ],
)
def test_runs_that_cannot_be_compared_get_no_verdict(changes, reason):
    for pair in ((result(), result(FP8, **changes)), (result(FP8, **changes), result())):
        pair_verdict = verdict(*pair)
        assert pair_verdict.status == "none" and pair_verdict.tail_gap is None
        assert pair_verdict.sentence.startswith("No verdict: ")
    assert reason in verdict(result(), result(FP8, **changes)).sentence
