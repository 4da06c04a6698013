"""Decide by predicted cost which linear layers of a model compute in FP8, and in which recipe.

A layer gets the fastest recipe if that beats bf16 by `MIN_SPEEDUP`. Recipes within `TIE_FACTOR` of the fastest count as
equally fast, and the first of them in `RECIPES`, which lists recipes by preference, wins: a model should not mix three
recipes to gain a percent. Rules of thumb (few tokens, narrow outputs) decide nothing; they only explain the figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.numerics.plan import Decision
from octavo.numerics.recipe import RECIPES, Recipe, get_recipe
from octavo.planner.devices import Gpu
from octavo.planner.roofline import (
    Cost,
    LinearCall,
    bf16_linear,
    fp8_linear,
    fp8_rate,
    quantization_times,
    triton_reason,
)

MIN_SPEEDUP = 1.02  # Convert a layer only if its predicted speed-up is at least this

TIE_FACTOR = 1.10
"""Recipes within this factor of the fastest count as equally fast: predictions of linears on an H100 are no surer
(docs/planner.md)."""

NARROW_FEATURES = 1024  # A reason calls a layer narrow if in_features or out_features are below this
FEW_TOKENS = 1024  # A reason mentions few tokens below this


@dataclass(frozen=True, kw_only=True)
class LinearDecision:
    """The decision for one linear layer, and the predictions behind it."""

    decision: Decision  # Recipe, reason and gain
    bf16: float  # Seconds of all calls in bf16, forward and backward
    planned: float  # Seconds of all calls as decided


def candidates(recipe: str | Recipe) -> tuple[Recipe, ...]:
    """Return the recipes to choose from: for `"auto"` every one without state, else the given one."""
    # Channel scales (`equalization`) are for accuracy: a recipe that has them is never faster than the same without.
    if recipe != "auto":
        return (get_recipe(recipe),)
    return tuple(r for r in RECIPES.values() if not r.equalization)


def decide(gpu: Gpu, calls: Sequence[LinearCall], recipes: Sequence[Recipe], *, eager: bool) -> LinearDecision:
    """Decide for one linear layer by the cost of all its calls in a step."""
    bf16_costs = [bf16_linear(gpu, call) for call in calls]
    bf16_cost, bf16 = total(bf16_costs), sum(cost.wall(gpu, eager=eager) for cost in bf16_costs)
    usable = [recipe for recipe in recipes if fp8_rate(gpu, recipe) is not None]
    if not usable:
        reason = (
            f"{gpu.name} has no FP8 matrix units: bf16"
            if not gpu.fp8_tflops
            else f"{', '.join(r.name for r in recipes)} is only emulated on {gpu.name}: bf16"
        )
        return LinearDecision(decision=Decision(recipe=None, reason=reason, gain=1.0), bf16=bf16, planned=bf16)
    costs = {r.name: [fp8_linear(gpu, call, r) for call in calls] for r in usable}
    times = {name: sum(cost.wall(gpu, eager=eager) for cost in each) for name, each in costs.items()}
    fastest = min(times.values())
    recipe = next(r for r in usable if times[r.name] <= fastest * TIE_FACTOR)
    gain = bf16 / times[recipe.name]
    chosen = total(costs[recipe.name])
    numbers = (
        f"{_sizes(calls)}, bf16 {_ms(bf16)}{_measured_share(bf16_cost, bf16)}, {recipe.name} "
        f"{_ms(times[recipe.name])}{_measured_share(chosen, times[recipe.name])}, "
        f"of it quantizing {_ms(sum(_quantization_seconds(gpu, call, recipe) for call in calls))}"
    )
    if times[recipe.name] > chosen.total:
        numbers += "; bound by the host"
    if triton_reason(gpu, recipe) is not None:
        numbers += "; PyTorch has no such product on this GPU: Triton's, at an assumed rate"
    if gain >= MIN_SPEEDUP:
        return LinearDecision(
            decision=Decision(recipe=recipe, reason=f"{gain:.2f}×: {numbers}", gain=gain),
            bf16=bf16,
            planned=times[recipe.name],
        )
    reason = f"{recipe.name} would be {gain:.2f}×: {numbers}{_size_remarks(calls)}"
    return LinearDecision(decision=Decision(recipe=None, reason=reason, gain=1.0), bf16=bf16, planned=bf16)


def break_even(gpu: Gpu, tokens: int, recipes: Sequence[Recipe], *, eager: bool, largest: int = 16384) -> int | None:
    """Return the smallest K = N, in steps of 64, from which FP8 pays at this number of tokens; None if none up to
    `largest`.
    """
    smallest = None
    for side in range(largest - largest % 64, 0, -64):
        call = LinearCall(m=tokens, k=side, n=side)
        if decide(gpu, [call], recipes, eager=eager).decision.recipe is None:
            break
        smallest = side
    return smallest


def _sizes(calls: Sequence[LinearCall]) -> str:
    shapes = sorted({(call.m, call.k, call.n) for call in calls})
    return "×".join(map(str, shapes[0])) + (f" and {len(shapes) - 1} others" if len(shapes) > 1 else "")


def _measured_share(cost: Cost, wall: float) -> str:
    """Describe how much of a time was measured; empty if none, or if the host's time dominates."""
    fraction = cost.measured / cost.total if 0 < wall <= cost.total * 1.001 else 0.0
    return "" if not fraction else " measured" if fraction > 0.999 else f" ({fraction:.0%} measured)"


def _quantization_seconds(gpu: Gpu, call: LinearCall, recipe: Recipe) -> float:
    forward, backward = quantization_times(gpu, call, recipe)
    return sum(seconds for seconds, _ in (*forward, *backward))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _size_remarks(calls: Sequence[LinearCall]) -> str:
    narrowest = min(min(call.k, call.n) for call in calls)
    fewest = min(call.m for call in calls)
    words = [f"narrow ({narrowest})"] if narrowest < NARROW_FEATURES else []
    words += [f"few tokens ({fewest})"] if fewest < FEW_TOKENS else []
    return f"; {' and '.join(words)}" if words else ""


def total(costs: Sequence[Cost]) -> Cost:
    """Add up costs."""
    return Cost(
        forward=sum(cost.forward for cost in costs), backward=sum(cost.backward for cost in costs),
        host=sum(cost.host for cost in costs), measured=sum(cost.measured for cost in costs),
    )  # fmt: skip
