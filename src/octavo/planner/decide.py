"""Decide by predicted cost which linear layers of a model compute in FP8, and in which recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from octavo.nn.convert import check_unconverted
from octavo.nn.filters import FilterLike, both, of_precision
from octavo.nn.select import HEAD_REASON, default_plan, is_linear
from octavo.numerics.plan import Decision, Plan
from octavo.numerics.precision import AUTO, Precision
from octavo.numerics.recipe import RECIPES, Recipe, get_recipe
from octavo.planner import roofline
from octavo.planner.devices import Gpu

MIN_SPEEDUP = 1.02  # Convert a layer only if its predicted speed-up is at least this

TIE_FACTOR = 1.10
"""Recipes within this factor of the fastest count as equally fast: predictions are no surer (docs/planner.md)."""

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


@dataclass(frozen=True, kw_only=True)
class RuleDecisions:
    """The decisions of the rules about a model, which predicted cost may change."""

    plan: Plan  # The decisions
    linears: tuple[str, ...]  # Names of the linear layers in it, which may also list modules that store activations
    forced_bf16: Mapping[str, str]  # Layers that stay in bf16 whatever they cost, with the reason
    recipes: Sequence[Recipe]  # The recipes to choose from

    def by_cost(
        self, gpu: Gpu, calls: Mapping[str, tuple[roofline.LinearCall, ...]], *, eager: bool
    ) -> tuple[Plan, dict[str, LinearDecision]]:
        """Decide each linear layer by the time of its calls on a GPU; return the plan, and the predictions by layer."""
        times, by_calls = dict[str, LinearDecision](), dict[tuple[roofline.LinearCall, ...], LinearDecision]()
        for name in self.linears:
            own = calls.get(name, ())
            if own not in by_calls:  # layers of equal blocks are decided once
                by_calls[own] = decide(gpu, own, self.recipes, eager=eager) if own else NOT_CALLED
            times[name] = choice = by_calls[own]
            if own and name in self.forced_bf16:
                reason = f"{self.forced_bf16[name]}; by cost: {choice.decision.reason}"
                times[name] = replace(
                    choice, decision=replace(choice.decision, recipe=None, reason=reason, gain=1.0), planned=choice.bf16
                )
        stored = {
            name: replace(choice.decision, activation_storage=self.plan[name].activation_storage)
            for name, choice in times.items()
        }
        return Plan({**self.plan.decisions, **stored}, self.plan.activations), times


NOT_CALLED = LinearDecision(
    decision=Decision(recipe=None, reason="not called by this batch: bf16", gain=1.0), bf16=0.0, planned=0.0
)


def decide_by_rule(
    model: nn.Module, precision: Precision, filter: FilterLike | None = None, *,
    recipes: Sequence[Recipe] | None = None, heads: bool = False,
) -> RuleDecisions:  # fmt: skip
    """Decide by the rules of `octavo.nn.select`; `heads`: whether cost decides vocabulary heads too."""
    check_unconverted(model)
    recipes = recipes or candidates(precision.recipe if precision.matmul == "fp8" else AUTO)
    recipe = recipes[0] if precision.matmul == "fp8" else None
    filter = both(of_precision(precision), filter)
    plan = default_plan(model, recipe, precision.skip, filter, precision.activations)
    linears = tuple(name for name in plan if is_linear(model.get_submodule(name)))
    reasons = {name: plan[name].reason for name in linears if plan[name].recipe is None}
    forced = {name: why for name, why in reasons.items() if not (heads and why.startswith(HEAD_REASON))}
    return RuleDecisions(plan=plan, linears=linears, forced_bf16=forced, recipes=recipes)


def decide(gpu: Gpu, calls: Sequence[roofline.LinearCall], recipes: Sequence[Recipe], *, eager: bool) -> LinearDecision:
    """Decide for one linear layer by the cost of all its calls in a step."""
    bf16_costs = [roofline.bf16_linear(gpu, call) for call in calls]
    bf16_cost, bf16 = roofline.total(bf16_costs), sum(cost.wall(gpu, eager=eager) for cost in bf16_costs)
    usable = [recipe for recipe in recipes if roofline.fp8_rate(gpu, recipe) is not None]
    if not usable:
        emulated = f"{', '.join(r.name for r in recipes)} is only emulated on {gpu.name}"
        reason = f"{emulated if gpu.fp8_tflops else f'{gpu.name} has no FP8 matrix units'}: bf16"
        return LinearDecision(decision=Decision(recipe=None, reason=reason, gain=1.0), bf16=bf16, planned=bf16)
    costs = {r.name: [roofline.fp8_linear(gpu, call, r) for call in calls] for r in usable}
    times = {name: sum(cost.wall(gpu, eager=eager) for cost in each) for name, each in costs.items()}
    fastest = min(times.values())
    recipe = next(r for r in usable if times[r.name] <= fastest * TIE_FACTOR)
    gain = bf16 / times[recipe.name]
    chosen = roofline.total(costs[recipe.name])
    passes = (roofline.quantization_times(gpu, call, recipe) for call in calls)
    quantizing = sum(sum(seconds for seconds, _ in (*forward, *backward)) for forward, backward in passes)
    numbers = (
        f"{_sizes(calls)}, bf16 {_ms(bf16)}{_measured_share(bf16_cost, bf16)}, {recipe.name} "
        f"{_ms(times[recipe.name])}{_measured_share(chosen, times[recipe.name])}, of it quantizing {_ms(quantizing)}"
    )
    if times[recipe.name] > chosen.total:
        numbers += "; bound by the host"
    if roofline.triton_reason(gpu, recipe) is not None:
        numbers += "; PyTorch has no such product on this GPU: Triton's, at an assumed rate"
    if gain >= MIN_SPEEDUP:
        decision = Decision(recipe=recipe, reason=f"{gain:.2f}×: {numbers}", gain=gain)
        return LinearDecision(decision=decision, bf16=bf16, planned=times[recipe.name])
    narrowest, fewest = min(min(call.k, call.n) for call in calls), min(call.m for call in calls)
    words = [f"narrow ({narrowest})"] if narrowest < NARROW_FEATURES else []
    words += [f"few tokens ({fewest})"] if fewest < FEW_TOKENS else []
    remarks = f"; {' and '.join(words)}" if words else ""
    reason = f"{recipe.name} would be {gain:.2f}×: {numbers}{remarks}"
    return LinearDecision(decision=Decision(recipe=None, reason=reason, gain=1.0), bf16=bf16, planned=bf16)


def break_even(gpu: Gpu, tokens: int, recipes: Sequence[Recipe], *, eager: bool, largest: int = 16384) -> int | None:
    """Return the smallest K = N, in steps of 64, from which FP8 pays at this number of tokens; None if none does."""
    smallest = None
    for side in range(largest - largest % 64, 0, -64):
        call = roofline.LinearCall(m=tokens, k=side, n=side)
        if decide(gpu, [call], recipes, eager=eager).decision.recipe is None:
            break
        smallest = side
    return smallest


def _sizes(calls: Sequence[roofline.LinearCall]) -> str:
    shapes = sorted({(call.m, call.k, call.n) for call in calls})
    return "×".join(map(str, shapes[0])) + (f" and {len(shapes) - 1} others" if len(shapes) > 1 else "")


def _measured_share(cost: roofline.Cost, wall: float) -> str:
    """Describe how much of a time was measured; empty if none, or if the host's time dominates."""
    fraction = cost.measured / cost.total if 0 < wall <= cost.total * 1.001 else 0.0
    return "" if not fraction else " measured" if fraction > 0.999 else f" ({fraction:.0%} measured)"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
