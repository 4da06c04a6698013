"""Linears decided by predicted cost, and the reasons that go with it."""

from dataclasses import replace

import pytest

from octavo.numerics import RECIPES, Plan
from octavo.numerics.plan import Decision
from octavo.planner.decide import MIN_SPEEDUP, TIE_FACTOR, break_even, candidates, decide
from octavo.planner.devices import DEVICES
from octavo.planner.roofline import LinearCall, fp8_linear

H100, ALL = DEVICES["h100"], candidates("auto")


def decide_call(m, k, n, gpu=H100, recipes=ALL, eager=False, **flags):
    return decide(gpu, [LinearCall(m=m, k=k, n=n, **flags)], recipes, eager=eager)


def test_a_large_linear_gains_and_says_how_much():
    decided = decide_call(16384, 4096, 14336)
    assert decided.decision.recipe is RECIPES["rowwise"]
    assert decided.decision.gain == pytest.approx(decided.bf16 / decided.planned)
    assert 1.4 < decided.decision.gain < 1.7
    for text in (f"{decided.decision.gain:.2f}×: 16384×4096×14336", "bf16 7.", "rowwise ", "quantizing"):
        assert text in decided.decision.reason


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((16384, 4096, 8), "narrow (8)"),  # a LoRA rank
        ((16384, 4096, 128), "narrow (128)"),
        ((16384, 4096, 2), "narrow (2)"),  # a classifier
        ((1, 4096, 4096), "few tokens (1)"),
        ((512, 512, 512), "narrow (512) and few tokens (512)"),
    ],
)
@pytest.mark.parametrize("device", sorted(DEVICES))
def test_what_would_lose_stays(shape, words, device):
    decided = decide_call(*shape, gpu=DEVICES[device], eager=True)
    assert decided.decision.recipe is None
    assert decided.decision.gain == 1.0 and decided.planned == decided.bf16
    if DEVICES[device].fp8_tflops:
        assert "would be 0." in decided.decision.reason or "would be 1.0" in decided.decision.reason
        assert decided.decision.reason.endswith(words)


def test_automatic_decisions_choose_no_recipe_with_state():
    """Not even one whose measured time is shorter by chance."""
    assert {recipe.name for recipe in ALL} == set(RECIPES) - {"rowwise_equalized"}
    assert decide_call(16384, 4096, 14336, recipes=candidates("rowwise_equalized")).decision.gain > 1.4


def test_cost_decides_and_not_the_rule_of_thumb():
    """Narrow by the rule, and still worth it where the other dimension is large."""
    decided = decide_call(65536, 16384, 768)
    assert decided.decision.recipe is not None
    assert "narrow" not in decided.decision.reason


def test_what_is_emulated_is_not_taken():
    decided = decide_call(16384, 8192, 8192, gpu=DEVICES["a100"])
    assert decided.decision.recipe is None and "no FP8 matrix units" in decided.decision.reason
    decided = decide_call(16384, 8192, 8192, recipes=candidates("mxfp8"))
    assert decided.decision.recipe is None and "mxfp8 is only emulated on H100 SXM" in decided.decision.reason
    assert decide_call(16384, 8192, 8192, gpu=DEVICES["b200"], recipes=candidates("mxfp8")).decision.recipe is not None


def test_the_preferred_recipe_among_equals():
    for shape in ((16384, 4096, 4096), (8192, 8192, 28672)):
        for gpu in (H100, DEVICES["b200"]):
            call = LinearCall(m=shape[0], k=shape[1], n=shape[2])
            chosen = decide_call(*shape, gpu=gpu)
            usable = [r for r in ALL if gpu.native_mx or r.name != "mxfp8"]
            fastest = min(fp8_linear(gpu, call, recipe).total for recipe in usable)
            assert fastest <= chosen.planned <= fastest * TIE_FACTOR


def test_the_host_is_counted_in_eager_code():
    shape = (2048, 1408, 1408)
    assert decide_call(*shape).decision.recipe is not None
    decided = decide_call(*shape, replace(H100, host_us=10), eager=True)
    assert decided.decision.recipe is None and "bound by the host" in decided.decision.reason


@pytest.mark.parametrize("tokens", [2048, 16384])
def test_break_even_is_where_decisions_change(tokens):
    side = break_even(H100, tokens, ALL, eager=False)
    assert side is not None and side % 64 == 0 and 256 < side < 4096
    assert decide_call(tokens, side, side).decision.gain >= MIN_SPEEDUP
    assert decide_call(tokens, side - 64, side - 64).decision.recipe is None
    assert break_even(H100, 16, ALL, eager=False) is None
    assert break_even(DEVICES["a100"], tokens, ALL, eager=False) is None


def test_a_gain_goes_through_json():
    plan = Plan({"a": Decision(recipe=RECIPES["rowwise"], reason="r", gain=1.5), "b": Decision(recipe=None, reason="")})
    assert Plan.from_json(plan.to_json()) == plan
    assert '"gain": 1.5' in plan.to_json() and plan.to_json().count("gain") == 1
