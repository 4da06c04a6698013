"""Plans: what their rows say."""

from octavo.numerics import RECIPES, Plan
from octavo.numerics.plan import Decision, PlanRow


def test_rows_are_the_decisions_in_order():
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
    assert Plan.from_json(plan.to_json()).rows == plan.rows
