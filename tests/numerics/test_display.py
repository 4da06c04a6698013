"""What prompts and notebooks show of plans and reports."""

import torch
from torch import nn

import octavo
from octavo.inspect import Watch
from octavo.numerics.display import MAX_LINES
from octavo.numerics.plan import Decision
from octavo.planner.forecast import Forecast
from octavo.planner.memory_plan import MemoryPlan


def test_a_plan_of_many_unlike_layers_shows_a_screen_of_them() -> None:
    plan = octavo.Plan(
        {f"layer_{a}{b}": Decision(recipe=None, reason="kept") for a in "abcdefghij" for b in "abcdefghij"}
    )
    shown = repr(plan).splitlines()
    assert len(shown) == MAX_LINES
    assert "more lines: print() shows all" in shown[-6]
    assert shown[-1] == "0 of 100 modules compute in FP8"
    assert len(str(plan).splitlines()) == 104


def test_like_layers_share_a_line() -> None:
    plan = octavo.Plan({f"layers.{n}.q": Decision(recipe=octavo.RECIPES["rowwise"], reason="large") for n in range(80)})
    assert repr(plan) == str(plan)
    assert "layers.{0-79}.q  rowwise  large" in repr(plan)


def test_markup_in_names_is_text_in_a_notebook() -> None:
    shown = octavo.Plan({"<b>": Decision(recipe=None, reason="a < b")})._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "a &lt; b" in shown
    assert "<b>" not in shown


def test_results_show_their_tables() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    memory = octavo.inspect.memory(model, {"input": torch.ones(4, 256)})
    results = [octavo.convert(model, verbose=False) and octavo.report(model), memory, Watch(model)]
    results.append(octavo.plan(nn.Sequential(nn.Linear(256, 256)), (torch.ones(4, 256),), device="h100"))
    assert isinstance(results[-1], Forecast)
    assert isinstance(memory, MemoryPlan)
    for result in results:
        assert repr(result) == str(result)
        assert result._repr_html_().startswith("<pre")
    assert repr(Watch(model)) == "Watch: step 0, not sampled"
