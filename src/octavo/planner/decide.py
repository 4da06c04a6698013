"""Which linears of a model compute in FP8, in what recipe, and what that gains: by predicted cost, one by one.

The fastest recipe is taken if it beats bf16 by `WORTH`; among recipes within `EQUAL` of the fastest the first of
`RECIPES`, whose order is that of preference, so that a model does not end up with three recipes for a percent. Rules of
thumb (few tokens, narrow outputs) decide nothing: they only say in words what the figures say.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.numerics.plan import Decision
from octavo.numerics.recipe import RECIPES, Recipe, get_recipe
from octavo.planner.devices import Gpu
from octavo.planner.roofline import Cost, Linear, bf16_linear, fp8_linear, fp8_rate, quantizing, triton_alone

WORTH = 1.02
"""Least predicted speed-up of a layer for which it is converted."""

EQUAL = 1.03
"""Recipes within this factor of the fastest count as equally fast."""

NARROW = 1024
"""in_features or out_features below which a reason calls a layer narrow; FEW the same for tokens."""
FEW = 1024


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one linear is to compute in, and the predictions behind it.

    Attributes:
        decision: Recipe, reason and gain.
        bf16: Seconds of all its calls in bf16, forward and backward.
        planned: The same as decided.
    """

    decision: Decision
    bf16: float
    planned: float


def candidates(recipe: str | Recipe) -> tuple[Recipe, ...]:
    """The recipes to choose from: all with scales just in time for `"auto"`, else the one."""
    return tuple(r for r in RECIPES.values() if not r.history) if recipe == "auto" else (get_recipe(recipe),)


def decide(gpu: Gpu, calls: Sequence[Linear], recipes: Sequence[Recipe], *, eager: bool) -> Verdict:
    """Decide one linear by what all its calls in a step cost.

    Args:
        gpu: Where it will run.
        calls: Its calls in one forward, at least one.
        recipes: To choose from, in the order of preference.
        eager: Count the host's time per launch, where that is longer.
    """
    plain = total([bf16_linear(gpu, call) for call in calls])
    bf16 = sum(bf16_linear(gpu, call).wall(gpu, eager=eager) for call in calls)
    usable = [recipe for recipe in recipes if fp8_rate(gpu, recipe) is not None]
    if not usable:
        reason = (
            f"{gpu.name} has no FP8 matrix units: bf16"
            if not gpu.fp8_tflops
            else f"{', '.join(r.name for r in recipes)} would be emulated on {gpu.name}: bf16"
        )
        return Verdict(decision=Decision(recipe=None, reason=reason, gain=1.0), bf16=bf16, planned=bf16)
    times = {r.name: sum(fp8_linear(gpu, call, r).wall(gpu, eager=eager) for call in calls) for r in usable}
    fastest = min(times.values())
    recipe = next(r for r in usable if times[r.name] <= fastest * EQUAL)
    gain = bf16 / times[recipe.name]
    chosen = total([fp8_linear(gpu, call, recipe) for call in calls])
    numbers = (
        f"{_sizes(calls)}, bf16 {_ms(bf16)}{_known(plain, bf16)}, {recipe.name} "
        f"{_ms(times[recipe.name])}{_known(chosen, times[recipe.name])}, "
        f"of it quantizing {_ms(sum(_quantizing(gpu, call, recipe) for call in calls))}"
    )
    if times[recipe.name] > chosen.total:
        numbers += "; the host's launches take that long"
    if triton_alone(gpu, recipe) is not None:
        numbers += "; PyTorch has no such products there: Triton's, at an assumed rate"
    if gain >= WORTH:
        return Verdict(
            decision=Decision(recipe=recipe, reason=f"{gain:.2f}×: {numbers}", gain=gain),
            bf16=bf16,
            planned=times[recipe.name],
        )
    reason = f"{recipe.name} would be {gain:.2f}×: {numbers}{_in_words(calls)}"
    return Verdict(decision=Decision(recipe=None, reason=reason, gain=1.0), bf16=bf16, planned=bf16)


def break_even(gpu: Gpu, tokens: int, recipes: Sequence[Recipe], *, eager: bool, largest: int = 16384) -> int | None:
    """Smallest K = N, in steps of 64, from which on FP8 pays at so many tokens; None if it does not up to `largest`."""
    found = None
    for side in range(largest - largest % 64, 0, -64):
        call = Linear(m=tokens, k=side, n=side)
        if decide(gpu, [call], recipes, eager=eager).decision.recipe is None:
            break
        found = side
    return found


def _sizes(calls: Sequence[Linear]) -> str:
    shapes = sorted({(call.m, call.k, call.n) for call in calls})
    return "×".join(map(str, shapes[0])) + (f" and {len(shapes) - 1} others" if len(shapes) > 1 else "")


def _known(cost: Cost, wall: float) -> str:
    """How much of a time was measured, where any of it was and it is no time of the host."""
    share = cost.measured / cost.total if 0 < wall <= cost.total * 1.001 else 0.0
    return "" if not share else " measured" if share > 0.999 else f" ({share:.0%} measured)"


def _quantizing(gpu: Gpu, call: Linear, recipe: Recipe) -> float:
    forward, backward = quantizing(gpu, call, recipe)
    return sum(seconds for seconds, _ in (*forward, *backward))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _in_words(calls: Sequence[Linear]) -> str:
    narrowest = min(min(call.k, call.n) for call in calls)
    fewest = min(call.m for call in calls)
    words = [f"narrow ({narrowest})"] if narrowest < NARROW else []
    words += [f"few tokens ({fewest})"] if fewest < FEW else []
    return f"; {' and '.join(words)}" if words else ""


def total(costs: Sequence[Cost]) -> Cost:
    """Costs added up."""
    return Cost(
        forward=sum(cost.forward for cost in costs),
        backward=sum(cost.backward for cost in costs),
        launches=sum(cost.launches for cost in costs),
        measured=sum(cost.measured for cost in costs),
    )
