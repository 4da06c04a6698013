import dataclasses

import pytest

from octavo.numerics import LEVELS, RECIPES, Decision, Plan, Precision, Recipe
from octavo.numerics.plan import PlanRow


@pytest.mark.parametrize("name", RECIPES)
def test_json_round_trips(name):
    assert Recipe.from_json(RECIPES[name].to_json()) == RECIPES[name]


def test_what_folds_and_is_gathered_in_fp8_follows_from_the_granularity():
    assert {n: (r.folds_w, r.folds_x, r.shared_grad_cast, r.supports_fp8_gather) for n, r in RECIPES.items()} == {
        "rowwise": (True, True, False, True),
        "rowwise_equalized": (True, True, False, True),
        "tensorwise": (False, False, True, True),
        "rowwise_hp_wgrad": (True, False, False, True),
        "blockwise": (False, False, False, False),
        "mxfp8": (False, False, False, False),
    }


def test_half_a_wgrad_is_refused():
    with pytest.raises(ValueError, match="both wgrad_g and wgrad_x, or neither"):
        dataclasses.replace(RECIPES["rowwise"], wgrad_g=None)


def test_plan_rows_are_the_decisions_in_order_and_json_round_trips():
    plan = Plan({
        "b": Decision(recipe=RECIPES["rowwise"], reason="1.5×", gain=1.5),
        "a": Decision(recipe=None, reason="narrow", gain=1.0),
        "norm": Decision(recipe=None, reason="norm", activation_storage="norm"),
    })  # fmt: skip
    assert plan.rows == (
        PlanRow(name="b", converted=True, recipe="rowwise", reason="1.5×", gain=1.5),
        PlanRow(name="a", converted=False, recipe=None, reason="narrow", gain=1.0),
        PlanRow(name="norm", converted=False, recipe=None, reason="norm", gain=None),
    )
    read = Plan.from_json(plan.to_json())
    assert dict(read.decisions) == dict(plan.decisions) and read.converted == ["b"]
    with pytest.raises(ValueError, match="not a plan in JSON"):
        Plan.from_json('{"layers": []}')


def test_precision_levels_and_switches():
    assert Precision.level("bf16").matmul == "bf16"
    assert Precision.level("fp8", recipe="mxfp8") == Precision(matmul="fp8", recipe="mxfp8")
    assert set(LEVELS) == {"bf16", "fp8", "fp8+activations", "fp8+activations+optimizer"}
    assert Precision.level("fp8+activations") == Precision(matmul="fp8", activations="fp8")
    everything = Precision(matmul="fp8", activations="fp8", states="fp8", master="remainder")
    assert Precision.level("fp8+activations+optimizer") == everything
    assert [Precision.level(name).label for name in LEVELS] == [
        "bf16", "fp8 rowwise", "fp8+activations rowwise", "fp8+activations+optimizer rowwise",
    ]  # fmt: skip
    assert Precision(matmul="bf16", states="fp8").label == "bf16+optimizer"
    for alias, name in {"O1": "fp8", "O1+act": "fp8+activations", "O1+act+opt": "fp8+activations+optimizer"}.items():
        assert Precision.level(alias) == Precision.level(name)
    for wrong, message in (
        ({"states": "fp4"}, r"states is 'fp32' or 'fp8'; got 'fp4' \(did you mean 'fp8'\?\)"),
        ({"master": "reminder"}, "master is 'fp32', 'remainder' or 'none'; got 'reminder'.*'remainder'"),
        ({"matmul": "f8"}, "matmul is 'bf16' or 'fp8'; got 'f8'"),
        ({"recipe": "mxfp9"}, "did you mean 'mxfp8'"),
        ({"activations": "fuse"}, "activations is 'bf16', 'fused' or 'fp8'; got 'fuse' .*'fused'"),
    ):
        with pytest.raises(ValueError, match=message):
            Precision(**wrong)
    with pytest.raises(ValueError, match=r"unknown precision level 'fp8\+act' \(did you mean 'fp8\+activations'\?\)"):
        Precision.level("fp8+act")
